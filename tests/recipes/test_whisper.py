"""Both Whisper recipes' command lines on tiny models: demos, fine-tuning, resuming, export,
transcribing, and mistakes."""

import dataclasses
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import transformers
import yaml

from common import checkpoint
from common.batches import to_device
from models.whisper import formats, packs, start
from models.whisper.tokenizer import (
    LANGUAGES,
    WhisperTokenizer,
    make_tokenizer,
    read_tokenizer,
    special_tokens,
    train_bpe,
)
from recipes import whisper_morse as morse
from recipes import whisper_vietnamese as vietnamese
from speech.data.columns import Codes
from speech.morse.synthesis import Choice
from speech.signal.audio import SAMPLE_RATE, read_audio
from tests.models.whisper.test_formats import peer, weights_of
from tests.peers import write_texts
from tests.recipes import runs
from tests.recipes.runs import SHORT, TINY, error_lines, newest, planned, ran, refused
from tests.speech.morse.sets import write_set

BOTH = pytest.mark.parametrize("recipe", [morse, vietnamese], ids=["morse", "vietnamese"])
CLIPS = "--clips_per_epoch 8 --eval_clips 3 --clip_seconds 2".split()


def data_flags(corpus: dict[str, str]) -> list[str]:
    """The flags that name the manifests of a corpus."""
    return [word for split, path in corpus.items() for word in (f"--{split}_manifest", path)]


@pytest.fixture
def data(spoken):
    return data_flags(spoken)


@pytest.fixture(scope="module")
def released(spoken, tmp_path_factory):
    """A random model in both released forms: a Hugging Face folder as transformers saves it, and
    OpenAI's base.pt."""
    folder = tmp_path_factory.mktemp("released")
    tokenizer = train_bpe([row["text"] for row in runs.rows(spoken["train"])], 300, "vi")
    config = formats.make_config(16, (1, 1), 2, vocabulary=tokenizer.size)
    model = peer(config, tokenizer, suppress_tokens=None, begin_suppress_tokens=None)
    model.save_pretrained(folder / "hf")
    write_texts(tokenizer.file_texts(), folder / "hf")
    (folder / "openai").mkdir()
    write_texts(tokenizer.file_texts(), folder / "openai")
    weights = formats.hf_to_openai(weights_of(model))
    content = {"dims": formats.config_to_dims(config), "model_state_dict": weights}
    torch.save(content, folder / "openai" / "base.pt")
    return folder


@pytest.fixture(scope="module")
def morse_demo(tmp_path_factory):
    """The folder and the stdout of a Morse demo of two updates."""
    folder = tmp_path_factory.mktemp("morse demo")
    return folder, ran(
        morse, *TINY, *SHORT, *CLIPS, "--output_dir", folder, "--export", folder / "exported"
    )


@pytest.fixture
def morse_copy(morse_demo, tmp_path):
    """A copy of that folder, to continue in."""
    return shutil.copytree(morse_demo[0], tmp_path / "copy")


# --- demos ----------------------------------------------------------------------------------------


def test_the_morse_demo_and_what_it_leaves(morse_demo):
    folder, out = morse_demo
    assert "test set, " in out
    assert ", 3 clips" in out
    assert out.count("reference:") == 3
    assert "callsigns" in out
    tables = json.loads((folder / "logs" / "evaluation.json").read_text(encoding="utf-8"))
    assert set(tables) == {"all", "condition", "contest", "sample type", "speed", "SNR"}
    assert tables["all"]["all"]["samples"] == 3 and set(tables["condition"]) == {"demo"}
    assert tables["all"]["all"]["cer"] is not None
    exported = folder / "exported"
    files = {path.name for path in exported.iterdir()}
    assert {"model.safetensors", "model.pt", "tokenizer.json"} <= files
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert "language" not in yaml.safe_load(card.split("---\n")[1]) and "synthetic audio" in card
    assert "| test | 3 | 0.00 |" in card and "| test set | as sent | CER |" in card
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == generation["begin_suppress_tokens"] == []


def test_the_auxiliary_loss_may_end_before_the_run(morse_copy):
    flags = [*SHORT, *CLIPS, "--max_steps", "3", "--alignment_weight", "0", "--ctc_weight", "0"]
    out = ran(morse, *flags, "--resume", "auto", "--output_dir", morse_copy)
    paths = checkpoint.list_checkpoints(morse_copy / "checkpoints")
    after, before = (checkpoint.read(path, morse.RECIPE).model for path in paths)
    assert "(step 2)" in out and torch.equal(before["ctc_head.weight"], after["ctc_head.weight"])
    assert not torch.equal(
        before["decoder.embed_tokens.weight"], after["decoder.embed_tokens.weight"]
    )


