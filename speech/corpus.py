"""Checked splits: every utterance is looked at once before training, and what cannot be used is reported."""

import hashlib
import os
from array import array
from collections.abc import Callable
from pathlib import Path

import numpy as np

from common.errors import DataError
from speech.columns import Codes, Corpus, Rejections, Segments, Strings
from speech.headers import END_TOLERANCE, probe_all
from speech.manifest import read_manifest

FILE_TOLERANCE = 0.5  # the same for a whole file, whose duration is often rounded to a second
MICROSECOND = 1e-6  # what differences of times may be off by


def load_corpus(
    path: str,
    normalise: Callable[[str], str],
    min_duration: float,
    max_duration: float,
    audio_root: str | None = None,
    cache_dir: Path | None = None,
    needs_text: bool = True,
    use_chunking: bool | None = None,
) -> tuple[Corpus, Rejections]:
    """Reads and checks a manifest: what is returned can be read (by its headers), is neither too long nor too short and
    has a text; the rest is in the rejections. `use_chunking`: rows that are too long are cut by their segment times; None
    for a recipe that has no such flag."""
    rejected, segments = Rejections(), Segments(bool(use_chunking))
    corpus = read_manifest(path, rejected, normalise, audio_root, needs_text, segments)
    name = f"headers-{hashlib.sha1(os.path.abspath(path).encode()).hexdigest()[:12]}.npz"
    files = Codes(corpus.paths)
    lengths, reasons = probe_all(files.names, cache_dir / name if cache_dir else None)
    file_of = np.array(files.codes)
    left = lengths[file_of] - corpus.offsets
    corpus.seconds = np.where(np.isnan(corpus.durations), left, np.minimum(left, corpus.durations))
    short = corpus.durations - left
    keep = np.ones(len(corpus), dtype=bool)

    def reject(bad: np.ndarray, reason: str | None) -> None:
        for i in np.flatnonzero(bad & keep).tolist():
            length = "" if np.isnan(corpus.seconds[i]) else f" ({corpus.seconds[i]:.2f} s)"
            rejected.add(reason or reasons[file_of[i]], f"{path}:{corpus.lines[i]}: {corpus.where(i)}{length}")
        keep[bad] = False

    reject(np.array([reason != "" for reason in reasons], dtype=bool)[file_of], None)
    reject((left <= 0) | ((corpus.offsets > 0) & (short > END_TOLERANCE)), "segment ends beyond the file")
    reject(short > FILE_TOLERANCE, "file is shorter than its duration in the manifest (truncated?)")
    too_long, has_segments = f"longer than {max_duration:g} s (--max_duration)", np.array(segments.there, dtype=bool)
    if use_chunking:
        reject((corpus.seconds > max_duration) & ~has_segments, f"{too_long}, without segment times for --use_chunking")
        if (keep & (corpus.seconds > max_duration)).any():
            corpus, row_of = cut_by_segments(corpus, keep, segments, max_duration, rejected, path)
            file_of, keep = file_of[row_of], np.ones(len(corpus), dtype=bool)
    elif use_chunking is not None:
        hint = f"{too_long}; its segment times would be used by --use_chunking"
        reject((corpus.seconds > max_duration) & has_segments, hint)
    reject(corpus.seconds > max_duration, too_long)
    reject(corpus.seconds < min_duration, f"shorter than {min_duration:g} s (--min_duration)")
    reject(corpus.texts.empty() & needs_text, "text is empty")
    if not keep.all():
        corpus, file_of = corpus.select(np.flatnonzero(keep)), file_of[keep]
    rejected.repeated = count_repeated(file_of, corpus)
    return corpus, rejected


def cut_by_segments(
    corpus: Corpus, keep: np.ndarray, segments: Segments, max_duration: float, rejected: Rejections, path: str
) -> tuple[Corpus, np.ndarray]:
    """The rows to `keep`, those longer than `max_duration` cut into pieces of whole segments, and the row that each came
    from. A piece joins as many consecutive segments as fit, the gaps between them included. Segments that are too long
    alone, and rows whose segments are not within them, are added to `rejected`."""
    sources, offsets, durations, texts = array("q"), array("d"), array("d"), Strings()
    is_long = keep & (corpus.seconds > max_duration)
    for row in np.flatnonzero(is_long).tolist():
        where = f"{path}:{corpus.lines[row]}: {corpus.where(row)}"
        found, length = segments.row(row), float(corpus.seconds[row])
        problem = segments.problems[row]
        if not problem and found[-1][1] > length + END_TOLERANCE:
            problem = "segment times reach beyond the audio"
            where += f" ({found[-1][1]:.2f} of {length:.2f} s)"
        if problem:
            rejected.add(problem, where)
            continue
        for start, stop, text in join_segments(found, max_duration):
            stop = min(stop, length)
            if stop - start > max_duration + MICROSECOND:
                reason = f"a segment is longer than {max_duration:g} s (--max_duration)"
                rejected.add(reason, f"{where}, segment from {start:.2f} to {stop:.2f} s")
                continue
            sources.append(row)
            offsets.append(corpus.offsets[row] + start)
            durations.append(min(max(0.0, round(stop - start, 6)), max_duration))
            texts.append(text)
    whole = np.flatnonzero(keep & ~is_long)
    row_of = np.concatenate([whole, np.array(sources, dtype=np.int64)])
    order = np.argsort(row_of, kind="stable")
    row_of = row_of[order]
    all_texts = corpus.texts.select(whole)
    for text in texts:
        all_texts.append(text)
    seconds, starts, lengths = (
        np.concatenate([column[whole], pieces])[order]
        for column, pieces in ((corpus.seconds, durations), (corpus.offsets, offsets), (corpus.durations, durations))
    )
    return Corpus(corpus.paths.select(row_of), all_texts.select(order), seconds, starts, lengths,
                  corpus.speakers.select(row_of), corpus.languages.select(row_of), corpus.lines[row_of]), row_of  # fmt: skip


