"""The recipe of a voice: exactness of its losses, and its command line on a tiny model."""

import dataclasses
import functools
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch

from common import checkpoint
from common.batches import to_device
from models.matcha import formats, held_out, model, onnx, start, texts, vocoder, vocoder_training
from models.matcha.mels import HOP, SAMPLE_RATE, LogMel
from models.matcha.model import Matcha
from models.matcha.vocoder import GriffinLim
from recipes import matcha_voice as recipe
from speech.data.splits import Checks, load_corpus
from tests.models.matcha import plain
from tests.recipes import runs
from tests.recipes.cases import MATCHA
from tests.recipes.runs import newest, parse, ran, refused

CPU = torch.device("cpu")
TEXTS = ("ሰላም", "ቤት ውሃ", "ዳቦ", "ቡና ወተት ሥጋ", "መንገድ", "ከተማ ሰው", "ሴት ልጅ አባት", "እናት")
SECONDS = (0.9, 0.5, 1.4, 0.7, 1.0, 0.6, 1.1, 0.4)
ONE = ("--max_steps", 2, "--batch_size", 4, "--speak_held_out", 0)


@pytest.fixture(autouse=True, scope="module")
def tiny():
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(model.SIZES, "demo", MATCHA)
        patch.setattr(recipe, "GriffinLim", functools.partial(GriffinLim, steps=1))
        yield


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> str:
    """The manifest of eight clips of noise with the texts TEXTS, of two speakers."""
    folder = tmp_path_factory.mktemp("noise")
    rows = runs.rows_of(runs.write_noise(folder, TEXTS, SECONDS, SAMPLE_RATE, speakers=2))
    lines = ["|".join(row[name] for name in ("audio_filepath", "text", "speaker")) for row in rows]
    content = "\n".join(["audio_file|text|speaker_name", *lines])
    (folder / "train.csv").write_text(content, encoding="utf-8")
    return str(folder / "train.csv")


def both(noise: str) -> list[str]:
    """The noise for training and evaluation, with a model of the demo's size."""
    return ["--train_manifest", noise, "--val_manifest", noise, "--model_size", "demo"]


def info_of(train, initial=None) -> start.ModelInfo:
    """The record of a new voice that learns from a corpus."""
    family = start.Family(recipe.resolve(parse(recipe)))
    run = SimpleNamespace(resumed=None, initial=initial)
    return family.begin(family.create(None), None, run, lambda: train)[0]


@pytest.fixture(scope="module")
def material(noise):
    """A random model in float64, and the items of the noise."""
    corpus, _ = load_corpus(noise, recipe.text.normalise, Checks(max_duration=15))
    texts.read_corpora({"train": corpus}, "am")
    info = info_of(corpus)
    torch.manual_seed(0)
    network = Matcha(info.config).double()
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, 0.02, 0.1)
    network.mel_mean.fill_(-3.0)
    network.mel_std.fill_(1.7)
    data = recipe.Utterances(parse(recipe), corpus, info, training=True)
    items = [data.item(index, epoch=1) for index in range(len(data))]
    for item in items:
        item["audio"] = item["audio"].double()
        item["noise"] = item["noise"].double()
    return network, info, items


def losses_of(network: Matcha, batch: dict) -> dict[str, torch.Tensor]:
    return recipe.compute_loss(network, batch, LogMel().double())


@torch.no_grad()
def test_the_losses_are_those_of_a_second_implementation(material):
    network, info, items = material
    network.eval()
    weights = network.state_dict()
    (batch,) = to_device([recipe.collate(items)], CPU)
    found = losses_of(network, batch)
    expected = dict.fromkeys(found, 0.0)
    for item in items:
        vector = weights["spk_emb.weight"][item["speaker"]]
        frames = LogMel().double()(item["audio"][None])[0]
        frames = (frames + 3.0) / 1.7
        means, log_frames = plain.encoder(weights, info.config, item["tokens"], vector)
        # All paths are too many here; the search is compared with them elsewhere.
        path = recipe.alignment.search(
            means.t()[None], frames[None], torch.tensor([len(item["tokens"])]),
            torch.tensor([len(frames)]),
        )[0]  # fmt: skip
        durations = torch.bincount(path, minlength=len(item["tokens"]))
        expected["duration"] += (log_frames - (1e-8 + durations).log()).square().sum()
        mean_frames = means.t()[path]
        density = torch.distributions.Normal(mean_frames, 1.0).log_prob(frames)
        expected["prior"] -= density.sum()
        time, z = float(torch.tensor(item["time"])), item["noise"]
        noisy = (1 - (1 - 1e-4) * time) * z + time * frames
        columns = [noisy, mean_frames, vector.expand(len(frames), -1)]
        columns = torch.cat(columns, 1).t()
        columns = torch.nn.functional.pad(columns, (0, len(frames) % 2))
        if len(frames) % 2 == 0:  # the second implementation has no padding
            velocity = plain.velocity(weights, info.config, columns, time).t()
        else:
            velocity = network.velocity(
                noisy[None], mean_frames[None], torch.tensor([time]), torch.tensor([len(frames)]),
                vector[None],
            )[0]  # fmt: skip
        expected["flow"] += (velocity - (frames - (1 - 1e-4) * z)).square().sum()
    for name, value in expected.items():
        assert float(found[name]) == pytest.approx(float(value), rel=1e-5), name
    assert sum(len(item["noise"]) % 2 for item in items) < len(items) - 2
    assert batch["counts"]["flow"] == 80 * sum(len(item["noise"]) for item in items)


