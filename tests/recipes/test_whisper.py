"""Both Whisper recipes as a user runs them, on tiny models: demos, fine-tuning, resuming, export, transcribing, and the
mistakes at the command line. In this process where that does for the question; a process of its own takes seconds."""

import argparse
import contextlib
import functools
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from common import checkpoint, compiling, errors, memory, options
from common.device import Setup
from common.loop import run_window
from recipes import whisper_morse as morse
from recipes import whisper_vietnamese as vietnamese
from speech import audio, demo
from speech.morse import synthesis
from speech.whisper import formats as files
from speech.whisper import task
from speech.whisper import tokenizer as text
from speech.whisper.model import CHECKPOINTED, SAMPLE_RATE

ROOT = Path(__file__).resolve().parents[2]
SMALL = "--d_model 32 --encoder_layers 1 --decoder_layers 1 --attention_heads 2".split()
PLAIN = "--device cpu --no_tensorboard --dataloader_num_workers 0".split()
SHORT = "--max_steps 2 --batch_size 2 --gradient_accumulation_steps 1".split()
CLIPS = "--clips_per_epoch 8 --eval_clips 3 --clip_seconds 2".split()


def parse(recipe, *flags) -> argparse.Namespace:
    parser = options.Parser("test")
    recipe.add_arguments(parser)
    return parser.parse_args([*PLAIN, *map(str, flags)])


def run(recipe, folder: Path, *flags) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the recipe with these flags."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            errors.exit_with_one_line(recipe.main, parse(recipe, "--output_dir", folder, *flags))
        except SystemExit as leaving:
            status = leaving.code
    return status, out.getvalue(), err.getvalue()


def ran(recipe, folder: Path, *flags) -> str:
    """The stdout of a run that must succeed."""
    status, out, err = run(recipe, folder, *flags)
    assert status == 0, err
    return out


def newest(folder: Path, recipe) -> dict:
    return checkpoint.read(checkpoint.list_checkpoints(folder / "checkpoints")[0], recipe.RECIPE)


def spoken(folder: Path, sizes: dict[str, int]) -> dict[str, str]:
    return demo.speech_corpus(folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES[:3], sizes)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Manifests "train", "val" and "test"."""
    return spoken(tmp_path_factory.mktemp("corpus"), {"train": 14, "val": 3, "test": 3})


@pytest.fixture
def data(corpus):
    """The flags that name them."""
    return [word for split, path in corpus.items() for word in (f"--{split}_manifest", path)]


@pytest.fixture(scope="module")
def released(corpus, tmp_path_factory):
    """A random model in both released forms: a Hugging Face folder as transformers saves it, and OpenAI's base.pt."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("released")
    texts = [json.loads(line)["text"] for line in Path(corpus["train"]).read_text(encoding="utf-8").splitlines()]
    tokenizer = text.train_bpe(texts, 300, "vi")
    config = files.shape(32, (1, 1), 2, vocabulary=tokenizer.size)
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), tokenizer.end)
    torch.manual_seed(0)
    settings = transformers.WhisperConfig(**config, **special, decoder_start_token_id=tokenizer.start,
                                          suppress_tokens=None, begin_suppress_tokens=None)  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(settings)
    model.save_pretrained(folder / "hf")
    tokenizer.save(folder / "hf")
    (folder / "openai").mkdir()
    tokenizer.save(folder / "openai")
    weights = {name.removeprefix("model."): w for name, w in model.state_dict().items() if name != "proj_out.weight"}
    content = {"dims": files.config_to_dims(config), "model_state_dict": files.hf_to_openai(weights)}
    torch.save(content, folder / "openai" / "base.pt")
    (folder / "alone").mkdir()
    torch.save(content, folder / "alone" / "base.pt")
    torch.save(model.state_dict(), folder / "pytorch_model.bin")
    return folder


@pytest.fixture
def recording(tmp_path):
    """35 s of Morse."""
    path = tmp_path / "long.wav"
    clips = [synthesis.synthesise(0, number, synthesis.CONDITIONS["clean"]).audio for number in range(12)]
    soundfile.write(path, np.concatenate(clips)[: 35 * SAMPLE_RATE], SAMPLE_RATE)
    return path


