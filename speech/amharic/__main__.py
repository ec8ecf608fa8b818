"""The phonemes of texts on stdin: `python -m speech.amharic`."""

import argparse
import sys

from common.errors import exit_with_one_line
from speech.amharic import phonemes, read_lexicon


def main() -> None:
    """Reads text from stdin and prints the phonemes of each line."""
    parser = argparse.ArgumentParser(
        "python -m speech.amharic",
        description="Phonemes of Amharic text, line by line.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--lexicon", metavar="FILE", help="pronunciations, for gemination: word<TAB>phonemes"
    )
    parser.add_argument(
        "--no_epenthesis",
        action="store_true",
        help="write the sixth vowel wherever a letter has it",
    )
    args = parser.parse_args()
    lexicon = read_lexicon(args.lexicon) if args.lexicon is not None else None
    sys.stdout.reconfigure(encoding="utf-8")
    for line in sys.stdin.buffer:
        print(phonemes(line.decode("utf-8-sig", "replace"), lexicon, not args.no_epenthesis))


if __name__ == "__main__":
    exit_with_one_line(main)