# --- the command line -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(noise, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("voice")
    flags = [*both(noise), "--max_steps", 2, "--batch_size", 4, "--speak_held_out", 2]
    return folder, ran(recipe, *flags, "--output_dir", folder)


def test_a_training_lets_one_hear_and_see_it(trained):
    folder, out = trained
    assert (folder / "logs" / held_out.PICTURE).read_bytes()[:4] == b"\x89PNG"
    assert "2 held-out sentences spoken" in out and "2 speakers" in out
    assert len(list((folder / "speech").glob("*_synthesis.wav"))) == 2
    assert not (folder / "logs" / "earlier-1").exists()


def test_a_trained_voice_speaks(trained, tmp_path):
    folder, _ = trained
    said = ["--synthesize", "ሰላም ቤት", "ዳቦ 2", "--output", tmp_path / "a.wav"]
    said += ["--output_dir", folder]
    ran(recipe, *said)
    lengths = [len(soundfile.read(tmp_path / f"a_00{number}.wav")[0]) for number in (1, 2)]
    assert all(length and length % HOP == 0 for length in lengths)
    ran(recipe, *said, "--speed", 0.5, "--temperature", 0)
    assert len(soundfile.read(tmp_path / "a_001.wav")[0]) > 1.5 * lengths[0]
    ran(recipe, *said, "--speaker", "voice 1")
    status, err = refused(recipe, *said, "--speaker", "nobody")
    assert status == 2 and "the voice has voice" in err
    for flags, problem in (
        (["?!"], "the text has no letters"),
        (["abc"], "has none of its letters"),
        (["ሰላም", "--output", tmp_path / "a.mp3"], "a.mp3: speech is written as .wav"),
        (["ሰላም", "ዳቦ", "--output", tmp_path / "a"], "speech is written as .wav"),
    ):
        status, err = refused(recipe, "--synthesize", *flags, "--output_dir", folder)
        assert status == 2 and problem in err


def test_a_resumed_voice_gets_no_further_speaker_and_no_further_letters(trained, noise, tmp_path):
    shutil.copytree(trained[0], tmp_path / "run")
    again = [*both(noise)[2:], *ONE, "--resume", "auto", "--output_dir", tmp_path / "run"]
    rows = Path(noise).read_text(encoding="utf-8")
    other = Path(noise).with_name("other.csv")
    for old, new, problem in (
        ("|voice 1", "|asha", "the speakers of 4 clips: asha; start a new voice"),
        ("ም", "ፐጰ", "the vocabulary cannot write"),
    ):
        other.write_text(rows.replace(old, new), encoding="utf-8")
        status, err = refused(recipe, "--train_manifest", other, *again)
        assert status == 1 and problem in err, err
    # Of an evaluation set they are only named.
    other.write_text(rows.replace("|voice 1", "|asha"), encoding="utf-8")
    measured = ["--evaluate", "--test_manifest", other, "--output_dir", tmp_path / "run"]
    out = ran(recipe, *measured)
    assert "warning: test set: the voice lacks the speakers of 4 clips: asha" in out


def test_released_weights_get_the_tokens_and_speakers_of_the_training_set(
    noise, tmp_path, monkeypatch
):
    monkeypatch.setitem(model.SIZES, "full", MATCHA)
    released = Matcha({**MATCHA, "symbols": len(formats.RELEASED), "speakers": 9})
    torch.save({"state_dict": released.state_dict()}, tmp_path / "matcha_vctk.ckpt")
    header, *rows = Path(noise).read_text(encoding="utf-8").splitlines()
    one = Path(noise).with_name("one.csv")
    one.write_text("\n".join([header, *rows[::2]]), encoding="utf-8")
    flags = ["--train_manifest", one, "--val_manifest", one, *ONE, "--output_dir", tmp_path]
    out = ran(recipe, *flags, "--model_file", tmp_path / "matcha_vctk.ckpt")
    assert out.count(formats.LICENCE) == 1 and "1 speaker\n" in out
    assert "tokens are letters of the released model" in out
    info = newest(tmp_path, recipe).model_info
    assert info["pretrained"] and info["config"]["speakers"] == 2  # its layers expect vectors
    assert info["config"]["symbols"] == len(info["symbols"]) < 40
    out = ran(recipe, *flags, "--max_steps", 3, "--resume", "auto")
    assert "(step 2)" in out and formats.LICENCE not in out