# --- demos -----------------------------------------------------------------------------------------------------------


def test_the_morse_demo_and_what_it_leaves(tmp_path):
    flags = [*SMALL, *SHORT, *CLIPS]
    out = ran(morse, tmp_path, *flags, "--export", tmp_path / "exported")
    assert "test set, 3 clips" in out and out.count("reference:") == 3 and "callsigns" in out
    tables = json.loads((tmp_path / "logs" / "evaluation.json").read_text(encoding="utf-8"))
    assert set(tables) == {"all", "condition", "contest", "sample type", "speed", "SNR"}
    assert tables["all"]["all"]["samples"] == 3 and set(tables["condition"]) == {"demo"}
    assert tables["all"]["all"]["cer"] is not None
    assert {"best.safetensors", "best.json"} <= {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert (tmp_path / "logs" / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert {"model.safetensors", "model.pt", "tokenizer.json"} <= {p.name for p in (tmp_path / "exported").iterdir()}
    generation = json.loads((tmp_path / "exported" / "generation_config.json").read_text())
    assert generation["suppress_tokens"] == generation["begin_suppress_tokens"] == []
    # Run again, it goes on; finished, it only prints the figures again and exports over its own.
    out = ran(morse, tmp_path, *flags, "--max_steps", "3", "--resume", "auto", "--export", tmp_path / "exported")
    assert "resuming from" in out and "exported to" in out and newest(tmp_path, morse)["progress"]["step"] == 3


def test_the_vietnamese_demo(tmp_path, monkeypatch):
    monkeypatch.setattr(vietnamese, "DEMO_SIZES", {"train": 12, "val": 2, "test": 3})
    out = ran(vietnamese, tmp_path, *SMALL, *SHORT)
    assert "demo corpus: 17 utterances" in out and "test set, 3 utterances" in out and out.count("reference:") == 3
    assert len((tmp_path / "logs" / "transcripts.jsonl").read_text().splitlines()) == 3
    assert newest(tmp_path, vietnamese)["metadata"]["config"]["vocab_size"] <= 320
    # The same figures again, from the weights alone.
    again = ran(vietnamese, tmp_path, "--evaluate")
    figures = [[line for line in printed.splitlines() if line.startswith(("WER", "CER"))] for printed in (out, again)]
    assert figures[0] == figures[1] and len(figures[0]) == 2


def test_the_auxiliary_loss_may_end_before_the_run(tmp_path):
    ran(morse, tmp_path, *SMALL, *SHORT, *CLIPS)
    flags = ["--max_steps", "3", *SHORT[2:], *CLIPS, "--alignment_weight", "0", "--ctc_weight", "0"]
    out = ran(morse, tmp_path, *flags, "--resume", "auto")
    before, after = (checkpoint.read(path, morse.RECIPE)["model"] for path in reversed(checkpoint.list_checkpoints(tmp_path / "checkpoints")))  # fmt: skip
    assert "(step 2)" in out and torch.equal(before["ctc_head.weight"], after["ctc_head.weight"])


# --- stopped and resumed ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [morse, vietnamese], ids=["morse", "vietnamese"])
def test_stopped_by_a_signal_and_resumed_it_ends_with_the_same_bits(recipe, data, tmp_path):
    """Without data workers, then with one, which has read ahead when the signal comes."""
    source = CLIPS if recipe is morse else data
    flags = [*SMALL, *source, "--from_scratch", "--max_steps", "24", "--batch_size", "2", "--gradient_accumulation_steps",
             "2", "--log_every", "1", "--eval_every", "24", "--save_every", "0", "--dropout", "0.1"]  # fmt: skip
    ran(recipe, tmp_path / "whole", *flags)
    stopped = tmp_path / "stopped"
    command = [sys.executable, recipe.__file__, *PLAIN, *flags, "--dataloader_num_workers", "1", "--resume", "auto"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*command, "--output_dir", str(stopped)], env=environment, stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    metrics, deadline = stopped / "logs" / "metrics.jsonl", time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if metrics.exists() and metrics.read_text().count("\n") >= 3:
            break
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 143 and "--resume auto" in said, said
    step = newest(stopped, recipe)["progress"]["step"]
    assert 0 < step < 24
    assert f"(step {step})" in ran(recipe, stopped, *flags, "--resume", "auto", "--dataloader_num_workers", "1")
    a, b = newest(tmp_path / "whole", recipe), newest(stopped, recipe)
    assert a["progress"] == b["progress"] and a["progress"]["step"] == 24
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name


def tensors(load, wanted: list[tuple[int, int]]) -> list[dict]:
    return [{k: v.tolist() for k, v in load(i, e).items() if isinstance(v, torch.Tensor)} for i, e in wanted]


def tensors_of_pickled(path: str, wanted: list[tuple[int, int]]) -> list[dict]:
    with open(path, "rb") as file:
        return tensors(pickle.load(file), wanted)


def test_items_are_the_same_in_another_process(corpus, tmp_path):
    args = parse(vietnamese, "--train_manifest", corpus["train"], "--from_scratch", "--pad_share", "0.3")
    options.resolve(args, 1)
    task.check_arguments(args, is_demo=False)
    args.log_dir = tmp_path
    corpora = vietnamese.read_corpora(args)
    tokenizer = text.train_bpe(corpora["train"].texts, 300, "vi")
    task.check_limits(args, vietnamese.SIZES["demo"])
    spoken_ones = functools.partial(vietnamese.load_item, corpora["train"], tokenizer, args, 30.0, True)
    args = parse(morse, *CLIPS, "--spec_augment")
    morse.resolve(args)
    task.check_limits(args, morse.SIZES["demo"])
    clips, symbols = morse.read_clips(args)["train"], text.train_symbols(morse.SYMBOLS, "en")
    synthetic = functools.partial(morse.load_item, clips, symbols, args, 30.0, symbols.end, True)
    wanted = [(3, 0), (1, 2), (3, 2)]
    # One thread, as in data workers: with two the resampler rounds differently.
    with torch.multiprocessing.get_context("spawn").Pool(1, torch.set_num_threads, (1,)) as pool:
        for name, load in (("spoken", spoken_ones), ("synthetic", synthetic)):
            (tmp_path / name).write_bytes(pickle.dumps(load))
            theirs = pool.apply(tensors_of_pickled, (str(tmp_path / name), wanted))
            load(0, 0)  # what was asked for before does not matter
            ours = tensors(load, wanted)
            assert ours == theirs and ours[0]["time_masks"] != ours[2]["time_masks"]


# --- exactness -------------------------------------------------------------------------------------------------------


@functools.cache
def ragged_items() -> tuple[dict, list[dict], argparse.Namespace]:
    """Metadata of a tiny model and eight clips in float64, some of them padded to the window."""
    args = parse(morse, *SMALL, *CLIPS, "--pad_share", "0.3", "--label_smoothing", "0.1", "--spec_augment")
    morse.resolve(args)
    clips, metadata = morse.read_clips(args)["train"], morse.start(args, None)[0]
    task.check_limits(args, metadata["config"])
    tokenizer = text.make(metadata["tokenizer"])
    load = functools.partial(morse.load_item, clips, tokenizer, args, 30.0, tokenizer.end, True)
    items = [load(index, 1) for index in range(8)]
    for item in items:
        item["audio"] = item["audio"].double()
        for name in ("time_masks", "frequency_masks"):
            item[name] = item[name].double() if item[name].is_floating_point() else item[name]
    padded = [len(item["audio"]) == 30 * SAMPLE_RATE for item in items]
    assert any(padded) and not all(padded) and len({item["heard"] for item in items}) > 4
    return metadata, items, args


def tiny_model(args, metadata: dict):
    torch.manual_seed(0)
    model = task.make_model(metadata, label_smoothing=args.label_smoothing).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn(parameter.shape, dtype=torch.float64)
    return model.train()


def window_gradient(model, items: list[dict], size: int, terms: dict[str, float]) -> torch.Tensor:
    micro = [task.collate(items[first : first + size]) for first in range(0, len(items), size)]
    totals = {name: sum(batch["counts"][name] for batch in micro) for name in terms}
    outcome = run_window(model, micro, totals, morse.compute_loss, terms, Setup())
    assert outcome.failed is None
    found = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([gradient.flatten() for gradient in found])


@pytest.mark.parametrize("term", ["ctc", "alignment"])
def test_however_a_window_is_cut_its_gradient_is_the_same(term):
    metadata, items, args = ragged_items()
    if term == "ctc":
        items = [{key: value for key, value in item.items() if key != "alignment"} for item in items]
    whole = None
    for size in (8, 2, 1):
        gradient = window_gradient(tiny_model(args, metadata), items, size, {"attention": 0.7, term: 0.3})
        whole = gradient if whole is None else whole
        assert (gradient - whole).norm() <= 1e-10 * whole.norm() and whole.norm() > 0


def test_gradient_checkpointing_changes_neither_loss_nor_gradient():
    metadata, items, args = ragged_items()
    found = []
    for recompute in (False, True):
        model = tiny_model(args, metadata)
        if recompute:
            memory.checkpoint_layers(model, CHECKPOINTED)
        found.append(window_gradient(model, items[:3], 3, {"attention": 0.7, "alignment": 0.3}))
    assert torch.equal(*found)


# --- released models -------------------------------------------------------------------------------------------------


def test_both_released_forms_are_fine_tuned_alike(released, data, tmp_path):
    out = ran(vietnamese, tmp_path / "a", *data, *SHORT, "--model_dir", released / "hf")
    assert "learning rate: 3.75e-05 (fine-tuning at this width)" in out
    ran(vietnamese, tmp_path / "b", *data, *SHORT, "--model_file", released / "openai" / "base.pt")
    a, b = newest(tmp_path / "a", vietnamese), newest(tmp_path / "b", vietnamese)
    start = files.read_model(released / "hf")[0]
    for name, weight in a["model"].items():
        assert torch.equal(weight, b["model"][name]), name
        assert torch.equal(weight, start[name]) == (name == "encoder.embed_positions.weight"), name
    assert not a["metadata"]["pad_to_30s"]


def test_a_frozen_encoder_keeps_its_weights_and_hears_30_seconds(released, data, tmp_path):
    out = ran(
        vietnamese, tmp_path, *data, *SHORT, "--model_dir", released / "hf", "--freeze_encoder", "--dropout", "0.2"
    )
    start, found = files.read_model(released / "hf")[0], newest(tmp_path, vietnamese)
    for name, weight in found["model"].items():
        assert torch.equal(weight, start[name]) == name.startswith("encoder."), name
    assert found["metadata"]["pad_to_30s"] and not any(name.startswith("encoder.") for name in found["optimizer"])
    trained = sum(w.numel() for name, w in start.items() if name.startswith("decoder.")) / 1e6
    assert f"{trained:.1f} M of them trained" in out


def test_released_models_learn_morse_with_nothing_suppressed(released, tmp_path):
    out = ran(morse, tmp_path, *CLIPS, *SHORT, "--model_dir", released / "hf", "--language", "vi", "--conditions", "wide",
              "clean", "--export", tmp_path / "exported")  # fmt: skip
    tables = json.loads((tmp_path / "logs" / "evaluation.json").read_text())
    assert set(tables["condition"]) <= {"wide", "clean"} and "exported to" in out
    assert json.loads((tmp_path / "exported" / "generation_config.json").read_text())["suppress_tokens"] == []


# --- export, transcribing, evaluating --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def memorised(corpus, tmp_path_factory):
    """A run that knows two sentences by heart, padded to 30 s: its folder, and [(file, sentence)]."""
    folder = tmp_path_factory.mktemp("memorised")
    rows = [json.loads(line) for line in Path(corpus["train"]).read_text(encoding="utf-8").splitlines()]
    rows = sorted(rows, key=lambda row: row["duration"])
    rows = [rows[0], rows[-1]]
    for row in rows:
        row["audio_filepath"] = str(Path(corpus["train"]).parent / row["audio_filepath"])
    manifest = folder / "two.json"
    manifest.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    ran(vietnamese, folder, *SMALL, "--train_manifest", manifest, "--val_manifest", manifest, "--from_scratch",
        "--pad_to_30s", "--no_spec_augment", "--no_speed_perturbation", "--max_steps", "120", "--batch_size", "2",
        "--gradient_accumulation_steps", "1", "--learning_rate", "5e-3", "--eval_every", "60", "--export",
        folder / "exported")  # fmt: skip
    return folder, [(row["audio_filepath"], row["text"]) for row in rows]


def test_transformers_decodes_an_export_as_we_do(memorised, tmp_path):
    transformers = pytest.importorskip("transformers")
    folder, pairs = memorised
    paths = [path for path, _ in pairs]
    best = folder / "checkpoints" / "best.safetensors"
    ran(vietnamese, tmp_path, "--transcribe", *paths, "--resume", best, "--output", tmp_path / "ours.jsonl")
    ours = [json.loads(line)["text"] for line in (tmp_path / "ours.jsonl").read_text(encoding="utf-8").splitlines()]
    assert ours == [sentence for _, sentence in pairs]
    model = transformers.WhisperForConditionalGeneration.from_pretrained(folder / "exported").eval()
    processor = transformers.WhisperProcessor.from_pretrained(folder / "exported")
    waveforms = [audio.read_audio(path, SAMPLE_RATE).numpy() for path in paths]
    features = processor(waveforms, sampling_rate=SAMPLE_RATE, return_tensors="pt").input_features
    with torch.no_grad():
        theirs = processor.batch_decode(model.generate(features, max_new_tokens=60), skip_special_tokens=True)
    assert [found.strip() for found in theirs] == ours
    # The exported folder and its model.pt are models for us as well.
    for flag, path in (("--model_dir", folder / "exported"), ("--model_file", folder / "exported" / "model.pt")):
        assert ours[0] in ran(vietnamese, tmp_path, "--transcribe", *paths, flag, path)
    assert ours[1] in ran(vietnamese, tmp_path, "--transcribe", *paths, "--resume", best, "--decoding", "beam", "--beam_size", "2")  # fmt: skip


def test_export_alone_and_in_the_end_are_the_same(memorised, tmp_path):
    folder, _ = memorised
    out = ran(
        vietnamese, tmp_path, "--resume", folder / "checkpoints" / "best.safetensors", "--export", tmp_path / "alone"
    )
    assert "exported to" in out and "step" not in out
    for name in ("model.safetensors", "tokenizer.json", "generation_config.json", "config.json"):
        assert (tmp_path / "alone" / name).read_bytes() == (folder / "exported" / name).read_bytes()


def test_compared_to_a_baseline(memorised, released, tmp_path):
    folder, _ = memorised
    status, out, _ = run(vietnamese, tmp_path, "--evaluate", "--resume", folder / "checkpoints" / "best.safetensors",
                         "--test_manifest", folder / "two.json", "--compare_to", released / "hf")  # fmt: skip
    assert status == 0 and "test set, 2 utterances" in out and "demo corpus" not in out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("WER", "CER"))}
    assert "before    after  lower by" in out and rows["CER"][1:] == ["0.00%", "100.0%"] and rows["CER"][0] != "0.00%"


