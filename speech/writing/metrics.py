"""Word and character error rates, how far chance moves them, and the tables that show them."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from common.errors import require
from speech.writing.text import for_scoring

UNITS = {"wer": "words", "cer": "characters"}
OF_PROFILE = {**UNITS, "uer": "units"}  # of a recogniser with an orthography profile
RESAMPLES = 1000  # sets that are drawn for an interval
SEED = 0  # of the drawing: the same texts have the same interval
SHARE = 95  # per cent of the drawn sets that an interval holds

Normaliser = Callable[[str], str]
Cut = Callable[[str], list[str]]
SPACE = "\u2581"  # in place of a space that is counted


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
        """Errors over the references' length; insertions if all references are empty."""
        return self.total / max(1, self.length)

    def __add__(self, other: "Errors") -> "Errors":
        return Errors(
            self.substitutions + other.substitutions,
            self.deletions + other.deletions,
            self.insertions + other.insertions,
            self.length + other.length,
        )


# --- counting -------------------------------------------------------------------------------------


def errors_of_each(
    references: list[str], hypotheses: list[str], unit: str, normalise: Normaliser = for_scoring
) -> list[Errors]:
    """The edit distance of each pair, in "words" or "characters" (including spaces), after
    `normalise` on both sides. What `normalise` divides by spaces are words."""
    jiwer = require("jiwer", "WER and CER")
    process = jiwer.process_words if unit == "words" else jiwer.process_characters
    counted = []
    for reference, hypothesis in zip(references, hypotheses, strict=True):
        reference = normalise(reference).strip()
        hypothesis = normalise(hypothesis).strip()
        if not reference:  # jiwer refuses empty references
            inserted = hypothesis.split() if unit == "words" else hypothesis
            counted.append(Errors(insertions=len(inserted)))
            continue
        counts = process(reference, hypothesis)
        length = counts.hits + counts.substitutions + counts.deletions
        counted.append(Errors(counts.substitutions, counts.deletions, counts.insertions, length))
    return counted


def count_errors(
    references: list[str], hypotheses: list[str], unit: str, normalise: Normaliser = for_scoring
) -> Errors:
    """The sum of `errors_of_each`."""
    return sum(errors_of_each(references, hypotheses, unit, normalise), Errors())


def cer_and_wer(
    references: list[str], hypotheses: list[str], normalise: Normaliser = for_scoring
) -> dict[str, Errors]:
    """The counts of errors of which "cer" and "wer" are the rates."""
    pair = references, hypotheses
    return {name: count_errors(*pair, UNITS[name], normalise) for name in ("cer", "wer")}


def score(rows: list[dict], normalise: Normaliser = for_scoring) -> dict[str, tuple[int, int]]:
    """{"cer" and "wer": (errors, length)} of decoded rows ({"reference", "hypothesis"})."""
    pairs = [[row[side] for row in rows] for side in ("reference", "hypothesis")]
    errors = cer_and_wer(*pairs, normalise)
    return {name: (each.total, each.length) for name, each in errors.items()}


def read_by(
    rows: list[dict], readings: dict[str, Normaliser], cut: Cut | None = None
) -> dict[str, dict[str, list[Errors]]]:
    """The errors of each of `rows` ({"reference", "hypothesis"}), as {reading: {"wer": [...],
    "cer": [...]}}, with "uer" if `cut` cuts texts into units, of which a space is one. `readings`:
    normalisers by name."""
    pairs = [[row[side] for row in rows] for side in ("reference", "hypothesis")]
    found = {}
    for reading, normalise in readings.items():
        found[reading] = {
            name: errors_of_each(*pairs, unit, normalise) for name, unit in UNITS.items()
        }
        if cut:
            found[reading]["uer"] = errors_of_each(*pairs, "words", in_units(normalise, cut))
    return found


def in_units(normalise: Normaliser, cut: Cut) -> Normaliser:
    """`normalise`, with a text's units divided by spaces; its own spaces become another sign."""
    return lambda text: " ".join(cut(normalise(text).strip().replace(" ", SPACE)))


def errors_of_row(errors: dict[str, dict[str, list[Errors]]], number: int) -> dict:
    """The counts of `read_by` in one row, as {reading: {"words": [errors, length], "characters":
    [errors, length]}}: intervals can be computed from these alone."""
    return {
        reading: {
            OF_PROFILE[name]: [each[number].total, each[number].length]
            for name, each in found.items()
        }
        for reading, found in errors.items()
    }


# --- intervals ------------------------------------------------------------------------------------


def resampled_rates(several: list[list[Errors]]) -> np.ndarray:
    """(K, RESAMPLES) the K error rates of sets of N utterances that are drawn with replacement. All
    of `several` (K, N) are compared on the same draws (Bisani and Ney 2004)."""
    random = np.random.default_rng(SEED)
    number = len(several[0])
    counts = np.array(
        [[[e.total for e in errors], [e.length for e in errors]] for errors in several]
    )
    sums = np.empty((RESAMPLES, len(several), 2), dtype=np.int64)
    for row in sums:
        times = np.bincount(random.integers(0, number, number), minlength=number)
        row[:] = np.einsum("kcn,n->kc", counts, times)  # unlike BLAS, in this thread
    return (sums[..., 0] / np.maximum(1, sums[..., 1])).T


def middle(values: np.ndarray) -> tuple[float, float]:
    """The ends of the middle SHARE per cent of (RESAMPLES,) values."""
    outside = (100 - SHARE) / 2
    low, high = np.percentile(values, [outside, 100 - outside])
    return float(low), float(high)


