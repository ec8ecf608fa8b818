"""The Parakeet recipe with Nemotron's models: languages, look-aheads, tags, adapters, exports."""

import functools
import re
from pathlib import Path

import pytest
import torch
import transformers

from common import memory, records
from common.device import Setup
from common.loop import Run
from models.parakeet import formats, start
from models.parakeet.model import Parakeet
from models.parakeet.settings import make_config
from recipes import parakeet_tdt as recipe
from speech.signal.audio import SAMPLE_RATE
from tests import contract
from tests.models.parakeet.test_extend import prepared
from tests.models.parakeet.test_nemotron import pieces
from tests.recipes import adapters, runs
from tests.recipes.runs import newest, planned, ran, refused

moved = functools.partial(contract.moved, recipe)
V = 24
CONFIG = {
    **make_config(16, 2, 2, (8, 1), V, num_mel_bins=16, channels=4, subsampling=4),
    "kind": "rnnt",
    "durations": [],
    "streaming": {"left": 12, "lookaheads": [3, 0, 5]},
    "prompts": {"slots": 9, "width": 32},
}
ENGLISH = {name: value for name, value in CONFIG.items() if name != "prompts"}
NAMES = {"en-US": 0, "de-DE": 1, "de": 1, "fi-FI": 4, "auto": 7}
TEXTS = ("abc.", "b", "cab ba.", "ca", "a c?", "bb", "ac b", "cba.")
LANGUAGES = ("de", "de-DE", "en-US", "fi-FI", "de", "", "en-US", "auto")
SECONDS = (0.9, 0.5, 1.2, 0.7, 1.0, 0.6, 0.8, 1.1)
STEPS = "--batch_size 2 --gradient_accumulation_steps 1 --log_every 1 --save_every 1".split()


PIECES = pieces([*TEXTS, "abc cab bca ab ca bc ac"], V)


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> Path:
    """Eight utterances of noise with texts and languages."""
    path = Path(runs.write_noise(tmp_path_factory.mktemp("noise"), TEXTS, SECONDS, SAMPLE_RATE))
    rows = runs.rows(path)
    for row, language in zip(rows, LANGUAGES, strict=True):
        if language:
            row["target_lang"] = language
    return runs.write_rows(path, rows)


def release(folder: Path, config: dict) -> Path:
    torch.manual_seed(0)
    size = len(formats.tokenizer.pieces({"sentencepiece": PIECES.hex()}))
    config = {**config, "vocabulary": size}
    extras = {
        "tokenizer": {"sentencepiece": PIECES.hex()},
        "source": {},
        "loss": {"sigma": 0.0, "omega": 0.0, "fastemit": 5e-3, "reduction": "mean_batch"},
        "languages": NAMES if "prompts" in config else {},
    }
    formats.export(folder, "hf", Parakeet(config).state_dict(), config, extras)
    return folder


@pytest.fixture(scope="module")
def released(tmp_path_factory) -> Path:
    return release(tmp_path_factory.mktemp("released") / "hf", CONFIG)


@pytest.fixture(scope="module")
def english(tmp_path_factory) -> Path:
    return release(tmp_path_factory.mktemp("english") / "hf", ENGLISH)


def flags_of(manifest: Path, model: Path, *more) -> list:
    data = ["--train_manifest", manifest, "--val_manifest", manifest]
    return [*data, "--model_dir", model, *STEPS, *more]


def make_data(manifest: Path, released: Path, *more, training: bool = True):
    args = runs.parse(recipe, *flags_of(manifest, released, "--language", "fi-FI", *more))
    asked = recipe.resolve(args)
    info, model = start.Family(asked).first_model(Run(Setup()), list)
    weights = model.state_dict()
    corpora = recipe.read_data(asked)
    tokenizer = start.tokenizer_of(info)
    data = recipe.Utterances(asked, corpora["train"], tokenizer, info, training)
    return info, weights, data


