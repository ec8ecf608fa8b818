"""The tokenizer of a wav2vec2 model with a CTC head: single characters, in omniASR's SentencePiece
file or in Hugging Face's vocab.json.

Checkpoints hold a tokenizer's state, a dict that fits one of `STATE`. V is the number of pieces,
and the blank is one of them. Ids are those of SentencePiece and of transformers'
Wav2Vec2CTCTokenizer, with these exceptions:
- A text neither begins nor ends with a space, and has no two in a row. SentencePiece may put one
  at the beginning, which the model would learn to write.
- The text may spell out a special token or have the delimiter in it. These are plain text here.
- transformers drops the spaces around a piece of several characters."""

from collections.abc import Iterable

from common.errors import UsageError, first_line
from common.records import mismatch
from speech.writing import profile
from speech.writing.text import SentencePieceTokenizer, sentencepiece_messages
from speech.writing.unknown import not_encoded

SPACE = "\u2581"  # SentencePiece's space
UNKNOWN = "\ufffd"  # what the unknown piece is decoded to
SPECIAL = ("<s>", "</s>", "<pad>", "<unk>")  # no part of a text
MOST = 65_536  # pieces
LONGEST = 64  # characters of a piece
NORMAL = 1  # kind of a SentencePiece piece

# --- schemas of common.records.mismatch -----------------------------------------------------------


def _are_pieces(pieces) -> bool:
    is_list = isinstance(pieces, list) and 0 < len(pieces) <= MOST
    # (Half of a surrogate pair cannot be encoded, which is an error.)
    are_short = is_list and all(piece.encode() and len(piece) <= LONGEST for piece in pieces)
    return are_short and len(set(pieces)) == len(pieces)


_ID = range(MOST)
STATE = (
    {"kind": {"sentencepiece"}, "model": str},
    {
        "kind": {"characters"}, "pieces": _are_pieces, "delimiter": str, "blank": _ID,
        "unknown": (type(None), _ID), "lower": bool, "profile?": profile.are_rows,
    },
)  # fmt: skip

# --- the tokenizer --------------------------------------------------------------------------------


