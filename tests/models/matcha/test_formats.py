"""Released checkpoints of Matcha-TTS: files of their form with random weights."""

import functools
import zipfile
from collections import OrderedDict
from unittest import mock

import pytest
import torch

from common.errors import UsageError
from models.matcha import formats, model
from models.matcha.model import SIZES, Matcha
from models.matcha.tokenizer import MARKS

TINY = {**SIZES["full"], "width": 16, "layers": 1, "inner": 16, "predictor": 16, "channels": 16}


class Settings:
    """Stands for a class of a program that is not here."""

    def __init__(self, **values):
        self.__dict__.update(values)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(model.SIZES, "full", TINY)


def released(speakers: int = 1) -> dict:
    torch.manual_seed(0)
    network = Matcha({**TINY, "symbols": 178, "speakers": speakers})
    network.mel_mean.fill_(-5.5)
    optimizer = functools.partial(torch.optim.Adam, lr=1e-4)
    return {
        "state_dict": OrderedDict(network.state_dict()),
        "hyper_parameters": {"optimizer": optimizer, "encoder": Settings(n_feats=80, kind="a")},
        "pytorch-lightning_version": "2.0",
    }


def test_the_weights_in_a_pickle_of_objects_are_read(tmp_path):
    content = released()
    torch.save(content, tmp_path / "matcha.ckpt")
    config, weights = formats.read_model(str(tmp_path / "matcha.ckpt"))
    assert config["symbols"] == 178 and config["speakers"] == 1
    assert weights.keys() == content["state_dict"].keys()
    assert all(torch.equal(weights[name], w) for name, w in content["state_dict"].items())


def test_no_code_of_a_checkpoint_is_run(tmp_path):
    mark = tmp_path / "ran"

    class Runs:
        def __reduce__(self):
            return mark.touch, ()

    torch.save({**released(), "hyper_parameters": Runs()}, tmp_path / "matcha.ckpt")
    try:
        formats.read_model(str(tmp_path / "matcha.ckpt"))
    except UsageError as error:
        assert "refused" in str(error)
    assert not mark.exists()


def without(name: str) -> dict:
    content = released()
    del content["state_dict"][name]
    return content


def with_tensor(name: str, value: float) -> dict:
    content = released()
    content["state_dict"][name] = torch.tensor(value)
    return content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda: {"weights": 1}, "no state_dict"),
        (lambda: without("encoder.proj_m.bias"), r"lacks 'encoder\.proj_m\.bias'"),
        (lambda: with_tensor(formats.SPEAKERS, 1.0), r"spk_emb\.weight"),
        (lambda: with_tensor("mel_std", 0.0), r"x\.ckpt .* mel_std is 0, and"),
        (lambda: with_tensor("mel_std", -1.0), r"x\.ckpt .* mel_std is -1, and"),
    ],
)
def test_what_is_not_such_a_checkpoint_is_refused(content, message, tmp_path):
    torch.save(content(), tmp_path / "x.ckpt")
    with pytest.raises(UsageError, match=message):
        formats.read_model(str(tmp_path / "x.ckpt"))


def test_a_file_that_would_take_much_memory_is_refused(tmp_path):
    torch.save(released(), tmp_path / "matcha.ckpt")
    with (
        zipfile.ZipFile(tmp_path / "matcha.ckpt") as source,
        zipfile.ZipFile(tmp_path / "bomb.ckpt", "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(name, source.read(name) + bytes((1 << 24) * name.endswith(".pkl")))
    names = "torch.serialization.get_unsafe_globals_in_checkpoint"
    with (
        mock.patch(names, side_effect=AssertionError("it was decompressed")),
        pytest.raises(UsageError, match="is damaged"),
    ):
        formats.read_model(str(tmp_path / "bomb.ckpt"))


def test_letters_keep_their_rows(capsys):
    weights = {name: w.clone() for name, w in released()["state_dict"].items()}
    symbols = [*MARKS, "a", "é", "z"]
    config = {**TINY, "symbols": 178, "speakers": 1}
    config, changed = formats.adapted(config, weights, symbols, 1)
    rows = changed[formats.ROWS]
    assert config["symbols"] == len(symbols) == len(rows)
    for number in (0, 3, 4, 6):
        row = formats.RELEASED.index(symbols[number])
        assert torch.equal(rows[number], weights[formats.ROWS][row])
    assert "4 of 7 tokens" in capsys.readouterr().out
    Matcha(config).load_state_dict(changed)
    with pytest.raises(UsageError, match="one speaker"):
        formats.adapted(config, weights, symbols, 2)


@pytest.mark.parametrize("speakers, rows", [(1, 2), (3, 3)])
def test_a_model_of_several_speakers_takes_any_number(speakers, rows):
    weights = released(speakers=9)["state_dict"]
    config = {**TINY, "symbols": 178, "speakers": 9}
    config, changed = formats.adapted(config, weights, [*MARKS, "a"], speakers)
    assert config["speakers"] == rows == len(changed[formats.SPEAKERS])
    Matcha(config).load_state_dict(changed)
