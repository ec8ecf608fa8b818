"""The XTTS recipe: its GPT against Coqui's, training, data, memory options, and its command line on
tiny models. What every recipe promises: test_contract.py."""

import functools
import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import yaml
from safetensors.torch import load_file

from common import checkpoint, records
from models.xtts import decoding, formats, speaking, start, texts
from models.xtts import model as xtts
from models.xtts.codec import DVAE, SAMPLE_RATE, SAMPLES_PER_CODE, Mel, code_count
from models.xtts.decoding import Sampling
from models.xtts.frozen import Frozen
from models.xtts.model import GPT
from models.xtts.start import ModelInfo
from models.xtts.tokenizer import Vocabulary, new_vocabulary
from recipes import xtts_amharic as recipe
from speech.data.columns import Corpus
from speech.data.splits import Checks, load_corpus
from speech.decoding import judge
from tests import contract
from tests.contract import awake, metrics
from tests.models.xtts.small import (
    CONFIG,
    FIXTURES,
    ROWS,
    WITHOUT_AM,
    coquis,
    dvae_weights,
    make_info,
    small_vocoder,
    use_small_vocoder,
    write_released,
)
from tests.peers import same_tensors
from tests.recipes import adapters, runs
from tests.recipes.runs import newest, ran, refused

moved = functools.partial(contract.moved, recipe)
COQUI = json.loads((FIXTURES / "cases.json").read_text(encoding="utf-8"))["sizes"]
TEXTS = ("ሰላም", "ቤት ውሃ", "ዳቦ", "ቡና ወተት ሥጋ", "መንገድ", "ከተማ ሰው", "ሴት ልጅ አባት", "እናት")
SECONDS = (0.9, 0.5, 3.4, 0.7, 1.0, 0.6, 2.0, 1.1)
WEIGHTS = recipe.LOSS_WEIGHTS
FROZEN = ("dvae", "hifigan_decoder")
SLICE = start.SLICE


@pytest.fixture(autouse=True, scope="module")
def tiny():
    """A small vocoder. Shapes are counted once."""
    expected_shapes = formats.expected_shapes
    shapes_of = functools.cache(lambda text: expected_shapes(json.loads(text)))

    def remembered(config: dict) -> dict:
        return {group: dict(shapes) for group, shapes in shapes_of(json.dumps(config)).items()}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "expected_shapes", remembered)
        use_small_vocoder(patch)
        yield


@pytest.fixture(scope="module")
def noise(tmp_path_factory) -> tuple[str, Corpus]:
    """The manifest and the corpus of eight clips of noise with the texts TEXTS."""
    path = runs.write_noise(tmp_path_factory.mktemp("noise"), TEXTS, SECONDS, SAMPLE_RATE, 2)
    corpus, _ = load_corpus(path, recipe.text.normalise, Checks(max_duration=11.6))
    assert len(corpus) == 8
    return path, corpus


def make_frozen(dtype=torch.float64) -> Frozen:
    """Real mels and the DVAE of the fixtures, whose codes differ between frames."""
    dvae, stats = DVAE(CONFIG), torch.full((80,), 4.0)
    dvae.load_state_dict(dvae_weights())
    frozen = Frozen(Mel("dvae", stats), Mel("conditioning", stats), dvae, small_vocoder(16))
    for part in (frozen.dvae_mel, frozen.conditioning_mel, dvae):
        part.to(dtype)
    return frozen.to(torch.device("cpu"))


def make_utterances(
    noise: tuple[str, Corpus], *flags, training: bool = True, slices=SLICE, condition="same"
):
    """The noise as it is trained on."""
    path, corpus = noise
    args = runs.parse(recipe, "--train_manifest", path, *flags)
    vocab = new_vocabulary(texts.CHARACTERS, ["en", "am"], CONFIG["text_tokens"])
    info = replace(make_info(vocab), condition=condition, slice=tuple(slices))
    texts.read_corpora(texts.Texts(info), {"": corpus})
    return recipe.Utterances(args, corpus, texts.Texts(info), info, training)


def make_items(noise, dtype=torch.float64) -> list[dict]:
    """The eight utterances with slices of a tenth of the usual length, which take a tenth of the
    time."""
    data = make_utterances(noise, slices=[length // 10 for length in SLICE])
    items = [data.item(index, 1) for index in range(len(data))]
    return [
        {**item, "audio": item["audio"].to(dtype), "slice": item["slice"].to(dtype)}
        for item in items
    ]


def make_model(dropout: float = 0.0, dtype=torch.float64, config: dict = CONFIG) -> GPT:
    torch.manual_seed(0)
    return awake(GPT(config, dropout).to(dtype))


def gradient_of(loss: torch.Tensor, model) -> torch.Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])])


# --- parity with Coqui ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def theirs() -> GPT:
    """Our GPT with Coqui's random weights, in evaluation."""
    weights = {name.removeprefix("gpt."): w for name, w in coquis("gpt").items()}
    return xtts.make_model(COQUI, weights).eval()


def stub(codes: torch.Tensor, mels: torch.Tensor) -> SimpleNamespace:
    """Frozen parts that give these codes (B, n) and conditioning mels (B, 80, F), whatever the
    waveforms are."""
    return SimpleNamespace(codes=lambda waveforms: codes, conditioning_mel=lambda waveforms: mels)