def test_one_voice_is_made_of_several(trained, noise, tmp_path):
    """With all layers, and with the origin of the several; the same speakers keep their rows."""
    saved = checkpoint.read_weights(trained[0] / "checkpoints" / "best.safetensors", recipe.RECIPE)
    saved = dataclasses.replace(saved, model_info={**saved.model_info, "pretrained": True})
    corpus, _ = load_corpus(noise, recipe.text.normalise, Checks(max_duration=15))
    texts.read_corpora({"train": corpus}, "am")
    first = saved.model_info["speakers"]
    row = corpus.select(np.array([list(corpus.speakers).index(first[1])]))
    for train, speakers in ((corpus, first), (row, first[1:])):
        info = info_of(train, saved)
        assert info.pretrained and info.speakers == speakers and info.config["speakers"] == 2
    saved.model_info["speakers"] = first[::-1]
    assert info_of(corpus, saved).speakers == first[::-1]


def test_an_export_names_whose_voice_it_is(trained, tmp_path):
    pytest.importorskip("onnx")
    folder, _ = trained
    best = folder / "checkpoints" / "best.safetensors"
    alone = ["--resume", best, "--export", tmp_path / "voice", "--output_dir", tmp_path]
    status, err = refused(recipe, *alone, "--consent", " ")
    assert status == 2 and "--consent: it is empty" in err
    ran(recipe, *alone, "--consent", "Abebe agrees; CC0 | all")
    names = sorted(path.name for path in (tmp_path / "voice").iterdir())
    assert names == ["README.md", "made_from.json", "tokens.txt", onnx.NAME, f"{onnx.NAME}.json"]
    status, err = refused(
        recipe, "--export", tmp_path / "x", "--consent", "mine", "--output_dir", folder
    )
    assert status == 2 and f"{best} is there: add --resume {best} to export it" in err
    card = (tmp_path / "voice" / "README.md").read_text(encoding="utf-8")
    assert "Abebe agrees; CC0 \\| all" in card and "pipeline_tag: text-to-speech" in card


def test_flags_that_contradict_the_checkpoint(trained, noise):
    folder, _ = trained
    again = [*both(noise), *ONE, "--resume", "auto", "--output_dir", folder]
    for flags in (["--model_size", "large"], ["--language", "de"]):
        status, err = refused(recipe, *again, *flags)
        assert status == 2 and "conflicts with the checkpoint" in err, err
    assert checkpoint.recipe_of(folder / "checkpoints" / "best.safetensors") == recipe.RECIPE


def test_what_is_of_no_use_is_refused_before_the_training(trained, noise, tmp_path):
    """A voice as the judge, and a folder as the released model."""
    folder, _ = trained
    best = folder / "checkpoints" / "best.safetensors"
    flags = [*both(noise)[:4], "--output_dir", tmp_path]
    status, err = refused(recipe, *flags, "--judge", best)
    assert status == 2 and "is not a recogniser" in err
    status, err = refused(recipe, *flags, "--model_file", folder)
    assert status == 2 and "it is a folder: name the file in it" in err


def test_a_text_that_is_too_long_for_its_clip_is_rejected(noise, tmp_path):
    rows = Path(noise).read_text(encoding="utf-8").replace("|ሰላም|", f"|{'ሰላም ' * 30}|")
    (Path(noise).parent / "long.csv").write_text(rows, encoding="utf-8")
    manifest = Path(noise).parent / "long.csv"
    out = ran(recipe, "--check_data", "--train_manifest", manifest, "--val_manifest", noise)
    assert "the text is too long for its clip" in out and "7 utterances in train" in out


def test_a_vocoder_is_trained_beside_the_voice(noise, tmp_path, monkeypatch):
    monkeypatch.setitem(vocoder.SIZES, "demo", {"width": 8, "layers": 1})
    flags = [*both(noise), *ONE, "--output_dir", tmp_path, "--vocoder_steps", 2]
    out = ran(recipe, *flags, "--speak_held_out", 1)
    assert "vocoder: 2 updates" in out and "1 held-out sentences spoken" in out
    assert "(step 2)" in ran(recipe, *flags, "--resume", "auto")
    folder = tmp_path / "checkpoints"
    assert isinstance(vocoder_training.read_vocoder(folder, recipe.RECIPE), vocoder.Vocos)
    said = ["--synthesize", "ሰላም", "--output", tmp_path / "a.wav"]
    assert "a.wav" in ran(recipe, *said, "--output_dir", tmp_path)
    ran(recipe, *both(noise), *ONE, "--output_dir", tmp_path)  # a new voice
    assert vocoder_training.read_vocoder(folder, recipe.RECIPE) is None
    assert (folder / "earlier-1" / "vocoder" / "best.safetensors").exists()
