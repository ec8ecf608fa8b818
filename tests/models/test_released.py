"""Where a model starts: checkpoint, released or random weights, and the flags that contradict."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from common.checkpoint import Saved
from common.errors import UsageError
from models import model_files, released
from speech.data.folders import write_folder

FORMS = released.Forms("Toy", "a folder", "toy.pt", "for others", "hf download toy")
SIZES = {"demo": {"width": 3}, "base": {"width": 5}}


@dataclass(frozen=True)
class ModelInfo:
    config: dict
    pretrained: bool = False


def network(info: ModelInfo) -> torch.nn.Module:
    return torch.nn.Linear(info.config["width"], 2)


def weights_of(info: ModelInfo) -> dict[str, torch.Tensor]:
    return network(info).state_dict()


class Toy(released.Family):
    model_info = ModelInfo
    sized = ("width",)

    def __init__(self, origin: released.Origin):
        super().__init__(SimpleNamespace(origin=origin))

    def read(self, path: str) -> tuple[ModelInfo, dict]:
        info = ModelInfo({"width": 4}, pretrained=True)
        return info, weights_of(info)

    def network(self, info: ModelInfo) -> torch.nn.Module:
        return network(info)

    def check(self, info: ModelInfo, name: str) -> None:
        pass


def make_origin(**changes) -> released.Origin:
    origin = released.Origin(
        given=frozenset(),
        path=None,
        flag="--model_dir",
        from_scratch=False,
        may_be_random=False,
        size_name="demo",
        size=SIZES["demo"],
        resume=None,
        checkpoint_dir=Path("checkpoints"),
        export=None,
        forms=FORMS,
    )
    return replace(origin, **changes)


def saved_model(info: ModelInfo) -> Saved:
    return Saved(Path("saved.pt"), "toy", asdict(info), {}, weights_of(info))


def choose(origin: released.Origin, resumed=None, initial=None):
    def create() -> ModelInfo:
        return ModelInfo(origin.size)

    return Toy(origin).choose(resumed, initial, create)


def test_a_checkpoint_comes_before_released_weights_and_these_before_random_ones():
    own = ModelInfo({"width": 7}, pretrained=True)
    info, weights = choose(make_origin(path="toy"), resumed=saved_model(own))
    assert info == own and weights is None  # the loop loads them
    info, weights = choose(make_origin(path="toy", may_be_random=True))
    assert info.pretrained and weights["weight"].shape == (2, 4)
    info, weights = choose(make_origin(), initial=saved_model(own))
    assert info == own and weights is None
    info, weights = choose(make_origin(may_be_random=True), initial=saved_model(own))
    assert info.config == SIZES["demo"] and weights is None


def test_without_a_checkpoint_something_must_say_where_the_model_starts():
    with pytest.raises(UsageError, match="nothing says where the model starts: add --model_dir"):
        choose(make_origin(resume="auto"))


def test_all_flags_that_contradict_are_in_one_message():
    origin = make_origin(
        given=frozenset({"model_size"}), path="toy", size_name="base", size=SIZES["base"]
    )
    saved = saved_model(ModelInfo({"width": 3}))
    with pytest.raises(UsageError) as caught:
        choose(origin, resumed=saved)
    assert "--model_size base (the checkpoint has width 3), --model_dir toy (" in str(caught.value)
    with pytest.raises(UsageError, match="add --from_scratch to make a new one"):
        choose(replace(origin, path=None), initial=saved)
    scratch = make_origin(from_scratch=True)
    with pytest.raises(UsageError, match=r"--from_scratch .*began from released weights"):
        choose(scratch, resumed=saved_model(ModelInfo({"width": 3}, pretrained=True)))


@pytest.mark.parametrize(
    ("changes", "alone"),
    [
        ({"export": "x", "path": "toy"}, True),
        ({"export": "x", "resume": "a.pt"}, True),
        ({"export": "x", "resume": "auto", "path": "toy"}, False),
        ({"export": "x", "path": "toy", "given": frozenset({"max_steps"})}, False),
        ({"export": "x", "resume": "a.pt", "given": frozenset({"dry_run"})}, False),
        ({"export": "x"}, False),
        ({"path": "toy"}, False),
    ],
)
def test_whether_an_export_is_all_that_is_asked_for(changes, alone):
    assert released.exports_only(make_origin(**changes)) == alone


@pytest.mark.parametrize(
    "named",
    [
        {"model_dir": "x"},
        {"model_dir": "link"},
        {"compare_to": "x"},
        {"train_manifest": "x/data/train.json"},
        {"speaker_wav": ["a.wav", "x/data/train.json"]},
        {"cache_audio": "x/cache"},
        {"export_adapter": "x"},
        {"export_adapter": "link/adapter"},
        {"export": "y/export", "export_adapter": "y"},
    ],
    ids=str,
)
def test_an_export_replaces_nothing_that_the_command_uses(named, tmp_path, monkeypatch):
    def fill(aside: Path) -> None:
        (aside / "data").mkdir()
        (aside / "data" / "train.json").touch()

    monkeypatch.chdir(tmp_path)
    write_folder(Path("x"), fill, model_files.MADE_BY)
    Path("link").symlink_to("x")
    written = {"checkpoint_dir": "checkpoints", "log_dir": "logs", "output_dir": "."}
    inputs = [
        place
        for name, value in named.items()
        if name not in released.EXPORTS
        for place in (value if isinstance(value, list) else [value])
    ]
    flags = {**written, "export": "x", **named}
    with pytest.raises(UsageError, match=r"--export.*; name a folder of its own for the export"):
        released.require_exports(flags, inputs)
    released.require_exports({**written, "export": "x"}, [])


def test_the_command_that_fetches_a_missing_model():
    usual = "hf download openai/whisper-base --local-dir whisper-base"
    forms = released.Forms("Whisper", "a folder", "base.pt", "for others", usual)
    with pytest.raises(UsageError, match=f"with: .*{usual}$"):
        released.require_source("gone", "--model_dir", forms)
    forms = replace(forms, fetch_file="curl -LO https://a/base.pt")
    with pytest.raises(UsageError, match=r"with: curl -LO https://a/base\.pt$"):
        released.require_source("gone.pt", "--model_file", forms)