def test_long_files_are_transcribed_in_overlapping_windows(tmp_path, recording, released):
    ran(morse, tmp_path, "--transcribe", recording, "--model_dir", released / "hf", "--language", "vi", "--output",
        tmp_path / "out.jsonl")  # fmt: skip
    (row,) = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text(encoding="utf-8").splitlines()]
    assert row["seconds"] == 35 and len(row["pieces"]) == 2
    assert row["pieces"][0]["start"] == 0 and row["pieces"][1]["end"] == 35
    assert row["pieces"][0]["end"] == row["pieces"][1]["start"]  # what both windows heard is in one of them


# --- data ------------------------------------------------------------------------------------------------------------


def test_a_written_data_set_is_trained_on_and_evaluated(tmp_path):
    out = ran(
        morse, tmp_path, "--write_dataset", tmp_path / "set", 20, "--clip_seconds", 2, "--conditions", "clean", "wide"
    )
    assert "data set: 20 clips" in out
    header = (tmp_path / "set" / "metadata.csv").read_text(encoding="utf-8").splitlines()[0]
    assert header.startswith("id,audio_file,text,contest_type,sample_type,wpm,condition,duration,is_noise_only")
    flags = ["--data_dir", tmp_path / "set", "--clip_seconds", 2]
    assert "are for synthetic clips" in run(morse, tmp_path, *flags, "--from_scratch")[2]
    ran(morse, tmp_path, *flags[:2], "--from_scratch", *SMALL, *SHORT, "--speed_perturbation")
    tables = json.loads((tmp_path / "logs" / "evaluation.json").read_text(encoding="utf-8"))
    assert tables["all"]["all"]["samples"] == 2 and set(tables["condition"]) <= {"clean", "wide"}
    shutil.move(tmp_path / "logs" / "evaluation.json", tmp_path / "before.json")
    ran(morse, tmp_path, *flags[:2], "--evaluate")
    assert (tmp_path / "logs" / "evaluation.json").read_text() == (tmp_path / "before.json").read_text()


