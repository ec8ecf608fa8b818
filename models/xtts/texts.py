"""Texts as XTTS reads them: in lower case, without double quotes, with numbers in words, then
tokens.

Languages that Coqui speaks are written as its tokenizer does (`cleaners`). Others are written here,
so that it leaves them as they are: an export gets the tokens that were trained. The released
vocabulary has no Ethiopic letters. Amharic is read as phonemes in Latin letters that it has
(--use_amharic_g2p), or the vocabulary is extended by Ethiopic characters, or by these and pieces of
words (--extend_vocab, see `new_tokens`)."""

import functools
import math
import re
import sys
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Annotated

import numpy as np

from common import options
from common.errors import UsageError
from common.options import ALONE, USUAL, OnOff, flag
from models.xtts import cleaners
from models.xtts.tokenizer import MOST_TOKENS, Vocabulary
from speech import amharic
from speech.data.columns import Corpus, Strings
from speech.writing import languages, reading
from speech.writing.reading import AMHARIC, code_of
from speech.writing.unknown import check_unknown, named

# Coqui speaks a language that it does not know as English text that begins with the new token.
CARRIER = "en"
KINDS = ("characters", "bpe")  # of --extend_vocab
VOCAB_SIZE = 2000
MAX_TEXT = 200  # tokens of a text, at most
PHONEMES = "abcdefghijklmnopqrstuvwxyzäəčšžñı'"
# The characters of a plan's vocabulary.
CHARACTERS = "".join(map(chr, range(0x1200, 0x1380))) + "'.,;:?!-" + PHONEMES
ETHIOPIC = re.compile(amharic.ETHIOPIC)
# What is not read in words by language: of Coqui's languages only numbers can be left.
NOTHING = re.compile("(?!)")  # tones have numbers, and Coqui's code leaves some
UNREAD = {
    **dict.fromkeys(cleaners.LANGUAGES, reading.UNREAD),
    cleaners.CHINESE: NOTHING,
    cleaners.JAPANESE: NOTHING,
}

# Flags that a checkpoint decides, and the fields of `TextOptions` that keep them.
KEPT = {
    "use_amharic_g2p": "g2p",
    "epenthesis": "epenthesis",
    "extend_vocab": "extend_vocab",
    "vocab_size": "vocab_size",
}
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


@dataclass(frozen=True)
class TextOptions:
    """How a model reads texts: the flags of a new model, and what its checkpoints keep.
    `extend_vocab` is None or one of `KINDS`; `vocab_size` limits the new tokens of "bpe"."""

    g2p: bool = False
    epenthesis: bool = True
    lexicon: Annotated[dict, lambda lexicon: set(map(type, lexicon.values())) <= {str}] = field(
        default_factory=dict
    )
    extend_vocab: Annotated[str | None, (type(None), {*KINDS})] = None
    vocab_size: int = VOCAB_SIZE