def test_the_vietnamese_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(vietnamese, "DEMO_SIZES", {"train": 12, "val": 2, "test": 3})
    out = ran(vietnamese, *TINY, *SHORT, "--output_dir", tmp_path)
    assert "demo corpus: 17 utterances" in out
    assert ", 3 utterances, decoding" in out
    assert out.count("reference:") == 3
    assert out.splitlines()[-1].startswith("memory: peak ")
    assert len((tmp_path / "logs" / "transcripts.jsonl").read_text().splitlines()) == 3
    assert newest(tmp_path, vietnamese).model_info["config"]["vocab_size"] <= 320
    assert len(error_lines(out)) == 2


# --- data -----------------------------------------------------------------------------------------


def test_a_folder_of_recordings_is_trained_on_and_evaluated(tmp_path):
    write_set(tmp_path / "set", 20, Choice(["clean", "wide"], clip_seconds=2.0).mix())
    flags = ["--data_dir", tmp_path / "set", "--output_dir", tmp_path]
    ran(morse, *flags, "--from_scratch", *TINY, *SHORT, "--speed_perturbation")
    path = tmp_path / "logs" / "evaluation.json"
    tables = json.loads(path.read_text(encoding="utf-8"))
    assert tables["all"]["all"]["samples"] == 2 and set(tables["condition"]) <= {"clean", "wide"}
    shutil.move(path, tmp_path / "before.json")
    ran(morse, *flags, "--evaluate")
    assert path.read_text() == (tmp_path / "before.json").read_text()


# --- released models ------------------------------------------------------------------------------


def test_both_released_forms_are_fine_tuned_alike(released, data, tmp_path):
    flags = [*data, *SHORT]
    hf = ["--model_dir", released / "hf", "--output_dir", tmp_path / "a"]
    assert "3.75e-05 (fine-tuning at this width)" in ran(vietnamese, *flags, *hf)
    openai = ["--model_file", released / "openai" / "base.pt", "--output_dir", tmp_path / "b"]
    ran(vietnamese, *flags, *openai)
    a, b = newest(tmp_path / "a", vietnamese), newest(tmp_path / "b", vietnamese)
    before = formats.read_model(released / "hf")[0]
    for name, weight in a.model.items():
        assert torch.equal(weight, b.model[name]), name
        assert torch.equal(weight, before[name]) == (name == "encoder.embed_positions.weight"), name
    assert not a.model_info["pad_to_30s"]


def test_a_frozen_encoder_keeps_its_weights_and_hears_30_seconds(released, data, tmp_path):
    flags = ["--model_dir", released / "hf", "--freeze_encoder", "--dropout", "0.2"]
    out = ran(vietnamese, *data, *SHORT, *flags, "--output_dir", tmp_path)
    before, state = formats.read_model(released / "hf")[0], newest(tmp_path, vietnamese)
    for name, weight in state.model.items():
        assert torch.equal(weight, before[name]) == name.startswith("encoder."), name
    assert state.model_info["pad_to_30s"]
    assert not any(name.startswith("encoder.") for name in state.state["optimizer"])
    trained = sum(w.numel() for name, w in before.items() if name.startswith("decoder.")) / 1e6
    assert f"{trained:.1f} M of them trained" in out


def test_released_models_learn_morse_with_nothing_suppressed(released, tmp_path):
    flags = [*CLIPS, *SHORT, "--model_dir", released / "hf", "--language", "vi"]
    flags += ["--conditions", "wide", "clean", "--export", tmp_path / "exported"]
    ran(morse, *flags, "--output_dir", tmp_path)
    tables = json.loads((tmp_path / "logs" / "evaluation.json").read_text())
    assert set(tables["condition"]) <= {"wide", "clean"}
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == []


# --- times ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def with_times(spoken, tmp_path_factory):
    """A random model with all languages and time tokens, as transformers saves it, in two folders;
    "unlisted" has a tokenizer without the time tokens, as older folders have it."""
    folder = tmp_path_factory.mktemp("with times")
    bpe = train_bpe([row["text"] for row in runs.rows(spoken["train"])], 300, "vi")
    # The multilingual vocabularies end with an empty token. CTranslate2 knows them by it: without
    # it faster-whisper leaves language and task out of its prompts.
    vocab = {**bpe.vocab, "": len(bpe.vocab)}
    for name, has_times in (("listed", True), ("unlisted", False)):
        specials = special_tokens(len(vocab), LANGUAGES[:99], has_times)
        tokenizer = WhisperTokenizer(vocab, bpe.merges, specials, (), "vi")
        if has_times:
            config = formats.make_config(16, (1, 1), 2, vocabulary=tokenizer.size)
            model = peer(config, tokenizer, suppress_tokens=None, begin_suppress_tokens=None)
        model.save_pretrained(folder / name)
        write_texts(tokenizer.file_texts(), folder / name)
    return folder