class Wav2Vec2Tokenizer:
    """Attributes: `kind` ("sentencepiece" or "characters"), `size` (V), `blank` (an id), `unknown`
    (an id, or None: then what is unknown is left out), `pieces` (V strings, with U+2581 for the
    space), `is_lower` (whether its capitals stand for a text in lower case), `characters` (what the
    other pieces write), `profile` (the `profile.Profile` whose units they are, or None).

    `spaces`, `delimiters` and `parted` are for `speech.decoding.words`."""

    parted = frozenset()

    def __init__(self, state: dict):
        """Raises `UsageError` for a damaged state."""
        schema = STATE[isinstance(state, dict) and state.get("kind") == "characters"]
        if reason := mismatch(state, schema, "it"):
            raise _refused(reason)
        self._state = state
        self.kind = state["kind"]
        backend = _Characters(state) if self.kind == "characters" else _Model(state["model"])
        self.encode = backend.encode
        self.lacking = backend.lacking
        self.pieces = backend.pieces
        self.blank = backend.blank
        self.unknown = backend.unknown
        self.is_lower = self.kind == "characters" and state["lower"]
        self.profile = profile.of_rows(state.get("profile", []))
        self.size = len(self.pieces)
        self._written = ["" if piece in SPECIAL else piece for piece in self.pieces]
        self._written[self.blank] = ""
        if self.unknown is not None:
            self._written[self.unknown] = UNKNOWN
        self.characters = {self.decode([number]) for number in range(self.size)} - {"", UNKNOWN}
        self.spaces = {number for number, piece in enumerate(self.pieces) if piece == SPACE}
        self.delimiters = self.spaces

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids below V whose repetitions are joined, with single spaces, without blanks
        and special tokens; U+FFFD for the unknown piece."""
        text = "".join(self._written[token] for token in tokens)
        text = " ".join(text.replace(SPACE, " ").split())
        if self.profile:
            text = profile.composed(text)
        return text.lower() if self.is_lower else text

    def numbers(self) -> dict[str, int]:
        """The ids of the pieces that write something, the space among them."""
        pieces = {piece.replace(SPACE, " "): i for i, piece in enumerate(self._written)}
        return {piece: i for piece, i in pieces.items() if piece not in ("", UNKNOWN)}

    def is_tag(self, token: int) -> bool:
        """Whether the piece names a language, as in other families: none does."""
        return False

    def state(self) -> dict:
        return self._state


class _Model:
    """A SentencePiece file."""

    def __init__(self, model: str):
        try:
            self.model = SentencePieceTokenizer(bytes.fromhex(model))
            "".join(self.model.pieces)  # ones that are not UTF-8 are a ValueError
        except (RuntimeError, ValueError) as error:
            raise _refused(first_line(error)[:100]) from None
        self.pieces = self.model.pieces
        self.unknown = self.model.unknown
        self.blank = self.model.processor.bos_id()
        if self.blank < 0 or not _are_pieces(self.pieces):
            raise _refused("it lacks the piece <s>, which is the blank, or repeats a piece")
        self.lacking = not_encoded(self)

    def encode(self, text: str) -> list[int]:
        tokens = self.model.encode(" ".join(text.split()))
        while tokens and self.pieces[tokens[0]] == SPACE:
            tokens = tokens[1:]
        return tokens


class _Characters:
    """A vocab.json."""

    def __init__(self, state: dict):
        self.pieces = [SPACE if piece == state["delimiter"] else piece for piece in state["pieces"]]
        self.blank = state["blank"]
        self.unknown = state["unknown"]
        if max(self.blank, self.unknown or 0) >= len(self.pieces) or self.blank == self.unknown:
            raise _refused("its blank or its unknown token is not one of its pieces")
        if not _are_pieces(self.pieces):
            raise _refused("it has two pieces for the space")
        self.is_lower = state["lower"]
        special = {*SPECIAL, self.pieces[self.blank]}
        if self.unknown is not None:
            special.add(self.pieces[self.unknown])
        self.ids = {piece: i for i, piece in enumerate(self.pieces) if piece not in special}
        self.space = self.ids.pop(SPACE, None)
        self.lengths = sorted({1, *map(len, self.ids)}, reverse=True)
        self.profile = profile.of_rows(state.get("profile", []))

    def cut(self, text: str) -> list[list[str]]:
        """The words of a text, each as its pieces, the longest first, or single characters."""
        words = (text.upper() if self.is_lower else text).split()
        if self.profile:
            return [self.profile.cut(word) for word in words]
        if self.lengths == [1]:
            return [[*word] for word in words]
        parts = []
        for word in words:
            parts.append([])
            place = 0
            while place < len(word):
                candidates = (word[place : place + length] for length in self.lengths)
                part = next((part for part in candidates if part in self.ids), word[place])
                parts[-1].append(part)
                place += len(part)
        return parts

    def encode(self, text: str) -> list[int]:
        tokens = []
        for word in self.cut(text):
            numbers = [self.ids.get(part, self.unknown) for part in word]
            numbers = [number for number in numbers if number is not None]
            if tokens and numbers and self.space is not None:
                tokens.append(self.space)
            tokens += numbers
        return tokens

    def lacking(self, text: str) -> list[str]:
        return [part for word in self.cut(text) for part in word if part not in self.ids]


def make_tokenizer(state: dict, vocabulary: int) -> Wav2Vec2Tokenizer:
    """The tokenizer of a state. Raises `UsageError` if it is damaged or its size is not the model's
    `vocabulary`."""
    tokenizer = Wav2Vec2Tokenizer(state)
    if tokenizer.size != vocabulary:
        raise _refused(f"it has {tokenizer.size} pieces and the model {vocabulary}")
    return tokenizer


def with_added(state: dict, characters: Iterable[str]) -> dict:
    """The state with further characters after its pieces, which keep their ids. Raises `UsageError`
    for one that the model's normalisation changes: a text would never have it."""
    added = [*characters]
    if state["kind"] == "characters":
        return {**state, "pieces": [*state["pieces"], *added]}
    old = _Model(state["model"]).model
    proto = sentencepiece_messages().ModelProto.FromString(old.model)
    lowest = min(piece.score for piece in proto.pieces)
    for number, character in enumerate(added):
        read = old.processor.normalize(character).removeprefix(SPACE)
        if read != character:
            raise UsageError(
                f"the character {character!r} cannot be added: the model's vocabulary reads it as"
                f" {read!r}; correct the texts, or make a vocabulary of their own"
            )
        proto.pieces.add(piece=character, type=NORMAL, score=lowest - 1 - number)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return {**state, "model": proto.SerializeToString(deterministic=True).hex()}


def _refused(reason: str) -> UsageError:
    return UsageError(
        f"the model's tokenizer cannot be used ({reason}): take the tokenizer files of the model"
        " again"
    )
