"""The Parakeet recipe: its model against transformers', exactness of training, data, and its
command line on tiny models."""

import contextlib
import dataclasses
import fcntl
import functools
import json
import multiprocessing
import re
import shlex
import shutil
import signal
import termios
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
import yaml
from safetensors.torch import load_file

from common import checkpoint, optim, records
from common.device import Setup
from common.loop import Run
from models.parakeet import archive, formats, onnx, settings, start, vocabulary
from models.parakeet import model as network
from models.parakeet.model import Parakeet
from models.parakeet.scratch import fit_new_rows
from models.parakeet.tokenizer import pad_pieces
from recipes import parakeet_tdt as recipe
from speech.data.columns import Corpus, Strings
from speech.data.loading import Checks, load_corpus
from speech.signal.audio import SAMPLE_RATE, read_audio
from speech.signal.features import valid_mask
from speech.writing.text import train_tokenizer
from tests import contract, small
from tests.contract import awake
from tests.models.parakeet.test_extend import prepared
from tests.recipes import adapters, runs
from tests.recipes.runs import SHORT, newest, ran, refused

moved = functools.partial(contract.moved, recipe)
SMALL = settings.make_config(16, 2, 2, (8, 2), 6, num_mel_bins=16, channels=4, ctc=True)
SIGMA = 0.02
TEXTS = ("abc", "b", "cab ba", "ca", "a c", "bb", "ac b", "cba")
SECONDS = (0.9, 0.5, 1.2, 0.7, 1.0, 0.6, 0.8, 1.1)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """The demo's shape with two layers of 16, and a CTC head."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            settings.SIZES,
            "demo",
            settings.make_config(16, 2, 2, (8, 1), num_mel_bins=16, channels=4, ctc=True),
        )
        yield


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> tuple[str, Corpus]:
    """The manifest and the corpus of eight utterances of noise with the texts TEXTS."""
    path = runs.write_noise(tmp_path_factory.mktemp("noise"), TEXTS, SECONDS, SAMPLE_RATE)
    return path, load_corpus(path, recipe.text.normalise, Checks())[0]


def make_utterances(
    noise: tuple[str, Corpus], *flags, training: bool = True, loss: dict | None = None, **config
) -> tuple:
    """The corpus as main reads it, and the info of a small model. `loss`: its settings."""
    path, corpus = noise
    args = runs.parse(
        recipe, "--train_manifest", path, "--from_scratch", "--model_size", "demo", *flags
    )
    asked = recipe.resolve(args)
    info, _ = start.Family(asked).first_model(Run(Setup()), lambda: corpus.texts)
    loss = {**info.loss, **(loss or {})}
    info = dataclasses.replace(info, config={**info.config, **config}, loss=loss)
    return recipe.Utterances(asked, corpus, start.tokenizer_of(info), info, training), info


def make_items(noise, loss: dict | None = None, **config) -> tuple[start.ModelInfo, list[dict]]:
    """Info of a small model and the eight utterances in float64, about half of them with the plain
    loss."""
    data, info = make_utterances(noise, loss={"omega": 0.5, **(loss or {})}, **config)
    items = [data.item(index, 1) for index in range(len(data))]
    for item in items:
        item["audio"] = item["audio"].double()
    assert {item["plain"] for item in items} == {True, False} and "time_masks" in items[0]
    return info, items


def make_model(config: dict, *dropouts: float, dtype=torch.float64) -> Parakeet:
    torch.manual_seed(0)
    return awake(Parakeet(config, SIGMA, *dropouts).to(dtype))


# --- parity with transformers ---------------------------------------------------------------------


def make_theirs(config: dict):
    """transformers' model with this configuration and random weights, in evaluation."""
    pieces = ["<unk>", *map(chr, range(97, 96 + config["vocabulary"]))]
    content = formats.hf_settings(config, pieces, {"source": {}})["config.json"]
    assert content["encoder_config"]["layerdrop"] == 0.0
    torch.manual_seed(0)
    described = transformers.ParakeetTDTConfig.from_dict(content)
    return awake(transformers.ParakeetForTDT(described).double().eval())


def make_ours(theirs, config: dict) -> Parakeet:
    """Our model with the weights of theirs. The names must be the same, apart from the CTC
    head's."""
    with torch.device("meta"):
        model = Parakeet(config, SIGMA)
    weights = theirs.state_dict()
    if config["ctc"]:
        weights |= {
            f"ctc_head.{name}": w.new_empty(w.shape, device="cpu")
            for name, w in model.ctc_head.state_dict().items()
        }
    assert {name: tuple(w.shape) for name, w in weights.items()} == formats.expected_shapes(config)
    model.load_state_dict(weights, strict=True, assign=True)
    return model.double().eval()


FOUR = {"subsampling": 4, "kernel": 5}
TWO = {"subsampling": 2, "ctc": True, "durations": [0, 1, 2], "heads": 4}
BANDS = {"num_mel_bins": 24, "ffn": 40, "prediction_layers": 1}
SHAPES = {
    "no biases, factor 8": {},
    "biases, scaled, factor 4": {"biases": True, "scale_input": True, **FOUR},
    "biases, factor 2, CTC": {"biases": True, **TWO},
    "scaled, factor 8, odd bands": {"scale_input": True, **BANDS},
}