def coqui_batch(cases: dict, rows: list[int]) -> tuple[dict, SimpleNamespace]:
    items = []
    for row in rows:
        length = int(cases["wav_lengths"][row])
        tokens = cases["text"][row, : cases["text_lengths"][row]]
        item = {"audio": torch.zeros(length), "tokens": tokens, "codes": code_count(length)}
        item |= {"slice": torch.zeros(1), "heard": (0, 0), "language": "en"}
        items.append({**item, "name": str(row), "index": row})
    return moved(items), stub(cases["codes"][rows], cases["mels"][rows])


@torch.no_grad()
@pytest.mark.parametrize("rows", [[0, 1, 2], [1]], ids=["ragged", "a row"])
def test_losses_and_logits_are_coquis(theirs, rows):
    cases, logits = coquis("gpt_cases"), {}
    hooks = [
        getattr(theirs, f"{name}_head").register_forward_hook(
            lambda _, __, out, name=name: logits.update({name: out})
        )
        for name in WEIGHTS
    ]
    batch, frozen = coqui_batch(cases, rows)
    terms = recipe.compute_loss(theirs, batch, frozen)
    for hook in hooks:
        hook.remove()
    lengths = {"text": cases["text_lengths"] + 1, "mel": torch.tensor([8, 20, 15]) + 4}
    assert list(terms) == list(WEIGHTS) == list(logits)
    for name, total in terms.items():
        ours = total / batch["counts"][name]
        expected = cases[f"loss_{name}" if len(rows) == 3 else f"row{rows[0]}.loss_{name}"]
        assert ours.item() == pytest.approx(expected.item(), abs=1e-5)
        assert batch["counts"][name] == sum(int(lengths[name][row]) for row in rows)
        wanted = torch.cat([cases[f"{name}_logits"][row, : lengths[name][row]] for row in rows])
        assert (logits[name] - wanted).abs().max() < 1e-5 and wanted.std() > 0.3


def test_gradients_are_coquis(theirs):
    cases = coquis("gpt_cases")
    batch, frozen = coqui_batch(cases, [0, 1, 2])
    terms = recipe.compute_loss(theirs, batch, frozen)
    loss = sum(WEIGHTS[name] * total / batch["counts"][name] for name, total in terms.items())
    assert loss.item() == pytest.approx(cases["loss"].item(), abs=1e-5)
    names, parameters = zip(*theirs.named_parameters(), strict=True)
    gradients = dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))
    for name, gradient in gradients.items():
        norm = cases[f"grad_norm.{name}"].item()
        assert gradient.norm().item() == pytest.approx(norm, rel=1e-4) and norm > 0, name
        if f"grad.{name}" in cases:
            assert (gradient - cases[f"grad.{name}"]).abs().max() < 1e-5
    assert sum(name.startswith("grad.") for name in cases) == 3


@torch.no_grad()
def test_conditioning_latents_of_a_waveform_are_coquis(theirs, monkeypatch):
    cases = coquis("mel_cases")
    mel = Mel("conditioning", cases["mel_stats"])
    lengths = formats.Conditioning(gpt_cond_chunk_len=1)
    waveform = load_file(FIXTURES / "mel_cases.safetensors")["waveform"].float() / 32768
    latents = speaking.latents_of(theirs, mel, waveform, lengths)
    assert (latents - cases["chunked_latents"]).abs().max() < 2e-5


@torch.no_grad()
def test_greedy_codes_and_latents_are_coquis(theirs, capsys):
    cases = coquis("gpt_cases")
    settings = Sampling(temperature=1.0, top_k=1, top_p=1.0, repetition_penalty=1.0, max_codes=20)
    (speech,) = decoding.sample(
        theirs, COQUI, cases["style"][1:2], [cases["text"][1].tolist()], settings
    )
    assert torch.equal(speech.codes, cases["greedy"][0]) and len(speech.codes.unique()) > 3
    assert (speech.latents - cases["greedy_latents"][0]).abs().max() < 1e-5


# --- exactness ------------------------------------------------------------------------------------


def test_the_explicit_product_is_the_fused_attention(noise, monkeypatch):
    items, model, frozen = make_items(noise)[:4], make_model().train(), make_frozen()
    explicit, calls, results = xtts.explicit_attention, [], []
    monkeypatch.setattr(
        xtts, "explicit_attention", lambda *inputs: calls.append(1) or explicit(*inputs)
    )
    for sdpa, expected in ((True, 0), (False, 2)):
        xtts.use_sdpa(model, sdpa)
        terms = recipe.compute_loss(model, moved(items), frozen)
        results.append([*terms.values(), gradient_of(sum(terms.values()), model)])
        assert len(calls) == expected
    for fused, product in zip(*results, strict=True):
        assert (fused - product).norm() <= 1e-10 * fused.norm()