@pytest.fixture(scope="module")
def recorded(spoken, tmp_path_factory):
    """The manifests of two long recordings, "train" and "val": speech with pauses of 0.8 s, with an
    offset for each utterance."""
    folder = tmp_path_factory.mktemp("recorded")
    for split, copies in (("train", 3), ("val", 2)):
        rows = []
        parts = []
        now = 0
        for row in runs.rows_of(spoken[split]) * copies:
            samples = read_audio(row["audio_filepath"], SAMPLE_RATE).numpy()
            place = {"offset": now / SAMPLE_RATE, "duration": len(samples) / SAMPLE_RATE}
            rows.append({"audio_filepath": f"{split}.wav", "text": row["text"], **place})
            parts += [samples, np.zeros(round(0.8 * SAMPLE_RATE), np.float32)]
            now += len(parts[-2]) + len(parts[-1])
        soundfile.write(folder / f"{split}.wav", np.concatenate(parts), SAMPLE_RATE)
        runs.write_rows(folder / f"{split}.json", rows)
    return ["--train_manifest", folder / "train.json", "--val_manifest", folder / "val.json"]


def make_packs(with_times, recorded, folder, *flags, share: float = 0.5, name: str = "listed"):
    """The training set of packs as the recipe's main makes it."""
    source = ["--model_dir", with_times / name, "--output_dir", folder]
    args = runs.parse(vietnamese, *recorded, *source, *flags)
    asked = vietnamese.resolve(args)
    corpus = vietnamese.read_data(asked, times=True)["train"]
    info, _ = start.read_released(asked, args.model_dir)
    info = dataclasses.replace(info, times=True)
    tokenizer = make_tokenizer(info.tokenizer)
    utterances = vietnamese.Utterances(asked, corpus, tokenizer, info, training=True)
    return vietnamese.as_packs(utterances, share)


def test_a_row_has_the_token_of_its_language(with_times, recorded, tmp_path):
    data = make_packs(with_times, recorded, tmp_path)
    alone = data.utterances
    names = {number: name for name, number in alone.tokenizer.specials.items()}
    count = len(data)
    alone.corpus.languages = Codes([("", "en", "vi-VN", "kok")[row % 4] for row in range(count)])
    for index in range(count):
        expected = ("<|vi|>", "<|en|>", "<|vi|>", "<|vi|>")[index % 4]
        for item in (data.item(index, 0), alone.item(index, 0)):
            tokens = item["tokens"].tolist()
            place = tokens.index(alone.tokenizer.start)
            assert names[tokens[place + 1]] == expected
    batch = vietnamese.collate([alone.item(index, 0) for index in range(4)])
    assert batch["languages"] == ["", "en", "vi-VN", "kok"]


def test_packs_as_tokens_and_labels(with_times, recorded, tmp_path):
    data = make_packs(with_times, recorded, tmp_path, "--pad_share", "0", "--max_target_tokens", 90)
    tokenizer = data.utterances.tokenizer
    begin = tokenizer.timestamp_begin
    kinds = set()
    for index in range(len(data)):
        pack = data.packs.pack(index, 1)
        item = data.item(index, 1)
        tokens, labels = item["tokens"].tolist(), item["labels"].tolist()
        assert tokens[1:] == labels[:-1] and labels[-1] == tokenizer.eos and len(tokens) <= 90
        before, rest = tokens[: item["unscored"]], tokens[item["unscored"] :]
        assert not before or before[0] == tokenizer.previous
        assert len(before) <= 1 + packs.PREVIOUS_TOKENS
        prompt = tokenizer.timed_prompt if pack.timed else tokenizer.prompt
        assert rest[: len(prompt)] == prompt and tokenizer.no_timestamps not in rest[len(prompt) :]
        said = rest[len(prompt) :]
        times = [(token - begin) * 0.02 for token in said if token >= begin]
        assert tokenizer.decode(said).strip() == item["text"]
        assert times == sorted(times) and all(0 <= time <= 30 for time in times)
        whole = len(pack.rows) - pack.cut
        assert len(times) == (2 * whole + pack.cut if pack.timed else 0)
        if pack.timed:
            assert said[0] >= begin and tokenizer.decode(said[1:2])[0] == " "
            assert (said[-1] >= begin) and (said[-2] >= begin) == pack.cut
        kinds.add((pack.timed, pack.cut, bool(before), whole > 1))
    assert {(True, True), (True, False), (False, False)} == {kind[:2] for kind in kinds}
    assert {kind[2] for kind in kinds} == {kind[3] for kind in kinds} == {True, False}