@torch.no_grad()
@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES)
def test_the_model_is_that_of_transformers(changes):
    config = {**SMALL, "ctc": False, **changes}
    theirs = make_theirs(config)
    assert theirs.decoder.embedding.weight[config["vocabulary"]].abs().max() > 0.01
    ours = make_ours(theirs, config)
    lengths = torch.tensor([97, 64, 41, 9, 1])
    features = torch.randn(len(lengths), 97, config["num_mel_bins"]).double()
    features *= valid_mask(lengths, features.shape[1])[..., None]
    counts = lengths
    for _ in range(config["subsampling"].bit_length() - 1):
        counts = (counts - 1) // 2 + 1
    encoded = ours.encoder(features, lengths, counts.tolist())
    tokens = torch.randint(config["vocabulary"], (len(lengths), 5))
    their_tokens = torch.cat([torch.full((len(lengths), 1), config["vocabulary"]), tokens], dim=1)
    output = theirs(
        features,
        attention_mask=valid_mask(lengths, features.shape[1]).long(),
        decoder_input_ids=their_tokens,
    )
    projected, predicted = ours.encoder_projector(encoded), ours.predict(tokens)
    logits = ours.joint.logits(projected[:, :, None], predicted[:, None])
    assert encoded.std() > 0.1 and logits.shape == output.logits.shape
    for row, count in enumerate(counts.tolist()):
        assert (encoded[row, :count] - output.last_hidden_state[row, :count]).abs().max() < 1e-9
        assert (logits[row, :count] - output.logits[row, :count]).abs().max() < 1e-9


# --- exactness ------------------------------------------------------------------------------------


def gradient_of(loss: torch.Tensor, model) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


MEAN_VOLUME = {"reduction": "mean_volume", "ctc_reduction": "mean_volume"}


@pytest.mark.parametrize(
    ("loss", "config", "weights"),
    [
        ({"reduction": "mean", "ctc_reduction": "mean"}, {}, {"tdt": 0.7, "ctc": 0.3}),
        (MEAN_VOLUME, {}, {"tdt": 0.7, "ctc": 0.3}),
        ({}, {"kind": "rnnt", "durations": []}, {"rnnt": 0.7, "ctc": 0.3}),
        ({}, {"kind": "ctc", "durations": []}, {"ctc": 1.0}),
    ],
)
def test_other_losses_have_the_same_gradient_however_a_global_batch_is_cut(
    loss, config, weights, noise
):
    info, items = make_items(noise, loss, **config)
    assert recipe.loss_weights(info) == weights
    model = make_model(info.config).train()
    contract.check_any_cut(contract.loss_of(recipe, model, items, weights))


@pytest.mark.parametrize("kind", ["rnnt", "ctc"])
def test_what_ctc_cannot_align_is_in_no_ctc_loss(kind, noise, capsys):
    """A model with a transducer learns from it all the same."""
    data, info = make_utterances(noise, kind=kind, durations=[])
    texts = list(data.corpus.texts)
    dense = dataclasses.replace(data.corpus, texts=Strings([texts[0] * 50, *texts[1:]]))
    found = recipe.without_infeasible(data.asked, {"train": dense, "val": dense}, info)
    assert len(found["train"]) == len(texts) - (kind == "ctc") and found["val"] is dense
    assert "in no CTC loss" in capsys.readouterr().out
    data.corpus = dense
    counts = [data.item(index, 1)["counts"] for index in (0, 1)]
    assert counts[0]["ctc"] == 0 < counts[1]["ctc"]
    assert counts[0].get("rnnt", 1) > 0


def test_reductions_differ_by_their_factors_and_counts(noise):
    by_reduction = {}
    for reduction in start.REDUCTIONS:
        info, items = make_items(noise, {"reduction": reduction, "ctc_reduction": reduction})
        batch = moved(items)
        with torch.no_grad():
            terms = recipe.compute_loss(make_model(info.config), batch)
        by_reduction[reduction] = terms["tdt"].item() / batch["counts"]["tdt"]
        lengths = batch["tokens_lengths"].double()
        factors = 1 / lengths if reduction == "mean" else torch.ones(8)
        count = int(lengths.sum()) if reduction == "mean_volume" else 8
        for term in ("tdt", "ctc"):
            assert torch.equal(batch[f"{term}_factors"], factors.double())
            assert batch["counts"][term] == count
    total = by_reduction["mean_batch"] * 8
    assert by_reduction["mean_volume"] == pytest.approx(total / sum(map(len, TEXTS)))
    assert by_reduction["mean"] < by_reduction["mean_batch"]


@pytest.mark.parametrize("at_once", [1, 100])
def test_pieces_of_the_subsampling_change_nothing(noise, monkeypatch, at_once):
    info, items = make_items(noise)
    model, results = make_model(info.config).train(), []
    for size in (network.AT_ONCE, at_once):
        monkeypatch.setattr(network, "AT_ONCE", size)
        terms = recipe.compute_loss(model, moved(items))
        results.append(
            torch.cat([torch.stack([*terms.values()]), gradient_of(sum(terms.values()), model)])
        )
    assert (results[0] - results[1]).abs().max() <= 1e-12 * results[0].abs().max()