# --- data -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [0.5, 3.0, 11.6])
def test_ten_thousand_slices(noise, monkeypatch, seconds):
    data, samples = make_utterances(noise), round(seconds * SAMPLE_RATE)
    waveform, codes = torch.arange(1.0, samples + 1), code_count(samples)
    monkeypatch.setattr(recipe, "read_utterance", lambda *_: waveform)
    monkeypatch.setattr(recipe.F, "pad", lambda x, _: x)  # it would copy 5 GB
    firsts, lengths = [], []
    for epoch in range(2000):
        item = data.item(epoch % 8, epoch)
        begin, length = int(item["slice"][0]) - 1, len(item["slice"])
        first, last = item["heard"]
        assert 0 <= begin <= begin + length <= samples and int(item["slice"][-1]) == begin + length
        assert item["codes"] == codes and 0 <= first <= last <= codes
        assert 0 <= begin - first * SAMPLES_PER_CODE < SAMPLES_PER_CODE
        assert last == codes or 0 <= begin + length - last * SAMPLES_PER_CODE < SAMPLES_PER_CODE
        firsts.append(begin)
        lengths.append(length)
    assert len(set(firsts)) > 1000
    if seconds < 3:
        assert set(lengths) == {samples // 2}
    else:
        assert all(SLICE[0] <= length <= SLICE[1] or length == samples // 2 for length in lengths)


def test_an_evaluation_hears_the_beginning_of_a_clip(noise):
    evaluated = make_utterances(noise, training=False)
    for epoch in (0, 3):
        item = evaluated.item(2, epoch)
        samples = len(item["audio"])
        length = 99_225 if samples >= 99_225 else samples // 2
        assert item["heard"] == (0, length // SAMPLES_PER_CODE)
        assert item["slice"].shape == (132_300,)
        assert torch.equal(item["slice"][:length], item["audio"][:length])
        assert not item["slice"][length:].any()


@torch.no_grad()
def test_the_counts_are_those_of_the_targets_and_no_stop_is_lost(noise, monkeypatch):
    items, model, frozen = make_items(noise), make_model(), make_frozen()
    codes, batch, targets = frozen.codes(moved(items)["audio"]), moved(items), {}
    cross_entropy = recipe.F.cross_entropy

    def spy(logits, wanted, reduction):
        targets["text" if logits.shape[1] == CONFIG["text_tokens"] else "mel"] = wanted.tolist()
        return cross_entropy(logits, wanted, reduction=reduction)

    monkeypatch.setattr(recipe.F, "cross_entropy", spy)
    recipe.compute_loss(model, batch, frozen)
    expected = {"text": [], "mel": []}
    for row, item in enumerate(items):
        first, last = item["heard"]
        kept = codes[row, : item["codes"]].tolist()
        expected["text"] += [*item["tokens"].tolist(), CONFIG["stop_text"]]
        expected["mel"] += [*kept[:first], *kept[last:], *[CONFIG["stop_audio"]] * 4]
        assert last > first or len(item["audio"]) < 4096
    assert targets == expected
    assert {name: len(values) for name, values in targets.items()} == batch["counts"]


# --- flags ----------------------------------------------------------------------------------------


ALIASES = {
    "--enable_grad_checkpoint": "--gradient_checkpointing",
    "--no_enable_grad_checkpoint": "--no_gradient_checkpointing",
    "--enable_sdpa": "--sdpa",
    "--enable_mixed_precision": "--mixed_precision",
    "--train_csv a": "--train_manifest a",
    "--eval_csv a": "--val_manifest a",
    "--output_path a": "--output_dir a",
    "--grad_acumm 7": "--gradient_accumulation_steps 7",
}


@pytest.mark.parametrize("alias", ALIASES)
def test_other_names_set_the_same_values(alias):
    ours, usual = (vars(runs.parse(recipe, *line.split())) for line in (alias, ALIASES[alias]))
    assert ours == usual and len(ours["given"]) >= 3


def test_the_longest_clip_in_samples(places):
    args = runs.parse(recipe, *tuning(places), "--max_audio_length", "220500")
    recipe.resolve(args)
    assert args.max_duration == 10.0
    assert runs.parse(recipe).max_duration == pytest.approx(255_995 / 22_050)


# --- trained, stopped and resumed -----------------------------------------------------------------

SPOKEN = ("hello", "the end", "ሀለመ ረሰ", "and then", "it's on", "sand", "ለመ", "shell, no")
PLAIN = (
    "--max_steps 2 --batch_size 2 --gradient_accumulation_steps 1 --save_every 1 --log_every 1"
    " --eval_every 1 --speak_held_out 0".split()
)


@pytest.fixture(scope="module")
def places(tmp_path_factory, tiny) -> SimpleNamespace:
    """Released folders `model` and `other` (another DVAE), and manifests `train` and `val` in
    Coqui's form."""
    folder, random = tmp_path_factory.mktemp("coqui"), np.random.default_rng(1)
    rows = []
    for number, text in enumerate(SPOKEN):
        samples = random.normal(size=round((0.6 + 0.2 * number) * SAMPLE_RATE)) * 0.1
        soundfile.write(folder / f"{number}.wav", samples.clip(-1, 1), SAMPLE_RATE)
        rows.append(f"{number}.wav|{text}|{'abc'[number % 3]}")
    for name, part in (("train", rows[:6]), ("val", rows[6:])):
        (folder / f"{name}.csv").write_text(
            "\n".join(["audio_file|text|speaker_name", *part]), encoding="utf-8"
        )
    return SimpleNamespace(
        model=write_released(folder / "model"),
        other=write_released(folder / "other", seed=1),
        train=folder / "train.csv",
        val=folder / "val.csv",
        wav=folder / "5.wav",
        folder=folder,
    )


def manifests(places) -> list:
    return ["--train_csv", places.train, "--eval_csv", places.val]


def tuning(places, *flags) -> list:
    return [*manifests(places), "--model_dir", places.model, *flags]


@pytest.fixture(scope="module")
def tuned(places, tmp_path_factory) -> tuple[Path, str]:
    """The folder and the stdout of two updates from released weights, exported to "coqui"."""
    folder = tmp_path_factory.mktemp("tuned")
    flags = [*PLAIN, "--learning_rate", "1e-3", "--export", folder / "coqui"]
    return folder, ran(recipe, *tuning(places, *flags), "--output_path", folder)


def best_of(folder: Path) -> tuple[dict, ModelInfo]:
    saved = checkpoint.read_weights(folder / "checkpoints" / "best.safetensors", recipe.RECIPE)
    return saved.model, info_of(saved)


def info_of(saved: checkpoint.Saved) -> ModelInfo:
    return records.read(ModelInfo, saved.model_info, saved.path)


def test_released_weights_are_evaluated_first_and_their_export_is_read_again(tuned, places):
    folder, out = tuned
    assert [line["step"] for line in metrics(folder) if "eval/mel" in line] == [0, 1, 2]
    assert out.count(formats.LICENCE) == 1 and "attention: " in out
    groups, config, extras = formats.read_model(folder / "coqui")
    before = formats.read_model(places.model)[0]
    best, info = best_of(folder)
    assert config == info.config and extras["vocab"] == info.vocab and extras["licence"]
    for ours, theirs in ((groups["gpt"], best), *((groups[n], before[n]) for n in FROZEN)):
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], w) for name, w in theirs.items())
    state = newest(folder, recipe).model
    same = [name for name, w in before["gpt"].items() if torch.equal(w, state[name])]
    assert len(same) < 5 and not any(name.startswith(("dvae", "hifigan")) for name in state)
    card = (folder / "coqui" / "README.md").read_text(encoding="utf-8")
    assert yaml.safe_load(card.split("---\n")[1])["license_name"] == "coqui-public-model-license"
    assert "mel loss of the evaluation set" in card and " before training" in card
    clips = folder / "coqui" / "speakers"
    assert {path.name for path in clips.iterdir()} == {"a.wav", "b.wav", "c.wav"}
    for name, number in zip("abc", (3, 4, 5), strict=True):  # the longest is nearest to 10 s
        clip, rate = soundfile.read(clips / f"{name}.wav", dtype="int16")
        source = soundfile.read(places.folder / f"{number}.wav", dtype="int16")[0]
        assert rate == SAMPLE_RATE and len(clip) == len(source)
        assert abs(clip.astype(int) - source).max() <= 1
    voices = torch.load(folder / "coqui" / "speakers_xtts.pth", weights_only=True)
    assert voices.keys() == {"a", "b", "c"}
    reference = (folder / "coqui" / "reference.wav").read_bytes()
    assert reference in {path.read_bytes() for path in clips.iterdir()}