def test_times_are_where_the_speech_is(with_times, recorded, tmp_path):
    """Also after speed perturbation and with silence in front."""
    data = make_packs(with_times, recorded, tmp_path, "--pad_share", "0", share=1.0)
    speeds, leads = set(), set()
    for index in range(len(data)):
        pack, item = data.packs.pack(index, 0), data.item(index, 0)
        seconds = data.seconds(0)[index]
        assert len(item["audio"]) / SAMPLE_RATE == pytest.approx(seconds, abs=0.002)
        begin = data.utterances.tokenizer.timestamp_begin
        said = item["tokens"].tolist()[item["unscored"] + 3 :]
        times = [(token - begin) * 0.02 for token in said if token >= begin]
        heard = item["audio"].abs() > 0.2 * item["audio"].abs().max()
        for start_time, end_time in zip(times[:-1:2], times[1::2], strict=False):
            span = slice(round(start_time * SAMPLE_RATE), round(end_time * SAMPLE_RATE))
            heard[max(0, span.start - 320) : span.stop + 320] = False
        if pack.cut:
            heard[round(times[-1] * SAMPLE_RATE) - 320 :] = False
        assert not heard.any()
        speeds.add(round(pack.speed, 1))
        leads.add(times[0] > 0)
    assert speeds == {0.9, 1.0, 1.1} and leads == {True, False}


def table_of(out: str) -> list[str]:
    """The lines of stdout about long recordings."""
    return out[out.index("long recordings, tried on ") :].splitlines()[:4]


def test_a_run_with_times_that_goes_on_ends_with_the_same_bits(
    with_times, recorded, tmp_path, monkeypatch
):
    monkeypatch.setattr(runs, "MAX_NEW_TOKENS", 4)
    steps = "--max_steps 4 --batch_size 2 --gradient_accumulation_steps 2 --eval_every 4"
    flags = [*recorded, *steps.split(), "--save_every", 3, "--model_dir", with_times / "listed"]
    whole = tmp_path / "whole"
    out = ran(vietnamese, *flags, "--output_dir", whole)
    assert "--timestamp_share 0.25: 98 % of the training utterances are followed" in out
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "checkpoints" / "checkpoint_step_00000004.pt").unlink()
    again = ran(vietnamese, *flags, "--resume", "auto", "--output_dir", copy)
    assert "(step 3)" in again
    runs.assert_same_state(newest(whole, vietnamese), newest(copy, vietnamese))
    before = [newest(each, vietnamese).run_info["times_before"] for each in (whole, copy)]
    assert before[0] == before[1] and len(before[0]) == 4
    # What was measured before the first update is in all tables, but not in that of another set.
    table = table_of(out)
    assert table == table_of(again) and table[0].split()[-2:] == ["before", "now"]
    evaluated = ran(vietnamese, "--evaluate", *recorded, "--output_dir", whole)
    assert table_of(evaluated)[1:] == table[1:]
    other = ["--test_manifest", recorded[-1], "--output_dir", whole]
    assert table_of(ran(vietnamese, "--evaluate", *other))[0].split()[-2] != "before"


@pytest.mark.slow
def test_old_packs_and_a_watched_set(with_times, recorded, spoken, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MAX_NEW_TOKENS", 4)
    flags = [*recorded, "--model_dir", with_times / "listed", "--timestamp_share", 0.5]
    runs.check_replay(vietnamese, tmp_path, spoken["test"], spoken["val"], *flags)


@pytest.mark.slow
def test_old_clips_and_watched_ones(spoken, tmp_path, monkeypatch):
    monkeypatch.setattr(runs, "MAX_NEW_TOKENS", 4)
    for split in ("train", "val", "test"):
        rows = [{**row, "text": "SOS"} for row in runs.rows_of(spoken[split])]
        runs.write_rows(tmp_path / f"{split}.json", rows)
    train, val, test = (tmp_path / f"{split}.json" for split in ("train", "val", "test"))
    flags = ["--train_manifest", train, "--val_manifest", val, "--from_scratch", *TINY]
    runs.check_replay(morse, tmp_path, test, val, *flags)


def test_a_run_without_times_is_resumed_without_them(with_times, recorded, silence, tmp_path):
    flags = [*recorded, *SHORT, "--model_dir", with_times / "listed", "--output_dir", tmp_path]
    out = ran(vietnamese, *flags, "--timestamp_share", 0, "--max_steps", 1)
    assert "long recordings, tried on " in out
    assert not newest(tmp_path, vietnamese).model_info["times"]
    out += ran(vietnamese, *flags, "--resume", "auto", "--max_steps", 2)
    assert "windows of them" not in out and not newest(tmp_path, vietnamese).model_info["times"]
    best = tmp_path / "checkpoints" / "best.safetensors"
    _, _, err = runs.run(vietnamese, "--transcribe", silence, "--timestamps", "--resume", best)
    assert "trained without times (--timestamp_share 0)" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "given, pretrained, followed, share, says",
    [
        (None, True, 0.98, 0.25, "--timestamp_share 0.25: 98 %"),
        (None, True, 0.0, 0.0, "--timestamp_share 0: "),
        (0.0, True, 0.0, 0.0, ""),
        (0.5, True, 0.0, 0.5, ""),
        (None, False, 0.98, 0.0, ""),
    ],
)
def test_what_is_trained_on_by_default(
    given, pretrained, followed, share, says, with_times, monkeypatch, capsys
):
    """A released model that is trained on single utterances may lose text in long recordings."""
    monkeypatch.setattr(packs, "followed", lambda corpus: followed)
    tokenizer = read_tokenizer(with_times / "listed", "vi")
    found = packs.asked_share(given, tokenizer, pretrained, resumed=None)
    assert (packs.usual_share(None) if found is None else found) == share
    out = capsys.readouterr().out
    assert out.startswith(says) and bool(out) == bool(says)