def test_languages_and_lookaheads_depend_on_seed_epoch_and_utterance(manifest, released):
    info, _, data = make_data(manifest, released)
    drawn = [[data.item(i, epoch) for i in range(8)] for epoch in range(30)]
    again = [data.item(i, 3) for i in range(8)]
    for one, other in zip(drawn[3], again, strict=True):
        assert (one["prompt"], one["lookahead"]) == (other["prompt"], other["lookahead"])
    own = [NAMES[name or "fi-FI"] for name in LANGUAGES]
    for row in range(8):
        prompts = [items[row]["prompt"] for items in drawn]
        assert set(prompts) == {own[row], 7} and 6 <= prompts.count(7) <= (24 if row < 7 else 30)
        assert {items[row]["lookahead"] for items in drawn} == {3, 0, 5}
    _, _, heard = make_data(manifest, released, training=False)
    items = [heard.item(i, 0) for i in range(8)]
    assert [item["prompt"] for item in items] == own and "lookahead" not in items[0]
    batch = recipe.collate(drawn[0])
    assert batch["prompts"].tolist() == [item["prompt"] for item in drawn[0]]
    assert info.languages == NAMES


def make_model(info, weights) -> Parakeet:
    model = Parakeet(info.config, fastemit=info.loss["fastemit"]).double()
    model.load_state_dict(weights)
    return model.train()


def items_of(data) -> list[dict]:
    items = [data.item(i, 1) for i in range(8)]
    for item in items:
        item["audio"] = item["audio"].double()
    return items


def test_however_a_global_batch_is_cut_its_gradient_is_the_same(manifest, released):
    """With layers that are recomputed in backward."""
    info, weights, data = make_data(manifest, released)
    items = items_of(data)
    assert len({item["lookahead"] for item in items}) > 1
    model = make_model(info, weights)
    memory.checkpoint_layers(model, recipe.CHECKPOINTED)
    contract.check_any_cut(contract.loss_of(recipe, model, items, recipe.loss_weights(info)))


def test_the_language_and_the_lookahead_change_the_loss(manifest, released):
    info, weights, data = make_data(manifest, released)
    model = make_model(info, weights).eval()
    batch = moved(items_of(data))

    def loss(**changes) -> float:
        with torch.no_grad():
            (term,) = recipe.compute_loss(model, {**batch, **changes}).values()
        return term.item()

    usual = loss()
    assert abs(loss(prompts=batch["prompts"].roll(1)) - usual) > 1e-6
    assert abs(loss(lookaheads=torch.zeros(8, dtype=torch.long)) - usual) > 1e-6
    model.encoder.lookahead, model.prompt = 5, 4
    unnamed = {key: value for key, value in batch.items() if key not in ("prompts", "lookaheads")}
    with torch.no_grad():
        (term,) = recipe.compute_loss(model, unnamed).values()
    full = torch.full((8,), 5)
    assert term.item() == pytest.approx(loss(lookaheads=full, prompts=full - 1), rel=1e-12)


@pytest.fixture(scope="module")
def trained(manifest, released, tmp_path_factory) -> tuple[Path, str]:
    """The folder of two updates with a new language, which begin from "new" in it, and what was
    printed when that was made."""
    folder = tmp_path_factory.mktemp("trained")
    rows = manifest.read_text().replace('"de"', '"se-NO"')
    (manifest.parent / "new.json").write_text(rows)
    language = ["--new_language", "se-NO", "--like", "fi-FI"]
    out = prepared(released, *language, "--export", folder / "new")
    more = ["--language", "en-US", "--max_steps", "2"]
    flags = flags_of(manifest.parent / "new.json", folder / "new", *more)
    ran(recipe, *flags, "--output_dir", folder, "--export", folder / "hf")
    return folder, out