def test_voices_that_a_user_names_come_first_and_short_ones_stop_nothing(places, tmp_path):
    """A clip of --speaker_wav goes before one of the corpus with its name. A speaker without a clip
    that is long enough has no voice."""
    named = [tmp_path / f"{name}.wav" for name in ("own", "a")]
    for seconds, path in enumerate(named, 1):
        soundfile.write(path, np.full(seconds * SAMPLE_RATE, 0.1), SAMPLE_RATE)
    short = tmp_path / "short.wav"
    soundfile.write(short, np.random.default_rng(0).normal(size=6400) * 0.1, SAMPLE_RATE)
    rows = places.train.read_text(encoding="utf-8").replace("\n", f"\n{places.folder}/")
    (tmp_path / "m.csv").write_text(f"{rows}\n{short}|on|zoe", encoding="utf-8")
    flags = ["--train_csv", tmp_path / "m.csv", "--min_duration", "0.2", "--output_dir", tmp_path]
    export = ["--export", tmp_path / "out", "--speaker_wav", *named, "--speak_held_out", "1"]
    out = ran(recipe, *tuning(places), *PLAIN, *flags, "--max_steps", "1", *export)
    assert out.count("no clip of 0.33 s") == 1 and "no voice for zoe: no clip" in out
    voices = torch.load(tmp_path / "out" / "speakers_xtts.pth", weights_only=True)
    assert list(voices)[:2] == ["own", "a"] and voices.keys() == {"own", "a", "b", "c"}
    for name, seconds in (("reference", 1), ("speakers/own", 1), ("speakers/a", 2)):
        samples = soundfile.read(tmp_path / "out" / f"{name}.wav")[0]
        assert len(samples) == seconds * SAMPLE_RATE


def test_an_export_alone_has_the_voices_of_speaker_wav(tuned, places, tmp_path):
    weights = ["--resume", tuned[0] / "checkpoints" / "best.safetensors"]
    wavs = [places.folder / f"{number}.wav" for number in (3, 4)]
    ran(recipe, *weights, "--export", tmp_path / "out", "--speaker_wav", *wavs, "--device", "cpu")
    voices = torch.load(tmp_path / "out" / "speakers_xtts.pth", weights_only=True)
    during = torch.load(tuned[0] / "coqui" / "speakers_xtts.pth", weights_only=True)
    for name, known in (("3", "a"), ("4", "b")):  # the same clips
        for value, other in zip(voices[name].values(), during[known].values(), strict=True):
            torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4)


