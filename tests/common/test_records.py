"""Records that are saved beside weights are read back with checks, and so are configurations."""

import json
import math
import re
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import numpy as np
import pytest

from common import records
from common.errors import UsageError


@dataclass(frozen=True)
class Shape:
    width: Annotated[int, range(1, 9)]
    kind: Annotated[str, {"global", "utterance"}] = "global"


@dataclass(frozen=True)
class Info:
    shape: Shape
    words: list[str]
    pair: tuple[int, float] = (1, 2.0)
    several: tuple[str, ...] = ()
    path: str | None = None
    settings: dict = field(default_factory=dict)
    share: float = 0.5
    is_new: bool = False
    anything: Any = None


FULL = Info(Shape(8, "utterance"), ["ह"], (3, 4.5), ("a", "b"), "x", {"a": [1]}, 1.0, True, [None])


@pytest.mark.parametrize("info", [Info(Shape(1), []), FULL])
def test_a_record_is_read_as_it_was_saved(info):
    assert records.read(Info, asdict(info), "file") == info
    assert records.read(Info, json.loads(json.dumps(asdict(info))), "file") == info


def test_a_field_with_a_default_may_be_missing():
    info = records.read(Info, {"shape": {"width": 3}, "words": []}, "file")
    assert info == Info(Shape(3), [])


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"shape": ...}, "Info.shape is missing"),
        ({"shape": {}}, "Shape.width is missing"),
        ({"shape": {"width": 9}}, "Shape.width is '9'"),
        ({"shape": {"width": True}}, "Shape.width is 'True'"),
        ({"shape": {"width": 10**400}}, "Shape.width is '1000"),
        ({"shape": {"width": 3, "kind": "other"}}, "Shape.kind is 'other'"),
        ({"words": ["a", 3]}, "Info.words[1] is '3'"),
        ({"pair": [1]}, "Info.pair has 1 values instead of 2"),
        ({"pair": [1, "x"]}, "Info.pair[1] is 'x'"),
        ({"path": 3}, "Info.path is '3'"),
        ({"share": "0.5"}, "Info.share is '0.5'"),
        ({"is_new": 1}, "Info.is_new is '1'"),
        ({"colour": 1}, "Info has no field 'colour'"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(change, reason):
    values = {**asdict(FULL), **change}
    values = {name: value for name, value in values.items() if value is not ...}
    with pytest.raises(UsageError) as refused:
        records.read(Info, values, "best.safetensors")
    assert str(refused.value).startswith(f"best.safetensors: {reason}")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 120


def test_what_is_no_record_is_named():
    with pytest.raises(UsageError, match="file: Info is 'None'"):
        records.read(Info, None, "file")


SCHEMA = {
    "layers": range(1, 5),
    "kind": {"a", "b"},
    "rate": (int, float),
    "sizes": [range(3)],
    "even": lambda value: value % 2 == 0,
    "note?": str,
}
SOUND = {"layers": 4, "kind": "a", "rate": 0.5, "sizes": [0, 2], "even": 4, "more": None}


def test_a_configuration_that_fits():
    assert records.mismatch(SOUND, SCHEMA, "config") is None
    assert records.mismatch({**SOUND, "note": "x", "sizes": []}, SCHEMA, "config") is None


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"layers": 5}, "config.layers is '5'"),
        ({"layers": 2.0}, "config.layers is '2.0'"),
        ({"kind": ["a"]}, "config.kind is \"['a']\""),
        ({"sizes": [1, 3]}, "config.sizes[1] is '3'"),
        ({"even": 3}, "config.even is '3'"),
        ({"even": math.nan}, "config.even is 'nan'"),
        ({"note": 3}, "config.note is '3'"),
    ],
)
def test_the_first_part_that_does_not_fit_is_named(change, reason):
    assert records.mismatch({**SOUND, **change}, SCHEMA, "config") == reason


def test_a_missing_key_is_named():
    for key in SCHEMA:
        values = {name: value for name, value in SOUND.items() if name != key}
        expected = None if key == "note?" else f"config.{key} is missing"
        assert records.mismatch(values, SCHEMA, "config") == expected
    assert records.mismatch([], SCHEMA, "config") == "config is '[]'"


@dataclass(frozen=True)
class Labels:
    labels: list[str]
    count: int = 1
    more: dict = field(default_factory=dict)


@pytest.mark.parametrize(
    "record, reason",
    [
        (Labels([0, 1]), "Labels.labels[0] is '0', of type int instead of str"),
        (Labels({"a"}), "Labels.labels is of type set"),
        (Labels([], np.int64(3)), "Labels.count is of type int64"),
        (Labels([], more={"rate": np.float64(3)}), "Labels.more.rate is of type float64"),
        (Labels([], more={1: "a"}), "Labels.more: its key '1' must be a str"),
    ],
)
def test_a_record_that_cannot_be_read_again_is_refused_when_it_is_made(record, reason):
    records.check(Labels(["a"], 2, {"a": [1, None]}))
    with pytest.raises(UsageError, match=re.escape(reason)):
        records.check(record)
