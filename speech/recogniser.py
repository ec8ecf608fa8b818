"""What every recogniser does besides learning: its flags, decoding a set, the results at the end,
transcripts of files."""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from common import batches, files, memory, options
from common.device import Setup
from common.errors import DataError, RunError, UsageError, cannot_write
from speech import metrics
from speech.audio import SAMPLE_RATE, audio_files, read_audio
from speech.long import BY_SILENCES, Cutting, Piece, unless_silent
from speech.text import for_scoring, style

TRANSCRIPT = b'{"file": '  # how a line of --output begins
EXAMPLES = 5  # transcripts printed at the end
MOST_BEAMS = 500  # hypotheses
SPEEDS = (0.9, 1.0, 1.1)  # of --speed_perturbation (Ko et al. 2015)

STYLES = {  # what a warning says, and the difference between shares of texts that is worth it
    "case": ("capitals are", 0.3),
    "punctuation": ("punctuation is", 0.3),
    "digits": ("digits are", 0.05),
}

AUGMENTATION = (
    "spec_augment",
    "speed_perturbation",
    "dropout",
    "label_smoothing",
)  # flags for training alone

# Rows for common.options: flags that exclude each other, and flags that need another one.
EXCLUDES = (*((flag, options.COMMAND, options.TRAINS) for flag in AUGMENTATION),)
NEEDS = (("output", ("transcribe",), ""), ("piece_seconds", ("transcribe",), ""))

# Of recognisers that start from released weights.
MODELS = ("model_dir", "model_file")
MODEL_EXCLUDES = (
    ("model_dir", "model_file", "both say where the model starts; give one of them"),
    *(
        (model, "from_scratch", "the second starts without released weights; leave one of them out")
        for model in MODELS
    ),
    *(
        (model, "model_size", "a released model has its own shape; leave one of them out")
        for model in MODELS
    ),
    ("transcribe", "export", "give one of them"),
)
GOALS = {
    "train_manifest",
    "from_scratch",
    "max_steps",
    "num_epochs",
    "dry_run",
    "verify_gpu",
}  # flags about training


def add_model_arguments(parser, sizes: list[str], family: str, file: str, exported: str):
    """The flags of a recogniser that fine-tunes a released model or makes one of `sizes`, as a
    group to add others to. The released models are a `family` in Hugging Face's form and a `file`
    in another; `exported` describes an export."""
    start = parser.add_argument_group(
        "model: where it starts (its shape comes from the checkpoint when resuming)"
    )
    start.add_argument(
        "--model_dir",
        type=options.path,
        metavar="DIR",
        help=(
            f"fine-tune a Hugging Face {family} folder; with --transcribe, --evaluate or --export,"
            " use it"
        ),
    )
    start.add_argument(
        "--model_file", type=options.path, metavar="FILE", help=f"the same for {file}"
    )
    start.add_argument(
        "--from_scratch",
        action=options.OnOff,
        default=False,
        help="train all weights, with a vocabulary made from the training text (on for the demo)",
    )
    start.add_argument(
        "--model_size",
        choices=sizes,
        help=f"shape of a model from scratch (demo, without data; {sizes[1]} with data)",
    )
    start.add_argument(
        "--export",
        type=options.path,
        metavar="DIR",
        help=(
            f"write the weights as a folder {exported}; after training, or alone with --resume PATH"
            " or --model_dir"
        ),
    )
    return start


def exports_only(
    export: str | None, resume: str | None, pretrained: str | None, given: Iterable[str]
) -> bool:
    """Whether --export is asked for alone: weights are named and no flag of `given` asks for
    training. `--resume auto` asks for a run to continue."""
    named = resume != "auto" if resume else pretrained
    return bool(export and named and not GOALS & set(given))


def add_arguments(
    parser, methods: tuple[str, ...] = (), method: str = "", beam_size: int = 0
) -> None:
    """The flags of a recogniser that decodes by `methods`, `method` by default."""
    augmentation = parser.add_argument_group("augmentation")
    augmentation.add_argument(
        "--spec_augment",
        action=options.OnOff,
        help="mask bands and spans of the features (on; off for the demo)",
    )
    augmentation.add_argument(
        "--speed_perturbation",
        action=options.OnOff,
        help="play at 0.9, 1.0 or 1.1 times the speed (on; off for the demo)",
    )
    decoding = parser.add_argument_group("decoding and transcribing")
    if methods:
        decoding.add_argument(
            "--decoding",
            choices=methods,
            default=method,
            help=f"method for the results at the end, --evaluate and --transcribe ({method})",
        )
        decoding.add_argument(
            "--beam_size",
            type=options.number(int, 1, MOST_BEAMS),
            metavar="N",
            help=f"hypotheses of a beam search ({beam_size})",
        )
    parser.add_command(
        decoding,
        "--transcribe",
        nargs="+",
        type=options.path,
        metavar="PATH",
        help=(
            "transcribe files and folders with the weights of --resume"
            " (CHECKPOINT_DIR/best.safetensors)"
        ),
    )
    decoding.add_argument(
        "--output",
        type=options.path,
        metavar="FILE",
        help="write the transcripts to this file as JSON Lines",
    )
    decoding.add_argument(
        "--piece_seconds",
        type=options.number(float, 1.0),
        metavar="S",
        help=(
            "cut recordings at silences into pieces of at most S seconds, to train on with"
            " --use_chunking (as long as the model reads)"
        ),
    )


