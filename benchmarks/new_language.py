"""Half an hour of a language in a script that a model's vocabulary lacks, through Parakeet, Whisper
and XTTS as a user would take it: with the preset scripts and the flags that their messages advise.

    python benchmarks/new_language.py corpus                      # speech by espeak-ng: a minute
    python benchmarks/new_language.py stand_in parakeet           # and whisper, xtts: trained models
    python benchmarks/new_language.py tune parakeet parakeet-bpe -- --train_tokenizer bpe
    python benchmarks/new_language.py judge                       # a recogniser for what XTTS speaks
    python benchmarks/new_language.py table

Everything is kept in --dir. A step that was interrupted continues, and a run that has ended
is not made again. `tune FAMILY NAME --code TREE` runs the scripts of another checkout on the same
data, so that a table has both. What follows `--` goes to the script, its tier and SIZE first.

The language is Amharic, with English sentences, Latin words, numbers, prices, abbreviations and
quotes in it. No released weights are needed: a stand-in is a model of the demo's size, trained on
another language and exported. It knows far less than a released model, so compare runs with each
other only."""

import argparse
import contextlib
import json
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
from benchmarks import xtts_demo
from common import checkpoint, files, options
from common.errors import RunError, exit_with_one_line
from speech import demo, metrics, model_files
from speech.audio import write_wav
from speech.folders import read_made_from, write_folder

SCRIPTS = {
    "parakeet": "run_parakeet_tdt.sh",
    "whisper": "run_whisper_vietnamese.sh",
    "xtts": "run_xtts_amharic.sh",
}
STAND_INS = {  # updates from scratch, and the flags of the export
    "parakeet": (800, ["--export_format", "hf"]),
    "whisper": (900, []),
    "xtts": (900, []),  # of the GPT and, at most, of each part of its DVAE
}
STOPPED = 128  # the least exit status of a run that a signal ended
JUDGE_CER = 0.1  # at most, of the judge's own
JUDGE_STEPS = 500  # updates of a round
SPOKEN = 20  # held-out sentences that XTTS speaks

# What is written, and how it is said.
AMHARIC_ITEMS = {
    "በ2016 ዓ.ም": "በሁለት ሺህ አስራ ስድስት ዓመተ ምሕረት",
    "$20": "ሃያ ዶላር",
    "25%": "ሃያ አምስት በመቶ",
    "100 ብር": "መቶ ብር",
    "3.5 ኪ.ሜ": "ሶስት ነጥብ አምስት ኪሎ ሜትር",
    "5G": "አምስት G",
    "ዶ/ር አበበ": "ዶክተር አበበ",
    "COVID": "COVID",
    "Google": "Google",
    "«ሰላም ነው»": "ሰላም ነው",
    '"አዲስ ቀን"': "አዲስ ቀን",
}
ENGLISH_ITEMS = {
    "2016": "two thousand and sixteen",
    "$20": "twenty dollars",
    "25%": "twenty five percent",
    "100": "one hundred",
    "5G": "five G",
    "COVID": "COVID",
    "Addis Ababa": "Addis Ababa",
    '"come home"': "come home",
}
ENGLISH_WORDS = (
    "the a man woman child house water bread coffee milk road city school book work day night"
    " morning evening today new old big small good bad red white black sky sun rain wind mountain"
    " sea tree flower bird dog cat cow horse he she we they came went ate drank saw heard wrote"
).split()
STAND_IN_WORDS = [
    *ENGLISH_WORDS,
    *(
        "family friend market river doctor teacher money window garden summer winter village music"
        " paper letter number question answer people country kitchen table village fire stone"
        " hand foot voice street bridge train ship quick slow early late never always perhaps"
    ).split(),
]
# Variants of espeak-ng's voices.
MANY = ["m1", "m3", "m7", "f2", "f4", "f5"]
TWO = ["m1", "f2"]
OTHERS = ["m3", "m7", "f4", "f5"]
CORPORA = {  # sizes of the splits, words of a sentence, share of English, voices
    "many": ({"train": 360, "val": 40, "test": 60}, (6, 14), 0.2, MANY),
    "two": ({"train": 360, "val": 40, "test": 60}, (6, 14), 0.2, TWO),
    "judge": ({"train": 1300}, (2, 7), 0.2, TWO),
    "english": ({"train": 1200, "val": 40}, (3, 8), 1.0, OTHERS),
}
ITEM = 0.6  # of the sentences have a number, an abbreviation, a Latin word or a quotation
SECONDS = (1.0, 9.0)  # of a clip, with silence
SILENCE = (0.05, 0.6)  # seconds at each end
NOISE = 20.0  # standard deviation of the noise, int16


