"""Texts as XTTS reads them: phonemes or letters, then tokens.

Coqui's vocabulary has no Ethiopic letters. Amharic is read as phonemes in Latin letters that it has
(--use_amharic_g2p), or the vocabulary is extended by Ethiopic characters, or by these and pieces of
words (--extend_vocab, see `new_tokens`)."""

import math
import os
import re
import sys
from dataclasses import dataclass, field
from typing import Annotated

from common import files, options
from common.errors import UsageError
from speech import amharic
from speech.columns import Corpus
from speech.manifest import check_encoding
from speech.text import normalise
from speech.xtts.tokenizer import MOST_TOKENS, Vocabulary

AMHARIC = "am"
OTHER_NAMES = {
    "amh": "am", "amharic": "am", "eng": "en", "fra": "fr", "deu": "de", "spa": "es", "ara": "ar",
    "ita": "it",
}  # fmt: skip
# Coqui speaks a language that it does not know as English text that begins with the new token.
CARRIER = "en"
KINDS = ("characters", "bpe")  # of --extend_vocab
VOCAB_SIZE = 2000
PHONEMES = "abcdefghijklmnopqrstuvwxyzäəčšžñı'"
# The characters of a model from scratch.
CHARACTERS = "".join(map(chr, range(0x1200, 0x1380))) + "'.,;:?!-" + PHONEMES
ETHIOPIC = re.compile(amharic.ETHIOPIC)
FILE = re.compile(r"\S+\.(txt|csv|tsv|json)")  # an argument that must be the name of a file

_LATER = "the vocabulary of a trained model is not extended; leave it out"
EXCLUDES = (
    ("extend_vocab", "use_amharic_g2p", "phonemes need no new tokens; give one of them"),
    *(("extend_vocab", goal, _LATER) for goal in ("synthesize", "evaluate", "show_text")),
    *(("vocab_size", goal, _LATER) for goal in ("synthesize", "evaluate", "show_text")),
)
NEEDS = (
    ("lexicon", ("use_amharic_g2p",), ""),
    ("epenthesis", ("use_amharic_g2p",), ""),
    ("epenthesis False", ("use_amharic_g2p",), ""),
    ("vocab_size", ("extend_vocab bpe",), ""),
)


def _are_words(lexicon: dict) -> bool:
    return all(type(word) is str is type(sounds) for word, sounds in lexicon.items())


@dataclass(frozen=True)
class TextOptions:
    """How a model reads texts: the flags of a new model, and what its checkpoints keep.
    `extend_vocab` is None or one of `KINDS`; `vocab_size` limits the new tokens of "bpe"."""

    g2p: bool = False
    epenthesis: bool = True
    lexicon: Annotated[dict, _are_words] = field(default_factory=dict)
    extend_vocab: Annotated[str | None, (type(None), {*KINDS})] = None
    vocab_size: int = VOCAB_SIZE


def add_arguments(parser) -> None:
    group = parser.add_argument_group("text (of a new model; a checkpoint keeps how it reads)")
    group.add_argument(
        "--use_amharic_g2p",
        action=options.OnOff,
        help=(
            "read Amharic as phonemes in Latin letters, which the released vocabulary has (off: as"
            " it is written, with numbers in words)"
        ),
    )
    group.add_argument(
        "--lexicon",
        type=options.path,
        metavar="FILE",
        help=(
            "with --use_amharic_g2p: pronunciations of words, above all their long consonants,"
            " which are not written"
        ),
    )
    group.add_argument(
        "--epenthesis",
        action=options.OnOff,
        default=True,
        help="with --use_amharic_g2p: write the vowel ı that breaks up clusters of consonants (on)",
    )
    group.add_argument(
        "--extend_vocab",
        choices=KINDS,
        help=(
            "add to the vocabulary the characters of the training texts that it lacks; bpe: also"
            " pieces of Ethiopic words"
        ),
    )
    group.add_argument(
        "--vocab_size",
        type=options.number(int, 1, MOST_TOKENS),
        default=VOCAB_SIZE,
        metavar="N",
        help=f"with --extend_vocab bpe: tokens to add at most ({VOCAB_SIZE})",
    )
    parser.add_command(
        group,
        "--show_text",
        nargs="+",
        metavar="TEXT",
        help="print what the model reads of texts, or of a file with a text in each line, and exit",
    )


