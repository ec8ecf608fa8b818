"""--align: recordings and their texts to a manifest of utterances or files of annotations, a list
of what is left out, and a page on which a person listens to them."""

import glob
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from common import batches, files, options
from common.device import Setup
from common.errors import DataError, RunError, UsageError
from common.layers import finite_layers
from common.options import ALONE, USUAL, flag
from speech.alignment import cutting, emissions, flat, matching, page
from speech.alignment.cutting import Cuts
from speech.alignment.letters import HOLE, Vocabulary, edge_numbers, is_letter
from speech.alignment.sentences import Piece, read_book
from speech.data import splits
from speech.data.annotations import writing
from speech.data.finding import comparable
from speech.data.headers import probe
from speech.decoding import transcripts
from speech.signal.audio import audio_files
from speech.writing import unknown

MANIFEST = b'{"audio_filepath":'  # how the lines of both lists begin, also those of the page
DOUBTFUL_SHARE = 0.1  # of the utterances of a recording, the least certain, to listen to first
MOST_LACKING = 0.1  # of a text's letters, above which a warning names what a recogniser lacks
TEXTS = (".txt", ".text", ".md")  # suffixes of texts
OTHER = "it is for transcripts; leave the first out"
NO_WEIGHTS = "a flat start reads no weights; leave one out"

# Rows for `Parser.refuse`. A recipe with --align has --output and the flags of decoding, too.
EXCLUDES = (
    ("normaliser", "align", OTHER),
    ("decoding", "align", "the path of CTC is used; leave the first out"),
    ("align", "export", "give one of them"),
    *splits.unused_by("align"),
    *(("flat_start", weights, NO_WEIGHTS) for weights in ("resume", "model_file", "model_dir")),
)
NEEDS = (
    ("align", ("output",), "name the manifest to write, such as aligned.json"),
    ("flat_start", ("align",), ""),
)


@dataclass(frozen=True)
class Request:
    """The request of --align."""

    pairs: list[tuple[Path, Path]]  # (recording, text)
    manifest: Path | None  # to write, with its `page`
    annotations: dict[Path, Path]  # files to write, by recording
    left_out: Path  # the list of what is left out
    page: Path | None
    is_flat: bool  # without a recogniser


@dataclass(frozen=True)
class Recogniser:
    """A CTC model that is ready to use."""

    setup: Setup
    log_probs: Callable[[dict], torch.Tensor]  # (T, V) of a batch of one waveform, 16 kHz
    frame: float  # seconds of one
    vocabulary: Vocabulary
    longest: float  # seconds that it hears at once, at most

    def hear(self, waveform: torch.Tensor) -> np.ndarray:
        """The log-probabilities (T, V) of a waveform (N,)."""
        audio, lengths = batches.pad([waveform])
        batch = {"audio": audio, "audio_lengths": lengths}
        on_device = next(batches.to_device([batch], self.setup.device))
        with self.setup.autocast():
            return self.log_probs(on_device).cpu().numpy()


# --- flags ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlignmentFlags:
    """Flags of alignment."""

    # fmt: off
    align: list[str] | None = flag(
        options.path, None, ("AUDIO", "TEXT"),
        "cut a long recording with its text, or folders of both, into utterances to train on:"
        " writes the manifest --output FILE, what is left out, and a page to review them",
        USUAL, ALONE, nargs=2)
    flat_start: bool = flag(
        None, False, None,
        "with --align: without a model, by how long each sentence takes; for a text that is read in"
        " its order, with pauses", action="store_true")


def add_arguments(parser) -> None:
    options.add_record(parser, "aligning", AlignmentFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args) -> Request | None:
    """What --align asks for, None without it. Raises `UsageError`."""
    if not args.align:
        return None
    pairs = find_pairs(*args.align)
    inputs = [*(path for pair in pairs for path in pair), *options.paths_in(args, "output")]
    output = transcripts.output_of(args.output, args.output_format, args.align[:1])
    if args.output_format == "jsonl":
        raise UsageError("--output_format jsonl: a manifest is of all; name it as --output x.json")
    manifest, review = output.table, None
    if manifest:
        review = manifest.with_suffix(".html")
        left_out = manifest.with_name(f"{manifest.stem}_left_out.json")
        transcripts.check_file(manifest, MANIFEST, inputs)
        transcripts.check_file(review, page.BEGINS, inputs)
        transcripts.check_file(transcripts.partial_of(manifest), MANIFEST, inputs)
    else:
        transcripts.check_output(output, inputs)
        beside = Path(args.output)
        left_out = beside.with_name(f"{beside.stem}_left_out.json")
        if output.folder:
            left_out = output.folder / "left_out.json"
    transcripts.check_file(left_out, MANIFEST, inputs)
    return Request(pairs, manifest, output.files, left_out, review, args.flat_start)