def test_segments_are_utterances_only_for_training_with_times(with_times, recorded, tmp_path):
    rows = runs.rows(recorded[1])
    segments = []
    for row in rows:
        times = {"start": row["offset"], "end": row["offset"] + row["duration"]}
        segments.append({**times, "text": row["text"]})
    row = {"audio_filepath": str(Path(recorded[1]).parent / "train.wav"), "segments": segments}
    manifest = runs.write_rows(tmp_path / "long.json", [row])
    flags = ["--train_manifest", manifest, *recorded[2:], "--use_chunking"]
    data = make_packs(with_times, flags, tmp_path)
    assert len(data) == len(rows) and data.packs.has_next.sum() == len(rows) - 1
    args = runs.parse(vietnamese, *flags, "--from_scratch", "--output_dir", tmp_path)
    asked = vietnamese.resolve(args)
    assert len(vietnamese.read_data(asked)["train"]) < len(rows) / 3
    released = [*flags, "--model_dir", with_times / "listed", "--output_dir", tmp_path / "checked"]
    checked = ran(vietnamese, *released, "--check_data")
    assert f"{len(rows)} utterances" in checked
    joined = ran(vietnamese, *released, "--check_data", "--timestamp_share", 0)
    assert f"{len(rows)} utterances" not in joined


def test_few_neighbours_leave_segments_joined(with_times, recorded, tmp_path, monkeypatch, spoken):
    """By default, where most utterances have a file of their own."""
    monkeypatch.setattr(packs, "FOLLOWED", 1.0)
    row = json.loads(Path(recorded[1]).read_text(encoding="utf-8").splitlines()[0])
    parts = [{"start": 0.1 * n, "end": 0.1 * n + 0.1, "text": f"a{n}"} for n in range(400)]
    row = {"audio_filepath": str(Path(recorded[1]).parent / "train.wav"), "segments": parts}
    (tmp_path / "long.json").write_text(json.dumps(row) + "\n", encoding="utf-8")
    flags = ["--train_manifest", tmp_path / "long.json", *recorded[2:], "--use_chunking"]
    args = runs.parse(vietnamese, *flags, "--model_dir", with_times / "listed")
    asked = vietnamese.resolve(args)
    info, _ = start.read_released(asked, args.model_dir)
    asked_for = []

    def read(times: bool) -> dict:
        asked_for.append(times)
        return vietnamese.read_data(asked, times=times)

    corpora, share = packs.read_for(asked, info, False, read)
    assert (share, asked_for, len(corpora["train"])) == (0.0, [True, False], 2)
    # Words are joined to phrases of a second.
    assert min(read(True)["train"].seconds) >= 0.9


def test_a_run_with_times_is_planned(with_times):
    flags = ["--model_dir", with_times / "listed", "--max_duration", 4]
    plain = planned(vietnamese, *flags)
    packed = planned(vietnamese, *flags, "--timestamp_share", 0.5)
    assert max(plain.batch["seconds"]) < 6 < 25 < packed.global_batches.data.seconds(0).max()
    assert "unscored_lengths" in packed.batch and "unscored_lengths" not in plain.batch


