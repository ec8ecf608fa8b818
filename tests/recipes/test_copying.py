"""A copy of recipes/template.py trains and continues as its original does, and becomes a recipe for
another task by the changes that recipes/template.md lists."""

import ast
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import save_file

from common import checkpoint, checks
from tests.recipes import runs
from tests.recipes.test_xtts import places, tiny  # noqa: F401  fixtures

ROOT = Path(__file__).resolve().parents[2]
TEMPLATE = ROOT / "recipes" / "template.py"
RATE = 16_000


def replace(source: str, *changes: tuple[str, str]) -> str:
    """The source with plain texts replaced, each of which occurs once."""
    for old, new in changes:
        assert source.count(old) == 1, (source.count(old), old)
        source = source.replace(old, new)
    return source


def parts(source: str) -> dict[str, str]:
    """The top-level functions and classes, by name, without their decorators."""
    nodes = [node for node in ast.parse(source).body if hasattr(node, "name")]
    return {node.name: ast.get_source_segment(source, node) for node in nodes}


def redefine(source: str, definitions: str, removed: tuple[str, ...] = ()) -> str:
    """The source with the top-level functions and classes of `definitions` in place of those of the
    same name, and without the `removed` ones."""
    new = parts(definitions)
    for name, old in parts(source).items():
        if name in new or name in removed:
            source = replace(source, (old, new.pop(name, "")))
    assert not new, f"the template does not define {list(new)}"
    return source


# --- a copy with another name ---------------------------------------------------------------------

SMALL = (
    ("WIDTH = 128", "WIDTH = 32"),
    ("LAYERS = 4", "LAYERS = 2"),
    ('DEMO_SIZES = {"train": 1200, "val": 100}', 'DEMO_SIZES = {"train": 8, "val": 2}'),
)