def resolve(args, language: str) -> TextOptions:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
    given = [flag for flag in ("use_amharic_g2p", "lexicon", "epenthesis") if flag in args.given]
    if given and args.synthesize and (args.resume or not args.model_dir):
        raise UsageError(
            f"--{given[0]}: a checkpoint keeps how it reads; leave it out, or give --model_dir"
            " without --resume"
        )
    if args.use_amharic_g2p and language != AMHARIC:
        raise UsageError(
            f"--use_amharic_g2p is for Amharic ({AMHARIC}), and --language is {language}: leave one"
            " of them out"
        )
    return TextOptions(
        g2p=bool(args.use_amharic_g2p),
        epenthesis=args.epenthesis,
        lexicon=amharic.read_lexicon(args.lexicon) if args.lexicon else {},
        extend_vocab=args.extend_vocab,
        vocab_size=args.vocab_size,
    )


def conflicts(given: frozenset[str], wanted: TextOptions, saved: TextOptions) -> list[str]:
    """The flags on the command line that contradict how a checkpoint's model reads, each with what
    the checkpoint has."""
    found = []
    if "use_amharic_g2p" in given and wanted.g2p != saved.g2p:
        reads = "phonemes" if saved.g2p else "text as written"
        found.append(f"{_switch('use_amharic_g2p', wanted.g2p)} (the checkpoint reads {reads})")
    if "lexicon" in given and wanted.lexicon != saved.lexicon:
        found.append("--lexicon (the checkpoint has other words)")
    if "epenthesis" in given and wanted.epenthesis != saved.epenthesis:
        flag = _switch("epenthesis", wanted.epenthesis)
        found.append(f"{flag} (the checkpoint has the opposite)")
    extended = "the checkpoint's vocabulary was not extended"
    if saved.extend_vocab:
        most = f"{saved.vocab_size} at most"
        extended = f"the checkpoint's vocabulary was extended by {saved.extend_vocab}, {most}"
    if "extend_vocab" in given and wanted.extend_vocab != saved.extend_vocab:
        found.append(f"--extend_vocab {wanted.extend_vocab} ({extended})")
    if "vocab_size" in given and wanted.vocab_size != saved.vocab_size:
        found.append(f"--vocab_size {wanted.vocab_size} ({extended})")
    return found


def _switch(flag: str, on: bool) -> str:
    return f"--{flag}" if on else f"--no_{flag}"


def texts_of(wanted: list[str], flag: str = "--synthesize") -> list[str]:
    """The texts of a flag: the name of a file stands for its lines. Raises `UsageError`."""
    lines = wanted
    if len(wanted) == 1 and os.path.isfile(wanted[0]):
        lines = files.read_text(wanted[0]).split("\n")  # other separators may be within a text
    elif len(wanted) == 1 and FILE.fullmatch(wanted[0]):
        raise UsageError(f"{flag} {wanted[0]}: no such file")
    for line in lines:
        try:
            check_encoding(line)
        except ValueError:
            raise UsageError(
                f"{flag} {line[:40]!r}: it is not UTF-8, or the locale is not: set LC_ALL=C.UTF-8"
            ) from None
    texts = [normalise(line) for line in lines]
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError(f"{flag}: there is no text")
    return texts


# --- reading --------------------------------------------------------------------------------------


class FrontEnd:
    """Texts of the model's language to what the model reads. Amharic becomes phonemes, or is
    written without numerals and abbreviations. Other languages are left as they are."""

    def __init__(self, language: str, text: TextOptions):
        self.language = language
        self.text = text

    def read(self, text: str, language: str | None = None) -> str:
        if self.language != AMHARIC or language not in (None, "", AMHARIC):
            return text
        if self.text.g2p:
            return amharic.phonemes(text, self.text.lexicon, self.text.epenthesis)
        has_letters = any(character.isalpha() for character in text)
        if ETHIOPIC.search(text) or (re.search(r"\d", text) and not has_letters):
            return amharic.spoken(text)
        return text

    def fault(self, text: str, language: str | None, longest: float) -> None:
        """None: without a vocabulary every text can be read."""


