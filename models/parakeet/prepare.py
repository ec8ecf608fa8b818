"""A released Parakeet with other pieces, or with one language more, as a folder that training
takes:

    python -m models.parakeet.prepare --model_dir parakeet --train_manifest train.json --add_tokens "( ) %" --export more
    python -m models.parakeet.prepare --model_file parakeet.nemo --train_manifest train.json --train_tokenizer char --export amharic
    python -m models.parakeet.prepare --model_dir nemotron --new_language se-NO --like fi-FI --export sami
    python recipes/parakeet_tdt.py --model_dir more --train_manifest train.json --val_manifest val.json

The folder has the released model's form, Hugging Face's or a .nemo. Pieces that the model has keep
their rows; those that are new begin with their share in the training texts of the probability of
all old ones. The folder notes which these are: in training they learn at a higher rate."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from common import options
from common.batches import pad, to_device
from common.errors import DataError, UsageError, exit_with_one_line
from models import model_files, released
from models.parakeet import formats, start, vocabulary
from models.parakeet.languages import COLUMNS, NAME, with_new
from models.parakeet.scratch import fit_new_rows
from models.parakeet.tokenizer import ParakeetTokenizer
from speech.data import splits
from speech.data.columns import Corpus, Strings
from speech.data.loading import Checks, load_corpus
from speech.signal.audio import SAMPLE_RATE, read_utterance
from speech.writing import text

SEED = 1
MAX_SECONDS = 20.0  # of an utterance, as in training
UTTERANCES = 32  # that the rows of new pieces are fitted to
SHARE_TEXTS = 1000  # in which new pieces are counted
NEW_PIECES = 1024  # of --train_tokenizer bpe


@dataclass(frozen=True)
class Asked:
    """The request of the flags. `path`: the released model. `tokenizer`: whose vocabulary is taken.
    `kind`: of the pieces that are made from the texts, "bpe" or "char", or None; `size`: how many.
    `added`: pieces that follow. `language`: a new name, and the one that it begins as."""

    path: str
    export: str
    manifests: list[str]
    checks: Checks
    tokenizer: str | None
    kind: str | None
    size: int
    added: tuple[str, ...]
    language: tuple[str, str] | None

    @property
    def changes_pieces(self) -> bool:
        return bool(self.tokenizer or self.kind or self.added)


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model_dir", type=options.path, metavar="DIR", help="the released model")
    source.add_argument(
        "--model_file", type=options.path, metavar="FILE", help="the same as a model.nemo"
    )
    parser.add_argument(
        "--export", type=options.path, metavar="DIR", required=True, help="the new folder"
    )
    pieces = parser.add_mutually_exclusive_group()
    pieces.add_argument(
        "--train_tokenizer",
        choices=["bpe", "char"],
        help="make a new vocabulary from the texts, for a script that the model cannot write",
    )
    pieces.add_argument(
        "--tokenizer",
        type=options.path,
        metavar="PATH",
        help="take the vocabulary of a SentencePiece .model, a tokenizer.json, or a released model",
    )
    parser.add_argument(
        "--vocab_size",
        type=options.number(int, 2, vocabulary.MOST),
        metavar="N",
        help=f"pieces of --train_tokenizer bpe ({NEW_PIECES})",
    )
    parser.add_argument(
        "--add_tokens",
        metavar="PIECES",
        help='add pieces, divided by spaces, or those of a file, one a line. For example "( ) %%"',
    )
    parser.add_argument(
        "--new_language",
        metavar="xx-YY",
        help="a language that a Nemotron does not know, in a free slot of its prompt",
    )
    parser.add_argument(
        "--like", metavar="NAME", help="the known language that --new_language begins as"
    )
    add_data_arguments(parser)


def add_data_arguments(parser) -> None:
    parser.add_argument(
        "--train_manifest",
        type=options.path,
        nargs="+",
        default=[],
        metavar="FILE",
        help=(
            "as in training: the texts of a new vocabulary, and of the first file the utterances"
            " that new rows are fitted to"
        ),
    )
    parser.add_argument(
        "--audio_root", type=options.path, metavar="DIR", help="base of audio paths, as in training"
    )
    parser.add_argument(
        "--tier",
        action=options.Repeated,
        nargs="+",
        metavar="NAME",
        help="the tiers with the texts in .eaf and .TextGrid, as in training",
    )
    parser.add_argument(
        "--max_duration",
        type=options.RATE,
        default=MAX_SECONDS,
        metavar="S",
        help=f"leave out longer utterances, seconds ({MAX_SECONDS:g})",
    )
    parser.add_argument(
        "--use_chunking",
        action=options.OnOff,
        default=False,
        help="cut recordings over --max_duration by the manifest's segment times (off)",
    )


def resolve(args) -> Asked:
    """The request of the flags. Raises `UsageError`."""
    asked = Asked(
        path=args.model_dir or args.model_file,
        export=args.export,
        manifests=args.train_manifest,
        checks=Checks(
            max_duration=args.max_duration,
            audio_root=args.audio_root,
            use_chunking=args.use_chunking,
            tiers=tuple(args.tier or ()),
        ),
        tokenizer=args.tokenizer,
        kind=args.train_tokenizer,
        size=args.vocab_size or NEW_PIECES,
        added=vocabulary.read_pieces(args.add_tokens) if args.add_tokens is not None else (),
        language=(args.new_language, args.like) if args.new_language else None,
    )
    if not (asked.changes_pieces or asked.language):
        ways = "--add_tokens, --train_tokenizer, --tokenizer or --new_language"
        raise UsageError(f"nothing says what the new model shall have: add {ways}")
    if asked.changes_pieces and not asked.manifests:
        raise UsageError("new pieces are fitted to training data: add --train_manifest")
    if args.vocab_size and asked.kind != "bpe":
        raise UsageError("--vocab_size goes with --train_tokenizer bpe")
    if bool(args.new_language) != bool(args.like):
        raise UsageError("--new_language and --like go together")
    if args.new_language and not NAME.fullmatch(args.new_language):
        raise UsageError(f"--new_language {args.new_language}: give it the form of fi-FI")
    return asked


# --- the model ------------------------------------------------------------------------------------


def with_new_language(
    info: start.ModelInfo, weights: dict[str, torch.Tensor], name: str, like: str
) -> tuple[start.ModelInfo, dict[str, torch.Tensor]]:
    """A model with a further language in a free slot of its prompt. Raises `UsageError`."""
    if not info.languages:
        raise UsageError(f"--new_language {name}: this model is told no language; leave it out")
    slots = info.config["prompts"]["slots"]
    languages, columns = with_new(info.languages, weights[COLUMNS], slots, name, like)
    print(f"new language: {name} begins as {like}, in slot {languages[name]}")
    return dataclasses.replace(info, languages=languages), {**weights, COLUMNS: columns}


@dataclass(frozen=True)
class Utterances:
    """A corpus as `splits.some_items` takes it."""

    corpus: Corpus
    tokenizer: ParakeetTokenizer

    def __len__(self) -> int:
        return len(self.corpus)

    def item(self, index: int, epoch: int) -> dict:
        """Waveform (T,) and tokens (U,)."""
        tokens = self.tokenizer.encode(self.corpus.texts[index])
        return {
            "audio": read_utterance(self.corpus, index, SAMPLE_RATE),
            "tokens": torch.tensor(tokens, dtype=torch.long),
        }


def training_batch(corpus: Corpus, tokenizer: ParakeetTokenizer) -> dict:
    """Random utterances: audio (B, T) and tokens (B, U), with their lengths. Raises `DataError`."""
    items = splits.some_items(Utterances(corpus, tokenizer), SEED, UTTERANCES)
    if not items:
        raise DataError("--train_manifest: none of its utterances can be read")
    batch = {}
    for key in ("audio", "tokens"):
        batch[key], batch[f"{key}_lengths"] = pad([item[key] for item in items])
    return next(to_device([batch], torch.device("cpu")))


def fitted(
    info: start.ModelInfo,
    weights: dict[str, torch.Tensor],
    old: dict[str, torch.Tensor],
    pieces: int,
    corpus: Corpus,
) -> dict[str, torch.Tensor]:
    """The `weights` with rows of new pieces that are fitted to utterances of `corpus`. `old`: those
    of the released model, which has so many `pieces`."""
    tokenizer = start.tokenizer_of(info)
    model = start.make_model(info, weights)
    model.prompt = start.usual_prompt(info)
    sample = np.random.default_rng(SEED).permutation(len(corpus))[:SHARE_TEXTS]
    texts = [corpus.texts[int(row)] for row in sample]
    shares = vocabulary.shares(tokenizer, texts, info.new_pieces)
    batch = training_batch(corpus, tokenizer)
    fit_new_rows(model, batch, info.new_pieces, shares, old, pieces)
    return model.state_dict()


def with_new_pieces(
    asked: Asked, info: start.ModelInfo, weights: dict[str, torch.Tensor], form: str
) -> tuple[start.ModelInfo, dict[str, torch.Tensor]]:
    """A model with the vocabulary that the flags ask for, which `form` has to be able to express.
    Raises `UsageError` and `DataError`."""
    corpora = [load_corpus(path, text.normalise, asked.checks)[0] for path in asked.manifests]
    state = info.tokenizer
    if asked.tokenizer:
        state = vocabulary.read_tokenizer(asked.tokenizer)
    elif asked.kind:
        texts = Strings(itertools.chain(*(corpus.texts for corpus in corpora)))
        state = vocabulary.train_tokenizer(texts, asked.kind, asked.size)
    if asked.added:
        state = vocabulary.add_lacking(state, asked.added)
    new, changed = vocabulary.with_new_vocabulary(info, weights, state)
    formats.check_form(form, new.config, start.exported(new))
    if new.new_pieces:
        changed = fitted(new, changed, weights, info.config["vocabulary"], corpora[0])
    return new, changed


def prepare(asked: Asked) -> None:
    """Writes the folder. Raises `UsageError`, `DataError` and `RunError`."""
    model_files.require_export(asked.export)
    released.refuse_overlap(asked.export, asked.path)
    torch.manual_seed(SEED)
    info, weights = start.read(asked.path)
    form = "nemo" if "yaml" in info.source else "hf"
    if asked.language:
        info, weights = with_new_language(info, weights, *asked.language)
    if asked.changes_pieces:
        info, weights = with_new_pieces(asked, info, weights, form)
    if asked.language and asked.language[0] not in start.tokenizer_of(info).tags:
        print(f"its sentences end without a tag: --add_tokens '<{asked.language[0]}>' makes one")
    note = {"new_pieces": info.new_pieces, "base": info.base or Path(asked.path).resolve().name}
    names = formats.export(
        asked.export, form, weights, info.config, start.exported(info), note=note
    )
    print(f"prepared {asked.export}: {', '.join(names)}; train with --model_dir {asked.export}")


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(lambda: prepare(resolve(parser.parse_args())))
