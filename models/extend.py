"""A released model with further tokens or languages, as a folder that training takes:

    python -m models.extend parakeet parakeet.nemo train.json --add_tokens "( ) %" --export more
    python -m models.extend parakeet parakeet train.json --train_tokenizer char --export amharic
    python -m models.extend parakeet nemotron --new_language se-NO --like fi-FI --export sami
    python recipes/parakeet_tdt.py --model_dir more --train_manifest train.json --val_manifest val.json

The folder has the form of the model. Tokens that it has keep their rows; the others begin with
their share in the training texts of the probability of all old ones. The folder notes which are
new: in training they learn at a higher rate."""

import sys

from common import options
from common.errors import exit_with_one_line
from models.parakeet import extend as parakeet


def make_parser() -> options.Parser:
    parser = options.Parser(__doc__)
    parser.add_argument("family", choices=["parakeet"])
    parakeet.add_arguments(parser)
    return parser


def main(words: list[str]) -> None:
    """Writes the folder. Raises `UsageError`, `DataError` and `RunError`."""
    parakeet.extend(parakeet.resolve(make_parser().parse_args(words)))


if __name__ == "__main__":
    exit_with_one_line(lambda: main(sys.argv[1:]))
