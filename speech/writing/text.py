"""Text: normalisation for training and for scoring, and the tokenizers."""

import io
import itertools
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

from common.errors import DataError, UsageError, require
from common.files import read_json

MOST_SENTENCES = 1_000_000  # to train SentencePiece on: it holds them in memory
# They shape glyphs, so training keeps them. They are not heard, so scoring removes them.
JOINERS = "\u200c\u200d"
UNHEARD = ("Cc", "Cf", "Cs", "Co")  # categories of control characters and the like
# Latin, Armenian, Hebrew, Arabic, Urdu, Devanagari, Tibetan, Myanmar, Ethiopic, Khmer, Chinese
# and full-width.
SENTENCE_ENDS = tuple(
    ".?!\u0589\u05c3\u061f\u06d4\u0964\u0965\u0f0d\u104b\u1362\u1367\u17d4\u3002"
    "\uff01\uff0e\uff1f\uff61"
)

APOSTROPHES = "'\u2018\u2019\u201b"
IN_WORDS = frozenset(APOSTROPHES + ":\u00b7?!@")  # between letters they are parts of words
PUNCTUATION = re.compile(r"[^\w\s]|_")  # and marks and symbols

# Scripts without spaces between words, and their punctuation: Thai and Lao, Myanmar, Khmer, kana,
# Chinese characters.
UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3001-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    "\uff65-\uff9f\U00020000-\U0003ffff]"
)


def normalise(text: str) -> str:
    """For training: NFC, no control characters or byte-order marks, single spaces. Keeps case,
    punctuation and all combining marks."""
    if not text.isprintable():  # a fast test, since characters to remove are rare
        kept = (c.isspace() or c in JOINERS or unicodedata.category(c) not in UNHEARD for c in text)
        text = "".join(itertools.compress(text, kept))
    return " ".join(unicodedata.normalize("NFC", text).split())


def is_letter(character: str) -> bool:
    """Whether a character is a letter or a mark, with the tone letters and other modifier letters
    (U+02E9, U+A789) that Unicode has among its symbols."""
    category = unicodedata.category(character)
    return category[0] in "LM" or (
        category == "Sk" and unicodedata.name(character, "").startswith("MODIFIER LETTER")
    )


def in_unspaced(character: str) -> bool:
    """Whether the character belongs to a script without spaces between words."""
    return bool(UNSPACED.match(character))


def spaces_before(words: list[str], text: str) -> list[str]:
    """What is before each of the words that make up `text`: a space or nothing; else spaces."""
    if "".join(text.split()) != "".join("".join(words).split()):
        return [" "] * len(words)
    gaps = []
    place = 0
    for word in words:
        gaps.append(" " if text[place : place + 1].isspace() else "")
        for character in "".join(word.split()):
            place = text.index(character, place) + 1
    return gaps


def for_scoring(text: str) -> str:
    """`normalise` without punctuation and joiners. Keeps combining marks: हांव कोंकणी would become
    ह व क कण. Signs that are typed for a glottal stop, a click or a long vowel stay between letters:
    ma’a, wà:ke."""
    text = normalise("".join(character for character in text if character not in JOINERS))
    return " ".join(PUNCTUATION.sub(_scored, text).split())


def _scored(match: re.Match) -> str:
    """What becomes of a character that may be punctuation."""
    character, text, place = match[0], match.string, match.start()
    if not unicodedata.category(character).startswith("P"):
        return character
    if character not in IN_WORDS or not 0 < place < len(text) - 1:
        return " "
    sides = text[place - 1], text[place + 1]
    if not all(is_letter(side) and not in_unspaced(side) for side in sides):
        return " "
    return "'" if character in APOSTROPHES else character


def in_lower_case(text: str) -> str:
    """`for_scoring` in lower case: what most reports compare. Marks and numbers stay."""
    return for_scoring(text).lower()


def as_whisper(text: str) -> str:
    """As Whisper's multilingual normaliser (its `BasicTextNormalizer`), by which many error rates
    are reported: lower case, without what is in brackets, and a space in place of each mark, symbol
    and punctuation. Letters with composed marks (ế) stay, but Indic vowel signs do not."""
    text = re.sub(r"[<\[][^>\]]*[>\]]", "", text.lower())
    text = unicodedata.normalize("NFKC", re.sub(r"\(([^)]+?)\)", "", text))
    kept = (" " if unicodedata.category(c)[0] in "MSP" else c for c in text)
    return re.sub(r"\s+", " ", "".join(kept).lower())


# What tables call the ways in which two texts are compared.
NAMES = {
    for_scoring: "case kept, no punctuation",
    in_lower_case: "lower case, no punctuation",
    as_whisper: "Whisper's multilingual normaliser",
}


def mark_share(texts: Iterable[str]) -> float:
    """The share of marks and tone letters, which `as_whisper` removes, among letters in `texts`."""
    counts = Counter()
    for text in texts:
        counts.update(unicodedata.normalize("NFKC", text))
    kinds = Counter()
    for character, count in counts.items():
        if is_letter(character):
            kinds[unicodedata.category(character)[0]] += count
    return 1 - kinds["L"] / kinds.total() if kinds else 0.0