def test_long_recordings_are_cut_by_their_segments_or_rejected(corpus, tmp_path):
    rows = [json.loads(line) for line in Path(corpus["train"]).read_text(encoding="utf-8").splitlines()]
    pieces, segments, now = [], [], 0.0
    for row in rows * 4:
        samples = audio.read_audio(str(Path(corpus["train"]).parent / row["audio_filepath"]), SAMPLE_RATE).numpy()
        seconds = len(samples) / SAMPLE_RATE
        segments.append({"start": round(now, 3), "end": round(now + seconds, 3), "text": row["text"]})
        pieces.append(samples)
        now += seconds
    soundfile.write(tmp_path / "long.wav", np.concatenate(pieces), SAMPLE_RATE)
    assert now > 31
    manifest = tmp_path / "long.json"
    manifest.write_text(json.dumps({"audio_filepath": "long.wav", "segments": segments}, ensure_ascii=False) + "\n")
    flags = ["--train_manifest", manifest, "--val_manifest", corpus["val"], "--from_scratch", *SMALL, *SHORT]
    status, _, err = run(vietnamese, tmp_path, *flags)
    assert status == 1 and "--use_chunking" in err
    ran(vietnamese, tmp_path, *flags, "--use_chunking", "--max_duration", "12")
    assert 6 < newest(tmp_path, vietnamese)["metadata"]["longest"] <= 12