def find_pairs(audio: str, text: str) -> list[tuple[Path, Path]]:
    """A recording and its text, or those with the same names in two folders. Raises `UsageError`
    where there are none; names those that have no partner on stderr."""
    is_pattern = any(glob.has_magic(each) and not os.path.exists(each) for each in (audio, text))
    if is_pattern or os.path.isdir(audio) != os.path.isdir(text):
        raise UsageError(f"--align {audio} {text}: name two files or two folders")
    recordings = audio_files([audio])
    if not os.path.isdir(audio):
        if Path(text).suffix.lower() not in (*TEXTS, ""):  # markup would become a text to read
            raise UsageError(
                f"--align {audio} {text}: name a recording, and a text such as book.txt"
            )
        return [(recordings[0], files.require_file(text, "--align"))]
    texts = [path for path in sorted(Path(text).rglob("*")) if path.suffix.lower() in TEXTS]
    texts = [path for path in texts if path.is_file() and not path.name.startswith("._")]
    sounds, books = _by_name(audio, recordings), _by_name(text, texts)
    for folder, found in ((audio, sounds), (text, books)):
        for name in sorted(sounds.keys() & books.keys()):
            if len(found[name]) > 1:
                names = " and ".join(map(str, found[name]))
                raise UsageError(
                    f"--align: {names} have the same name: leave one of them in {folder}"
                )
    for name in sorted(sounds.keys() - books.keys()):
        print(f"warning: {sounds[name][0]}: no text {name}.txt in {text}", file=sys.stderr)
    for name in sorted(books.keys() - sounds.keys()):
        print(f"warning: {books[name][0]}: no recording of this name in {audio}", file=sys.stderr)
    pairs = [(sounds[name][0], books[name][0]) for name in sorted(sounds.keys() & books.keys())]
    if not pairs:
        raise UsageError(f"--align {audio} {text}: no recording has the name of a text")
    return pairs


def _by_name(folder: str, paths: list[Path]) -> dict[str, list[Path]]:
    """Files in a folder, by the names by which recordings and texts are compared."""
    found: dict[str, list[Path]] = {}
    for path in paths:
        name = comparable(str(path.relative_to(folder).with_suffix("")))
        found.setdefault(name, []).append(path)
    return found


# --- aligning -------------------------------------------------------------------------------------


@torch.no_grad()
def align_files(request: Request, load: Callable[[], Recogniser]) -> None:
    """Aligns every pair and writes what the request asks for, by the recogniser that `load`
    returns; a flat start loads none. A pair that cannot be read is named on stderr and the others
    are aligned; then `DataError` is raised, and also if nothing could be kept."""
    recogniser = None if request.is_flat else load()
    utterances: list[dict] = []
    left_out: list[dict] = []
    try:
        with finite_layers():
            failed = align_pairs(request, recogniser, utterances, left_out)
    except BaseException:
        if utterances and request.manifest:
            partial = transcripts.partial_of(request.manifest)
            transcripts.write(partial, utterances)
            print(f"what was aligned before is in {partial}", file=sys.stderr)
        raise
    if utterances:
        _write(request, utterances, left_out)
    elif left_out:
        transcripts.write(request.left_out, left_out)
    if failed:
        raise DataError(f"{failed} of {len(request.pairs)} recordings could not be aligned")
    if not utterances:
        reason = "the recogniser hears too little of their language"
        if request.is_flat:
            reason = "there are too few pauses in them"
        raise DataError(
            f"nothing was found: the texts are not read in these recordings, or {reason}; what is"
            f" left out is in {request.left_out}"
        )


def align_pairs(
    request: Request, recogniser: Recogniser | None, utterances: list[dict], left_out: list[dict]
) -> int:
    """Aligns every pair, adds its rows to `utterances` and `left_out`, and writes its file of
    annotations, if one is asked for. Returns how many pairs could not be read."""
    failed = 0
    for audio, text in request.pairs:
        try:
            cuts = align(audio, text, recogniser) if recogniser else align_flat(audio, text)
        except (DataError, UsageError) as error:
            if len(request.pairs) == 1:
                raise
            print(f"error: {error}", file=sys.stderr)
            failed += 1
            continue
        name = {"audio_filepath": _path_from(request.left_out.parent, audio)}
        if request.annotations and cuts.utterances:
            write_annotations(request.annotations[audio], audio, cuts.utterances)
        utterances += ({**name, **row} for row in cuts.utterances)
        left_out += ({**name, **row} for row in (*cuts.texts, *cuts.sounds))
        print(summary(audio, cuts), flush=True)
    return failed


def _path_from(folder: Path, audio: Path) -> str:
    """The path of a recording from a folder, absolute if `..` would leave a link."""
    relative = os.path.relpath(audio, folder)
    leads_there = os.path.realpath(folder / relative) == os.path.realpath(audio)
    return relative if leads_there else os.path.abspath(audio)