def test_training_changes_neither_the_blank_row_nor_the_statistics(noise):
    info, items = make_items(noise)
    torch.manual_seed(0)
    model = Parakeet(info.config, SIGMA, 0.1, 0.2).double().train()
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    embedding = model.decoder.embedding.weight
    before = embedding.detach().clone()
    assert not before[model.blank].any()
    optimizer = small.optimizer_of(
        model, 1e-2, weight_decay=0.1, settings=optim.AdamWSettings(decay_embeddings=False)
    )
    given = contract.loss_of(recipe, model, items, {"tdt": 0.7, "ctc": 0.3})
    for _ in range(3):
        contract.update(given, model, [4, 4])
        optimizer.step()
    changed = (embedding != before).any(dim=1)
    assert (
        not embedding[model.blank].any() and changed[1 : model.blank].all() and not changed[0]
    )  # no text has it
    assert any(name.endswith("num_batches_tracked") for name in statistics)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, statistics[name]), name


@torch.no_grad()
@pytest.mark.parametrize("scaled", [False, True])
def test_a_model_from_scratch_is_fitted_to_the_valid_frames_of_some_utterances(
    noise, monkeypatch, scaled
):
    data, info = make_utterances(noise, scale_input=scaled)
    item = data.item
    monkeypatch.setattr(
        data, "item", lambda *place: {**item(*place), "audio": item(*place)["audio"].double()}
    )
    torch.manual_seed(0)
    model = start.make_model(info, None, 0.5, 0.5).double().train()
    before = model.encoder.subsampling.linear.weight.clone()
    recipe.fit(1, model, data)
    assert model.training
    assert not any(norm.measures for norm in model.modules() if hasattr(norm, "measures"))
    model.eval()

    def inputs_of(module) -> torch.Tensor:
        """The module's input for all utterances, each encoded alone, so that there is no
        padding."""
        inputs = []
        hook = module.register_forward_pre_hook(lambda _, given: inputs.append(given[0][0]))
        for index in range(len(data)):
            model.encode(moved([data.item(index, 0)]))
        hook.remove()
        return torch.cat(inputs)

    first = inputs_of(model.encoder.layers[0])
    assert first.mean(0).abs().max() < 1e-9 and first.std().item() == pytest.approx(1, rel=1e-2)
    ratio = model.encoder.subsampling.linear.weight / before
    assert torch.allclose(ratio, ratio[0, 0].expand_as(ratio)) and not 0.9 < ratio[0, 0] < 1.1
    for layer in model.encoder.layers:
        norm, frames = layer.conv.norm, inputs_of(layer.conv.norm)
        assert torch.allclose(norm.running_mean, frames.mean(0), rtol=1e-9, atol=1e-12)
        assert torch.allclose(norm.running_var, frames.var(0), rtol=1e-9, atol=1e-12)
        assert norm.num_batches_tracked == 0 and frames.mean(0).abs().max() > 1e-4


# --- data -----------------------------------------------------------------------------------------


def test_dither_is_tiny_and_an_evaluation_set_is_read_as_it_is(noise):
    flags = ("--no_speed_perturbation", "--no_wave_augment")
    data, _ = make_utterances(noise, *flags, loss={"omega": 1.0})
    evaluated, _ = make_utterances(noise, *flags, training=False)
    for index in range(8):
        item, plain = data.item(index, 1), evaluated.item(index, 1)
        dither = (item["audio"] - plain["audio"]).double()
        assert plain["audio"].shape == item["audio"].shape == (round(SECONDS[index] * SAMPLE_RATE),)
        assert dither.std().item() == pytest.approx(1e-5, rel=0.05) and dither.abs().max() < 1e-4
        assert item["plain"]
        assert not plain["plain"]
        assert "time_masks" not in plain
        assert plain["text"] == TEXTS[index]
        path = Path(noise[0]).parent / f"{index}.wav"
        assert torch.equal(plain["audio"], read_audio(str(path), SAMPLE_RATE))


def test_the_plain_loss_is_drawn_for_a_share_of_the_utterances(noise, monkeypatch):
    monkeypatch.setattr(recipe, "read_utterance", lambda *_: torch.zeros(100))
    flag, loss = "--no_speed_perturbation", {"omega": 0.3}
    data, evaluated = (
        make_utterances(noise, flag, training=training, loss=loss)[0] for training in (True, False)
    )

    def drawn(utterances, epoch: int) -> list[bool]:
        return [utterances.item(index, epoch)["plain"] for index in range(8)]

    plain = [drawn(data, epoch) for epoch in range(100)]
    assert np.mean(plain) == pytest.approx(0.3, abs=0.05) and plain[0] != plain[1]
    assert not any(any(drawn(evaluated, epoch)) for epoch in range(20))
    masked, _ = make_utterances(noise, flag, "--no_spec_augment", loss=loss)
    assert drawn(masked, 5) == plain[5]


def test_masks_of_spec_augment_reach_the_features(noise):
    _, items = make_items(noise)
    model, seen = make_model(SMALL), []
    model.encoder.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    batch = moved(items[:1])
    unmasked = {key: value for key, value in batch.items() if not key.endswith("_masks")}
    masks = {"time_masks": [[[0.5, 0.6]]], "frequency_masks": [[[0.0, 0.25]]]}
    model.encode({**batch, **{name: torch.tensor(value) for name, value in masks.items()}})
    model.encode(unmasked)
    (masked, whole), frames = (x[0] for x in seen), seen[1].shape[1]
    first, last = round(0.5 * frames), round(0.6 * frames)
    expected = whole.clone()
    expected[first:last] = 0
    expected[:, :4] = 0
    assert torch.equal(masked, expected) and last > first and whole.abs().min() > 0