def join_segments(found: list[tuple[float, float, str]], most: float) -> list[tuple[float, float, str]]:
    """Consecutive (start, stop, text), ordered and without overlap, joined from the first on into pieces of at most
    `most` seconds, as few as can be; a longer one stays alone, and nothing is joined across it."""
    pieces: list[tuple[float, float, list[str]]] = []
    for start, stop, text in found:
        if pieces and stop - pieces[-1][0] <= most + MICROSECOND:
            begin, _, texts = pieces.pop()
            texts.append(text)
            pieces.append((begin, stop, texts))
        else:
            pieces.append((start, stop, [text]))
    return [(start, stop, " ".join(text for text in texts if text)) for start, stop, texts in pieces]


def count_repeated(file_of: np.ndarray, corpus: Corpus) -> int:
    """Utterances whose file and times an earlier one has too."""
    keys = (file_of, corpus.offsets, np.nan_to_num(corpus.durations, nan=-1))
    order = np.lexsort(keys)
    return int(np.logical_and.reduce([key[order[1:]] == key[order[:-1]] for key in keys]).sum())


def report_rejections(name: str, corpus: Corpus, rejected: Rejections, strict: bool) -> None:
    """Prints how much is used and what is not. Raises `DataError` where nothing is left, or with `--strict_data` where
    anything was rejected."""
    hours = float(corpus.seconds.sum()) / 3600
    amount = f"{hours:.2f} h" if hours >= 0.1 else f"{60 * hours:.1f} min"
    print(
        f"{name}: {len(corpus)} utterances, {amount}"
        + (f"; {rejected.repeated} repeat the audio of another (all are used)" if rejected.repeated else "")
        + (f"; {rejected.total} rejected:\n{rejected.table()}" if rejected.total else "")
    )
    if not len(corpus):
        raise DataError(
            f"{name}: no usable utterance: {'; '.join(f'{n} x {r}' for r, n in rejected.counts.items()) or 'the manifest is empty'}"
        )
    if strict and rejected.total:
        raise DataError(f"{name}: {rejected.total} utterances rejected (--strict_data)")


def drop(
    corpus: Corpus, name: str, fault: Callable[[int], tuple[str, str] | None], strict: bool
) -> Corpus:  # fmt: skip
    """Without the utterances for which `fault(index)` returns a reason and what is wrong in particular; these are
    reported as those of `name`, with where they stand."""
    rejected, keep = Rejections(), []
    for index in range(len(corpus)):
        if found := fault(index):
            rejected.add(found[0], f"{corpus.where(index)}: {found[1]}")
        else:
            keep.append(index)
    if rejected.total:
        corpus = corpus.select(np.array(keep, dtype=int))
        report_rejections(name, corpus, rejected, strict)
    return corpus


def hold_out(corpus: Corpus, share: float, most: int, seed: int) -> tuple[Corpus, Corpus]:
    """Splits off a random part for evaluation: `share` of the utterances, at least one and at most `most`. Raises
    `DataError` where nothing would be left to train on."""
    count = min(most, max(1, round(share * len(corpus))))
    if count >= len(corpus):
        raise DataError("one utterance is too few to hold one out for evaluation: give --val_manifest")
    order = np.random.default_rng(seed).permutation(len(corpus))
    print(f"no --val_manifest: {count} of the {len(corpus)} training utterances are held out")
    return corpus.select(np.sort(order[count:])), corpus.select(np.sort(order[:count]))


def load_splits(
    args, paths: dict[str, str | None], normalise: Callable[[str], str], held_out: float, most_held_out: int
) -> dict[str, Corpus]:
    """The corpora of the splits that have a path, checked and reported as the shared flags ask; `--max_samples` cuts
    "train", and without a "val" a part of "train" is held out."""
    corpora = {}
    for split, path in paths.items():
        if not path:
            continue
        corpus, rejected = load_corpus(
            path, normalise, args.min_duration, args.max_duration, args.audio_root, args.log_dir / "cache",
            use_chunking=getattr(args, "use_chunking", None),
        )  # fmt: skip
        if split == "train" and args.max_samples:
            corpus = corpus.select(np.arange(min(args.max_samples, len(corpus))))
        report_rejections(f"{split} set ({path})", corpus, rejected, args.strict_data)
        corpora[split] = corpus
    if "val" not in corpora and "train" in corpora:
        corpora["train"], corpora["val"] = hold_out(corpora["train"], held_out, most_held_out, args.seed)
    return corpora