def resolve(args, augment: bool, beam_size: int = 0) -> None:
    """Fills in the defaults: augmentation is on if `augment`, unless a flag says otherwise. Raises
    `UsageError`."""
    if args.output:
        check_output(args.output)
    if options.plans(args):
        args.cache_audio = None  # nothing is written
    if args.spec_augment is None:
        args.spec_augment = augment
    if args.speed_perturbation is None:
        args.speed_perturbation = augment
    if beam_size and args.beam_size is None:
        args.beam_size = beam_size


def decode_set(
    decode: Callable[[dict], tuple[list[str], dict[str, torch.Tensor]]],
    eval_batches: Iterable[dict],
    device: torch.device,
    terms: Iterable[str] = (),
) -> tuple[list[dict], dict[str, tuple[float, float]]]:
    """Decodes batches with `decode(batch on device)`, which returns the texts and the sums of loss
    terms. A batch that does not fit into memory is split. Returns a row {"file", "reference",
    "hypothesis", "index"} for each utterance, and {loss term: (sum, count)} for each of `terms`,
    zeros if there are no batches: the ranks add these up."""
    rows, sums = [], dict.fromkeys(terms, (0.0, 0))
    for batch in eval_batches:
        hypotheses, losses = [], dict.fromkeys(sums, 0.0)
        for texts, values in memory.split_on_oom(
            lambda b: decode(next(batches.to_device([b], device))), batch, device
        ):
            hypotheses += texts
            for name in losses:
                losses[name] += float(values[name])
        utterances = zip(batch["names"], batch["texts"], batch["indices"], hypotheses, strict=True)
        for name, reference, index, hypothesis in utterances:
            rows.append(
                {"file": name, "reference": reference, "hypothesis": hypothesis, "index": index}
            )
        for name, value in losses.items():
            total, count = sums[name]
            sums[name] = (total + value, count + batch["counts"][name])
    return rows, sums


def print_results(
    rows: list[dict],
    title: str,
    log_dir: Path,
    seed: int = 0,
    normalise: Callable[[str], str] = for_scoring,
) -> None:
    """Prints WER, CER and a few of `rows` ({"file", "reference", "hypothesis"}, and perhaps timed
    "words"), and writes all of them to transcripts.jsonl. Both texts are compared after
    `normalise`."""
    print(f"\n{title}")
    print(
        metrics.error_table(
            [row["reference"] for row in rows], [row["hypothesis"] for row in rows], normalise
        )
    )
    for number in np.random.default_rng(seed).permutation(len(rows))[:EXAMPLES]:
        print(
            f"  reference:  {rows[number]['reference']}\n  transcript: {rows[number]['hypothesis']}"
        )
        times = [
            f"{word['start']:.2f}-{word['end']:.2f} {word['text']}"
            for word in rows[number].get("words", ())
        ]
        print(f"  times:      {'  '.join(times)}\n" if times else "")
    shown = ({key: value for key, value in row.items() if key != "index"} for row in rows)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in shown)
    try:
        files.write_text(log_dir / "transcripts.jsonl", text)
    except OSError as error:
        raise cannot_write(log_dir, error, "--log_dir") from None


def warn_of_style(texts: list[str], rows: list[dict]) -> None:
    """Says once if the training `texts` and the hypotheses in `rows` differ in style: error rates
    rise while a model learns another one. `texts` is emptied."""
    if texts and rows:
        ours, its = (style(each) for each in (texts, [row["hypothesis"] for row in rows]))
        for name, (words, limit) in STYLES.items():
            if abs(ours[name] - its[name]) > limit:
                shares = (
                    f"{100 * its[name]:.0f} % of the model's texts and in {100 * ours[name]:.0f} %"
                    " of the training texts"
                )
                print(
                    f"warning: {words} in {shares}: error rates rise while the model learns another"
                    " style",
                    flush=True,
                )
    texts.clear()


def is_stream(path: Path) -> bool:
    """Whether a path is a device, a pipe or an open file, such as /dev/stdout: it is written to and
    not replaced."""
    while path.is_symlink() and not str(path).startswith(("/dev/", "/proc/")):
        path = path.parent / path.readlink()
    return str(path).startswith(("/dev/", "/proc/")) or (path.exists() and not path.is_file())


