"""Aligning long recordings with their texts: `--align`'s search against ctc-segmentation and
torchaudio's forced_align, on the same log-probabilities in the same run.

    python benchmarks/alignment.py                           # simulated tapes of ten minutes
    python benchmarks/alignment.py --minutes 120 --methods ours
    python benchmarks/alignment.py --checkpoint checkpoints/best.safetensors --minutes 60

The simulated tapes are log-probabilities of a peaky CTC model at three letter error rates, with an
introduction and music (simulated_tape.py). Those of --checkpoint, a Konkani model of the demo, are
what it hears of spoken sentences that it has not been trained on, joined with pauses and noise. In
disorder means that 10 % of the sentences are missing in the recording, as many are added to it and
as many moved.

Each row is a process of its own, on one thread: `pip install --no-deps --target PEERS
ctc-segmentation torchaudio` and PYTHONPATH=PEERS bring the peers. It prints the median and the
95th percentile of the distance between a cut and where the sound really begins or ends, the share
of the speech of the text that is kept, the share of what is kept that is wrong (more than 0.75 s
off, or another text), seconds of processor time, and the peak of resident memory, in which are the
interpreter, the libraries and the log-probabilities.
The peers keep what has a score above the threshold that keeps most with less than 1 % wrong, or
least wrong; it is chosen with the truth, ours is not."""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np

METHODS = ("ours", "ctc-segmentation", "forced_align")
ERROR_RATES = (0.05, 0.15, 0.3)
DISORDER = {"missing": 0.1, "added": 0.1, "moved": 0.1}
# Seconds: a cut that is further off is wrong. ctc-segmentation cuts in the middle of a pause.
FAR = 0.75
MOST_WRONG = 0.01
SEED = 7

Segment = tuple[str, float, float, float]  # text, start and end in seconds, score


# --- tapes ----------------------------------------------------------------------------------------


def simulated(minutes: float, error_rate: float, in_disorder: bool) -> dict:
    from benchmarks import simulated_tape

    shares = DISORDER if in_disorder else {}
    tape = simulated_tape.tape(SEED, minutes, error_rate, **shares)
    return {
        "log_probs": tape.log_probs,
        "letters": simulated_tape.LETTERS,
        "true": tape.true,
        "texts": tape.texts,
        "frame": simulated_tape.FRAME,
    }


def spoken(minutes: float, checkpoint: str, in_disorder: bool) -> dict:
    """What a Konkani model hears of spoken sentences."""
    import soundfile
    import torch

    from common import options
    from recipes import konkani_conformer as konkani
    from speech.alignment import emissions
    from speech.data import demo

    parser = options.Parser("")
    konkani.add_arguments(parser)
    words = ["--resume", checkpoint, "--align", "a.wav", "a.txt", "--device", "cpu"]
    args = parser.parse_args(words)
    args.checkpoint_dir = Path(".")
    recogniser = konkani.recogniser_to_align(args)
    with tempfile.TemporaryDirectory() as folder:
        texts, true, samples, rate = joined(Path(folder), minutes, in_disorder, demo)
        soundfile.write(Path(folder, "tape.wav"), samples, rate)
        energy = []
        with torch.no_grad():
            windows = emissions.windows_of(
                str(Path(folder, "tape.wav")),
                recogniser.hear,
                recogniser.frame,
                energy,
                emissions.window_for(recogniser.longest),
            )
            log_probs = np.concatenate(list(windows))
    return {
        "log_probs": log_probs[:, 1:],  # without the unknown one: the blank is the last
        "letters": "".join(recogniser.vocabulary.spellings),
        "true": true,
        "texts": texts,
        "frame": recogniser.frame,
        "energy": np.concatenate(energy),
    }