@torch.no_grad()
def test_the_text_before_a_pack_has_no_loss(with_times, recorded, tmp_path):
    data = make_packs(with_times, recorded, tmp_path)
    torch.manual_seed(1)
    folder = with_times / "listed"
    args = runs.parse(vietnamese, *recorded, "--model_dir", folder, "--output_dir", tmp_path)
    info, _ = start.read_released(vietnamese.resolve(args), folder)
    model = start.make_model(info, label_smoothing=0.1).double().eval()
    items = [data.item(index, 0) for index in range(8)]
    for item in items:
        item["audio"] = item["audio"].double()
    assert any(item["unscored"] for item in items)

    def loss(items: list[dict]) -> tuple[float, int]:
        batch = vietnamese.collate(items)
        (moved,) = to_device([batch], torch.device("cpu"))
        terms = vietnamese.compute_loss(model, moved)
        return float(terms["attention"]), batch["counts"]["attention"]

    whole, count = loss(items)
    parts = [loss([item]) for item in items]
    assert whole == pytest.approx(sum(part for part, _ in parts), rel=1e-9)
    assert count == sum(count for _, count in parts)
    assert count == sum(len(item["labels"]) - item["unscored"] for item in items)
    for item in items:  # other labels there make no difference
        item["labels"][: item["unscored"]] = 3
    assert loss(items) == (whole, count)


def test_time_tokens_that_a_folder_does_not_list(with_times):
    size = formats.read_config(with_times / "listed")["vocab_size"]
    listed, found = (
        read_tokenizer(with_times / name, "vi", size) for name in ("listed", "unlisted")
    )
    assert listed.specials == found.specials
    assert found.timestamp_begin == found.no_timestamps + 1
    assert read_tokenizer(with_times / "unlisted", "vi").timestamp_begin is None
    assert found.time(2.3) == found.specials["<|2.30|>"]
    assert found.time(31.0) == found.specials["<|30.00|>"]
    assert found.timed_prompt == found.prompt[:3]
    assert found.previous == found.specials["<|startofprev|>"]


def test_a_translation_has_its_token_chrf_and_card(data, released, tmp_path):
    begins = ["--model_dir", released / "hf", "--task", "translate"]
    exported = tmp_path / "exported"
    out = ran(
        vietnamese, *data, *begins, *SHORT, "--output_dir", tmp_path, "--export", exported,
        "--compare_to", released / "hf",
    )  # fmt: skip
    assert "language of the speech, which the texts translate: " in out
    assert "\nchrF2: " in out and "its chrF2 is" in out and "WER" not in out
    best = tmp_path / "checkpoints" / "best.safetensors"
    assert json.loads(best.with_suffix(".json").read_text())["metric"] == "chrf"
    results = json.loads((tmp_path / "logs" / "results.json").read_text())
    assert 0 <= results["chrf"] <= 1 and 0 <= results["chrf_before"] <= 1
    generation = json.loads((exported / "generation_config.json").read_text())
    assert generation["task"] == "translate"
    card = (exported / "README.md").read_text(encoding="utf-8")
    assert 'generate_kwargs={"task": "translate"}' in card and "It translates speech in" in card
    use = ["--resume", best, "--output_dir", tmp_path]
    assert "\nchrF2: " in ran(vietnamese, "--evaluate", *data[-2:], *use)  # without the flag
    _, said = refused(vietnamese, "--evaluate", *data[-2:], *use, "--task", "transcribe")
    assert "--task transcribe (the checkpoint has translate)" in said
    _, said = refused(vietnamese, "--evaluate", "--long", data[-1], *use)
    assert "this model translates, and translations are scored by utterance" in said
    _, said = refused(vietnamese, *data, "--from_scratch", "--task", "translate")
    assert "--task" in said and "--model_dir" in said


@pytest.fixture(scope="module")
def exported_with_times(with_times, recorded, tmp_path_factory):
    """The export of a run with times from the folder that does not list them."""
    folder = tmp_path_factory.mktemp("exported with times")
    model = ["--model_dir", with_times / "unlisted", "--timestamp_share", 0.5]
    ran(vietnamese, *recorded, *SHORT, *model, "--output_dir", folder, "--export", folder / "out")
    return folder / "out"


def test_an_export_that_is_exported_again_keeps_its_times(exported_with_times, tmp_path):
    model = ["--model_dir", exported_with_times, "--language", "vi"]
    ran(vietnamese, *model, "--export", tmp_path / "again", "--output_dir", tmp_path / "run")
    text = (tmp_path / "again" / "generation_config.json").read_text(encoding="utf-8")
    assert json.loads(text)["return_timestamps"]