@dataclass(frozen=True)
class TextFlags:
    """Flags of how a new model reads texts."""

    # fmt: off
    use_amharic_g2p: bool | None = flag(
        OnOff, None, None,
        "read Amharic as phonemes in Latin letters, which the released vocabulary has (off: as it"
        " is written, with numbers in words)", USUAL)
    lexicon: str | None = flag(
        options.path, None, "FILE",
        "with --use_amharic_g2p: pronunciations of words, above all their long consonants, which"
        " are not written")
    epenthesis: bool = flag(
        OnOff, True, None,
        "with --use_amharic_g2p: write the vowel ı that breaks up clusters of consonants (on)")
    extend_vocab: str | None = flag(
        KINDS, None, None,
        "add to the vocabulary the characters of the training texts that it lacks; bpe: also pieces"
        " of Ethiopic words", USUAL)
    vocab_size: int = flag(
        options.number(int, 1, MOST_TOKENS // 2), VOCAB_SIZE, "N",
        f"with --extend_vocab bpe: tokens to add at most ({VOCAB_SIZE})")
    show_text: list[str] | None = flag(
        None, None, "TEXT",
        "print what the model reads of texts, or of a file with a text in each line, and exit",
        ALONE, nargs="+")


def add_arguments(parser) -> None:
    title = "text (of a new model; a checkpoint keeps how it reads)"
    options.add_record(parser, title, TextFlags)
    parser.refuse(EXCLUDES, NEEDS)


def resolve(args, language: str | None) -> TextOptions:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
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


# --- reading --------------------------------------------------------------------------------------


def most_text(config: dict) -> int:
    """Tokens of the longest text; START, STOP and two tokens of the language are not counted."""
    return min(MAX_TEXT, config["text_positions"] - 4)


def read_corpora(reader: "Texts", corpora: dict[str, Corpus]) -> None:
    """Puts what the model reads of each text into the corpora. This is slow, so it is done once.
    Says in which language rows are read that name none, and warns of letters that are left out."""
    if corpora:
        print(f"language of the texts: {languages.described(reader.language)}")
    for name, corpus in corpora.items():
        pairs = list(zip(corpus.texts, corpus.languages, strict=True))
        corpus.read = Strings(reader.read(*pair) for pair in pairs)
        for language in sorted({reader.language_of(told) for told in set(corpus.languages)}):
            if language in cleaners.LANGUAGES:  # they are read as Coqui's code reads them
                continue
            own = (text for text, told in pairs if reader.language_of(told) == language)
            read = functools.partial(reader.read, language=language)
            reading.warn_left_out(name, own, read, language)


class Texts:
    """Texts to what the model reads and, if its `vocabulary` is known, to tokens. The token of a
    language that Coqui knows comes first; the token of another one follows English's, because
    Coqui's code takes its texts for English. `info`: the model's `ModelInfo`, whose `vocab` may be
    empty. `is_new`: the vocabulary may still be extended, which error messages advise."""

    def __init__(self, info, is_new: bool = False):
        self.vocabulary = Vocabulary(info.vocab) if info.vocab else None
        self.language = info.language  # of texts without one
        self.text = info.text
        self.carried = info.carried
        self.is_new = is_new

    def language_of(self, language: str | None) -> str:
        """The language that a row is read in: its own, if the vocabulary has it, or the model's."""
        return self._known(language) or self.language

    def _known(self, language: str | None) -> str | None:
        """The code of a language, if the vocabulary has it."""
        code = code_of(language) if language else None
        if self.vocabulary and code not in self.vocabulary.languages:
            return None
        return code

    def languages_of(self, corpus: Corpus) -> list[str]:
        """The languages that the rows of a corpus are read in, sorted."""
        return sorted({self.language_of(language) for language in corpus.languages})

    def tokens_of(self, corpus: Corpus) -> list[np.ndarray]:
        """The tokens (U,) of each row in training. Warns of languages that the vocabulary lacks."""
        tokens = []
        for read, language in zip(corpus.read, corpus.languages, strict=True):
            tokens.append(np.array(self.encode_read(read, language), dtype=np.int32))
        foreign = [code for code in corpus.languages if code and not self._known(code)]
        if foreign:
            reason = f"a language that the vocabulary lacks, such as {foreign[0][:20]!r}"
            print(f"warning: {len(foreign)} rows have {reason}: they are read as {self.language}")
        return tokens

    def read(self, text: str, language: str | None = None) -> str:
        """The text as the model reads it."""
        language = self.language_of(language)
        is_carried = self.carried and language == self.language
        if language in cleaners.LANGUAGES:
            text = cleaners.clean(text, language)
        elif language == AMHARIC and self.text.g2p:
            text = amharic.phonemes(text, self.text.lexicon, self.text.epenthesis)
        elif language == AMHARIC:
            text = amharic.spoken(text)
        else:
            text = reading.plain(text, language)
        return cleaners.shield(text) if is_carried else text

    def encode(self, text: str, language: str | None = None) -> list[int]:
        """The tokens of what the model reads of a text, after those of the language."""
        return self.encode_read(self.read(text, language), language)

    def encode_read(self, read: str, language: str | None = None) -> list[int]:
        """The tokens of what was `read` of a text, after those of the language."""
        language = self.language_of(language)
        if self.carried and language == self.language:
            return self.vocabulary.encode(f"[{language}]{read}", CARRIER)
        return self.vocabulary.encode(read, language)

    def fault(self, read: str, language: str | None, longest: float) -> tuple[str, str] | None:
        """Why the model cannot learn what was `read` of a text, as (reason, details): numbers or
        signs are not in words, the vocabulary has none of its letters, or it has more than
        `longest` tokens. None if it can."""
        language = self.language_of(language)
        problem = reading.fault(read, language, UNREAD.get(language, reading.NOT_IN_WORDS))
        if problem or self.vocabulary is None:
            return problem
        prefix = self.encode_read("", language)
        tokens = self.encode_read(read, language)[len(prefix) :]
        lacking = self.vocabulary.lacking(read) if self.vocabulary.unknown in tokens else ()
        if not any(map(str.isalnum, {*read}.difference(lacking))):
            reason = "the vocabulary has none of the text's letters"
            if self.is_new and ETHIOPIC.search(read):
                reason += ": --use_amharic_g2p or --extend_vocab"
            return reason, repr(read[:40])
        if len(tokens) > longest:
            return f"text is longer than {longest} tokens", f"{len(tokens)} tokens"
        return None

    def check_unknown(self, corpora: dict[str, Corpus], allow: bool) -> None:
        """Prints the characters that the vocabulary lacks in what is read of the texts. Raises
        `DataError` if they are many, unless `allow`."""
        read = {name: replace(corpus, texts=corpus.read) for name, corpus in corpora.items()}
        advice = "--extend_vocab adds letters to it" if self.is_new else ""
        check_unknown(read, self.vocabulary.lacking, allow, advice)

    def check(self, text: str) -> str:
        """Returns the text of --synthesize as it is. Raises `UsageError` if the model cannot read
        it, and warns of characters that the vocabulary lacks."""
        if fault := self.fault(self.read(text), None, math.inf):
            raise UsageError(f"--synthesize {text[:40]!r}: {': '.join(fault)}")
        self.warn(text)
        return text

    def warn(self, text: str) -> None:
        """Prints on stderr which characters of a text the vocabulary lacks."""
        if lacking := Counter(self.vocabulary.lacking(self.read(text))):
            print(f"warning: {text[:40]!r}: the vocabulary lacks {named(lacking)}", file=sys.stderr)


def show(wanted: list[str], reader: Texts, longest: int) -> None:
    """--show_text: prints what `reader` makes of each text, one line each. Warns on stderr of
    numbers and signs that are not in words and, with a vocabulary, of characters that it lacks and
    of texts with more than `longest` tokens. These are not trained on."""
    for text in reading.texts_of(wanted, "--show_text"):
        read = reader.read(text)
        print(read)
        if fault := reader.fault(read, None, longest):
            print(f"warning: {text[:40]!r}: {': '.join(fault)}", file=sys.stderr)
        if reader.vocabulary:
            reader.warn(text)