def joined(folder: Path, minutes: float, in_disorder: bool, demo) -> tuple:
    """The text, its true places, and the samples of spoken sentences, joined with pauses."""
    from benchmarks.simulated_tape import reordered

    random = np.random.default_rng(SEED)
    count = round(minutes * 60 / 2.1)
    lines = demo.sentences(demo.KONKANI_WORDS, 3200 + count, np.random.default_rng(SEED))[3200:]
    if in_disorder:
        order = reordered(list(range(count)), DISORDER["moved"], random)
    else:
        order = list(range(count))
    voice = demo.espeak()
    parts, true, added = [], [], set()
    now = 0.0
    for number in order:
        fate = random.random() if in_disorder else 1.0
        if fate < DISORDER["missing"]:
            continue
        speaker = demo.KONKANI_VOICES[int(random.integers(len(demo.KONKANI_VOICES)))]
        speech = demo.trim(voice.say(lines[number], speaker, int(random.integers(140, 221))))
        seconds = len(speech) / voice.sample_rate
        if fate < DISORDER["missing"] + DISORDER["added"]:
            added.add(number)
        else:
            true.append((number, now, now + seconds))
        pause = np.zeros(round(random.uniform(0.3, 1.0) * voice.sample_rate))
        if random.random() < 0.01:
            pause = random.normal(0, 1500, 10 * len(pause))
        parts += [speech, pause]
        now += seconds + len(pause) / voice.sample_rate
    samples = np.concatenate(parts) + random.normal(0, 10, sum(map(len, parts)))
    kept = [number for number in range(count) if number not in added]
    index = {number: place for place, number in enumerate(kept)}
    true = [(index[number], start, end) for number, start, end in true]
    texts = [lines[number] for number in kept]
    return texts, true, samples.clip(-32768, 32767).astype(np.int16), voice.sample_rate


# --- methods --------------------------------------------------------------------------------------


def by_ours(tape: dict) -> list[Segment]:
    from speech.alignment import cutting, emissions, letters, matching
    from speech.alignment.sentences import Piece

    index = {letter: i for i, letter in enumerate(tape["letters"])}
    size = len(index) + 1
    vocabulary = letters.of_characters(index, size - 1, size)
    text = matching.text_of(tape["texts"], vocabulary)
    found = emissions.collect(
        np.array_split(tape["log_probs"], 100),
        tape["frame"],
        text.tokens,
        size - 1,
        [tape["energy"]] if "energy" in tape else None,
    )
    placed = matching.place(found, text, vocabulary)
    pieces = [Piece(line, True) for line in tape["texts"]]
    cuts = cutting.cut(pieces, placed, found, matching.heard_in(found, vocabulary))
    return [
        (row["text"], row["offset"], row["offset"] + row["duration"], row["confidence"])
        for row in cuts.utterances
    ]


def by_ctc_segmentation(tape: dict) -> list[Segment]:
    import ctc_segmentation as peer

    config = peer.CtcSegmentationParameters()
    config.char_list = ["<blank>", *tape["letters"]]
    config.blank = 0
    config.space = " "
    config.index_duration = tape["frame"]
    log_probs = np.roll(tape["log_probs"], 1, axis=1).astype(np.float32)  # the blank comes first
    matrix, begins = peer.prepare_text(config, tape["texts"])
    timings, probabilities, _ = peer.ctc_segmentation(config, log_probs, matrix)
    segments = peer.determine_utterance_segments(
        config, begins, probabilities, timings, tape["texts"]
    )
    return [(text, *map(float, each)) for text, each in zip(tape["texts"], segments, strict=True)]


def by_forced_align(tape: dict) -> list[Segment]:
    import torch
    from torchaudio.functional import forced_align

    index = {letter: i for i, letter in enumerate(tape["letters"])}
    lines = [[index[letter] for letter in line] for line in tape["texts"]]
    tokens = torch.tensor([list(itertools.chain.from_iterable(lines))])
    log_probs = torch.from_numpy(tape["log_probs"]).float()
    aligned, scores = forced_align(log_probs[None], tokens, blank=len(index))
    aligned, scores = aligned[0].numpy(), scores[0].numpy()
    is_new = (aligned != len(index)) & (np.diff(aligned, prepend=-1) != 0)
    firsts = np.flatnonzero(is_new)
    margins = scores - tape["log_probs"].max(axis=1)
    segments = []
    place = 0
    for line, text in zip(lines, tape["texts"], strict=True):
        first, last = firsts[place], firsts[place + len(line) - 1]
        place += len(line)
        score = float(margins[first : last + 1].mean())
        segments.append((text, first * tape["frame"], (last + 1) * tape["frame"], score))
    return segments


# --- results --------------------------------------------------------------------------------------