@pytest.mark.slow
def test_compiled_layers_train(tmp_path):
    if compiling.compile_problem(torch.device("cpu")):
        pytest.skip("nothing to compile with")
    assert "torch.compile:" in ran(morse, tmp_path, *SMALL, *SHORT, *CLIPS, "--torch_compile")


# --- mistakes at the command line --------------------------------------------------------------------------------------

MISTAKES = {  # flags, and the status and what is said; {released}, {corpus} and {here} are folders
    vietnamese: [
        ("--train_manifest {here}/gone.json --from_scratch", 2, "manifest {here}/gone.json: No such file"),
        ("--train_manifest {here}/mp3.json --from_scratch", 1, "no usable utterance: 2 x file is missing"),
        ("{train}", 2, "where does the model start? --model_dir DIR"),
        ("{train} --model_dir {released}/hf/config.json", 2, "config.json is refused"),
        ("{train} --model_dir {released}/hf/model.safetensors", 2, "give the folder that holds it"),
        ("{train} --model_dir {here}/empty", 2, "holds no config.json"),
        ("{train} --model_dir openai/whisper-base", 2, "nothing is downloaded here"),
        ("{train} --model_file {released}/pytorch_model.bin", 2, "a Hugging Face model is given by its folder"),
        ("{train} --model_file {released}/alone/base.pt", 2, "--tokenizer_file names one elsewhere"),
        ("{train} --model_dir {released}/hf --model_file x", 2, "give one of them"),
        ("{train} --model_dir {released}/hf --language kok", 2, "language kok: Whisper has no token for it"),
        ("{train} --from_scratch --freeze_encoder", 2, "--freeze_encoder with random weights"),
        ("{train} --model_dir {released}/hf --freeze_encoder --no_pad_to_30s", 2, "only knows 30 s windows"),
        ("{train} --model_dir {released}/hf --model_size base", 2, "has its own shape"),
        ("{train} --model_dir {released}/hf --vocab_size 500", 2, "has its own vocabulary"),
        ("{train} --model_dir {released}/hf --ctc_weight 0.3", 2, "--ctc_weight is for models from scratch"),
        ("{train} --model_dir {released}/hf --export {here}/foreign", 2, "it exists and is no earlier export"),
        ("{train} --model_dir {released}/hf --compare_to {here}/gone", 2, "--compare_to {here}/gone: no such file"),
        ("{train} --model_dir {released}/hf --compare_to {here}/a.wav", 2, "no weights at all"),
        ("{train} --model_dir {released}/hf --output x.jsonl", 2, "--output goes with --transcribe"),
        ("{train} --model_dir {released}/hf --beam_size 3", 2, "--beam_size goes with --decoding beam"),
        ("{train} --model_dir {released}/hf --average_by best", 2, "--average_by goes with --average_checkpoints"),
        ("{train} --model_dir {released}/hf --pad_share 0.3 --pad_to_30s", 2, "--pad_share is for variable length"),
        ("{train} --model_dir {released}/hf --max_target_tokens 1000", 2, "the decoder has 448 positions"),
        ("{train} --model_dir {released}/hf --max_duration 60", 2, "the model's window is 30 s"),
        ("{train} --from_scratch --tokenizer_file {released}/hf", 2, "--tokenizer_file goes with --model_dir"),
        ("{train} --from_scratch --vocab_size 10", 2, "--vocab_size 10 is too few"),
        ("{train} --from_scratch --d_model 30 --attention_heads 4", 2, "must be a multiple of twice"),
        ("--val_manifest {corpus}/val.json", 2, "--val_manifest was given without --train_manifest"),
        ("--test_manifest {corpus}/test.json", 2, "alone it goes with --evaluate"),
        ("--evaluate", 2, "no weights at {here}/checkpoints/best.safetensors: train first"),
        ("--transcribe {here}/a.wav", 2, "no weights at {here}/checkpoints/best.safetensors: train first"),
        ("--transcribe {here}/gone.wav --model_dir {released}/hf", 2, "gone.wav: no such file or folder"),
        ("--transcribe {here}/a.wav --evaluate", 2, "two things: give one of them"),
        ("--transcribe {here}/a.wav --model_dir {released}/hf --export {here}/x", 2, "two things: give one of them"),
        ("--transcribe {here}/a.wav --model_dir {released}/hf --compare_to {released}/hf", 2, "have no reference"),
        ("--resume {here}/gone.pt --export {here}/x", 2, "no weights at {here}/gone.pt"),
    ],
    morse: [
        ("--train_manifest {here}/gone.json --from_scratch", 2, "manifest {here}/gone.json: No such file"),
        ("--train_manifest {train_file} --data_dir {here}", 2, "both name recordings"),
        ("--use_chunking", 2, "it goes with --train_manifest"),
        ("--wpm 30 20", 2, "--wpm 30 20: the first is to be the lower one"),
        ("--wpm 1 2", 2, "below 5 words a minute"),
        ("--tone 5000 6000", 2, "tones of 100 to 4,000 Hz"),
        ("--conditions wide", 2, "where does the model start?"),
        ("--data_dir {here}/gone --from_scratch", 2, "neither splits/train.csv nor metadata.csv is there"),
        ("--data_dir {here}/gone --from_scratch --eval_clips 9", 2, "are for synthetic clips"),
        ("--data_dir {here}/gone --from_scratch --alignment_weight 0.3", 2, "--ctc_weight needs no times"),
        ("--alignment_weight 0.3 --ctc_weight 0.3", 2, "give one of them"),
        ("--alignment_weight 0.3 --model_dir {released}/hf", 2, "is for models from scratch"),
        ("--conditions wide --clips_per_epoch 4 --eval_clips 2 --resume auto", 2, "nothing says where the model"),
        ("--freeze_encoder --clips_per_epoch 4 --eval_clips 2 --resume auto", 2, "a random encoder would stay random"),
        ("--speed_perturbation", 2, "would move what --alignment_weight trains on"),
        ("--max_samples 9", 2, "are for recordings"),
        ("--data_dir {here} --audio_root {here} --from_scratch", 2, "--audio_root is for --train_manifest"),
        ("--write_dataset {here}/foreign 9", 2, "the folder holds something else"),
        ("--write_dataset {here}/new many", 2, "'many' is not a whole number"),
        ("--export {here}/foreign", 2, "it exists and is no earlier export"),
        ("--output x.jsonl", 2, "--output goes with --transcribe"),
        ("--evaluate", 2, "train first, or name them with --resume"),
        ("--transcribe {here}/a.wav", 2, "train first, or name them with --resume"),
        ("--from_scratch --freeze_encoder", 2, "--freeze_encoder with random weights"),
    ],
}