class Texts:
    """Texts to tokens. The token of a language that Coqui knows comes first; the token of another
    one follows English's. `info`: the model's `ModelInfo`. `is_new`: the vocabulary may still be
    extended, which error messages advise."""

    def __init__(self, info, is_new: bool = False):
        self.vocabulary = Vocabulary(info.vocab)
        self.language = info.language
        self.unknown = self.vocabulary.unknown
        self.is_carried = info.carried
        self.is_new = is_new
        self.front_end = FrontEnd(info.language, info.text)
        # When XTTS speaks, the codes follow STOP. In the training of the released model they do not
        # attend to it. A model from scratch that is trained like that adds a syllable at the end,
        # because it has never seen STOP.
        self.ending = [self.vocabulary.stop] if info.reads_stop else []

    def language_of(self, language: str | None) -> str:
        """The language that a row is read in: its own, or the model's if the row has none or the
        vocabulary lacks it."""
        return self._known(language) or self.language

    def _known(self, language: str | None) -> str | None:
        """The vocabulary's code of a language, which may be in another case or have a region
        (en-US) or three letters (eng)."""
        code = (language or "").lower().replace("_", "-")
        without_region = code.split("-")[0]
        for each in (code, OTHER_NAMES.get(code), OTHER_NAMES.get(without_region, without_region)):
            if each in self.vocabulary.languages:
                return each
        return None

    def languages_of(self, corpus: Corpus) -> list[str]:
        """The languages that the rows of a corpus are read in, sorted."""
        return sorted({self.language_of(language) for language in corpus.languages})

    def tokens_of(self, corpus: Corpus) -> list[list[int]]:
        """The tokens of each row, as they are trained on. Warns of rows with characters, or a
        language, that the vocabulary lacks."""
        pairs = zip(corpus.texts, corpus.languages, strict=True)
        tokens = [self.encode(text, language) + self.ending for text, language in pairs]
        if unknown := sum(self.unknown in row for row in tokens):
            print(
                f"warning: {unknown} texts have characters that the vocabulary lacks: see"
                " --show_text"
            )
        foreign = [code for code in corpus.languages if code and not self._known(code)]
        if foreign:
            reason = f"a language that the vocabulary lacks, such as {foreign[0][:20]!r}"
            print(f"warning: {len(foreign)} rows have {reason}: they are read as {self.language}")
        return tokens

    def read(self, text: str, language: str | None = None) -> str:
        """What the model reads of a text."""
        return self.front_end.read(text) if self.language_of(language) == self.language else text

    def encode(self, text: str, language: str | None = None) -> list[int]:
        """The tokens of what the model reads of a text, after those of the language."""
        return self._encode_read(self.read(text, language), language)

    def fault(self, text: str, language: str | None, longest: float) -> tuple[str, str] | None:
        """Why the model cannot read a text, as (reason, details): the vocabulary has none of its
        letters, or the text has more than `longest` tokens. None if it can."""
        prefix = self._encode_read("", language)
        tokens = self.encode(text, language)[len(prefix) :]
        written = self.vocabulary.decode([token for token in tokens if token != self.unknown])
        if not any(character.isalnum() for character in written):
            reason = "the vocabulary has none of the text's letters"
            if self.is_new and ETHIOPIC.search(text):
                reason += ": --use_amharic_g2p or --extend_vocab"
            return reason, repr(text[:40])
        if len(tokens) > longest:
            return f"text is longer than {longest} tokens", f"{len(tokens)} tokens"
        return None

    def check(self, text: str) -> str:
        """Returns the text of --synthesize as it is. Raises `UsageError` if the model cannot read
        it, and warns of characters that the vocabulary lacks."""
        if fault := self.fault(text, None, math.inf):
            raise UsageError(f"--synthesize: {': '.join(fault)}")
        self.warn(text)
        return text

    def warn(self, text: str) -> None:
        """Prints on stderr which characters of a text the vocabulary lacks."""
        if lacking := self.vocabulary.lacking(self.read(text)):
            print(
                f"warning: {text[:40]!r}: the vocabulary lacks {' '.join(lacking[:20])}",
                file=sys.stderr,
            )

    def _encode_read(self, text: str, language: str | None) -> list[int]:
        language = self.language_of(language)
        if self.is_carried and language == self.language:
            return self.vocabulary.encode(f"[{language}]{text}", CARRIER)
        return self.vocabulary.encode(text, language)


def show(wanted: list[str], reader: FrontEnd | Texts, longest: int) -> None:
    """--show_text: prints what `reader` makes of each text, one line each. With a vocabulary, warns
    on stderr of characters that it lacks and of texts with more than `longest` tokens, which are
    not trained on."""
    for text in texts_of(wanted, "--show_text"):
        print(reader.read(text))
        if isinstance(reader, FrontEnd):
            continue
        reader.warn(text)
        count = len(reader.encode(text)) - len(reader.encode(""))
        if count > longest:
            print(
                f"warning: {text[:40]!r}: {count} tokens; training takes {longest} at most",
                file=sys.stderr,
            )
