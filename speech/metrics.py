"""Word and character error rates, and the tables that show them."""

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import require
from speech.text import for_scoring


@dataclass
class Errors:
    """Counts of edits. `length`: the number of words or characters in the references."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors over the references' length; the number of insertions if all references are
        empty."""
        return self.total / max(1, self.length)


def count_errors(
    references: list[str],
    hypotheses: list[str],
    unit: str,
    normalise: Callable[[str], str] = for_scoring,
) -> Errors:
    """Edit distance summed over pairs, in "words" or "characters" (including spaces), after
    `normalise` on both sides."""
    jiwer = require("jiwer", "WER and CER")
    process = jiwer.process_words if unit == "words" else jiwer.process_characters
    errors = Errors()
    spoken = []
    decoded = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        reference = normalise(reference)
        hypothesis = normalise(hypothesis)
        if reference:
            spoken.append(reference)
            decoded.append(hypothesis)
        else:  # jiwer refuses empty references
            errors.insertions += len(hypothesis.split() if unit == "words" else hypothesis)
    if spoken:
        counts = process(spoken, decoded)
        errors.substitutions += counts.substitutions
        errors.deletions += counts.deletions
        errors.insertions += counts.insertions
        errors.length += counts.hits + counts.substitutions + counts.deletions
    return errors


def cer_and_wer(
    references: list[str], hypotheses: list[str], normalise: Callable[[str], str] = for_scoring
) -> dict[str, Errors]:
    """The counts of errors of which "cer" and "wer" are the rates."""
    return {
        "cer": count_errors(references, hypotheses, "characters", normalise),
        "wer": count_errors(references, hypotheses, "words", normalise),
    }


def score(
    rows: list[dict], normalise: Callable[[str], str] = for_scoring
) -> dict[str, tuple[int, int]]:
    """The errors and the length, by which they are divided, of "cer" and "wer" of decoded rows
    ({"reference", "hypothesis"})."""
    references = [row["reference"] for row in rows]
    hypotheses = [row["hypothesis"] for row in rows]
    errors = cer_and_wer(references, hypotheses, normalise)
    return {name: (each.total, each.length) for name, each in errors.items()}


def rate(pair: tuple[float, float]) -> float:
    """Numerator over denominator of a metric as `score` or an evaluation returns it."""
    return pair[0] / max(1, pair[1])


def error_table(
    references: list[str], hypotheses: list[str], normalise: Callable[[str], str] = for_scoring
) -> str:
    """WER and CER with substitutions, deletions and insertions, as lines to print."""
    lines = [f"{'':4} {'%':>7} {'errors':>7} {'of':>7} {'subst.':>7} {'delet.':>7} {'insert.':>7}"]
    errors = cer_and_wer(references, hypotheses, normalise)
    for name in ("wer", "cer"):
        e = errors[name]
        counts = (e.total, e.length, e.substitutions, e.deletions, e.insertions)
        columns = " ".join(f"{count:7}" for count in counts)
        lines.append(f"{name.upper():4} {100 * e.rate:7.2f} {columns}")
    return "\n".join(lines)


def improvement_table(
    before: list[dict], after: list[dict], normalise: Callable[[str], str] = for_scoring
) -> str:
    """WER and CER of two models' rows ({"reference", "hypothesis"}) on the same set, and the
    relative reduction, as lines to print."""
    lines = [f"{'':4} {'before':>8} {'after':>8} {'lower by':>9}"]
    scores_before = score(before, normalise)
    scores_after = score(after, normalise)
    for name in ("wer", "cer"):
        old = rate(scores_before[name])
        new = rate(scores_after[name])
        reduction = f"{100 * (1 - new / old):8.1f}%" if old else f"{'-':>9}"
        lines.append(f"{name.upper():4} {100 * old:7.2f}% {100 * new:7.2f}% {reduction}")
    return "\n".join(lines)


def longest_deletion(
    reference: str, hypothesis: str, normalise: Callable[[str], str] = for_scoring
) -> int:
    """The most words of the reference in a row that the hypothesis lacks, after `normalise`."""
    jiwer = require("jiwer", "WER and CER")
    reference = normalise(reference)
    if not reference:
        return 0
    alignments = jiwer.process_words(reference, normalise(hypothesis)).alignments[0]
    deleted = [each for each in alignments if each.type == "delete"]
    return max((each.ref_end_idx - each.ref_start_idx for each in deleted), default=0)


def recordings_table(rows: list[dict], normalise: Callable[[str], str] = for_scoring) -> str:
    """WER, CER, deleted words and the longest passage that was dropped, for each of `rows` ({"file",
    "seconds", "reference", "hypothesis"}) and for all of them, as lines to print."""
    dropped = [longest_deletion(row["reference"], row["hypothesis"], normalise) for row in rows]
    lines = [f"{'WER %':>7} {'CER %':>7} {'words':>7} {'delet.':>7} {'in a row':>8} {'seconds':>8}"]

    def add(part: list[dict], longest: int, name: str) -> None:
        pairs = ([row[key] for row in part] for key in ("reference", "hypothesis"))
        errors = cer_and_wer(*pairs, normalise)
        rates = " ".join(f"{100 * errors[unit].rate:7.2f}" for unit in ("wer", "cer"))
        words = errors["wer"]
        seconds = sum(row["seconds"] for row in part)
        counts = f"{words.length:7} {words.deletions:7} {longest:8} {seconds:8.1f}"
        lines.append(f"{rates} {counts}  {name}")

    for row, longest in zip(rows, dropped, strict=True):
        add([row], longest, row["file"])
    add(rows, max(dropped), "all")
    return "\n".join(lines)