def test_a_language_that_the_vocabulary_lacks_gets_a_token(tuned, places):
    folder, out = tuned
    best, info = best_of(folder)
    vocabulary, before = Vocabulary(info.vocab), formats.read_model(places.model)[0]["gpt"]
    assert "language am: a new token" in out
    assert info.carried
    assert info.config["text_tokens"] == ROWS + 1
    for name in ("text_embedding.weight", "text_head.weight", "text_head.bias"):
        assert len(best[name]) == len(before[name]) + 1
    reader = texts.Texts(info)
    ids = WITHOUT_AM["model"]["vocab"]
    assert reader.encode("no") == [ids["[en]"], ROWS, ids["n"], ids["o"]]
    assert vocabulary.encode("[am]no", "en") == reader.encode("no")
    assert reader.encode("no", "de") == [ids["[de]"], ids["n"], ids["o"]]


def test_the_language_of_a_row_goes_before_that_of_the_flag(places, json_lines, tmp_path):
    rows = []
    for number, language in enumerate(("de", "", "am", "xx")):
        row = {"audio_filepath": str(places.folder / f"{number}.wav"), "text": "no"}
        rows.append({**row, "lang": language} if language else row)
    corpus, _ = load_corpus(json_lines(tmp_path / "m.json", rows), recipe.text.normalise, Checks())
    args = runs.parse(recipe, *tuning(places))
    asked = recipe.resolve(args)
    info, _ = start.Family(asked).choose(None, None, lambda: start.planned_info(asked))
    reader = texts.Texts(info)
    texts.read_corpora(reader, {"val": corpus})
    assert len(recipe.check_corpora(asked, {"val": corpus}, reader, info.config)["val"]) == 4
    data = recipe.Utterances(asked, corpus, reader, info, training=True)
    german, *others = [row.tolist() for row in data.tokens]
    assert german == reader.encode("no", "de") and others == [reader.encode("no")] * 3
    assert [data.item(index, 0)["language"] for index in range(4)] == ["de", "am", "am", "am"]
    assert german[0] == WITHOUT_AM["model"]["vocab"]["[de]"] and german[1:] == others[0][2:]


def test_the_gpt_of_an_already_tuned_file(places, tmp_path):
    """Its forms: tests/models/xtts/test_formats.py."""
    source = formats.read_model(write_released(tmp_path / "source", seed=2))[0]
    torch.save({f"gpt.{name}": w for name, w in source["gpt"].items()}, tmp_path / "tuned.pth")
    flags = ["--custom_model", tmp_path / "tuned.pth", "--language", "en", "--output_dir", tmp_path]
    ran(recipe, *tuning(places, *PLAIN, *flags), "--max_steps", "1", "--freeze_layers", "2")
    state = newest(tmp_path, recipe).model
    kept = {name for name, w in source["gpt"].items() if torch.equal(w, state[name])}
    assert {name for name in source["gpt"] if name.startswith("gpt.h.")} <= kept
    assert len(kept) < len(state) - 20


def test_another_dvae_on_resume_is_refused(tuned, places, tmp_path):
    folder = shutil.copytree(tuned[0], tmp_path / "copy")
    flags = [*manifests(places), *PLAIN, "--resume", "auto", "--output_dir", folder]
    status, err = refused(recipe, *flags, "--max_steps", "3", "--model_dir", places.other)
    assert status == 2 and "the DVAE is not the one that this GPT learned the codes of" in err
    assert "(step 2)" in ran(recipe, *flags, "--max_steps", "3")


# --- exported and spoken --------------------------------------------------------------------------


def test_a_released_model_is_exported_as_it_is(places, tmp_path):
    flags = ["--model_dir", places.model, "--language", "en", "--output_dir", tmp_path]
    ran(recipe, *flags, "--export", tmp_path / "b")
    (ours, *others), (theirs, *expected) = map(formats.read_model, (tmp_path / "b", places.model))
    assert same_tensors(ours, theirs) and others == expected
    assert not (tmp_path / "checkpoints").exists()


def test_a_training_follows_the_hours_of_speech(places):
    tuned = runs.planned(recipe, *tuning(places))
    assert tuned.task.fine_tunes and tuned.task.evaluate_first
    seconds = [soundfile.info(places.folder / f"{number}.wav").duration for number in range(6)]
    assert tuned.global_batches.hours == pytest.approx(sum(seconds) / 3600)


def test_texts_are_spoken_with_the_vocoder(tuned, places, tmp_path):
    best = tuned[0] / "checkpoints" / "best.safetensors"
    flags = ["--speaker_wav", places.wav, places.folder / "4.wav", "--top_k", "3"]
    spoken = {}
    for name, more in (("one", []), ("again", []), ("export", ["--model_dir", tuned[0] / "coqui"])):
        source = more or ["--resume", best]
        path = tmp_path / f"{name}.wav"
        out = ran(recipe, "--synthesize", "hello. the end", *flags, *source, "--output", path)
        samples, rate = soundfile.read(path, dtype="int16")
        assert rate == 24_000 and len(samples) > 1000 and samples.any() and f"{path}: " in out
        spoken[name] = samples
    assert np.array_equal(spoken["one"], spoken["again"])
    assert np.array_equal(spoken["one"], spoken["export"]), "the export speaks in another way"
    (tmp_path / "lines.txt").write_text("hello\n\nthe end\n", encoding="utf-8")
    several = [tmp_path / "lines.txt", *flags, "--resume", best, "--output", tmp_path / "n.wav"]
    ran(recipe, "--synthesize", *several)
    assert {path.name for path in tmp_path.glob("n*.wav")} == {"n_001.wav", "n_002.wav"}