# --- trained, stopped and resumed -----------------------------------------------------------------

DEMO = "--from_scratch --model_size demo".split()


@pytest.fixture(scope="module")
def scratch(manifests, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the stdout of two updates from scratch, exported to "hf"."""
    folder = tmp_path_factory.mktemp("scratch")
    steps = "--save_every 1 --log_every 1 --eval_every 1 --learning_rate 1e-2".split()
    places = ["--export", folder / "hf", "--output_dir", folder]
    return folder, ran(recipe, *manifests, *DEMO, *SHORT, *steps, *places)


@pytest.fixture(scope="module")
def best(scratch, tmp_path_factory) -> Path:
    """Its best weights, changed so that the model writes something: several known tokens, and
    blanks."""
    path = tmp_path_factory.mktemp("best") / "best.safetensors"
    weights = load_file(scratch[0] / "checkpoints" / path.name)
    blank = len(weights["decoder.embedding.weight"]) - 1
    weights["joint.head.weight"] *= 8
    weights["joint.head.bias"][blank] -= 2
    weights["joint.head.bias"][blank + 1] -= 4  # a duration of 0: transformers bounds none
    weights["joint.head.bias"][0] -= 100  # the unknown token
    runs.write_best(path, scratch[0] / "checkpoints" / path.name, weights)
    return path


@pytest.fixture(scope="module")
def released(best, tmp_path_factory) -> Path:
    """The same weights in both released forms, exported alone: "hf" and "nemo"."""
    folder = tmp_path_factory.mktemp("released")
    for form, files in (("hf", "tokenizer_config.json"), ("nemo", "made_from.json, model.nemo")):
        export = ["--export", folder / form, "--export_format", form]
        out = ran(recipe, "--resume", best, *export, "--output_dir", folder)
        line = out.splitlines()[-1]
        assert line.startswith(f"exported to {folder / form}: ") and line.endswith(files)
    return folder


@pytest.mark.slow
def test_adapters_beside_a_released_parakeet(released, manifests, tmp_path):
    in_peft = functools.partial(adapters.check_peft, transformers.ParakeetForTDT)
    source = ["--model_dir", released / "hf"]
    out = adapters.check(recipe, manifests, source, tmp_path, formats, in_peft=in_peft)
    assert "trained whole: decoder, joint, " in out


def test_an_export_to_onnx_has_the_programs_files_and_a_card(best, tmp_path, monkeypatch):
    """What is in the files: tests/models/parakeet/test_onnx.py."""

    def prepare(tensors, config, pieces):
        assert config["vocabulary"] == len(pieces) and "encoder_projector.weight" in tensors
        return lambda folder: (folder / "encoder.onnx").write_bytes(b"graph"), {}

    monkeypatch.setattr(onnx, "prepare", prepare)
    export = ["--export", tmp_path / "onnx", "--export_format", "onnx"]
    out = ran(recipe, "--resume", best, *export, "--output_dir", tmp_path)
    assert "README.md" in out.splitlines()[-1] and "encoder.onnx" in out.splitlines()[-1]
    assert "library_name: onnx" in (tmp_path / "onnx" / "README.md").read_text(encoding="utf-8")


BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of BatchNorm


def statistics_of(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    statistics = {name: w for name, w in weights.items() if name.endswith(BUFFERS)}
    assert len(statistics) == 6
    return statistics


def test_a_run_from_scratch_leaves_what_it_promises(scratch):
    folder, out = scratch
    steps = [line["step"] for line in contract.metrics(folder) if "eval/cer" in line]
    assert steps == [1, 2]  # random weights are not evaluated
    assert out.index("val set, weights of the best evaluation") < out.index("\nexported to")
    assert "no CTC head in the export" in out
    assert not re.search("compared to (?!decoding)|warning|outside the vocabulary", out)
    card = (folder / "hf" / "README.md").read_text(encoding="utf-8")
    block = yaml.safe_load(card.split("---\n")[1])
    assert block["library_name"] == "transformers" and "license" not in block
    [results] = [each["results"] for each in block["model-index"]]
    noted = json.loads((folder / "logs" / "results.json").read_text(encoding="utf-8"))
    rates = [*noted["rates"].values()][-1]
    assert results[0]["metrics"][0]["value"] == round(100 * rates["wer"]["rate"], 2)
    paths = checkpoint.list_checkpoints(folder / "checkpoints")
    after, before = (checkpoint.read(path, recipe.RECIPE).model for path in paths)
    for name, value in statistics_of(after).items():
        assert torch.equal(value, before[name]), name
        fresh = torch.full_like(value, float(name.endswith("running_var")))
        assert torch.equal(value, fresh) == name.endswith("num_batches_tracked"), name


@pytest.mark.parametrize("form", ["hf", "nemo"])
def test_an_export_is_fine_tuned_and_evaluated_before_its_first_update(
    released, manifests, form, tmp_path, monkeypatch
):
    monkeypatch.setattr(
        recipe, "fit_to_data", lambda *_: pytest.fail("the statistics were measured again")
    )
    path = {
        "hf": ["--model_dir", released / "hf"],
        "nemo": ["--model_file", released / "nemo" / "model.nemo"],
    }[form]
    export = ["--export", tmp_path / "out", "--export_format", form]
    flags = [*manifests, *path, "--max_steps", "1", *export, "--output_dir", tmp_path]
    with runs.one_on_device(Parakeet) as models:
        out = ran(recipe, *flags)
    assert len(models) == 2  # the second one is the released model, for the comparison
    assert [line["step"] for line in contract.metrics(tmp_path) if "eval/wer" in line] == [0, 1]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] in (0, 1)
    assert "compared to " in out and "learning rate 3e-05" in out
    assert "warning" not in out  # neither writes capitals
    state, before = newest(tmp_path, recipe), formats.read_model(path[1])[0]
    has_ctc = form == "nemo"
    assert state.model_info["pretrained"] and state.model_info["config"]["ctc"] == has_ctc
    expected = {**start.SCRATCH_LOSS, "ctc": 0.3} if has_ctc else {**settings.TDT.loss, "ctc": 0.0}
    assert state.model_info["loss"] == expected
    kept = [name for name, value in state.model.items() if torch.equal(value, before[name])]
    assert set(statistics_of(before)) <= set(kept) and len(kept) < len(before) / 2
    best = checkpoint.read_weights(tmp_path / "checkpoints" / "best.safetensors", recipe.RECIPE)
    best = best.model
    after = formats.read_model(tmp_path / "out")[0]
    assert after.keys() == best.keys()
    assert all(torch.equal(after[name], best[name]) for name in after)


def test_a_run_and_both_forms_of_its_export_write_the_same_texts(best, released, konkani):
    """That they are those of transformers: tests/models/parakeet/test_families.py."""
    audio = sorted((Path(konkani["val"]).parent / "audio").glob("val_*.wav"))
    sources = (
        ["--resume", best],
        ["--model_dir", released / "hf"],
        ["--model_file", released / "nemo" / "model.nemo"],
    )
    words = ["--transcribe", *audio, "--lm", "off"]
    first, *others = (ran(recipe, *words, *flags) for flags in sources)
    assert others == [first, first] and any(line.split("\t")[1] for line in first.splitlines())


def test_another_style_of_the_training_texts_is_a_warning(released, konkani, json_lines, tmp_path):
    rows = runs.rows_of(konkani["train"])[:6]
    for number, row in enumerate(rows):
        row["text"] = row["text"] + (", Yes." if number % 2 else "")
    manifest = json_lines(tmp_path / "m.json", rows)
    flags = ["--train_manifest", manifest, "--val_manifest", konkani["val"]]
    flags += ["--model_dir", released / "hf", "--max_steps", "1", "--output_dir", tmp_path]
    flags += ["--allow_unknown"]
    out = ran(recipe, *flags)
    lacking, *others = [line for line in out.splitlines() if line.startswith("warning")]
    assert "outside the vocabulary: , x 3, . x 3, Y x 3, e x 3, s x 3" in lacking
    shares = "0 % of the model's texts and in 50 % of the training texts"
    assert [line.partition(" ")[2].partition(":")[0] for line in others] == [
        f"capitals are in {shares}",
        f"punctuation is in {shares}",
    ]
    again = ran(recipe, *flags, "--max_steps", "2", "--resume", "auto")
    assert "resuming from" in again and "learns another style" not in again


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--ctc_weight 0", {"tdt": 1.0}),
        ("--ctc_weight 0.1", {"tdt": 0.9, "ctc": 0.1}),
    ],
)
def test_the_share_of_the_ctc_head(noise, line, expected):
    args = runs.parse(recipe, "--train_manifest", noise[0], *DEMO, *line.split())
    info, _ = start.Family(recipe.resolve(args)).first_model(Run(Setup()), lambda: TEXTS)
    assert recipe.loss_weights(info) == expected and info.config["ctc"] == ("ctc" in expected)


def test_a_run_that_names_another_model_than_its_checkpoint_is_refused(
    released, manifests, tmp_path
):
    """Also if the shapes are equal and the vocabularies are not."""
    flags = [*manifests, *SHORT, "--output_dir", tmp_path]
    ran(recipe, *flags, "--model_dir", released / "hf", "--max_steps", "1")
    weights, config, extras = formats.read_model(released / "hf")
    tokenizer = {"sentencepiece": other_vocabulary(config["vocabulary"]).hex()}
    other = {**extras, "source": {}, "tokenizer": tokenizer}
    formats.export(tmp_path / "other", "hf", weights, config, other)
    _, line = refused(recipe, *flags, "--model_dir", tmp_path / "other", "--resume", "auto")
    assert "another shape or vocabulary" in line


def other_vocabulary(size: int) -> bytes:
    texts = ["".join(chr(97 + i * k % 9) for k in range(1, 9)) for i in range(200)]
    return pad_pieces(train_tokenizer(texts, "bpe", min(size, 20)).model, size)


# --- evaluated and transcribed --------------------------------------------------------------------


def test_transcripts_have_words_and_segments_and_long_files_are_cut(
    best, konkani, silence, tmp_path
):
    paths = sorted((Path(konkani["val"]).parent / "audio").glob("val_*"))
    pieces = [soundfile.read(path)[0] for path in paths]
    long = np.concatenate([np.concatenate([piece, np.zeros(8000)]) for piece in pieces * 3])
    soundfile.write(tmp_path / "long.flac", long, 22050)
    files = [tmp_path / "long.flac", silence]
    ran(recipe, "--transcribe", *files, "--resume", best, "--output", tmp_path / "out.jsonl")
    row, silent = runs.rows(tmp_path / "out.jsonl")
    longest = checkpoint.read_weights(best, recipe.RECIPE).run_info["longest"]
    assert len(row["pieces"]) > 3
    assert all(piece["end"] - piece["start"] <= longest + 1e-6 for piece in row["pieces"])
    assert row["seconds"] == pytest.approx(len(long) / 22050, abs=1e-3)
    for name in ("words", "segments"):
        assert " ".join(part["text"] for part in row[name]) == row["text"]
        times = [(part["start"], part["end"]) for part in row[name]]
        assert times == sorted(times)
        assert all(0 <= start <= end <= row["seconds"] + 0.4 for start, end in times)
    assert len(row["segments"]) >= len([piece for piece in row["pieces"] if piece["text"]])
    last = row["pieces"][-1]["start"]
    assert row["words"][-1]["start"] >= round(last, 3) > longest  # words are rounded to 1 ms
    assert silent["text"] == "" and not silent.get("words")


# --- mistakes -------------------------------------------------------------------------------------


def test_a_loss_that_is_a_sum_becomes_a_mean(released, manifests, tmp_path):
    weights, config, extras = formats.read_model(released / "nemo" / "model.nemo")
    extras["loss"]["reduction"] = "sum"
    formats.export(tmp_path / "sum", "nemo", weights, config, extras)
    flags = [*manifests, "--model_file", tmp_path / "sum" / "model.nemo", "--max_steps", "1"]
    flags += ["--output_dir", tmp_path]
    assert "the model's loss is a sum over a batch" in ran(recipe, *flags)
    assert newest(tmp_path, recipe).model_info["loss"]["reduction"] == "mean_volume"


# --- a language that the vocabulary cannot write --------------------------------------------------


@pytest.fixture(scope="module")
def foreign(spoken, released) -> list:
    """The flags of a fine-tuning on another script."""
    data = ["--train_manifest", spoken["train"], "--val_manifest", spoken["val"]]
    return [*data, "--model_file", released / "nemo" / "model.nemo"]


@pytest.fixture(scope="module")
def retrained(foreign, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the stdout of such a fine-tuning with a new vocabulary, from the folder "new"
    in it."""
    folder = tmp_path_factory.mktemp("retrained")
    made = ["--train_tokenizer", "bpe", "--vocab_size", "100", "--export", folder / "new"]
    prepared(foreign[-1], foreign[1], *made)
    model = ["--model_dir", folder / "new", "--max_steps", "1", "--save_every", "1"]
    places = ["--export", folder / "hf", "--output_dir", folder / "run"]
    return folder, ran(recipe, *foreign[:4], *model, *places)


@pytest.mark.parametrize("command", [[], ["--check_data"]])
def test_another_script_is_refused_with_the_way_out(foreign, command, tmp_path):
    status, err = refused(recipe, *foreign, *command, "--output_dir", tmp_path)
    assert status == 1 and err.startswith("error: train set: the vocabulary cannot write ")
    assert "extend parakeet MODEL TEXTS --train_tokenizer char" in err and "--allow_unknown" in err
    assert not list(tmp_path.rglob("*.pt"))


def test_data_are_checked_without_the_weights(foreign, released, tmp_path):
    shutil.copytree(released / "hf", tmp_path / "hf")
    (tmp_path / "hf" / "model.safetensors").unlink()
    flags = [*foreign[:4], "--model_dir", tmp_path / "hf", "--output_dir", tmp_path]
    status, _ = refused(recipe, *flags, "--check_data")
    assert status == 1
    assert "can be used" in ran(recipe, *flags, "--check_data", "--allow_unknown")


def test_a_run_knows_which_pieces_are_new(retrained, released, foreign, tmp_path):
    """tests/models/parakeet/test_vocabulary.py: which rows are kept."""
    before, _ = start.read(released / "nemo" / "model.nemo")
    info, weights = start.read(retrained[0] / "new")
    assert (retrained[0] / "new" / "model.nemo").is_file()  # the released model's form
    assert info.config == {**before.config, "vocabulary": 100}
    assert all(tensor.isfinite().all() for tensor in weights.values())
    folder = shutil.copytree(retrained[0] / "run", tmp_path / "run")
    saved = newest(folder, recipe)
    trained = records.read(start.ModelInfo, saved.model_info, "the run")
    assert trained.config == info.config and trained.new_pieces == info.new_pieces
    assert saved.progress.parts["new_rows"]["rows"]["joint.head.bias"] == info.new_pieces
    exported = start.read(retrained[0] / "hf")[0]
    assert exported.config["vocabulary"] == 100
    assert start.tokenizer_of(exported).pieces == start.tokenizer_of(info).pieces
    flags = ["--model_dir", retrained[0] / "new", "--max_steps", "2", "--resume", "auto"]
    assert "resuming from" in ran(recipe, *foreign[:4], *flags, "--output_dir", folder)


@pytest.mark.parametrize(
    ("added", "letters"),
    [
        ((), "कखग"),  # a vocabulary for the same texts in other letters
        (("(", ")", "ख"), "aख("),  # three more letters
    ],
    ids=["new vocabulary", "added pieces"],
)
def test_fitted_rows_begin_below_random_ones(noise, added, letters):
    """A model that has learned TEXTS gets them in other `letters`."""
    _, corpus = noise
    data, info = make_utterances(noise, training=False)
    batch = moved([data.item(index, 0) for index in range(len(data))])
    torch.manual_seed(0)
    old = start.make_model(info, None)
    recipe.fit_to_data(old, batch)
    optimizer = torch.optim.Adam(old.parameters(), 1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        terms = recipe.compute_loss(old, batch)
        (terms["tdt"] + terms["ctc"]).backward()
        optimizer.step()
    others = [text.translate(str.maketrans("abc", letters)) for text in corpus.texts]
    weights = {name: tensor.detach() for name, tensor in old.state_dict().items()}
    if added:
        state = vocabulary.add_lacking(info.tokenizer, added)
    else:
        state = vocabulary.train_tokenizer(others, "char", 0)
    new, changed = vocabulary.with_new_vocabulary(info, weights, state)
    corpus = dataclasses.replace(corpus, texts=Strings(others))
    data = recipe.Utterances(data.asked, corpus, start.tokenizer_of(new), new, training=False)
    batch = moved([data.item(index, 0) for index in range(len(data))])
    fresh = start.make_model(new, None).state_dict()
    losses = {}
    for kind in ("fresh", "fitted"):
        model = start.make_model(new, {name: tensor.clone() for name, tensor in changed.items()})
        if kind == "fitted":
            shares = vocabulary.shares(data.tokenizer, others, new.new_pieces)
            size = info.config["vocabulary"]
            fit_new_rows(model, batch, new.new_pieces, shares, weights, size)
        else:
            for name in vocabulary.ROWS:
                model.state_dict()[name][new.new_pieces] = fresh[name][new.new_pieces]
        with torch.no_grad():
            losses[kind] = recipe.compute_loss(model.eval(), batch)
    for term in ("tdt", "ctc"):
        assert losses["fitted"][term] < losses["fresh"][term], losses


# --- added pieces ---------------------------------------------------------------------------------

SIGNS = ("(", ")", "%", "°")


@pytest.fixture(scope="module")
def signs(konkani, tmp_path_factory) -> list:
    """The flags of a fine-tuning on texts with signs that the released model lacks."""
    rows = [{**row, "text": f"({row['text']}) °%"} for row in runs.rows_of(konkani["train"])]
    manifest = runs.write_rows(tmp_path_factory.mktemp("signs") / "m.json", rows)
    return ["--train_manifest", manifest, "--val_manifest", konkani["val"]]


@pytest.fixture(scope="module")
def with_signs(signs, released, tmp_path_factory) -> Path:
    """The released model with them."""
    folder = tmp_path_factory.mktemp("prepared") / "more"
    added = ["--add_tokens", " ".join(SIGNS), "--export", folder]
    out = prepared(released / "hf", signs[1], *added)
    assert "4 are new" in out
    return folder


@pytest.fixture(scope="module")
def grown(signs, with_signs, tmp_path_factory) -> Path:
    """The folder of a run of three updates that begins there."""
    folder = tmp_path_factory.mktemp("grown")
    flags = ["--model_dir", with_signs, *SHORT, "--max_steps", "3", "--warmup_steps", "2"]
    out = ran(recipe, *signs, *flags, "--output_dir", folder)
    assert "outside the vocabulary" not in out
    return folder


def test_missing_characters_are_named_with_the_command_that_adds_them(
    signs, released, with_signs, tmp_path
):
    flags = [*signs, "--check_data", "--allow_unknown", "--output_dir", tmp_path]
    out = ran(recipe, *flags, "--model_dir", released / "hf")
    (line,) = [line for line in out.splitlines() if line.startswith("to add them")]
    words = shlex.split(line.partition(": ")[2])
    assert words[:4] == ["python", "-m", "models.extend", "parakeet"]
    assert "4 are new" in prepared(*words[4:-1], tmp_path / "new")
    assert "outside the vocabulary" not in ran(recipe, *flags, "--model_dir", with_signs)


@pytest.mark.parametrize("keeps", [True, False])
def test_adapters_of_a_run_with_added_pieces_begin_another_run(keeps, signs, with_signs, tmp_path):
    """Their rows stay as they have become, merged or not."""
    flags = [*signs, "--model_dir", with_signs, *SHORT]
    adapters = ["--lora", "2"] if keeps else []
    ran(recipe, *flags, "--lora", "2", "--output_dir", tmp_path / "first")
    best = tmp_path / "first" / "checkpoints" / "best.safetensors"
    flags += ["--init_from", best, *adapters, "--learning_rate", "1e-9"]
    ran(recipe, *flags, "--output_dir", tmp_path / "second")
    saved = newest(tmp_path / "second", recipe)
    assert saved.model_info["new_pieces"] == []  # they have been trained
    name = "decoder.embedding.weight"
    torch.testing.assert_close(saved.model[name], load_file(best)[name], rtol=0, atol=1e-6)


def test_weights_of_a_run_fit_a_larger_vocabulary(signs, with_signs, scratch, tmp_path):
    best = scratch[0] / "checkpoints" / "best.safetensors"
    flags = ["--model_dir", with_signs, "--init_from", best, "--learning_rate", "1e-9", *SHORT]
    ran(recipe, *signs, *flags, "--output_dir", tmp_path)
    saved, before = newest(tmp_path, recipe), load_file(best)
    added = start.read(with_signs)[0].new_pieces
    assert saved.model_info["new_pieces"] == added
    for name in vocabulary.ROWS[:3]:
        old = before[name][: added[0]]
        torch.testing.assert_close(saved.model[name][: added[0]], old, rtol=0, atol=1e-6)


@pytest.mark.parametrize("form", ["hf", "nemo"])
def test_stock_tools_write_added_pieces(grown, form, tmp_path):
    best = grown / "checkpoints" / "best.safetensors"
    export = ["--export", tmp_path / form, "--export_format", form]
    ran(recipe, "--resume", best, *export, "--output_dir", tmp_path)
    info = records.read(start.ModelInfo, newest(grown, recipe).model_info, "the run")
    ours = start.tokenizer_of(info)
    text = "(abc) 5 °% (%"
    ids = ours.encode(text)
    back, _ = start.read(tmp_path / form)
    assert back.config == info.config and start.tokenizer_of(back).encode(text) == ids
    assert set(info.new_pieces) <= set(ids)
    assert "fine-tuned from hf" in (tmp_path / form / "README.md").read_text()  # not "more"
    if form == "hf":
        model = transformers.ParakeetForTDT.from_pretrained(tmp_path / form)
        theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / form)
        assert theirs(text, add_special_tokens=False).input_ids == ids
        assert theirs.decode(ids, group_tokens=False) == ours.decode(ids)
        size = info.config["vocabulary"]
        assert (model.config.vocab_size, model.config.blank_token_id) == (size + 1, size)
    else:
        content = archive.load_yaml(
            archive.unpack(tmp_path / form / "model.nemo")[archive.YAML], ""
        )
        assert content["labels"] == content["joint"]["vocabulary"] == ours.pieces


# --- streams --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def streaming(best, tmp_path_factory) -> Path:
    """A model that streams, of frames of 80 ms, with weights of `best` where they fit."""
    path = tmp_path_factory.mktemp("streaming") / "best.safetensors"
    made = {}

    def change(saved: dict) -> None:
        saved["model_info"]["config"] |= {
            "kind": "rnnt",
            "durations": [],
            "ctc": False,
            "streaming": {"left": 12, "lookaheads": [3, 0]},
            "prompts": {"slots": 3, "width": 8},
        }
        saved["model_info"]["languages"] = {"auto": 1, "de-DE": 0, "fi-FI": 2}
        torch.manual_seed(0)
        model = start.make_model(records.read(start.ModelInfo, saved["model_info"], "it"), None)
        fits = load_file(best)
        for name, tensor in model.state_dict().items():
            same = name in fits and fits[name].shape == tensor.shape
            made[name] = (fits[name] if same else tensor).contiguous()

    runs.write_best(path, best, made, change)
    return path


def test_a_stream_writes_what_one_pass_writes(streaming, best, tmp_path, konkani):
    paths = [row["audio_filepath"] for row in runs.rows_of(konkani["val"])]
    model = ["--resume", streaming]
    found = 0
    for number, path in enumerate(paths[:3]):
        output = ["--output", tmp_path / f"{number}.jsonl"]
        told = [*model, "--language", "fi-FI"]
        whole = ran(recipe, "--transcribe", path, "--lookahead", "3", *told)
        streamed = ran(recipe, "--transcribe", path, "--stream", "320", *told, *output)
        assert streamed.split() == whole.split()
        rows = runs.rows(output[1])
        assert " ".join(row["text"] for row in rows).split() == whole.split()
        found += len(rows)
    assert found
    _, err = refused(recipe, "--transcribe", path, "--stream", "80", "--resume", best)
    assert "Nemotron 3.5 ASR" in err  # other mistakes: tests/models/parakeet/test_live.py


def is_read(descriptor: int) -> bool:
    """Whether all that was written to a pipe has been read."""
    left = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, left)
    return not any(left)