def test_a_new_language_is_trained_saved_and_exported(trained, released, manifest, tmp_path):
    folder, out = trained
    assert "new language: se-NO begins as fi-FI, in slot 2" in out
    assert "without a tag: --add_tokens" in out
    saved = newest(folder, recipe)
    info = records.read(start.ModelInfo, saved.model_info, "it")
    assert info.languages == {**NAMES, "se-NO": 2} and not info.new_pieces
    weights, config, extras = formats.read_model(folder / "hf")
    assert extras["languages"] == info.languages and config == info.config
    card = (folder / "hf" / "README.md").read_text()
    assert 'language="auto"' in card and "Nemotron" in card
    before = formats.read_model(released)[0]["prompt_projector.linear_1.weight"]
    columns = weights["prompt_projector.linear_1.weight"]
    assert (columns[:, 16 + 2] - before[:, 16 + 4]).abs().max() < 1e-3
    assert (columns[:, 16 + 2] - before[:, 16 + 2]).abs().max() > 1e-2
    model = transformers.Nemotron3_5AsrForRNNT.from_pretrained(folder / "hf")
    assert torch.equal(model.prompt_projector.linear_1.weight, columns)
    best = ["--resume", folder / "checkpoints" / "best.safetensors"]
    nemo = ["--export", tmp_path / "nemo", "--export_format", "nemo"]
    ran(recipe, *best, *nemo, "--output_dir", tmp_path)
    assert "RNNTPromptTranscribeConfig" in (tmp_path / "nemo" / "README.md").read_text()
    found = formats.read_model(tmp_path / "nemo")
    assert found[2]["languages"] == info.languages and found[1] == config
    more = ["--language", "en-US", "--max_steps", "3", "--resume", "auto"]
    flags = flags_of(manifest.parent / "new.json", folder / "new", *more)
    assert "(step 2)" in ran(recipe, *flags, "--output_dir", folder)


def test_adapters_beside_a_nemotron(manifest, released, tmp_path):
    in_peft = functools.partial(adapters.check_peft, transformers.Nemotron3_5AsrForRNNT)
    data = flags_of(manifest, released)[:4]
    source = ["--model_dir", released]
    flags = [*data, "--language", "de"]
    out = adapters.check(recipe, flags, source, tmp_path, formats, in_peft=in_peft)
    assert "trained whole: decoder, joint, prompt_projector" in out


@pytest.mark.parametrize(
    "flags, message",
    [
        ([], "have no language, which this model is told: add --language NAME"),
        (["--language", "deu"], "--language deu: the model knows no such language.*de"),
        (["--language", "de", "--lookahead", "4"], "chunks of 5 frames do not divide the 12"),
        (["--export", "x", "--export_format", "onnx", "--language", "de"], "ONNX"),
    ],
)
def test_mistakes_are_answered_in_one_line(flags, message, manifest, released, tmp_path):
    places = ["--output_dir", tmp_path, "--max_steps", "1"]
    flags = [tmp_path / "x" if flag == "x" else flag for flag in flags]
    for command in ([],) if "--export" in flags else ([], ["--check_data"]):
        _, err = refused(recipe, *flags_of(manifest, released, *flags), *places, *command)
        assert re.search(message, err), err
    assert not list(tmp_path.rglob("checkpoint_step*"))


def test_the_english_model_is_told_no_language(manifest, english, tmp_path):
    places = ["--output_dir", tmp_path, "--max_steps", "1"]
    _, err = refused(recipe, *flags_of(manifest, english, "--language", "de"), *places)
    assert "this model is told no language" in err
    ran(recipe, *flags_of(manifest, english, "--lookahead", "0"), *places)


def test_a_plan_needs_no_data(released):
    run = planned(recipe, "--dry_run", "--model_dir", released, *STEPS, "--max_duration", "2")
    assert run.batch["prompts"].tolist() == [7, 7] and len(run.batch["lookaheads"]) == 2


def test_an_added_tag_ends_the_sentences_of_a_new_language(manifest, released, tmp_path):
    rows = manifest.read_text().replace('"fi-FI"', '"se-NO"').replace('"ca"', '"ca."')
    path = manifest.parent / "tagged.json"
    path.write_text(rows)
    new = ["--new_language", "se-NO", "--like", "fi-FI", "--add_tokens", "<se-NO>"]
    made = ["--export", tmp_path / "new"]
    assert "without a tag" not in prepared(released, path, *new, *made)
    _, _, data = make_data(path, tmp_path / "new")
    tag = data.tokenizer.tags["se-NO"]
    assert data.item(3, 0)["tokens"][-1] == tag and tag == data.tokenizer.size - 1
    flags = flags_of(path, tmp_path / "new", "--language", "de", "--max_steps", "1")
    ran(recipe, *flags, "--output_dir", tmp_path / "run")
    assert newest(tmp_path / "run", recipe).model_info["new_pieces"] == [tag]