# --- what is written ------------------------------------------------------------------------------


def test_a_new_run_moves_the_sentences_of_the_earlier_one_aside(places, tmp_path):
    flags = tuning(places, *PLAIN, "--max_steps", "1", "--speak_held_out", "2")
    flags += ["--output_dir", tmp_path]
    mine = tmp_path / "speech" / "mine.txt"
    ran(recipe, *flags)
    mine.write_text("mine")
    ran(recipe, *flags, "--seed", "1")
    assert (tmp_path / "earlier-1" / "speech" / "mine.txt").read_text() == "mine"
    assert not mine.exists()
    # The same run, spoken again: its own sentences are replaced, those of somebody else are kept.
    mine.write_text("mine")
    flags += ["--seed", "1", "--resume", "auto"]
    assert "what was there was moved to " in ran(recipe, *flags)
    assert (tmp_path / "earlier-2" / "speech" / "mine.txt").read_text() == "mine"
    assert "what was there was moved to " not in ran(recipe, *flags)


# --- the voice of another clip --------------------------------------------------------------------


def numbered(corpus: Corpus, index: int, *_) -> torch.Tensor:
    """A clip of three seconds whose samples are its number and one more."""
    return torch.full((3 * SAMPLE_RATE,), index + 1.0)


def voices_of(data: recipe.Utterances, index: int, epochs=range(40)) -> list[int]:
    """The clips that the slice of an utterance was cut from."""
    items = [data.item(index, epoch) for epoch in epochs]
    assert all(item["heard"] == (0, 0) for item in items), "codes that were not heard are left out"
    assert all(int(item["audio"][0]) == index + 1 for item in items)
    return [int(item["slice"][0]) - 1 for item in items]


def test_the_voice_comes_from_another_clip_of_the_speaker(noise, monkeypatch):
    monkeypatch.setattr(recipe, "read_utterance", numbered)
    data, again = (
        make_utterances(noise, condition="other", slices=[9_000, 12_000]) for _ in range(2)
    )
    seeded = make_utterances(noise, "--seed", "2", condition="other")
    for index in range(8):
        chosen = voices_of(data, index)
        assert set(chosen) == set(range(index % 2, 8, 2)) - {index}
        assert chosen == voices_of(again, index)
        assert set(voices_of(seeded, index)) == set(chosen)
    assert voices_of(data, 0) != voices_of(seeded, 0)
    evaluated = make_utterances(noise, condition="other", training=False)
    assert [voices_of(evaluated, index, (0, 4)) for index in range(8)] == [
        [(index + 2) % 8] * 2 for index in range(8)
    ]


@pytest.mark.parametrize("training", [True, False])
def test_a_speaker_with_one_clip_is_heard_in_it(noise, training):
    part = noise[0], noise[1].select(np.array([5, 0, 3]))
    other, same = (
        make_utterances(part, training=training, condition=name) for name in ("other", "same")
    )
    for epoch in range(3):
        ours, usual = other.item(1, epoch), same.item(1, epoch)
        assert torch.equal(ours["slice"], usual["slice"]) and ours["heard"] == usual["heard"]
        assert ours["heard"][1] > ours["heard"][0]


# --- evaluation by language -----------------------------------------------------------------------


@torch.no_grad()
def test_the_sums_of_the_languages_are_the_total(noise):
    items, model, frozen = make_items(noise), make_model().eval(), make_frozen()
    items = [
        {**item, "language": ("am", "de", "am")[number % 3]} for number, item in enumerate(items)
    ]
    batches = [recipe.collate(items[:3]), recipe.collate(items[3:])]
    result = recipe.evaluate(frozen, ["am", "de"], model, batches)
    assert result.keys() == {"text", "mel", "text_am", "text_de", "mel_am", "mel_de"}
    for name in WEIGHTS:
        parts = [result[f"{name}_{language}"] for language in ("am", "de")]
        assert sum(total for total, _ in parts) == pytest.approx(result[name][0], rel=1e-10)
        assert sum(count for _, count in parts) == result[name][1]
        assert min(total for total, _ in parts) > 0
    german = [item for item in items if item["language"] == "de"]
    alone = recipe.evaluate(frozen, ["de"], model, [recipe.collate(german)])
    assert alone.keys() == set(WEIGHTS)
    for name in WEIGHTS:
        total, count = result[f"{name}_de"]
        assert alone[name] == (pytest.approx(total, rel=1e-10), count)
    nothing = recipe.evaluate(frozen, ["am", "de", "en"], model, [recipe.collate(german)])
    assert nothing["mel_en"] == (0, 0) == nothing["text_am"] and nothing["mel_de"] == nothing["mel"]


@pytest.mark.parametrize("languages", [("de", "am"), ("de", "de")])
def test_the_results_have_a_line_for_each_language(places, json_lines, tmp_path, languages):
    rows = [
        {"audio_filepath": str(places.folder / f"{number}.wav"), "text": text, "lang": language}
        for number, (text, language) in enumerate(zip(("no", "on"), languages, strict=True))
    ]
    manifest = json_lines(tmp_path / "m.json", rows)
    use = ["--model_dir", places.model, "--output_dir", tmp_path]
    out = ran(recipe, "--evaluate", "--test_manifest", manifest, *use)
    title = "test set, the given weights (cross-entropy per token and per code)"
    lines = out.partition(title)[2].splitlines()[1:]
    names = [line.partition(":")[0].strip() for line in lines if "  mel " in line]
    assert names == (["all", "am", "de"] if "am" in languages else ["all"])
    assert all(line.startswith("  ") and ": text " in line for line in lines[: len(names)])