# --- the corpora ----------------------------------------------------------------------------------


def sentence(random: np.random.Generator, lengths: tuple[int, int], is_english: bool) -> list[str]:
    """A random sentence: as it is written, and as it is said."""
    words = ENGLISH_WORDS if is_english else demo.AMHARIC_WORDS
    items = ENGLISH_ITEMS if is_english else AMHARIC_ITEMS
    count = int(random.integers(lengths[0], lengths[1] + 1))
    written = [words[i] for i in random.integers(0, len(words), count)]
    said = list(written)
    if random.random() < ITEM:
        item = list(items)[int(random.integers(len(items)))]
        place = int(random.integers(1, count))
        written[place], said[place] = item, items[item]
    text = " ".join(written)
    if is_english:
        return [text[0].upper() + text[1:] + ".?!"[int(random.integers(3))], " ".join(said)]
    return [text + "።?!"[int(random.integers(3))], " ".join(said)]


def plain(random: np.random.Generator, lengths: tuple[int, int]) -> list[str]:
    """A random sentence of the stand-in's words, without anything but letters."""
    count = int(random.integers(lengths[0], lengths[1] + 1))
    text = " ".join(STAND_IN_WORDS[i] for i in random.integers(0, len(STAND_IN_WORDS), count))
    return [text, text]


def speak(random: np.random.Generator, said: str, voice: str) -> np.ndarray:
    """int16 samples (T,) with silence and a little noise, of espeak-ng's usual rate."""
    speaker = demo.espeak()
    samples = demo.trim(speaker.say(said, voice, int(random.integers(160, 181)), 50))
    ends = [round(speaker.sample_rate * random.uniform(*SILENCE)) for _ in range(2)]
    samples = np.pad(samples.astype(np.float32), ends)
    noisy = samples + random.normal(0, NOISE, len(samples))
    return np.clip(noisy.round(), -32768, 32767).astype(np.int16)


def fill_corpus(name: str, folder: Path) -> float:
    """Writes the clips and manifests of a corpus; returns its hours. A row has `said` beside the
    text, for the judge."""
    sizes, lengths, share, voices = CORPORA[name]
    random = np.random.default_rng([21, *name.encode()])
    rate = demo.espeak().sample_rate
    seconds = 0.0
    (folder / "audio").mkdir()
    for split, size in sizes.items():
        rows = []
        while len(rows) < size:
            is_english = random.random() < share
            text, said = (
                plain(random, lengths) if share == 1 else sentence(random, lengths, is_english)
            )
            variant = voices[int(random.integers(len(voices)))]
            language = "en" if is_english else "am"
            samples = speak(random, said, f"{language}+{variant}")
            length = len(samples) / rate
            if not SECONDS[0] <= length <= SECONDS[1]:
                continue
            file = f"audio/{split}_{len(rows):04d}.wav"
            write_wav(folder / file, samples, rate)
            row = {"audio_filepath": file, "text": text, "duration": round(length, 3)}
            rows.append({**row, "lang": language, "speaker": variant, "said": said})
            seconds += length
        write_rows(folder / f"{split}.json", rows)
    return seconds / 3600


def write_rows(path: Path, rows: list[dict]) -> None:
    files.write_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in files.read_text(path).splitlines()]


def make_corpus(folder: Path) -> None:
    """All corpora of `CORPORA`, unless they are there."""
    for name in CORPORA:
        made_from = json.loads(json.dumps({"corpus": CORPORA[name], "version": 1}))
        if read_made_from(folder / name) == made_from:
            continue
        hours = write_folder(
            folder / name, lambda aside, name=name: fill_corpus(name, aside), made_from
        )
        print(f"{folder / name}: {60 * hours:.1f} min")