def judged(segments: list[Segment], tape: dict) -> list[dict]:
    """For each segment whether it is right, its errors in seconds, and the seconds of the text that
    it covers."""
    true = sorted(tape["true"], key=lambda each: each[1])
    starts = np.array([start for _, start, _ in true])
    ends = np.array([end for _, _, end in true])
    rows = []
    for text, start, end, score in segments:
        first = int(np.abs(starts - start).argmin())
        last = max(first, int(np.abs(ends - end).argmin()))
        wanted = " ".join(tape["texts"][number] for number, _, _ in true[first : last + 1])
        errors = [abs(start - starts[first]), abs(end - ends[last])]
        seconds = float((ends - starts)[first : last + 1].sum())
        is_right = text == wanted and max(errors) <= FAR
        rows.append({"right": is_right, "errors": errors, "seconds": seconds, "score": score})
    return rows


def best_threshold(rows: list[dict]) -> list[dict]:
    """The rows above the threshold that keeps most with few wrong, or that has fewest wrong."""
    ordered = sorted(rows, key=lambda row: -row["score"])
    wrong = np.cumsum([not row["right"] for row in ordered]) / np.arange(1, len(ordered) + 1)
    passing = np.flatnonzero(wrong <= MOST_WRONG)
    count = int(passing[-1]) + 1 if len(passing) else int(wrong.argmin()) + 1
    return ordered[:count]


def measure(method: str, tape: dict) -> dict:
    """The results of a method in this process."""
    run = {
        "ours": by_ours,
        "ctc-segmentation": by_ctc_segmentation,
        "forced_align": by_forced_align,
    }
    run[method]({**tape, **beginning(tape)})  # imports what it needs
    started = time.process_time()
    segments = run[method](tape)
    seconds = time.process_time() - started
    rows = judged(segments, tape)
    if method != "ours":
        rows = best_threshold(rows)
    right = [row for row in rows if row["right"]]
    errors = [1000 * error for row in right for error in row["errors"]] or [float("nan")]
    total = sum(end - start for _, start, end in tape["true"])
    return {
        "median": float(np.median(errors)),
        "most": float(np.percentile(errors, 95)),
        "kept": sum(row["seconds"] for row in right) / total,
        "wrong": 1 - len(right) / max(1, len(rows)),
        "cpu": seconds,
        "memory": peak(),
    }


def beginning(tape: dict) -> dict:
    """A minute of the tape with a text."""
    return {"log_probs": tape["log_probs"][:3000], "texts": tape["texts"][:4]}


def peak() -> float:
    """MiB of resident memory, at most so far. (getrusage also counts the parent's, before exec.)"""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s*(\d+)", status)[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--checkpoint", help="of recipes/konkani_conformer.py: real speech")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)  # a method and a tape's file
    args = parser.parse_args()
    if args.one:
        tape = np.load(args.one[1], allow_pickle=True).item()
        print(json.dumps(measure(args.one[0], tape)))
        return
    print(
        "| tape | method | median, ms | 95 % | kept | wrong | CPU, s | MiB |\n" + "| --- " * 8 + "|"
    )
    rates = (None,) if args.checkpoint else ERROR_RATES
    for rate in rates:
        for in_disorder in (False, True):
            if args.checkpoint:
                tape = spoken(args.minutes, args.checkpoint, in_disorder)
            else:
                tape = simulated(args.minutes, rate, in_disorder)
            name = "spoken" if rate is None else f"{100 * rate:.0f} % errors"
            print_rows(name + (", in disorder" if in_disorder else ""), tape, args.methods)


def print_rows(name: str, tape: dict, methods: list[str]) -> None:
    """Runs each method in a process of its own and prints its row."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tape.npy")
        np.save(path, tape, allow_pickle=True)
        for method in methods:
            command = [sys.executable, __file__, "--one", method, str(path)]
            ran = subprocess.run(command, capture_output=True, text=True, env=environment)
            if ran.returncode:
                reason = ran.stderr.strip().splitlines()[-1:] or [f"status {ran.returncode}"]
                print(f"| {name} | {method} | {reason[0][:60]} | | | | | |", flush=True)
                continue
            row = json.loads(ran.stdout)
            print(
                f"| {name} | {method} | {row['median']:.0f} | {row['most']:.0f} |"
                f" {100 * row['kept']:.1f} % | {100 * row['wrong']:.1f} % | {row['cpu']:.1f} |"
                f" {row['memory']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
