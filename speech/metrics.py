"""Word and character error rates with their parts, and the table that shows them."""

from collections.abc import Callable
from dataclasses import dataclass

from common.errors import require
from speech.text import for_scoring


@dataclass
class Errors:
    """Counts that add up: `length` is the number of words or characters in the references."""

    substitutions: int = 0
    deletions: int = 0
    insertions: int = 0
    length: int = 0

    @property
    def total(self) -> int:
        return self.substitutions + self.deletions + self.insertions

    @property
    def rate(self) -> float:
        """Errors over the references' length; against empty references every insertion counts whole."""
        return self.total / max(1, self.length)


def count_errors(
    references: list[str], hypotheses: list[str], unit: str, normalise: Callable[[str], str] = for_scoring
) -> Errors:
    """Edit distance summed over pairs, in "words" or "characters" (spaces count as characters), after `normalise` on
    both sides."""
    jiwer = require("jiwer", "WER and CER")
    errors, pairs = Errors(), []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        reference, hypothesis = normalise(reference), normalise(hypothesis)
        if reference:
            pairs.append((reference, hypothesis))
        else:  # jiwer refuses empty references
            errors.insertions += len(hypothesis.split() if unit == "words" else hypothesis)
    if pairs:
        process = jiwer.process_words if unit == "words" else jiwer.process_characters
        found = process([r for r, _ in pairs], [h for _, h in pairs])
        errors.substitutions += found.substitutions
        errors.deletions += found.deletions
        errors.insertions += found.insertions
        errors.length += found.hits + found.substitutions + found.deletions
    return errors


def score(rows: list[dict], normalise: Callable[[str], str] = for_scoring) -> dict[str, tuple[int, int]]:
    """CER and WER of decoded rows ({"reference", "hypothesis"}), as (errors, length)."""
    references, hypotheses = [row["reference"] for row in rows], [row["hypothesis"] for row in rows]
    found = {}
    for name, unit in (("cer", "characters"), ("wer", "words")):
        errors = count_errors(references, hypotheses, unit, normalise)
        found[name] = (errors.total, errors.length)
    return found


def rate(pair: tuple[float, float]) -> float:
    """Errors over length, of a pair that `score` or an evaluation gave."""
    return pair[0] / max(1, pair[1])


def error_table(references: list[str], hypotheses: list[str], normalise: Callable[[str], str] = for_scoring) -> str:
    """WER and CER with substitutions, deletions and insertions, as lines to print."""
    rows = [f"{'':4} {'%':>7} {'errors':>7} {'of':>7} {'subst.':>7} {'delet.':>7} {'insert.':>7}"]
    for name, unit in (("WER", "words"), ("CER", "characters")):
        e = count_errors(references, hypotheses, unit, normalise)
        rows.append(
            f"{name:4} {100 * e.rate:7.2f} {e.total:7} {e.length:7} {e.substitutions:7} {e.deletions:7} {e.insertions:7}"
        )
    return "\n".join(rows)


def improvement_table(before: list[dict], after: list[dict], normalise: Callable[[str], str] = for_scoring) -> str:
    """WER and CER of two models' rows ({"reference", "hypothesis"}) on the same set, and how much lower the second's
    are, relative to the first's, as lines to print."""
    rows = [f"{'':4} {'before':>8} {'after':>8} {'lower by':>9}"]
    scores = [score(found, normalise) for found in (before, after)]
    for name in ("WER", "CER"):
        one, two = (rate(found[name.lower()]) for found in scores)
        lower = f"{100 * (1 - two / one):8.1f}%" if one else f"{'-':>9}"
        rows.append(f"{name:4} {100 * one:7.2f}% {100 * two:7.2f}% {lower}")
    return "\n".join(rows)
