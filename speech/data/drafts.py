"""What a recogniser wrote of recordings without texts, to a manifest for training: the pieces that
it was sure of.

    python -m speech.data.drafts drafts.jsonl --min_confidence 0.9 --without_lm plain.jsonl --output more.json

drafts.jsonl is the --output of --transcribe by a recogniser with CTC. plain.jsonl is that of the
same command with --lm off: where the two differ much, the language model has guessed. The rows are
marked as drafted, so they are trained on, and never evaluate."""

import argparse
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from common import files, options
from common.errors import DataError, UsageError, exit_with_one_line
from speech.data.fields import DRAFTED
from speech.writing import metrics

MAX_DIFFERENCE = 0.1  # share of the characters
KEPT = "kept"

Place = tuple[str, float, float]  # file, start and end in seconds


def pieces_of(path: Path) -> dict[Place, dict]:
    """The pieces of transcripts by their places. Raises `UsageError` and `DataError`."""
    found = {}
    with files.require_file(path).open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                for piece in row["pieces"]:
                    place = (str(row["file"]), float(piece["start"]), float(piece["end"]))
                    sure = confidence(row.get("words", []), place[1], place[2])
                    found[place] = {"text": str(piece["text"]), "sure": sure}
            except (ValueError, KeyError, TypeError):
                raise DataError(
                    f"{path}:{number} is no transcript with pieces, as --transcribe --output"
                    " writes it"
                ) from None
    return found


def confidence(words: list[dict], start: float, end: float) -> float | None:
    """The confidence of a piece: the mean of those of its words, by their lengths."""
    total = count = 0.0
    for word in words:
        if start <= (word["start"] + word["end"]) / 2 < end and "confidence" in word:
            total += len(word["text"]) * word["confidence"]
            count += len(word["text"])
    return round(total / count, 3) if count else None


def reason_of(piece: dict, least: float, other: dict | None, most: float, compares: bool) -> str:
    """Why a piece is left out, or KEPT. `other`: the same without the language model."""
    if not piece["text"].strip():
        return "no speech was heard"
    if piece["sure"] is None:
        return "no confidence (only a recogniser with CTC has one)"
    if piece["sure"] < least:
        return f"confidence below {least:g}"
    if compares and other is None:
        return "not in --without_lm (cut elsewhere?)"
    if other:
        (errors,) = metrics.errors_of_each([other["text"]], [piece["text"]], "characters")
        if errors.total > most * max(1, errors.length):
            return f"over {100 * most:g} % of it is different without the language model"
    return KEPT


def rows_of(pieces: dict[Place, dict], folder: Path, target: Path) -> Iterator[dict]:
    """Rows of a manifest in `target` of pieces whose files are relative to `folder`."""
    for (name, start, end), piece in pieces.items():
        path = name if os.path.isabs(name) else os.path.relpath(folder / name, target)
        yield {
            "audio_filepath": path,
            "offset": start,
            "duration": round(end - start, 6),
            "text": piece["text"],
            "confidence": piece["sure"],
            DRAFTED: True,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        "python -m speech.data.drafts",
        description="A manifest for training of what a recogniser was sure of.",
        allow_abbrev=False,
    )
    share = options.number(float, 0.0, 1.0)
    parser.add_argument("drafts", type=Path, help="the --output of --transcribe")
    parser.add_argument(
        "--min_confidence", type=share, required=True, help="of a piece, from 0 to 1"
    )
    parser.add_argument("--without_lm", type=Path, help="the same recordings with --lm off")
    parser.add_argument(
        "--max_difference",
        type=share,
        default=MAX_DIFFERENCE,
        help=f"from --without_lm, share of the characters ({MAX_DIFFERENCE})",
    )
    parser.add_argument("--output", type=Path, required=True, help="the manifest, .json")
    args = parser.parse_args()
    if args.output.exists():
        raise UsageError(f"--output {args.output} is there already: give another name")
    if not args.output.parent.is_dir():
        raise UsageError(f"--output {args.output}: there is no such folder")
    pieces = pieces_of(args.drafts)
    others = pieces_of(args.without_lm) if args.without_lm else {}
    reasons = {
        place: reason_of(
            piece,
            args.min_confidence,
            others.get(place),
            args.max_difference,
            compares=bool(args.without_lm),
        )
        for place, piece in pieces.items()
    }
    seconds = Counter()
    for place, reason in reasons.items():
        seconds[reason] += place[2] - place[1]
    for reason, count in Counter(reasons.values()).most_common():
        print(f"{reason}: {count} of {len(pieces)} pieces, {seconds[reason] / 60:.1f} minutes")
    kept = {place: pieces[place] for place, reason in reasons.items() if reason == KEPT}
    if not kept:
        raise DataError("nothing is kept: lower --min_confidence, or train the recogniser longer")
    rows = rows_of(kept, args.drafts.parent, args.output.parent)
    lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
    files.write_text(args.output, "".join(lines))
    print(f"--train_manifest {args.output}")


if __name__ == "__main__":
    exit_with_one_line(main)