# --- stand-ins ------------------------------------------------------------------------------------


def make_stand_in(family: str, folder: Path) -> None:
    """Trains a model from scratch on another language, and exports it to folder/stand_ins."""
    target = folder / "stand_ins" / family
    if target.exists():
        print(f"{target} is there")
        return
    updates, flags = STAND_INS[family]
    run = folder / "stand_ins" / f"{family}_run"
    if family == "xtts":
        return make_xtts(folder, run, target)
    command = ["bash", SCRIPTS[family], "cpu", "demo", "--max_steps", updates, *flags]
    run_command([*command, "--output_dir", run, "--export", target], ROOT, None)


def make_xtts(folder: Path, run: Path, target: Path) -> None:
    """An XTTS that speaks English, without Ethiopic letters in its vocabulary and without a
    vocoder, as a folder of Coqui."""
    from recipes import xtts_amharic
    from speech.xtts import formats, start, texts

    texts.CHARACTERS = "'.,;:?!-" + texts.PHONEMES
    # A folder does not say these: they are the released model's.
    formats.SIZES["demo"].update(latents=32, perceiver_heads=8)
    corpus = folder / "english"
    words = ["--device", "cpu", "--from_scratch", "--model_size", "demo", "--language", "en"]
    words += ["--train_manifest", corpus / "train.json", "--val_manifest", corpus / "val.json"]
    words += ["--batch_size", "16", "--gradient_accumulation_steps", "1", "--dropout", "0.05"]
    words += ["--max_steps", STAND_INS["xtts"][0], "--resume", "auto", "--output_dir", run]
    parser = options.Parser(__doc__)
    xtts_amharic.add_arguments(parser)
    weights = xtts_amharic.main(parser.parse_args(list(map(str, words))))["weights"]
    saved = checkpoint.read_weights(Path(weights), start.RECIPE)
    info = saved.model_info
    parts, _ = start.read_dvae(info["config"], [Path(weights).parent / start.DVAE_FOLDER])
    description = json.dumps(formats.settings(info["config"], {}))

    def fill(aside: Path) -> None:
        import torch

        state = {f"gpt.{name}": tensor for name, tensor in saved.model.items()}
        torch.save({"model": state}, aside / formats.MODEL)
        torch.save(parts["dvae"], aside / formats.DVAE_FILE)
        torch.save(parts["mel_stats"], aside / formats.MEL_STATS)
        (aside / formats.DESCRIPTION).write_text(description)
        (aside / formats.VOCAB).write_text(info["vocab"])

    model_files.write_export(target, fill)
    print(f"exported to {target}")


# --- runs -----------------------------------------------------------------------------------------