def style(texts: list[str]) -> dict[str, float]:
    """The shares of `texts` that have capitals, punctuation and digits."""

    def share(has: Callable[[str], bool]) -> float:
        count = sum(any(has(c) for c in text) for text in texts)
        return count / max(1, len(texts))

    return {
        "case": share(str.isupper),
        "punctuation": share(lambda c: unicodedata.category(c).startswith("P")),
        "digits": share(str.isdigit),
    }


class CharTokenizer:
    """One token per character or unit. `pieces` and what follows are for `decoding.timed`."""

    parted = frozenset()

    def __init__(self, characters: list[str], letters=None):
        self.characters = characters
        self.letters = letters  # an `alphabet.Characters` or a `profile.Profile`
        self.index = {character: i + 1 for i, character in enumerate(characters)}
        self.size = len(characters) + 1
        self.unknown = 0
        self.pieces = ["<unk>", *("\u2581" if c == " " else c for c in characters)]
        self.spaces = {number for number, piece in enumerate(self.pieces) if piece == "\u2581"}
        self.delimiters = self.spaces

    def is_tag(self, token: int) -> bool:
        """Whether the token names a language, as in other tokenizers: none does."""
        return False

    def encode(self, text: str) -> list[int]:
        units = self.letters.cut(text) if self.letters else text
        return [self.index.get(unit, self.unknown) for unit in units]

    def decode(self, tokens: list[int]) -> str:
        written = [self.characters[token - 1] if token else "\ufffd" for token in tokens]
        return self.letters.joined(written) if self.letters else "".join(written)


class SentencePieceTokenizer:
    """SentencePiece characters or BPE. `model`: the serialised model."""

    def __init__(self, model: bytes):
        self.model = model
        self.processor = require("sentencepiece", "the tokenizer").SentencePieceProcessor(
            model_proto=model
        )
        self.size = self.processor.vocab_size()
        self.unknown = self.processor.unk_id()
        self.encode(" ")  # raises what only use would show of a damaged model

    @property
    def pieces(self) -> list[str]:
        """By id, with U+2581 for a space."""
        return [self.processor.id_to_piece(i) for i in range(self.size)]

    def encode(self, text: str) -> list[int]:
        return self.processor.encode(text)

    def decode(self, tokens: list[int]) -> str:
        return self.processor.decode(tokens)


def sentencepiece_messages():
    """The module of SentencePiece's messages, to change a model. Raises `RunError` without it."""
    name = "sentencepiece.sentencepiece_model_pb2"
    return require(name, "the tokenizer's conversion", "sentencepiece protobuf")


def characters_of(texts: Iterable[str]) -> list[str]:
    """The characters of `texts`, the most frequent first."""
    counts = Counter(itertools.chain.from_iterable(texts))
    return sorted(counts, key=lambda character: (-counts[character], character))


def load_vocab_file(path: str, letters=None) -> CharTokenizer:
    """The tokenizer of a vocab.json: {"char2idx": {character: number}}, or only the mapping. Its
    special tokens (<pad>, <blank> ...) are left out, because blank and end belong to the model.
    Raises `UsageError`."""
    content = read_json(path, "--vocab_file")
    mapping = content.get("char2idx", content)
    if not isinstance(mapping, dict):
        raise UsageError(f"--vocab_file {path}: char2idx is not a JSON object")
    numbers = {c: i for c, i in mapping.items() if len(c) == 1 and unicodedata.category(c) != "Cs"}
    are_numbers = all(type(i) is int and i >= 0 for i in numbers.values())
    if not are_numbers or len(set(numbers.values())) < len(numbers):
        raise UsageError(
            f"--vocab_file {path}: it does not map each character to a number of its own"
        )
    if not numbers:
        raise UsageError(f"--vocab_file {path}: no single characters in it")
    return CharTokenizer(sorted(numbers, key=numbers.get), letters)


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> SentencePieceTokenizer:
    """A SentencePiece model of `texts`, which are read twice. The tokens of `kind` "char" are the
    characters of the texts; "bpe" adds longer pieces up to `vocab_size`. Raises `UsageError` if
    `vocab_size` is below the number of characters, and `DataError` if there is too little text."""
    sentencepiece = require("sentencepiece", "the tokenizer")
    characters: set[str] = set()
    for text in texts:
        characters.update(text)
    characters.discard(" ")
    if not characters:
        raise DataError("no tokenizer can be trained: there is no text")
    if kind == "bpe" and vocab_size < len(characters) + 2:  # the unknown token and the space
        letters = f"the {len(characters)} characters of the training texts"
        least = f"it must be at least {len(characters) + 2}"
        raise UsageError(f"--vocab_size {vocab_size} is too few for {letters}: {least}")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts),
            model_writer=model,
            model_type=kind,
            vocab_size=vocab_size if kind == "bpe" else 100_000,
            hard_vocab_limit=False,
            character_coverage=1.0,
            required_chars="".join(sorted(characters)),  # also of texts beyond MOST_SENTENCES
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            unk_surface="\ufffd",
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=kind == "bpe",
            max_sentence_length=100_000,
            num_threads=1,
            minloglevel=2,
            input_sentence_size=MOST_SENTENCES,
            shuffle_input_sentence=False,
        )
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1]
        raise DataError(f"no tokenizer could be trained on these texts: {reason}") from None
    return SentencePieceTokenizer(model.getvalue())