@pytest.mark.slow
def test_adapters_beside_a_released_gpt(places, tmp_path):
    flags = [*manifests(places), "--speak_held_out", "0"]
    base = ["--model_dir", places.model]
    transposed = ("c_attn", "c_fc", "c_proj")
    out = adapters.check(recipe, flags, base, tmp_path, formats, transposed)
    assert "trained whole: text_embedding, text_head" in out


def test_voices_of_an_export_with_a_base_in_16_bits(places, tmp_path):
    flags = [*manifests(places), *PLAIN, "--model_dir", places.model, "--lora", "2"]
    flags += ["--mixed_precision", "bf16", "--output_dir", tmp_path]
    ran(recipe, *flags, "--export", tmp_path / "coqui")
    assert (tmp_path / "coqui" / "speakers_xtts.pth").is_file()


def test_a_judge_hears_what_an_evaluation_speaks(places, tmp_path, monkeypatch):
    heard = []

    def transcripts(path, recipes, clips, device):
        assert (path, device) == (str(places.wav), "cpu") and (recipes / "template.py").is_file()
        heard.extend(clips)
        assert all(clip.is_file() for clip in clips)
        return {str(clip): "x" for clip in clips}

    monkeypatch.setattr(checkpoint, "recipe_of", lambda path, flag: "template")
    monkeypatch.setattr(judge, "transcripts", transcripts)
    flags = ["--evaluate", "--test_manifest", places.folder / "val.csv", "--speak_held_out", "1"]
    flags += ["--model_dir", places.model, "--output_dir", tmp_path]
    out = ran(recipe, *flags, "--judge", places.wav)
    assert "1 held-out sentences spoken: " in out and "speaker similarity: " in out
    table = out.partition("CER of the judge ")[2].splitlines()
    assert [line.split()[0] for line in table[1:]] == [*reversed(judge.KINDS)]
    assert len(heard) == 3 and "CER of the judge" not in ran(recipe, *flags)


# --- how texts are read ---------------------------------------------------------------------------

AMHARIC = (
    "ሰላም ለሁሉም።",
    "ቡና 3 ብር ነው",
    "ሰላም, እንዴት ነህ?",
    "ለሁሉም 25 ሰላም",
    "ቡና እወዳለሁ",
    "ሰላም ነው",
    "ብር 7 ነው",
    "ሰላም 8 ቡና",
)
MODES = {"phonemes": ["--use_amharic_g2p"], "bpe": ["--extend_vocab", "bpe", "--vocab_size", "40"]}


def write_texts(places, folder: Path, written: tuple[str, ...], *more: str) -> Path:
    """A manifest of the clips with these texts, and further rows."""
    rows = [f"{places.folder}/{number}.wav|{text}|a" for number, text in enumerate(written)]
    lines = ["audio_file|text|speaker_name", *rows, *more]
    (folder / "m.csv").write_text("\n".join(lines), encoding="utf-8")
    return folder / "m.csv"


@pytest.fixture
def short_slices(monkeypatch):
    """A tenth of a second of a voice, and so shorter runs."""
    monkeypatch.setattr(start, "SLICE", (2_205, 4_410))


@pytest.mark.parametrize("mode", MODES)
def test_amharic_is_trained_exported_spoken_and_resumed(places, short_slices, tmp_path, mode):
    manifest = write_texts(places, tmp_path, AMHARIC)
    data = ["--train_csv", manifest, "--eval_csv", manifest, *PLAIN, "--output_dir", tmp_path]
    out = ran(
        recipe, *data, "--model_dir", places.model, *MODES[mode], "--export", tmp_path / "coqui"
    )
    assert "characters that the vocabulary lacks" not in out and out.count("): 8 utterances") == 2
    info = info_of(newest(tmp_path, recipe))
    rows = info.config["text_tokens"]
    first, *_ = [line["eval/text"] for line in metrics(tmp_path) if "eval/text" in line]
    if mode == "phonemes":
        assert info.text.g2p and info.text.extend_vocab is None and rows == ROWS + 1
    else:
        assert not info.text.g2p and info.text.extend_vocab == mode
        assert ROWS + 1 < rows <= ROWS + 41 and first < math.log(rows)
    reader = texts.Texts(info)
    assert not any(reader.vocabulary.unknown in reader.encode(text) for text in AMHARIC)
    groups, config, extras = formats.read_model(tmp_path / "coqui")
    assert config["text_tokens"] == rows and extras["vocab"] == info.vocab
    assert all(torch.equal(w, groups["gpt"][name]) for name, w in best_of(tmp_path)[0].items())
    flags = ["--synthesize", "ሰላም 3 ቡና።", "--speaker_wav", places.wav]
    flags += ["--output", tmp_path / "o.wav"]
    spoken = []
    # An export has the vocabulary, and not how texts are read.
    more = MODES[mode] if mode == "phonemes" else []
    for source in (["--output_dir", tmp_path], ["--model_dir", tmp_path / "coqui", *more]):
        status, _, err = runs.run(recipe, *flags, *source)
        assert status == 0 and "warning" not in err, err
        spoken.append(soundfile.read(tmp_path / "o.wav")[0])
    assert np.array_equal(*spoken) and len(spoken[0]) > 1000
    other = MODES["phonemes" if mode == "bpe" else "bpe"]
    status, err = refused(recipe, *data, "--resume", "auto", *other)
    assert status == 2 and "conflicts with the checkpoint" in err
    assert "(step 2)" in ran(recipe, *data, "--resume", "auto", "--max_steps", "3")
    resumed = newest(tmp_path, recipe)
    assert resumed.progress.step == 3 and info_of(resumed) == info


