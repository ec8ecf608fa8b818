"""Morse scores: error rates, callsigns and exchanges, by condition, contest, speed and SNR."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from common import files
from common.errors import RunError
from speech.morse.alphabet import MORSE, normalise, symbols
from speech.writing import metrics

# What is known of a clip beside its text, in a row.
TAGS = (
    *("condition", "contest_type", "sample_type", "wpm", "snr_db"),
    *("is_noise_only", "callsigns", "exchange"),
)
SPEED_BAND = 5  # WPM, of the table by speed
SNR_BAND = 4  # dB, of the table by SNR
_SCORED = {label: chr(0xE000 + number) for number, label in enumerate(MORSE) if len(label) > 1}


def for_scoring(text: str) -> str:
    """A text with a character per symbol. Nothing is removed: ?, /, = and + are sent in Morse."""
    return "".join(_SCORED.get(label, label) for label in symbols(normalise(text)))


def measure(rows: list[dict]) -> dict:
    """Metrics of some clips; None for a share of nothing. A callsign is right if it is a word of
    the hypothesis, an exchange if its words are consecutive there."""
    references = [row["reference"] for row in rows]
    hypotheses = [normalise(row["hypothesis"]) for row in rows]
    errors = metrics.cer_and_wer(references, hypotheses, for_scoring)
    right = {"perfect": [], "callsigns": [], "exchanges": [], "noise_only": []}
    for row, text in zip(rows, hypotheses, strict=True):
        if row["is_noise_only"]:
            right["noise_only"].append(not text)
        else:
            right["perfect"].append(normalise(row["reference"]) == text)
        for call in row["callsigns"]:
            right["callsigns"].append(f" {call} " in f" {text} ")
        if row["exchange"]:
            right["exchanges"].append(f" {row['exchange']} " in f" {text} ")
    measures = {"samples": len(rows)}
    for name in ("wer", "cer"):
        measures[name] = errors[name].rate if errors[name].length else None
    for name, marks in right.items():
        measures[f"{name}_right"] = sum(marks) / len(marks) if marks else None
    for name, marks in right.items():
        measures[f"{name}_count"] = len(marks)
    return measures


def evaluation_tables(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{table: {group: metrics}} of evaluated clips, rows {"file", "reference", "hypothesis", and
    TAGS}: all clips, and by condition, contest, sample type, speed and SNR (in 2,500 Hz). Clips
    without a station are in no speed or SNR group."""

    def band(name: str, width: int, unit: str) -> Callable[[dict], tuple]:
        def key(row: dict) -> tuple:
            if row["is_noise_only"] or math.isnan(row[name]):
                return ()
            low = math.floor(row[name] / width) * width
            return low, f"{low} to {low + width} {unit}"

        return key

    keys = {
        "all": lambda row: ("all",),
        "condition": lambda row: (row["condition"],),
        "contest": lambda row: (row["contest_type"],),
        "sample type": lambda row: (row["sample_type"],),
        "speed": band("wpm", SPEED_BAND, "WPM"),
        "SNR": band("snr_db", SNR_BAND, "dB"),
    }
    tables = {}
    for table, key in keys.items():
        groups: dict[tuple, list[dict]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        named = [group for group in sorted(groups) if group and group[-1]]
        tables[table] = {str(group[-1]): measure(groups[group]) for group in named}
    return tables


def print_tables(tables: dict[str, dict[str, dict]]) -> None:
    """Prints the tables, shares in per cent; "-" for a share of nothing."""
    columns = {
        "WER": "wer",
        "CER": "cer",
        "perfect": "perfect_right",
        "callsigns": "callsigns_right",
        "exchanges": "exchanges_right",
        "silent on noise": "noise_only_right",
    }
    width = max([12, *(len(group) for groups in tables.values() for group in groups)])
    for table, groups in tables.items():
        if not groups:
            continue
        title = "%" if table == "all" else table
        print(f"{title:{width}} {'samples':>7} " + " ".join(f"{name:>9}" for name in columns))
        for group, values in groups.items():
            cells = []
            for name, key in columns.items():
                cell = "-" if values[key] is None else f"{100 * values[key]:.2f}"
                cells.append(f"{cell:>{max(9, len(name))}}")
            print(f"{group:{width}} {values['samples']:>7} " + " ".join(cells))
        print()


def write_evaluation(tables: dict[str, dict[str, dict]], path: Path) -> None:
    """Writes the tables as JSON, shares from 0 to 1. Raises `RunError`."""
    try:
        files.write_text(path, json.dumps(tables, indent=1, ensure_ascii=False) + "\n")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
