"""A Parakeet's part of `python -m models.extend`: other pieces, or one language more."""

import dataclasses
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch

from common import options
from common.batches import pad, to_device
from common.errors import DataError, UsageError
from common.options import flag
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
NEW_PIECES = 1024  # of --train_tokenizer bpe


# Rows of `options.refuse_conflicts`: flags that exclude each other, and those that need another.
EXCLUDES = (("train_tokenizer", "tokenizer", "both name the vocabulary; give one of them"),)
NEEDS = (
    ("vocab_size", ("train_tokenizer bpe",), ""),
    ("new_language", ("like",), ""),
    ("like", ("new_language",), ""),
)


@dataclass(frozen=True, kw_only=True)
class ExtendFlags:
    """The flags, and what stands before them: the `model`, and the manifests with the `texts`."""

    model: str
    texts: list[str]
    # fmt: off
    export: str = flag(options.path, None, "DIR", "the new folder", required=True)
    train_tokenizer: str | None = flag(
        ["bpe", "char"], None, None,
        "make a new vocabulary from the texts, for a script that the model cannot write")
    tokenizer: str | None = flag(
        options.path, None, "PATH",
        "take the vocabulary of a SentencePiece .model, a tokenizer.json, or a released model")
    vocab_size: int | None = flag(
        options.number(int, 2, vocabulary.MOST), None, "N",
        f"pieces of --train_tokenizer bpe ({NEW_PIECES})")
    add_tokens: str | None = flag(
        None, None, "PIECES",
        'add pieces, divided by spaces, or those of a file, one a line. For example "( ) %%"')
    new_language: str | None = flag(
        None, None, "xx-YY",
        "a language that a Nemotron does not know, in a free slot of its prompt")
    like: str | None = flag(None, None, "NAME", "the known language that --new_language begins as")
    audio_root: str | None = flag(options.path, None, "DIR", "base of audio paths, as in training")
    text_column: str | None = flag(
        None, None, "NAME", "the column of a table that has the texts, as in training")
    tier: list[str] | None = flag(
        options.Repeated, None, "NAME",
        "the tiers with the texts in .eaf and .TextGrid, as in training", nargs="+")
    max_duration: float = flag(
        options.RATE, MAX_SECONDS, "S", f"leave out longer utterances, seconds ({MAX_SECONDS:g})")
    use_chunking: bool = flag(
        options.OnOff, False, None,
        "cut recordings over --max_duration by the manifest's segment times (off)")
    # fmt: on

    @property
    def changes_pieces(self) -> bool:
        return bool(self.tokenizer or self.train_tokenizer) or self.add_tokens is not None

    @property
    def checks(self) -> Checks:
        return Checks(
            max_duration=self.max_duration,
            audio_root=self.audio_root,
            text_column=self.text_column,
            use_chunking=self.use_chunking,
            tiers=tuple(self.tier or ()),
        )


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    parser.add_argument("model", type=options.path, help="its folder, or its model.nemo")
    parser.add_argument(
        "texts",
        type=options.path,
        nargs="*",
        help="manifests as in training: the texts of a new vocabulary, and of the first file the"
        " utterances that new rows are fitted to",
    )
    options.add_record(parser, parser, ExtendFlags)


def resolve(args) -> ExtendFlags:
    """The flags, which are checked. Raises `UsageError`."""
    options.refuse_conflicts(args, EXCLUDES, NEEDS)
    asked = options.read_record(ExtendFlags, args, model=args.model, texts=args.texts)
    if not (asked.changes_pieces or asked.new_language):
        ways = "--add_tokens, --train_tokenizer, --tokenizer or --new_language"
        raise UsageError(f"nothing says what the new model shall have: add {ways}")
    if asked.changes_pieces and not asked.texts:
        raise UsageError(
            "new pieces are fitted to training data: name its manifest after the model"
        )
    if asked.add_tokens is not None:
        vocabulary.read_pieces(asked.add_tokens)  # what is wrong with them is reported now
    if asked.new_language and not NAME.fullmatch(asked.new_language):
        raise UsageError(f"--new_language {asked.new_language}: give it the form of fi-FI")
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
        raise DataError("none of the utterances that rows are fitted to can be read")
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
    texts = vocabulary.some_texts(corpus, SEED)
    shares = vocabulary.shares(tokenizer, texts, info.new_pieces)
    batch = training_batch(corpus, tokenizer)
    fit_new_rows(model, batch, info.new_pieces, shares, old, pieces)
    return model.state_dict()


def with_new_pieces(
    asked: ExtendFlags, info: start.ModelInfo, weights: dict[str, torch.Tensor], form: str
) -> tuple[start.ModelInfo, dict[str, torch.Tensor]]:
    """A model with the vocabulary that the flags ask for, which `form` has to be able to express.
    Raises `UsageError` and `DataError`."""
    corpora = [load_corpus(path, text.normalise, asked.checks)[0] for path in asked.texts]
    state = info.tokenizer
    if asked.tokenizer:
        state = vocabulary.read_tokenizer(asked.tokenizer)
    elif asked.train_tokenizer:
        texts = Strings(itertools.chain(*(corpus.texts for corpus in corpora)))
        state = vocabulary.train_tokenizer(
            texts, asked.train_tokenizer, asked.vocab_size or NEW_PIECES
        )
    if asked.add_tokens is not None:
        state = vocabulary.add_lacking(state, vocabulary.read_pieces(asked.add_tokens))
    new, changed = vocabulary.with_new_vocabulary(info, weights, state)
    formats.check_form(form, new.config, start.exported(new))
    if new.new_pieces:
        changed = fitted(new, changed, weights, info.config["vocabulary"], corpora[0])
    return new, changed


def extend(asked: ExtendFlags) -> None:
    """Writes the folder. Raises `UsageError`, `DataError` and `RunError`."""
    model_files.require_export(asked.export)
    released.refuse_overlap(asked.export, asked.model)
    torch.manual_seed(SEED)
    info, weights = start.read(asked.model)
    form = "nemo" if "yaml" in info.source else "hf"
    if asked.new_language:
        info, weights = with_new_language(info, weights, asked.new_language, asked.like)
    if asked.changes_pieces:
        info, weights = with_new_pieces(asked, info, weights, form)
    if asked.new_language and asked.new_language not in start.tokenizer_of(info).tags:
        print(f"its sentences end without a tag: --add_tokens '<{asked.new_language}>' makes one")
    note = {"new_pieces": info.new_pieces, "base": info.base or Path(asked.model).resolve().name}
    names = formats.export(
        asked.export, form, weights, info.config, start.exported(info), note=note
    )
    print(f"prepared {asked.export}: {', '.join(names)}; train with --model_dir {asked.export}")