def copy_project(folder: Path) -> Path:
    """recipes/my_model.py in a copy of the project, small, with a demo of a few utterances."""
    for name in ("common", "speech", "recipes"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    copy = replace(TEMPLATE.read_text(encoding="utf-8"), *SMALL)
    (folder / "recipes" / "my_model.py").write_text(copy, encoding="utf-8")
    return folder


def finish(folder: Path, *flags: str) -> str:
    """The stdout of the copied recipe, which must succeed."""
    command = [sys.executable, "recipes/my_model.py", "--device", "cpu", *flags]
    process = runs.start(command, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    assert "\r" not in err  # plain lines, because stderr is not a terminal
    assert out.splitlines()[-1].startswith("memory: peak ")
    return out


def test_a_copy_with_its_own_name_trains_and_resumes(tmp_path):
    folder = copy_project(tmp_path)
    out = finish(folder, "--max_steps", "2")
    assert "demo corpus: 10 utterances" in out and "val set" in out
    assert len(runs.error_lines(out)) in (2, 4)  # the second two without the language model
    out = finish(folder, "--resume", "auto", "--max_steps", "4")
    assert "resuming from checkpoints/checkpoint_step_00000002.pt (step 2)" in out
    newest = checkpoint.list_checkpoints(folder / "checkpoints")[0]
    saved = checkpoint.read(newest, "my_model")
    assert saved.recipe == "my_model" and saved.progress.step == 4
    assert checkpoint.read_weights(folder / "checkpoints" / "best.safetensors", "my_model")


# --- a copy for another task ----------------------------------------------------------------------

# The task below learns from a `label` in place of a text, decodes nothing and has no demo.
WITHOUT_TEXT = """
def add_arguments(parser) -> None:
    splits.add_arguments(parser)
    options.add_record(parser, "model", Flags)
    options.add_arguments(parser)


def resolve(args) -> None:
    options.resolve(args, False, 0)


def read_data(args, before: splits.RunInfo | None = None) -> dict[str, Corpus]:
    return splits.load_splits(
        splits.resolve(args, before, needs="label"),
        text.normalise,
        stand_in=lambda: splits.stand_in(args.max_duration, labels=STAND_INS),
    )


@torch.no_grad()
def evaluate_only(args) -> None:
    setup = device.setup(args)
    model, before = trained(args, setup)
    check_folder(args.log_dir)
    corpora = read_data(args, before)
    corpora.pop("train", None)
    sets = {name: Utterances(corpora[name], model.classes) for name in corpora}
    evaluation = {name: EvalBatches(args, sets[name], collate, setup) for name in sets}
    with setup.autocast():
        report_results(model, evaluation, "the given weights")
"""
OF_LETTERS = ("check_texts", "letters_of", "encoding", "encode")
MAIN_WITHOUT_TEXT = (
    (
        "from speech.writing import alphabet, metrics\n",
        "from speech.writing import metrics, text\n",
    ),
    ("from speech.writing.alphabet import Characters\n", ""),
    ("    how = resolve(args)\n", "    resolve(args)\n"),
    ("    if args.transcribe:\n        return transcribe(args, how)\n", ""),
    ("return evaluate_only(args, how)", "return evaluate_only(args)"),
    (
        "report_results, how, model, evaluation, args.checkpoint_dir",
        "report_results, model, evaluation",
    ),
    ('        beside=language_model.as_file(corpora["train"].written_texts()),\n', ""),
    ("        reports=results.REPORTS,\n", ""),
    ("    check_texts(args, corpora, model_info)\n", ""),
    ("read_data(args, letters_of(args, None))", "read_data(args)"),
    ("    letters = letters_of(args, model_info)\n", ""),
    ("read_data(args, letters, earlier_run)", "read_data(args, earlier_run)"),
)

KEYWORDS = """
@dataclass(frozen=True)
class ModelInfo:
    width: Annotated[int, range(1, 8193)]
    layers: Annotated[int, range(1, 129)]
    classes: list[str]


class Utterances:
    def __init__(self, corpus: Corpus, classes: list[str]):
        self.corpus = corpus
        self.numbers = {name: number for number, name in enumerate(classes)}

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        return self.corpus.seconds

    def item(self, index: int, epoch: int) -> dict:
        return {
            "audio": read_utterance(self.corpus, index, SAMPLE_RATE),
            "class": self.numbers[self.corpus.label(index)],
            "name": self.corpus.where(index),
        }


def collate(items: list[dict]) -> dict:
    batch = {
        "names": [item["name"] for item in items],
        "seconds": [len(item["audio"]) / SAMPLE_RATE for item in items],
        "classes": torch.tensor([item["class"] for item in items]),
    }
    batch["audio"], batch["audio_lengths"] = pad([item["audio"] for item in items])
    batch["counts"] = {"class": len(items)}
    return batch


class Network(nn.Module):
    def __init__(self, info: ModelInfo, dropout: float = 0.0):
        super().__init__()
        self.classes = info.classes
        self.log_mel = LogMel(SAMPLE_RATE, N_MELS)
        self.feature_norm = FeatureNorm(N_MELS)
        self.input = nn.Linear(SUBSAMPLING * N_MELS, info.width)
        self.layers = nn.ModuleList(Layer(info.width, dropout) for _ in range(info.layers))
        self.norm = nn.LayerNorm(info.width)
        self.output = nn.Linear(info.width, len(info.classes))

    def forward(self, batch: dict) -> torch.Tensor:
        lengths = frames(batch["audio_lengths"], SAMPLE_RATE)
        x = self.feature_norm(self.log_mel(batch["audio"]), lengths)
        x = F.pad(x, (0, 0, 0, -x.shape[1] % SUBSAMPLING))
        x = self.input(x.unflatten(1, (-1, SUBSAMPLING)).flatten(2))
        lengths = encoder_frames(batch["audio_lengths"])
        padding = ~valid_mask(lengths, x.shape[1])[:, :, None]
        for layer in self.layers:
            x = layer(x, padding)
        x = self.norm(x).masked_fill(padding, 0.0).sum(1) / lengths[:, None]
        return upcast(self.output(x)).log_softmax(-1)


def compute_loss(model: Network, batch: dict) -> dict[str, torch.Tensor]:
    return {"class": F.nll_loss(model(batch), batch["classes"], reduction="sum")}


def evaluate(model: Network, eval_batches) -> dict[str, tuple[float, float]]:
    def results_of(batch: dict) -> tuple[float, int]:
        right = int((model(batch).argmax(-1) == batch["classes"]).sum())
        return float(compute_loss(model, batch)["class"]), right

    loss = right = count = 0.0
    for batch, results in memory.evaluated(results_of, model, eval_batches):
        loss += sum(each[0] for each in results)
        right += sum(each[1] for each in results)
        count += batch["counts"]["class"]
    return {"class": (loss, count), "accuracy": (right, count)}


def report_results(model: Network, evaluation: dict[str, EvalBatches], weights: str) -> None:
    name = "test" if "test" in evaluation else "val"
    right, count = evaluate(model, evaluation[name].whole())["accuracy"]
    print(f"{name} set, {weights}: accuracy {100 * right / count:.1f} % of {count:.0f}")
"""


def keyword_recipe(source: str) -> str:
    source = redefine(
        source,
        WITHOUT_TEXT + KEYWORDS,
        removed=(*OF_LETTERS, "texts_of", "transcribe", "language_model_tokens"),
    )
    return replace(
        source,
        *SMALL[:2],
        ('LOSS_WEIGHTS = {"ctc": 1.0}', 'LOSS_WEIGHTS = {"class": 1.0}\nSTAND_INS = ("yes", "no")'),
        ("import checkpoint, device, options\n", "import checkpoint, device, memory, options\n"),
        *MAIN_WITHOUT_TEXT,
        (
            '        characters = sorted(letters.vocabulary(corpora["train"].texts))\n',
            "        train_set = corpora['train']\n"
            "        classes = sorted({train_set.label(i) for i in range(len(train_set))})\n",
        ),
        (
            "ModelInfo(WIDTH, LAYERS, characters, letters.kept())",
            "ModelInfo(WIDTH, LAYERS, classes)",
        ),
        ("model_info) for name", "model_info.classes) for name"),
        ('metric="cer",', 'metric="accuracy",'),
        ("higher_is_better=False", "higher_is_better=True"),
    )


def made(folder: Path, source: str):
    """The recipe with this source, as a module."""
    path = folder / "my_model.py"
    path.write_text(source, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("my_model", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_model"] = module  # records look up types in their module
    spec.loader.exec_module(module)
    return module


def tone(frequency: float, count: int) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * frequency * np.arange(count) / RATE)


@pytest.fixture
def keywords(tmp_path):
    """Clips of low and high tones in noise, and the manifest that labels them."""
    random = np.random.default_rng(0)
    lines = []
    for number in range(40):
        label = ("low", "high")[number % 2]
        count = int(random.integers(6_000, 12_000))
        samples = tone({"low": 300, "high": 2000}[label], count) + 0.1 * random.normal(size=count)
        soundfile.write(tmp_path / f"{number}.wav", samples, RATE)
        lines.append(json.dumps({"audio_filepath": f"{number}.wav", "label": label}) + "\n")
    (tmp_path / "keywords.json").write_text("".join(lines))
    return tmp_path / "keywords.json"


TRAINING = "--max_steps 30 --eval_every 10 --learning_rate 3e-3".split()


def test_a_keyword_classifier(tmp_path, keywords):
    """It trains, resumes, evaluates, plans and checks the data, after the check of its loss that
    recipes/template.md advises."""
    recipe = made(tmp_path, keyword_recipe(TEMPLATE.read_text(encoding="utf-8")))
    flags = ["--train_manifest", keywords, "--output_dir", tmp_path / "run"]
    args = runs.parse(recipe, *flags)
    recipe.resolve(args)
    data = recipe.Utterances(recipe.read_data(args)["train"], ["high", "low"])
    model = recipe.Network(recipe.ModelInfo(8, 1, ["high", "low"]))
    items = [data.item(index, 0) for index in range(3)]
    checks.check_loss(model, recipe.collate(items), recipe.compute_loss)
    out = runs.ran(recipe, *flags, *TRAINING)
    again = runs.ran(recipe, *flags, *TRAINING[:-2], "--resume", "auto", "--max_steps", "31")
    assert "resuming from" in again and "(step 30)" in again
    for text in (out, runs.ran(recipe, *flags, "--evaluate")):
        assert "accuracy 100.0 % of 4" in text
    checked = runs.ran(recipe, *flags, "--check_data")
    assert "checked: 36 utterances in train, 4 utterances in val can be used" in checked
    runs.ran(recipe, *flags, "--dry_run", "8GB")
    plan = runs.planned(recipe, "--output_dir", tmp_path / "plan")
    assert len(plan.batch["names"]) == 2
    refused = runs.refused(recipe, "--output_dir", tmp_path)[1]
    assert refused.startswith("error: there are no data: give --train_manifest")


def test_changed_labels_are_noticed_when_a_run_is_resumed(tmp_path, keywords):
    recipe = made(tmp_path, keyword_recipe(TEMPLATE.read_text(encoding="utf-8")))
    flags = ["--train_manifest", keywords, "--output_dir", tmp_path / "run", "--max_steps"]
    runs.ran(recipe, *flags, "1")
    text = keywords.read_text()
    keywords.write_text(
        text.replace('"low"', '"x"').replace('"high"', '"low"').replace("x", "high")
    )
    out = runs.ran(recipe, *flags, "2", "--resume", "auto")
    assert "the training data have changed since the checkpoint" in out


# --- a copy that starts at released weights -------------------------------------------------------

FROM_A_FOLDER = """
def fit(model: Network, data: Utterances) -> None:
    items = splits.some_items(data, seed=0, count=FIT_UTTERANCES)
    model.feature_norm.measure([model.log_mel(item["audio"][None])[0] for item in items])
    weights = model_files.read_folder(Path(RELEASED))
    prefix = "encoder."
    encoder = {
        name.removeprefix(prefix): value
        for name, value in weights.items()
        if name.startswith(prefix)
    }
    model.layers.load_state_dict(encoder)
"""


def test_a_released_encoder_as_a_start(tmp_path, manifests):
    """As recipes/template.md shows it: `fit` reads the folder once for a new model, and a plan does
    not."""
    source = redefine(TEMPLATE.read_text(encoding="utf-8"), FROM_A_FOLDER)
    source = replace(
        source,
        *SMALL,
        (
            "from speech.data import feasible, splits",
            "from models import model_files\nfrom speech.data import feasible, splits",
        ),
        ("N_MELS = 80", f'N_MELS = 80\nRELEASED = "{tmp_path}/released"'),
    )
    recipe = made(tmp_path, source)
    torch.manual_seed(5)
    layers = recipe.Network(recipe.ModelInfo(32, 2, ["a"])).layers
    weights = {f"encoder.{name}": value for name, value in layers.state_dict().items()}
    flags = [*manifests, "--max_steps", "1", "--learning_rate", "1e-30", "--output_dir", tmp_path]
    runs.ran(recipe, *flags, "--dry_run", "8GB")
    (tmp_path / "released").mkdir()
    save_file(weights | {"decoder.weight": torch.ones(1)}, tmp_path / "released/model.safetensors")
    runs.ran(recipe, *flags)
    saved = checkpoint.read_weights(tmp_path / "checkpoints" / "best.safetensors", "my_model")
    for name, value in layers.state_dict().items():
        assert torch.allclose(saved.model[f"layers.{name}"], value, atol=1e-20)
