"""What counts as right in Morse: error rates, callsigns, exchanges, by condition, contest, speed and SNR."""

import json
import math
from collections.abc import Callable
from pathlib import Path

from common.errors import RunError
from speech import metrics
from speech.morse.alphabet import MORSE, normalise, symbols

SPEED_BAND, SNR_BAND = 5, 4  # WPM, dB: of the tables
_SCORED = {label: chr(0xE000 + number) for number, label in enumerate(MORSE) if len(label) > 1}


def for_scoring(text: str) -> str:
    """A text of one character a symbol, prosigns included; nothing is left out: in Morse ?, /, = and + are sent."""
    return "".join(_SCORED.get(label, label) for label in symbols(normalise(text)))


def measure(rows: list[dict]) -> dict:
    """The figures of some clips; a share of nothing is None. A callsign is right where it is a word of the hypothesis,
    an exchange where its words follow each other there."""
    references, hypotheses = [row["reference"] for row in rows], [normalise(row["hypothesis"]) for row in rows]
    words, characters = (metrics.count_errors(references, hypotheses, u, for_scoring) for u in ("words", "characters"))
    both = list(zip(rows, hypotheses, strict=True))
    right = {
        "perfect": [normalise(row["reference"]) == text for row, text in both if not row["is_noise_only"]],
        "callsigns": [f" {call} " in f" {text} " for row, text in both for call in row["callsigns"]],
        "exchanges": [f" {row['exchange']} " in f" {text} " for row, text in both if row["exchange"]],
        "noise_only": [not text for row, text in both if row["is_noise_only"]],
    }
    return {
        "samples": len(rows), "wer": words.rate if words.length else None,
        "cer": characters.rate if characters.length else None,
        **{f"{name}_right": sum(found) / len(found) if found else None for name, found in right.items()},
        **{f"{name}_count": len(found) for name, found in right.items()},
    }  # fmt: skip


def evaluation_tables(rows: list[dict]) -> dict[str, dict[str, dict]]:
    """{table: {group: figures}} of evaluated clips (as `Recordings.row` has them): all of them, by condition, contest,
    kind of sample, band of speed and band of SNR (in 2,500 Hz). Clips without a station are in no band."""

    def band(name: str, width: int, unit: str) -> Callable[[dict], tuple]:
        def key(row: dict) -> tuple:
            if row["is_noise_only"] or math.isnan(row[name]):
                return ()
            low = math.floor(row[name] / width) * width
            return low, f"{low} to {low + width} {unit}"

        return key

    keys = {
        "all": lambda row: ("all",), "condition": lambda row: (row["condition"],),
        "contest": lambda row: (row["contest_type"],), "sample type": lambda row: (row["sample_type"],),
        "speed": band("wpm", SPEED_BAND, "WPM"), "SNR": band("snr_db", SNR_BAND, "dB"),
    }  # fmt: skip
    tables = {}
    for table, key in keys.items():
        groups: dict[tuple, list[dict]] = {}
        for row in rows:
            groups.setdefault(key(row), []).append(row)
        tables[table] = {str(group[-1]): measure(groups[group]) for group in sorted(groups) if group and group[-1]}
    return tables


def print_tables(tables: dict[str, dict[str, dict]]) -> None:
    """Prints the figures in per cent, aligned; "-" where there is nothing to count."""
    columns = {
        "WER": "wer", "CER": "cer", "perfect": "perfect_right", "callsigns": "callsigns_right",
        "exchanges": "exchanges_right", "silent on noise": "noise_only_right",
    }  # fmt: skip
    width = max([12, *(len(group) for groups in tables.values() for group in groups)])
    for table, groups in tables.items():
        if not groups:
            continue
        print(
            f"{table if table != 'all' else '%':{width}} {'samples':>7} " + " ".join(f"{name:>9}" for name in columns)
        )
        for group, figures in groups.items():
            shares = [figures[key] for key in columns.values()]
            cells = [
                f"{'-' if share is None else f'{100 * share:.2f}':>{max(9, len(name))}}"
                for name, share in zip(columns, shares, strict=True)
            ]
            print(f"{group:{width}} {figures['samples']:>7} " + " ".join(cells))
        print()


def write_evaluation(tables: dict[str, dict[str, dict]], path: Path) -> None:
    """The tables as JSON, shares from 0 to 1."""
    try:
        path.write_text(json.dumps(tables, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror}") from None