def test_transformers_reads_long_recordings_by_an_exports_times(exported_with_times, recorded):
    text = (exported_with_times / "generation_config.json").read_text(encoding="utf-8")
    generation = json.loads(text)
    tokenizer = read_tokenizer(exported_with_times, "vi")
    assert generation["return_timestamps"] and generation["max_initial_timestamp_index"] == 50
    assert generation["no_timestamps_token_id"] == tokenizer.timestamp_begin - 1
    assert generation["suppress_tokens"] == []
    pipe = transformers.pipeline(
        "automatic-speech-recognition", str(exported_with_times), device="cpu"
    )
    waveform = read_audio(str(Path(recorded[1]).parent / "train.wav"), SAMPLE_RATE).numpy()
    assert len(waveform) > 35 * SAMPLE_RATE
    result = pipe(waveform[: 35 * SAMPLE_RATE], generate_kwargs={"max_new_tokens": 12})
    times = [time for chunk in result["chunks"] for time in chunk["timestamp"] if time is not None]
    assert times and times[-1] > 1


@pytest.mark.slow
def test_faster_whisper_reads_an_export(exported_with_times, recorded, tmp_path):
    """By the converter's command as it stands on its page. It takes ten seconds."""
    faster_whisper = pytest.importorskip("faster_whisper")
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers"]
    flags = ["--model", exported_with_times, "--output_dir", tmp_path / "ct2", "--copy_files"]
    names = ["tokenizer.json", "preprocessor_config.json", "--quantization", "float16"]
    subprocess.run([*converter, *flags, *names], check=True, capture_output=True)
    model = faster_whisper.WhisperModel(str(tmp_path / "ct2"), device="cpu", compute_type="int8")
    assert model.model.is_multilingual
    waveform = read_audio(str(Path(recorded[1]).parent / "train.wav"), SAMPLE_RATE).numpy()
    segments, _ = model.transcribe(
        waveform[: 35 * SAMPLE_RATE], temperature=0.0, max_new_tokens=12, no_speech_threshold=None
    )
    times = [time for segment in segments for time in (segment.start, segment.end)]
    assert times and times == sorted(times)


# --- export, transcribing, evaluating -------------------------------------------------------------


def memorise(recipe, spoken, folder: Path, sentences: list[str] | None = None) -> list[tuple]:
    """Trains a model in `folder` that knows two sentences by heart, padded to its longest input.
    Returns [(file, sentence)]. `sentences` take the place of what is said."""
    rows = sorted(runs.rows_of(spoken["train"]), key=lambda row: row["duration"])
    rows = [rows[0], rows[-1]]
    for row, sentence in zip(rows, sentences or [row["text"] for row in rows], strict=True):
        row["text"] = sentence
    manifest = runs.write_rows(folder / "two.json", rows)
    files = ["--train_manifest", manifest, "--val_manifest", manifest, "--output_dir", folder]
    flags = (
        "--from_scratch --model_size base --d_model 32 --max_steps 50 --learning_rate 1e-2"
        " --eval_every 50 --pad_to_30s --no_spec_augment --no_speed_perturbation --max_duration 3"
    )
    with pytest.MonkeyPatch.context() as patch:  # an input of 3 s takes a tenth of the time
        short = {**recipe.SIZES["base"], "max_source_positions": 150}
        patch.setitem(recipe.SIZES, "base", short)
        out = ran(recipe, *files, *TINY, *SHORT, *flags.split(), "--export", folder / "exported")
    assert "cer 0.00 %" in out
    return [(row["audio_filepath"], row["text"]) for row in rows]


@pytest.fixture(scope="module")
def memorised(spoken, tmp_path_factory):
    """A run that knows two sentences by heart: its folder, and [(file, sentence)]."""
    folder = tmp_path_factory.mktemp("memorised")
    return folder, memorise(vietnamese, spoken, folder)


def test_transformers_decodes_an_export_as_we_do(memorised, tmp_path):
    folder, pairs = memorised
    paths = [path for path, _ in pairs]
    best = folder / "checkpoints" / "best.safetensors"
    ran(vietnamese, "--transcribe", *paths, "--resume", best, "--output", tmp_path / "ours.jsonl")
    ours = [row["text"] for row in runs.rows(tmp_path / "ours.jsonl")]
    assert ours == [sentence for _, sentence in pairs]
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "exported").eval()
    processor = transformers.WhisperProcessor.from_pretrained(folder / "exported")
    waveforms = [read_audio(path, SAMPLE_RATE).numpy() for path in paths]
    features = processor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    with torch.no_grad():
        tokens = model.generate(features, max_new_tokens=60)
    theirs = processor.batch_decode(tokens, skip_special_tokens=True)
    assert [text.strip() for text in theirs] == ours
    # The exported folder and its model.pt are models for us as well.
    exported = folder / "exported"
    for source in (["--model_dir", exported], ["--model_file", exported / "model.pt"]):
        assert ours[0] in ran(vietnamese, "--transcribe", *paths, *source)
    beam = ["--decoding", "beam", "--beam_size", "2"]
    assert ours[1] in ran(vietnamese, "--transcribe", *paths, "--resume", best, *beam)