def run_command(command: list, code: Path, log: Path | None) -> tuple[int, float]:
    """Runs a command in a checkout on one thread. Returns its exit status and minutes of the
    processor. Its output goes to `log`, or is printed. If this program is stopped, so is the
    command, which saves its run first."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with open(log, "a") if log else contextlib.nullcontext() as output:
        words = list(map(str, command))
        process = subprocess.Popen(words, cwd=code, env=environment, stdout=output, stderr=output)
        try:
            process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return process.returncode, seconds / 60


def read_results(folder: Path) -> dict[str, dict]:
    """The rows of all runs that have ended, in the order of their names."""
    paths = sorted((folder / "runs").glob("*/row.json"))
    rows = {path.parent.name: files.read_json(path) for path in paths}
    return {name: row for name, row in rows.items() if row["status"] < STOPPED}


def keep(folder: Path, name: str, row: dict) -> None:
    text = json.dumps(row, indent=1, ensure_ascii=False)
    files.write_text(folder / "runs" / name / "row.json", f"{text}\n")


def tune(folder: Path, family: str, name: str, code: Path, flags: list[str]) -> None:
    """Fine-tunes a stand-in by its script, and keeps what came of it."""
    if name in read_results(folder):
        print(f"{name} has a row")
        return
    corpus = folder / ("two" if family == "xtts" else "many")
    run = folder / "runs" / name
    run.mkdir(parents=True, exist_ok=True)
    place = ["cpu"]
    while flags and not flags[0].startswith("-"):
        place, flags = [*place[:1], flags[0]], flags[1:]
    command = ["bash", SCRIPTS[family], *place]
    if "--from_scratch" not in flags:
        command += ["--model_dir", folder / "stand_ins" / family]
    for split in ("train", "val", "test"):
        command += [f"--{split}_manifest", corpus / f"{split}.json"]
    command += ["--output_dir", run]
    if family == "xtts":
        command += ["--speak_held_out", SPOKEN]
    command += flags
    log = run / "log.txt"
    status, minutes = run_command(command, code, log)
    if (run / "row.json").exists():  # it was stopped before
        minutes += files.read_json(run / "row.json")["minutes"]
    row = {"family": family, "code": str(code), "flags": shlex.join(flags), "status": status}
    row |= {"minutes": round(minutes, 2)}
    if status >= STOPPED:
        keep(folder, name, row)
        raise RunError(f"{name} was stopped: the same command continues it")
    if status:
        row["message"] = files.read_text(log).rstrip().splitlines()[-1]
    else:
        row |= results_of(run, printed(command, code), read_rows(corpus / "train.json"))
    keep(folder, name, row)
    print(json.dumps(row, ensure_ascii=False, indent=1))


def printed(command: list, code: Path) -> list[str]:
    """The recipe's command, as the script prints it."""
    command = list(map(str, [*command, "--print"]))
    return shlex.split(
        subprocess.run(command, cwd=code, capture_output=True, text=True).stdout.splitlines()[-1]
    )