def test_standard_input_ends_with_its_writer_or_ctrl_c_and_nothing_is_lost(
    streaming, tmp_path, konkani
):
    data = []
    for row in runs.rows_of(konkani["val"]):
        waveform = read_audio(row["audio_filepath"], SAMPLE_RATE)
        data.append((waveform * 32767).round().to(torch.int16).numpy())
    samples = np.concatenate(data)
    soundfile.write(tmp_path / "a.wav", samples, SAMPLE_RATE, subtype="PCM_16")
    flags = ["--stream", "80", "--resume", streaming]
    expected = ran(recipe, "--transcribe", tmp_path / "a.wav", *flags)
    assert len(expected) > 10
    command = runs.command(recipe, "--transcribe", "-", *flags)
    for ending in ("end", "ctrl-c", "terminated"):
        reading, writing = multiprocessing.Pipe(duplex=False)
        output = tmp_path / f"{ending}.jsonl"
        process = runs.start([*command, "--output", output], tmp_path, streams={0: reading})
        reading.close()
        with open(writing.fileno(), "wb", closefd=False) as pipe, contextlib.suppress(OSError):
            pipe.write(samples.tobytes())
        if ending in ("ctrl-c", "terminated"):
            runs.wait_until(process, functools.partial(is_read, writing.fileno()))
            number = signal.SIGINT if ending == "ctrl-c" else signal.SIGTERM
            process.send_signal(number)
            process.wait()
        writing.close()
        out, err = process.communicate()
        status = 128 + signal.SIGTERM if ending == "terminated" else 0
        assert process.returncode == status, err
        assert out == expected
        rows = runs.rows(output)
        assert " ".join(row["text"] for row in rows).split() == expected.split()
        assert "Traceback" not in err and err.count("\n") == 1 + (ending == "terminated")