@BOTH
def test_step_0_is_the_released_model_as_other_programs_read_it(
    recipe, memorised, spoken, tmp_path
):
    """Padded to its longest input, as by --evaluate --model_dir, whatever is trained on."""
    folder, _ = memorised
    if recipe is morse:
        folder = tmp_path
        memorise(morse, spoken, folder, ["CQ TEST", "73 TU"])
    two = folder / "two.json"
    output = tmp_path / "tuned"
    flags = ["--model_dir", folder / "exported", "--max_duration", 3, "--output_dir", output]
    data = ["--train_manifest", two, "--val_manifest", two, "--watch_manifest", two]
    ran(recipe, *data, *SHORT, *flags)
    best = json.loads((output / "checkpoints" / "best.json").read_text())
    assert best["evaluations"][0] == [0, 0.0] and best["watched"]["two"][0] == [0, 0.0]
    ran(recipe, "--evaluate", "--test_manifest", two, *flags)
    results = json.loads((output / "logs" / "results.json").read_text())
    assert all(rates["cer"]["rate"] == 0 for rates in results["rates"].values())
    saved = newest(output, recipe).model_info
    info = dataclasses.replace(start.ModelInfo(**saved), pad_to_30s=False)
    assert start.make_model(info).pad_to_longest  # after fine-tuning, too
    assert not start.make_model(dataclasses.replace(info, pretrained=False)).pad_to_longest


# --- mistakes at the command line -----------------------------------------------------------------


HF = "--model_dir {released}/hf"
CONTRADICTIONS = [  # what was saved, flags, and a part of the message
    ("scratch", "--vocab_size 400", "--vocab_size 400 (the checkpoint has 500)"),
    ("scratch", "--ctc_weight 0.3", "(the checkpoint's encoder has no output layer)"),
    ("tuned", f"{HF} --tokenizer_file {{other}}", "{other} (the checkpoint has another vocab"),
    ("tuned", f"{HF} --tokenizer_file {{released}}/hf --language vi --resume auto", None),
    ("scratch", "--vocab_size 500 --ctc_weight 0 --language vi", None),
]


@pytest.mark.parametrize(("saved", "line", "message"), CONTRADICTIONS)
def test_flags_that_contradict_the_checkpoint(saved, line, message, released, tmp_path):
    write_texts(train_bpe(["anh em"], 265, "vi").file_texts(), tmp_path)
    tuned = vietnamese.resolve(runs.parse(vietnamese, "--model_dir", released / "hf"))
    info, _ = start.read_released(tuned, released / "hf")
    info = dataclasses.replace(info, pretrained=saved == "tuned")
    state = {"args": {"vocab_size": 500}}
    content = checkpoint.Saved(tmp_path / "x.pt", vietnamese.RECIPE, {}, {}, {}, state=state)
    words = line.format(released=released, other=tmp_path).split()
    asked = vietnamese.resolve(runs.parse(vietnamese, *words))
    found = start.Family(asked).conflicts(info, content)
    if message is None:
        assert found == []
    else:
        assert message.format(other=tmp_path) in ", ".join(found)


def test_a_manifest_of_morse_keeps_what_it_holds_out(tmp_path, wav, json_lines):
    rows = [{"audio_filepath": wav(tmp_path / f"{n}.wav"), "text": "CQ"} for n in range(4)]
    manifest = json_lines(tmp_path / "m.json", rows)
    flags = ["--train_manifest", manifest, *TINY, *SHORT, "--from_scratch"]
    ran(morse, *flags, "--output_dir", tmp_path)
    assert len(newest(tmp_path, morse).run_info["data"]["held_out"]) == 1


def test_without_data_a_released_size_has_the_released_vocabulary(spoken, tmp_path):
    def vocabulary(*flags) -> int:
        flags = ["--from_scratch", *TINY, *flags, "--output_dir", tmp_path]
        info = planned(vietnamese, *flags).task.model_info
        assert 0 < info.ctc_tokens < 500
        return info.config["vocab_size"]

    assert vocabulary() == 320
    assert vocabulary("--model_size", "base") == 51_865
    assert vocabulary("--model_size", "large-v3") == 51_866
    assert vocabulary("--model_size", "base", "--vocab_size", "900") == 900
    assert vocabulary("--model_size", "base", "--train_manifest", spoken["train"]) <= 500