def test_texts_are_shown_one_a_line(places, tuned, tmp_path):
    """What they become: tests/models/xtts/test_texts.py."""
    best = tuned[0] / "checkpoints" / "best.safetensors"
    (tmp_path / "lines.txt").write_text("ሰላም 3\n\nhello\n", encoding="utf-8")
    for source in ([], ["--model_dir", places.model], ["--resume", best]):
        words = ["--show_text", tmp_path / "lines.txt", *source, "--output_dir", tmp_path]
        status, out, err = runs.run(recipe, *words)
        first, last = out.splitlines()[-2:]
        assert status == 0 and "ሰላም" in first and "3" not in first and last == "hello", (out, err)
        assert err.count("warning: ") == (len(source) == 2), err


# --- mistakes -------------------------------------------------------------------------------------

MISTAKES = [  # flags, a part of the message
    ("", "training needs a model to start from: add --model_dir DIR"),
    ("--model_dir {here}/gone", "{here}/gone: no such file or folder, and nothing is downloaded"),
    ("--model_dir {here}", "{here} lacks model.pth: a Coqui XTTS-v2 folder has"),
    ("--model_dir {model} --custom_model {here}/gone.pth", "gone.pth"),
    ("--model_dir {model} --version v2.0.3", "--version v2.0.3: its vocabulary has 6681 tokens"),
    ("--model_dir {model} --language አማርኛ", "--language አማርኛ: it must be a code such as am or en"),
    ("--model_dir {model} --freeze_layers 3", "--freeze_layers 3: the GPT has 2 layers"),
    ("--model_dir {model} --export {folder}", "{folder}: it holds files that are not replaced"),
    ("--language de --resume {tuned}", "--language de (the checkpoint has am) conflicts"),
    ("--condition other --resume {tuned}", "--condition other (the checkpoint has same) conflicts"),
    ("{export} --speaker_wav {here}/gone.wav", "gone.wav: no such file"),
    ("{export} --speaker_wav {short}", "--speaker_wav {short}: it is shorter than 0.33 s"),
    ("{export} --speaker_wav {wav} {same}", "{wav} and {same}: both would be the voice 5"),
    ("{say} --model_dir {model} --output {wav}", "--output {wav}: this command reads it ({wav})"),
    ("--synthesize hello --model_dir {model} --speaker_wav {model}/config.json", "cannot be used"),
    ("{say}", "no weights at "),
    ("--synthesize {empty} --speaker_wav {wav} --model_dir {model}", "there is no text"),
]


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistakes_are_answered_in_one_line_before_anything_is_trained(
    line, message, places, tuned, tmp_path
):
    (tmp_path / "empty.txt").write_text("\n \n")
    soundfile.write(tmp_path / "short.wav", np.zeros(SAMPLE_RATE // 10), SAMPLE_RATE)
    (tmp_path / "same").mkdir()
    shutil.copy(places.wav, tmp_path / "same")
    saved = checkpoint.list_checkpoints(tuned[0] / "checkpoints")[0]
    names = {
        "here": tmp_path,
        "empty": tmp_path / "empty.txt",
        "short": tmp_path / "short.wav",
        "same": tmp_path / "same" / places.wav.name,
        "tuned": saved,
        "say": f"--synthesize hello --speaker_wav {places.wav}",
        "export": f"--model_dir {places.model} --export {tmp_path}/x",
        **vars(places),
    }
    line, message = (text.format(**names) for text in (line, message))
    data = [] if "--synthesize" in line else [*manifests(places), *PLAIN]
    status, err = refused(recipe, *data, *line.split(), "--output_dir", tmp_path)
    assert status == (1 if message == "cannot be used" else 2) and message in err, err
    assert not list(tmp_path.glob("checkpoints/*.pt"))


def test_what_has_no_positions_or_no_letters_is_rejected(places, tmp_path):
    # The texts have 60 positions, 4 of them for other tokens.
    written = ("a" * 57, "a" * 56, "ኩኩ።", "on", "on")
    samples = np.random.default_rng(0).normal(size=76 * 1024 + 1) * 0.1
    soundfile.write(tmp_path / "long.wav", samples.clip(-1, 1), SAMPLE_RATE)
    manifest = write_texts(places, tmp_path, written, f"{tmp_path}/long.wav|no|a")
    flags = [*tuning(places), "--train_csv", manifest, *PLAIN, "--max_steps", "1"]
    flags += ["--output_dir", tmp_path]
    out = ran(recipe, *flags, "--eval_csv", manifest)
    for reason in (
        "text is longer than 56 tokens",
        "clip is longer than 76 codes",
        "the vocabulary has none of the text's letters",
    ):
        assert out.count(reason) == 2, reason
    assert out.count(" set, checked as speech: 3 utterances") == 2
    assert refused(recipe, *flags, "--strict_data")[0] == 1