def align(audio: Path, text: Path, recogniser: Recogniser) -> Cuts:
    """The utterances of a recording and its text. Raises `DataError`."""
    vocabulary = recogniser.vocabulary
    pieces = []
    for piece in read_book(str(text)):
        before, rest, after = edge_numbers(piece.text, vocabulary)
        pieces.append(replace(piece, text=rest, numbers=(before, after)))
    warn_of_lacking(text, pieces, vocabulary)
    tokens = matching.text_of([piece.text for piece in pieces], vocabulary)
    energy: list[np.ndarray] = []
    window, context = emissions.window_for(recogniser.longest)
    heard_windows = emissions.windows_of(
        str(audio), recogniser.hear, recogniser.frame, energy, (window, context)
    )
    emitted = emissions.collect(
        _with_progress(audio, heard_windows, recogniser.frame),
        recogniser.frame,
        tokens.tokens,
        vocabulary.blank,
        energy,
    )
    placed = matching.place(emitted, tokens, vocabulary)
    return cutting.cut(pieces, placed, emitted, matching.heard_in(emitted, vocabulary))


def warn_of_lacking(path: Path, pieces: list[Piece], vocabulary: Vocabulary) -> None:
    """Names the letters of a text that a recogniser cannot write, if they are many."""
    total = 0
    lacking: Counter[str] = Counter()
    words = Counter(word for piece in pieces for word in piece.text.split())
    for word, count in words.items():
        letters = list(filter(is_letter, word))
        total += count * len(letters)
        if HOLE in vocabulary.encode(word):
            for letter in letters:
                lacking[letter] += count * (HOLE in vocabulary.encode(letter))
    share = lacking.total() / max(1, total)
    if share > MOST_LACKING:
        print(
            f"warning: {path}: the recogniser cannot write {100 * share:.0f} % of its letters"
            f" ({unknown.named(+lacking, 5)})",
            file=sys.stderr,
        )


def align_flat(audio: Path, text: Path) -> Cuts:
    """The same without a recogniser. Raises `DataError`."""
    pieces, energy = read_book(str(text)), emissions.energy_in(str(audio))
    try:
        return flat.align(pieces, energy)
    except DataError as error:
        raise DataError(f"{audio} and {text}: {error}") from None


def _with_progress(audio: Path, windows: Iterator[np.ndarray], frame: float) -> Iterator:
    """The windows; prints a line every ten minutes of the recording."""
    frames = 0
    for window in windows:
        yield window
        before, frames = frames, frames + len(window)
        minutes = int(frames * frame / 600) * 10
        if minutes > int(before * frame / 600) * 10:
            print(f"{audio}: {minutes} minutes heard", flush=True)


def summary(audio: Path, cuts: Cuts) -> str:
    """What was kept of a recording and what was left out, with the reasons."""
    seconds = sum(row["duration"] for row in cuts.utterances)
    lines = [f"{audio}: {len(cuts.utterances)} utterances, {seconds / 60:.1f} minutes"]
    reasons = Counter(row["reason"] for row in cuts.texts)
    lines += [f"  text left out, {reason}: {count}" for reason, count in reasons.most_common()]
    if cuts.sounds:
        minutes = sum(row["duration"] for row in cuts.sounds) / 60
        lines.append(f"  sound left out in which letters are heard: {minutes:.1f} minutes")
    return "\n".join(lines)


def write_annotations(path: Path, audio: Path, utterances: list[dict]) -> None:
    """Writes a recording's utterances, the least certain marked as doubtful. Raises `RunError`."""
    order = sorted(range(len(utterances)), key=lambda place: utterances[place]["confidence"])
    doubtful = set(order[: math.ceil(DOUBTFUL_SHARE * len(order))])
    rows = [
        {
            "start": row["offset"],
            "end": row["offset"] + row["duration"],
            "text": row["text"],
            "draft": row["text"],
            "confidence": math.exp(row["confidence"]),
            "doubtful": place in doubtful,
        }
        for place, row in enumerate(utterances)
    ]
    transcripts.write_whole(path, writing.content(path, rows, audio, probe(str(audio))[0]))


def _write(request: Request, utterances: list[dict], left_out: list[dict]) -> None:
    """Writes manifest, page and the list of what is left out; renames others. Raises `RunError`."""
    if request.manifest:
        transcripts.write(request.manifest, utterances)
        transcripts.partial_of(request.manifest).unlink(missing_ok=True)  # of an earlier attempt
    if not transcripts.write(request.left_out, left_out):
        transcripts.keep_earlier(request.left_out)  # of another run
    seconds = sum(row["duration"] for row in utterances)
    told = f"{len(utterances)} utterances, {seconds / 3600:.2f} h, in"
    rest = f"what is left out in {request.left_out}" if left_out else "nothing is left out"
    if not request.manifest:
        several = len(request.annotations) > 1
        place = request.left_out.parent if several else next(iter(request.annotations.values()))
        print(f"{told} {place}; {rest}")
        return
    try:
        text = page.review(utterances, request.manifest.name)
        if request.page.is_file() and request.page.read_text(encoding="utf-8") != text:
            transcripts.keep_earlier(request.page)  # a browser has what is typed there
        files.write_text(request.page, text)
    except OSError as error:
        raise RunError(f"--output {request.page}: {error.strerror}") from None
    print(f"{told} {request.manifest}; {rest}; listen to them in {request.page}")