@pytest.mark.parametrize("recipe", MISTAKES, ids=["vietnamese", "morse"])
def test_mistakes_are_answered_in_one_line_before_anything_is_trained(
    recipe, released, corpus, tmp_path, wav, json_lines
):
    wav(tmp_path / "a.wav")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "mine.txt").touch()
    json_lines(tmp_path / "mp3.json", [{"audio_filepath": f"{n}.mp3", "text": "xin chào"} for n in range(2)])
    names = {"{train}": f"--train_manifest {corpus['train']}", "{train_file}": corpus["train"],
             "{released}": str(released), "{corpus}": str(Path(corpus["train"]).parent), "{here}": str(tmp_path)}  # fmt: skip
    for line, expected, message in MISTAKES[recipe]:
        for name, value in names.items():
            line, message = line.replace(name, value), message.replace(name, value)
        status, _, err = run(recipe, tmp_path, *line.split())
        assert (status, err.count("\n")) == (expected, 1), (line, err)
        assert err.startswith("error: ") and message in err, (line, err)
        assert not checkpoint.list_checkpoints(tmp_path / "checkpoints"), line


@pytest.mark.parametrize(
    ("recipe", "line", "message"),
    [
        (vietnamese, "--batch_size 0", "argument --batch_size: 0 is out of range: it must be at least 1"),
        (vietnamese, "--model_size huge", "invalid choice: 'huge'"),
        (vietnamese, "--lr 1e-4", "did you mean --learning_rate?"),
        (morse, "--snr 5", "did you mean --snr_db?"),
        (morse, "--snr_db 5", "argument --snr_db: expected 2 arguments"),
        (morse, "--clip_seconds 60", "it must be at most 29"),
        (morse, "--conditions contest", "invalid choice: 'contest'"),
    ],
)
def test_flags_that_cannot_be_read(recipe, line, message, capsys):
    with pytest.raises(SystemExit) as leaving:
        parse(recipe, *line.split())
    err = capsys.readouterr().err
    assert leaving.value.code == 2 and message in err and err.count("\n") == 1