def intervals(several: list[list[Errors]]) -> list[tuple[float, float] | None]:
    """The 95 % confidence interval of each of several error rates on the same utterances, by
    bootstrap over these; None for fewer than two, which say nothing about others."""
    if len(several[0]) < 2:
        return [None] * len(several)
    return [middle(values) for values in resampled_rates(several)]


def intervals_of_differences(
    before: list[list[Errors]], after: list[list[Errors]]
) -> list[tuple[float, float] | None]:
    """The same for each rate before minus the rate after, on the same utterances: the set's
    difficulty, which both share, cancels."""
    if len(before[0]) < 2:
        return [None] * len(before)
    old, new = np.split(resampled_rates(before + after), 2)
    return [middle(values) for values in old - new]


def rates(errors: dict[str, dict[str, list[Errors]]]) -> dict:
    """The rates of the counts of `read_by`, as {reading: {"wer": {"rate", "low", "high", "errors",
    "length"}, "cer": ...}}; low and high are the interval, None for fewer than two utterances."""
    every = [each for names in errors.values() for each in names.values()]
    ends = iter(intervals(every))
    tables: dict[str, dict] = {}
    for reading, names in errors.items():
        tables[reading] = {}
        for name, each in names.items():
            whole = sum(each, Errors())
            low, high = next(ends) or (None, None)
            shares = {"rate": whole.rate, "low": low, "high": high}
            tables[reading][name] = {**shares, "errors": whole.total, "length": whole.length}
    return tables


def rates_by(names: list[str], errors: dict[str, list[Errors]]) -> dict[str, dict]:
    """{name: {"utterances", "wer", "cer"}} of the utterances that each of `names` (N) names; error
    rates as in `rates`. `errors`: {"wer": [...], "cer": [...]} of the N utterances."""
    rows: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        rows.setdefault(name, []).append(row)
    tables = {}
    for name in sorted(rows):
        own = {unit: [each[row] for row in rows[name]] for unit, each in errors.items()}
        tables[name] = {"utterances": len(rows[name]), **rates({"": own})[""]}
    return tables


# --- tables ---------------------------------------------------------------------------------------


def shown(ends: tuple[float, float] | None) -> str:
    """An interval in per cent, in 20 characters or more."""
    text = f"({100 * ends[0]:.2f} to {100 * ends[1]:.2f})" if ends else "-"
    return f"{text:>20}"


def error_table(errors: dict[str, dict[str, list[Errors]]], rates: dict) -> str:
    """WER and CER with their intervals, and substitutions, deletions and insertions, as lines to
    print. `errors`: what `read_by` returns, and `rates` what `rates` makes of it. A reading with
    the errors of the first one gets no lines."""
    head = f"{'wrong':>7} {'missing':>7} {'extra':>7}"
    lines = [f"{'':4} {'%':>7} {'95 % interval':>20} {'errors':>7} {'of':>7} {head}"]
    first = next(iter(errors.values()))
    for reading, found in errors.items():
        if found is not first and found == first:
            lines.append(f"{reading}: the same")
            continue
        if len(errors) > 1:
            lines.append(f"{reading}:")
        for name, each in found.items():
            e = sum(each, Errors())
            counts = (e.total, e.length, e.substitutions, e.deletions, e.insertions)
            columns = " ".join(f"{count:7}" for count in counts)
            values = rates[reading][name]
            ends = None if values["low"] is None else (values["low"], values["high"])
            lines.append(f"{name.upper():4} {100 * e.rate:7.2f} {shown(ends)} {columns}")
    return "\n".join(lines)


def table_by_language(tables: dict[str, dict]) -> str:
    """WER and CER of each language with their intervals, as lines to print, of `rates_by`."""
    names = {name: name or "(no language given)" for name in tables}
    width = max(map(len, ["language", *names.values()]))
    head = " ".join(f"{name.upper():>7} {'95 % interval':>20}" for name in UNITS)
    lines = ["by language:", f"{'':{width}} {'number':>7} {head}"]
    for name, values in tables.items():
        columns = []
        for unit in UNITS:
            low, high = values[unit]["low"], values[unit]["high"]
            ends = shown(None if low is None else (low, high))
            columns.append(f"{100 * values[unit]['rate']:7.2f} {ends}")
        lines.append(f"{names[name]:{width}} {values['utterances']:7} {' '.join(columns)}")
    return "\n".join(lines)


def improvement_table(
    before: dict[str, dict[str, list[Errors]]], after: dict[str, dict[str, list[Errors]]]
) -> str:
    """WER and CER of two models on the same set, the difference in points with its interval, and
    the relative reduction, as lines to print. Both are what `read_by` returns. If an interval holds
    zero, other utterances might turn the order of the models."""
    head = f"{'before':>8} {'after':>8} {'points':>8} {'95 % interval':>20} {'lower by':>9}"
    lines = [f"{'':4} {head}"]
    first = next(iter(before))
    every = [
        [each for names in errors.values() for each in names.values()] for errors in (before, after)
    ]
    ends = iter(intervals_of_differences(*every))
    for reading in before:
        ends_of = {name: next(ends) for name in before[reading]}
        is_same = (before[reading], after[reading]) == (before[first], after[first])
        if reading != first and is_same:
            lines.append(f"{reading}: the same")
            continue
        if len(before) > 1:
            lines.append(f"{reading}:")
        for name in before[reading]:
            pair = before[reading][name], after[reading][name]
            old, new = (sum(each, Errors()).rate for each in pair)
            points = f"{100 * (old - new):8.2f} {shown(ends_of[name])}"
            reduction = f"{100 * (1 - new / old):8.1f}%" if old else f"{'-':>9}"
            rates = f"{100 * old:7.2f}% {100 * new:7.2f}%"
            lines.append(f"{name.upper():4} {rates} {points} {reduction}")
    return "\n".join(lines)