def check_output(output: str) -> None:
    """Raises `UsageError` if --output would replace anything but transcripts, or cannot be
    written."""
    path = Path(output)
    try:
        if path.is_dir():
            raise UsageError(f"--output {output}: it is a folder; name a file")
        if is_stream(path):
            return
        for place in (path, Path(f"{output}.partial")):
            start = place.open("rb").read(len(TRANSCRIPT)) if place.exists() else b""
            if start not in (b"", TRANSCRIPT):
                raise UsageError(
                    f"--output {place}: it exists and does not hold transcripts; choose another"
                    " file"
                )
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None


def in_recording(records: list[dict], pieces: list[Piece]) -> dict[str, list[dict]]:
    """The timed parts ("start" and "end", seconds) in the records of a recording's pieces, with
    times in the recording."""
    whole: dict[str, list[dict]] = {}
    for record, (begin, _) in zip(records, pieces, strict=True):
        for name, parts in record.items():
            shift = begin / SAMPLE_RATE
            moved = [
                {**p, "start": round(p["start"] + shift, 3), "end": round(p["end"] + shift, 3)}
                for p in parts
            ]
            whole.setdefault(name, []).extend(moved)
    return whole


def in_pieces(
    piece_seconds: float | None, longest: float, cutting: Cutting = BY_SILENCES
) -> tuple[float, Cutting]:
    """How `transcribe_files` cuts: `longest` and `cutting`, or by --piece_seconds at silences."""
    return (min(longest, piece_seconds), BY_SILENCES) if piece_seconds else (longest, cutting)


@torch.no_grad()
def transcribe_files(
    paths: list[str],
    decode: Callable[[dict], list[str | dict]],
    setup: Setup,
    longest: float,
    output: str | None = None,
    batch_size: int = 8,
    cutting: Cutting = BY_SILENCES,
    parts: tuple[str, ...] = (),
) -> None:
    """Prints the text of each file in `paths` (files and folders), after its name and a tab if
    there are several, or writes JSON Lines to `output`. `decode(batch on device)` returns the texts
    of a batch of waveforms, or records: "text" and lists of timed `parts`, such as "words".
    Recordings over `longest` seconds are cut, and their texts joined, by `cutting`. A file that
    cannot be read is named on stderr and the others are transcribed; then `DataError` is raised."""
    recordings = audio_files(paths)

    def records_of(waveforms: list[torch.Tensor], name: str) -> list[dict]:
        padded, lengths = batches.pad(waveforms)
        batch = {"audio": padded, "audio_lengths": lengths, "names": [name] * len(waveforms)}
        with setup.autocast():
            pieces = memory.split_on_oom(
                lambda b: decode(next(batches.to_device([b], setup.device))), batch, setup.device
            )
        return [
            text if isinstance(text, dict) else {"text": text} for texts in pieces for text in texts
        ]

    def rows() -> Iterable[dict]:
        audible_records = unless_silent(records_of, {"text": "", **{part: [] for part in parts}})
        for path in recordings:
            try:
                waveform = read_audio(str(path), SAMPLE_RATE)
            except DataError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            pieces, records = cutting.cut(waveform, SAMPLE_RATE, longest), []
            for first in range(0, len(pieces), batch_size):
                records += audible_records(
                    [waveform[a:b] for a, b in pieces[first : first + batch_size]], str(path)
                )
            text, spans = cutting.join([record.pop("text") for record in records], pieces)
            times = [
                {"start": a / SAMPLE_RATE, "end": b / SAMPLE_RATE, "text": part}
                for a, b, part in spans
            ]
            row = {
                "file": str(path),
                "text": text,
                "seconds": len(waveform) / SAMPLE_RATE,
                "pieces": times,
            }
            yield {**row, **in_recording(records, pieces)}

    done = 0
    if output:
        done = write_transcripts(Path(output), rows())
    else:
        for row in rows():
            done += 1
            print(
                f"{row['file']}\t{row['text']}" if len(recordings) > 1 else row["text"], flush=True
            )
    if done < len(recordings):
        raise DataError(
            f"{len(recordings) - done} of {len(recordings)} files could not be transcribed"
        )


def write_transcripts(path: Path, rows: Iterable[dict]) -> int:
    """Writes `rows` as JSON Lines and returns their number. What is there when a signal or an error
    ends the command is kept in PATH.partial. A device or a pipe is written to directly."""
    count = 0

    def write(target: Path) -> None:
        nonlocal count
        with open(target, "w", encoding="utf-8", errors="backslashreplace") as file:
            try:
                for row in rows:
                    file.write(json.dumps(row, ensure_ascii=False) + "\n")
                    file.flush()
                    count += 1
            except BaseException:
                if count and target != path:
                    files.write_file(
                        path.with_name(f"{path.name}.partial"),
                        lambda copy: shutil.copyfile(target, copy),
                    )
                    print(f"the first {count} transcripts are in {path}.partial", file=sys.stderr)
                raise

    try:
        if is_stream(path):
            write(path)
        else:
            files.write_file(path, write)
    except OSError as error:
        raise RunError(f"--output {path}: {error.strerror}") from None
    return count