def test_checkpoints_of_another_recipe_or_shape(released, tmp_path):
    ran(morse, tmp_path, *SMALL, *SHORT, *CLIPS)
    saved = checkpoint.list_checkpoints(tmp_path / "checkpoints")[0]
    for flags in (
        ["--resume", saved],
        ["--transcribe", saved, "--resume", tmp_path / "checkpoints" / "best.safetensors"],
    ):
        status, _, err = run(vietnamese, tmp_path / "other", *flags)
        assert status == 2 and "was saved by recipes/whisper_morse.py, not by recipes/whisper_vietnamese.py" in err
    status, _, err = run(morse, tmp_path / "other", "--resume", saved, "--model_size", "tiny", *CLIPS)
    assert status == 2 and "--model_size tiny (the checkpoint has 32 wide, 1+1 layers) conflicts" in err
    status, _, err = run(morse, tmp_path, "--resume", "auto", "--model_dir", released / "hf", *CLIPS)
    assert status == 2 and "(the checkpoint's model began from scratch) conflicts" in err and err.count("\n") == 1
    status, _, err = run(morse, tmp_path / "other", "--resume", tmp_path / "checkpoints" / "best.safetensors", *CLIPS)
    assert status == 2 and "holds weights only" in err and err.count("\n") == 1