def results_of(run: Path, words: list[str], rows: list[dict]) -> dict:
    """Updates, epochs, evaluations, the first and the best of them; for a recogniser, error rates
    on the test set in %. `words`: the recipe's command. `rows`: of the training set."""

    def last(flag: str) -> int:
        return int(words[len(words) - words[::-1].index(flag)])

    lines = read_rows(run / "logs" / "metrics.jsonl")
    evaluations = [line for line in lines if any(key.startswith("eval/") for key in line)]
    update = last("--batch_size") * last("--gradient_accumulation_steps")
    updates = max(line["step"] for line in lines)
    rates = re.findall(r"  lr (\S+) ", files.read_text(run / "log.txt"))
    row = {
        "update": update,
        "updates": updates,
        "epochs": round(updates / -(-len(rows) // update), 1),
        "rate": max(map(float, rates)),
        "evaluations": len(evaluations),
        "first": evaluations[0],
        "best": files.read_json(run / "checkpoints" / "best.json"),
    }
    transcripts = run / "logs" / "transcripts.jsonl"
    if transcripts.exists():
        row["test"] = error_rates(read_rows(transcripts))
    return row


def error_rates(rows: list[dict]) -> dict[str, float]:
    """CER and WER in % without case and punctuation, of all rows and of those in each language."""
    rows = [
        {key: xtts_demo.text.for_scoring(row[key]).lower() for key in ("reference", "hypothesis")}
        for row in rows
    ]
    parts = {
        "": rows,
        " English": [row for row in rows if row["reference"].isascii()],
        " Amharic": [row for row in rows if not row["reference"].isascii()],
    }
    rates = {}
    for part, chosen in parts.items():
        for name, pair in metrics.score(chosen).items():
            rates[f"{name}{part}"] = round(100 * metrics.rate(pair), 1)
    return rates


# --- what XTTS speaks -----------------------------------------------------------------------------


def as_said(sentence: str) -> str:
    return xtts_demo.fold(sentence).lower()


def judge(folder: Path) -> None:
    """Trains the judge, and keeps the character error rates of what the runs have spoken."""
    corpus = folder / "judge"
    rows = read_rows(corpus / "train.json")
    place = folder / "judged" / "data" / "amharic"
    place.mkdir(parents=True, exist_ok=True)
    write_rows(
        place / "train.json",
        [
            {
                "audio_filepath": str((corpus / row["audio_filepath"]).resolve()),
                "text": as_said(row["said"]),
            }
            for row in rows
        ],
    )
    judge_dir = folder / "judged" / "judge"
    has_data = xtts_demo.write_data(folder / "judged", judge_dir / "data")
    cer, step = xtts_demo.train_judge(judge_dir, has_data, JUDGE_STEPS, JUDGE_CER)
    print(f"the judge's own CER: {100 * cer:.1f} % after {step} updates")
    said = {row["text"]: as_said(row["said"]) for row in read_rows(folder / "two" / "val.json")}
    results = read_results(folder)
    speech = {}
    for name, row in results.items():
        spoken = folder / "runs" / name / "speech"
        if row["family"] != "xtts" or not spoken.is_dir():
            continue
        for kind in xtts_demo.KINDS:
            lines = files.read_text(spoken / f"{kind}.csv").splitlines()[1:]
            cells = [line.split("|") for line in lines]
            speech[f"{name} {kind}"] = [
                (str((spoken / file).resolve()), said[text]) for file, text, _ in cells
            ]
    if not speech:
        return
    recognised = xtts_demo.recognise(judge_dir, speech)
    for name, row in results.items():
        if f"{name} synthesis" in recognised:
            heard = {
                kind: round(xtts_demo.error_rates(recognised[f"{name} {kind}"])[0], 1)
                for kind in xtts_demo.KINDS
            }
            keep(folder, name, {**row, "heard": heard})
            print(name, heard)


# --- tables ---------------------------------------------------------------------------------------


def cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}"
    return str(value).replace("|", "/")


def table(folder: Path) -> None:
    """A Markdown table for each family."""
    columns: dict[str, Callable[[dict], object]] = {
        "update": lambda row: row.get("update"),
        "updates": lambda row: row.get("updates"),
        "epochs": lambda row: row.get("epochs"),
        "rate": lambda row: row.get("rate"),
        "evaluations": lambda row: row.get("evaluations"),
        "core min": lambda row: row["minutes"],
    }
    recogniser = {
        "CER %": lambda row: row.get("test", {}).get("cer"),
        "WER %": lambda row: row.get("test", {}).get("wer"),
        "CER % Amharic": lambda row: row.get("test", {}).get("cer Amharic"),
        "CER % English": lambda row: row.get("test", {}).get("cer English"),
    }
    speaker = {
        "text loss": lambda row: row.get("best", {}).get("text"),
        "mel loss": lambda row: row.get("best", {}).get("mel"),
        "first mel loss": lambda row: row.get("first", {}).get("eval/mel"),
        "heard CER %": lambda row: row.get("heard", {}).get("synthesis"),
        "from codes %": lambda row: row.get("heard", {}).get("resynthesis"),
    }
    for family in SCRIPTS:
        rows = {name: row for name, row in read_results(folder).items() if row["family"] == family}
        shown = columns | (speaker if family == "xtts" else recogniser)
        print(f"\n| {family} | flags | {' | '.join(shown)} |")
        print(f"|{' --- |' * (len(shown) + 2)}")
        for name, row in rows.items():
            cells = [cell(row["message"])] if row["status"] else []
            cells = cells or [cell(value(row)) for value in shown.values()]
            print(f"| {name} | `{row['flags']}` | {' | '.join(cells)} |")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", type=Path, default=Path("runs/new_language"))
    steps = parser.add_subparsers(dest="step", required=True)
    steps.add_parser("corpus")
    stand_in = steps.add_parser("stand_in")
    stand_in.add_argument("family", choices=SCRIPTS)
    run = steps.add_parser("tune")
    run.add_argument("family", choices=SCRIPTS)
    run.add_argument("name")
    run.add_argument("--code", type=Path, default=ROOT, help="a checkout (this one)")
    run.add_argument("flags", nargs="*")
    steps.add_parser("judge")
    steps.add_parser("table")
    return parser.parse_args()


def main(args) -> None:
    folder = args.dir.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if args.step == "corpus":
        make_corpus(folder)
    elif args.step == "stand_in":
        make_stand_in(args.family, folder)
    elif args.step == "tune":
        tune(folder, args.family, args.name, args.code.resolve(), args.flags)
    elif args.step == "judge":
        judge(folder)
    else:
        table(folder)


if __name__ == "__main__":
    exit_with_one_line(lambda: main(parse_arguments()))
