"""The error rates of whole recordings, and what is missing of them in a row."""

from collections.abc import Callable

from common.errors import require
from speech.decoding.recogniser import DecodingOptions
from speech.decoding.results import LONG, readings_of, write_rows
from speech.writing import metrics
from speech.writing.text import for_scoring, in_unspaced

Normaliser = Callable[[str], str]


def print_recordings(
    rows: list[dict],
    before: list[dict] | None,
    path: str | None,
    how: DecodingOptions,
    normalise: Callable[[str], str],
) -> None:
    """Prints the error rates of whole recordings and what they lose in a row, from their `rows`,
    which are written; then those of the model at `path` from its rows `before`. Raises
    `RunError`."""
    readings = readings_of(rows, how, normalise)
    errors = metrics.read_by(rows, readings)
    print(metrics.error_table(errors, metrics.rates(errors)))
    print(recordings_table(rows, normalise))
    write_rows(rows, how, LONG)
    if before:
        print(f"{path} on the same recordings:")
        print(recordings_table(before, normalise))
        print(metrics.improvement_table(metrics.read_by(before, readings), errors))


def longest_deletion(reference: str, hypothesis: str, normalise: Normaliser = for_scoring) -> int:
    """The most words of the reference in a row that the hypothesis lacks, after `normalise`."""
    jiwer = require("jiwer", "WER and CER")
    reference = normalise(reference)
    if not reference:
        return 0
    alignments = jiwer.process_words(reference, normalise(hypothesis)).alignments[0]
    deleted = [each for each in alignments if each.type == "delete"]
    return max((each.ref_end_idx - each.ref_start_idx for each in deleted), default=0)


def recordings_table(rows: list[dict], normalise: Normaliser = for_scoring) -> str:
    """WER, CER, what is missing and the longest passage that was dropped, for each of `rows`
    ({"file", "seconds", "reference", "hypothesis"}) and for all of them, as lines to print. What
    was deleted is counted in words or, in scripts without spaces between these, in characters."""
    unit, in_units = "words", normalise
    letters = [c for row in rows for c in row["reference"] if c.isalpha()]
    if 2 * sum(map(in_unspaced, letters)) > len(letters):  # of scripts without spaces
        unit = "characters"

        def in_units(text: str) -> str:
            return " ".join("".join(normalise(text).split()))

    dropped = [longest_deletion(row["reference"], row["hypothesis"], in_units) for row in rows]
    lines = [
        f"by recording (in a row: the {unit} of the longest passage that is missing):",
        f"{'WER %':>7} {'CER %':>7} {unit:>10} {'missing':>7} {'in a row':>8} {'seconds':>8}",
    ]

    def add(part: list[dict], longest: int, name: str) -> None:
        pairs = [[row[key] for row in part] for key in ("reference", "hypothesis")]
        errors = metrics.cer_and_wer(*pairs, normalise)
        rates = " ".join(f"{100 * errors[each].rate:7.2f}" for each in ("wer", "cer"))
        units = metrics.count_errors(*pairs, "words", in_units)
        seconds = sum(row["seconds"] for row in part)
        counts = f"{units.length:10} {units.deletions:7} {longest:8} {seconds:8.1f}"
        lines.append(f"{rates} {counts}  {name}")

    for row, longest in zip(rows, dropped, strict=True):
        add([row], longest, row["file"])
    add(rows, max(dropped), "all")
    return "\n".join(lines)
