"""The tokenizer of a Parakeet model: a SentencePiece model (of a `.nemo`) or a tokenizer.json (of
Hugging Face).

Checkpoints hold a tokenizer's state, a dict that fits `STATE` and has at least one of the first two
keys: {"sentencepiece": hexadecimal bytes of the .model, "json": text of tokenizer.json, "files":
{name: text} of FILES}. V is the number of pieces; the model's blank is V and not one of them.

Both forms give the same ids for a text, with these exceptions:
- The text spells out a special token, the unknown token or a byte (<0x41>), which are plain text
  for SentencePiece and tokens for transformers.
- The text consists of one user-defined symbol, which then has no prefix.
- The model has a normalisation table and changes a character before a combining mark: `tokenizers`
  drops the mark.
- Two ways of building the same piece overlap, such as ab+a and a+ba in ababa: SentencePiece prefers
  the left one.

A tokenizer.json of transformers' converter also strips other white space at the end, keeps one
leading space if the model keeps spaces, and puts a space after a user-defined symbol. A decoded
text differs only if it contains U+2581."""

import base64
import json
import math
import re
from collections.abc import Iterable

import numpy as np

from common import files
from common.errors import UsageError, first_line, require
from common.records import mismatch
from speech.writing.text import SentencePieceTokenizer, sentencepiece_messages

SPACE = "\u2581"  # SentencePiece's space
BLANK = "<blank>"
PAD = "<pad>"
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # kinds of pieces
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # types of SentencePiece's models
TAG = re.compile(rf"{SPACE}?<([a-z]{{2,3}}-[A-Z]{{2}})>")  # a piece that names a language
SURFACE = " \u2047 "  # what SentencePiece decodes the unknown token to, unless the model differs
LONGEST_PIECE = 512  # characters of a piece that merges make
# Steps of normalizers, pre-tokenizers and decoders, and the patterns of normalizers. A
# tokenizer.json with other ones is refused, because a pattern can take exponential time.
STEPS = ("Precompiled", "Strip", "Replace", "Metaspace", "ByteFallback", "Fuse")
MOST_STEPS = 32  # of each
RUN_OF_SPACES = " {2,}"
OUTER_SPACES = rf"\A +|[ {SPACE}]+\z"
# What reading a damaged tokenizer.json raises.
DAMAGED = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _are_files(texts) -> bool:
    return set(texts) <= set(FILES) and all(isinstance(text, str) for text in texts.values())


STATE = {"sentencepiece?": str, "json?": str, "files?": _are_files}  # a schema of `mismatch`


# --- the tokenizer --------------------------------------------------------------------------------


class ParakeetTokenizer:
    """Attributes: `size` (V), `unknown` (an id), `pieces` (V strings, with U+2581 for a space),
    `tags` (ids of the pieces that name a language, such as <de-DE>, by their names: they are no
    part of a text), `spaces` (ids of the pieces of spaces alone), `delimiters` (those that are
    decoded to a space when they are alone: they are no part of a word's time, as in NeMo; a
    tokenizer that begins a text with a space decodes them to nothing), `parted` (ids that are
    decoded with spaces around them)."""

    def __init__(self, state: dict, backend):
        self._state = state
        self._backend = backend
        self.pieces = backend.pieces
        self.size = len(self.pieces)
        self.unknown = backend.unknown
        self.tags = {
            match[1]: i for i, piece in enumerate(self.pieces) if (match := TAG.fullmatch(piece))
        }
        self._tag_ids = frozenset(self.tags.values())
        self.spaces = {i for i, piece in enumerate(self.pieces) if not piece.strip(SPACE)}
        self.delimiters = {i for i in self.spaces if self.decode([i]) == " "}
        self.parted = {self.unknown}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, below V, in which special tokens are plain text."""
        return self._backend.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids below V, without special tokens and tags; U+2047, or the model's own
        text, for unknown tokens."""
        return self._backend.decode([int(token) for token in tokens if token not in self._tag_ids])

    def is_tag(self, token: int) -> bool:
        return token in self._tag_ids

    def state(self) -> dict:
        return self._state


class _TokenizerJson:
    """A tokenizer.json in the library `tokenizers`.

    `content`: only its checked parts and its V pieces, without `<blank>`, what follows it, and a
    `<pad>` that was added after the last piece. `ids`: all tokens' ids. `added`: the added tokens
    among the pieces. `normalizer`, `splitter`, `decoder`: their steps. `special`: ids that
    decoding leaves out."""

    def __init__(self, text: str):
        tokenizers = require("tokenizers", "the tokenizer")
        try:
            self._read(json.loads(text))
            "".join(self.pieces).encode()  # half of a surrogate pair is a ValueError
        except DAMAGED:
            raise _refused("its tokenizer.json is damaged") from None
        # What the decoder of transformers' converter lacks. A second replacement has no effect.
        unknown = self.pieces[self.unknown]
        decoder = [*self.decoder, _replace({"String": unknown}, SURFACE)]
        if self.content["model"].get("byte_fallback") and {"type": "ByteFallback"} not in decoder:
            decoder.append({"type": "ByteFallback"})
        content = {**self.content, "decoder": _sequence("decoders", decoder)}
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library has no exception type
            raise _refused(first_line(error)[:100]) from None
        ids = self.tokenizer.get_vocab()
        if any(ids.get(piece) != i for i, piece in enumerate(self.pieces)):
            raise _refused("the ids of its tokenizer.json are not in order")
        self.tokenizer.encode_special_tokens = True  # as plain text
        self.special = {token["id"] for token in self.added if token["special"]} - {self.unknown}

    def _read(self, content) -> None:
        model = content["model"]
        self.is_bpe = model["type"] == "BPE"
        if model.get("dropout"):
            raise _refused("its tokenizer.json has dropout: a text would have other ids each time")
        defaults = {"special": False, "normalized": False}
        added = [{**defaults, **token} for token in content.get("added_tokens") or []]
        self._read_pieces(model, added)
        size = len(self.pieces)
        self.added = [token for token in added if token["id"] < size]
        patterns = (RUN_OF_SPACES, OUTER_SPACES, _prefix_pattern(self.added))
        self.normalizer = _steps(content.get("normalizer"), "normalizers", patterns)
        self.splitter = _steps(content.get("pre_tokenizer"), "pretokenizers")
        self.decoder = _steps(content.get("decoder"), "decoders")
        for step in self.normalizer:
            if step["type"] == "Precompiled":
                _check_table(base64.b64decode(step["precompiled_charsmap"], validate=True))
        if self.is_bpe:
            vocab = {piece: i for piece, i in model["vocab"].items() if i < size}
        else:
            vocab = model["vocab"][:size]
        self.content = _content(
            {**model, "vocab": vocab}, self.added, self.normalizer, self.splitter, self.decoder
        )

    def _read_pieces(self, model: dict, added: list[dict]) -> None:
        vocab = model["vocab"]
        if not self.is_bpe:
            vocab = {piece: i for i, (piece, _) in enumerate(vocab)}
        self.ids = dict(vocab)
        for token in added:
            if self.ids.setdefault(token["content"], token["id"]) != token["id"]:
                raise _refused("a token of its tokenizer.json has two ids")
        blank = self.ids.get(BLANK, math.inf)
        before_blank = {piece: i for piece, i in self.ids.items() if i < blank}
        self.pieces = sorted(before_blank, key=before_blank.get)
        if self.pieces[-1:] == [PAD] and PAD not in vocab:
            self.pieces.pop()
        size = len(self.pieces)
        has_gaps = [before_blank[piece] for piece in self.pieces] != list(range(size))
        has_others = not vocab.keys() <= {*self.pieces, BLANK}
        has_repeats = len(vocab) < len(model["vocab"])
        if has_gaps or has_others or has_repeats or "" in before_blank:
            raise _refused("the ids of its tokenizer.json have gaps, or repeat")
        if self.is_bpe:
            self.unknown = before_blank.get(model["unk_token"], size)
        else:
            self.unknown = model["unk_id"]
        if self.unknown >= size:
            raise _refused("its tokenizer.json lacks the unknown token")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        visible = [i for i in tokens if i not in self.special]
        return self.tokenizer.decode(visible, skip_special_tokens=False)

    def normalise(self, text: str) -> str:
        """`text` as the pieces have it, without a space at its start."""
        normalizer = self.tokenizer.normalizer
        return normalizer.normalize_str(text).removeprefix(SPACE) if normalizer else text


def make_tokenizer(state: dict, vocabulary: int) -> ParakeetTokenizer:
    """The tokenizer of a state. Raises `UsageError` if it is damaged or its size is not the model's
    `vocabulary`."""
    model, content = _open(state)
    if model and content and model.pieces != content.pieces:
        raise _refused("its SentencePiece model and its tokenizer.json have different pieces")
    tokenizer = ParakeetTokenizer(state, model or content)
    if tokenizer.size != vocabulary:
        raise _refused(f"it has {tokenizer.size} pieces and the model {vocabulary}")
    return tokenizer


def pieces(state: dict) -> list[str]:
    """The V pieces of a state, by id. Raises `UsageError`."""
    model, content = _open(state)
    return (model or content).pieces


def sentencepiece_model(state: dict) -> bytes:
    """The SentencePiece .model of a state. Raises `UsageError` if it has none."""
    model, _ = _open(state)
    if model is None:
        raise UsageError(
            "a .nemo needs a SentencePiece model, and this model has a tokenizer.json only: write"
            " the form hf, or fine-tune the .nemo of the released model"
        )
    return model.model


def pad_pieces(model: bytes, count: int) -> bytes:
    """A SentencePiece .model with `count` pieces: `model`'s, and pieces that no text contains."""
    proto = sentencepiece_messages().ModelProto.FromString(model)
    lowest = min(piece.score for piece in proto.pieces)
    for number in range(count - len(proto.pieces)):
        proto.pieces.add(piece=f"<unused_{number}>", score=lowest - 1 - number)
    proto.trainer_spec.vocab_size = count
    return proto.SerializeToString()


def read_as(state: dict, characters: Iterable[str]) -> dict[str, str]:
    """{character: what the model's normalisation makes of it}, such as 1\u20442 for \u00bd."""
    model, content = _open(state)
    normalise = (model or content).normalise
    return {character: normalise(character) for character in characters}


def add_pieces(state: dict, added: Iterable[str]) -> dict:
    """The state with user-defined pieces after those of `state`, which keep their ids. The ids of a
    text without these pieces stay, too. Raises `UsageError` for a piece that the model's
    normalisation changes: a text would never have it."""
    added = [*added]
    for piece, normalised in read_as(state, added).items():
        if normalised != piece:
            raise UsageError(
                f"--add_tokens: the piece {piece!r} cannot be added: the model's vocabulary reads"
                f" it as {normalised!r}"
            )
    model, content = _open(state)
    if model is None:
        return {"json": files.json_text(_with_symbols(content, added))}
    proto = sentencepiece_messages().ModelProto.FromString(model.model)
    for piece in added:
        proto.pieces.add(piece=piece, type=USER_DEFINED, score=0.0)
    proto.trainer_spec.vocab_size = len(proto.pieces)
    return {"sentencepiece": proto.SerializeToString(deterministic=True).hex()}


def hf_files(state: dict) -> dict[str, str]:
    """The tokenizer files of a Hugging Face folder, name to text, for transformers'
    ParakeetTokenizer and AutoTokenizer. A tokenizer.json of the state is unchanged if `<blank>` has
    the id V in it. The pad token is a piece `<pad>`, or `<blank>` if there is none. Raises
    `UsageError`."""
    model, content = _open(state)
    backend = content or model
    names = backend.pieces
    config = {
        "tokenizer_class": "ParakeetTokenizer",
        "processor_class": "ParakeetProcessor",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "unk_token": names[backend.unknown],
        "pad_token": PAD if PAD in names else BLANK,
    }
    result = {"tokenizer.json": "", "tokenizer_config.json": files.json_text(config)}
    if content is None:
        result["tokenizer.json"] = files.json_text(_to_json(model))
    elif content.ids.get(BLANK) == len(names):
        result["tokenizer.json"] = state["json"]
        result.update(state.get("files", {}))
    else:
        added = [*content.added, _added(len(names), BLANK)]
        result["tokenizer.json"] = files.json_text({**content.content, "added_tokens": added})
    return result


def _open(state: dict) -> tuple[SentencePieceTokenizer | None, _TokenizerJson | None]:
    """The state's SentencePiece model and its tokenizer.json, at least one of them."""
    if reason := mismatch(state, STATE, "it"):
        raise _refused(reason)
    if "sentencepiece" not in state and "json" not in state:
        raise _refused("it is neither a SentencePiece model nor a tokenizer.json")
    model = None
    if "sentencepiece" in state:
        model = _load_model(state["sentencepiece"])
    content = None
    if "json" in state:
        content = _TokenizerJson(state["json"])
    return model, content


def _refused(reason: str) -> UsageError:
    return UsageError(
        f"the model's tokenizer cannot be used ({reason}): take the tokenizer files of the model"
        " again"
    )


# --- SentencePiece --------------------------------------------------------------------------------


class _Pieces(SentencePieceTokenizer):
    def normalise(self, text: str) -> str:
        """`text` as the pieces have it, without a space at its start."""
        return self.processor.normalize(text).removeprefix(SPACE)


def _load_model(model: str) -> _Pieces:
    """`model`: its bytes in hexadecimal."""
    try:
        tokenizer = _Pieces(bytes.fromhex(model))
        "".join(tokenizer.pieces)  # ones that are not UTF-8 are a ValueError
        return tokenizer
    except (RuntimeError, ValueError) as error:
        raise _refused(first_line(error)[:100]) from None


def _merges(model_pieces) -> list[tuple[str, str]]:
    """All pairs of pieces that make another one, in SentencePiece's order of preference."""
    products = [piece for piece in model_pieces if piece.type == NORMAL]
    products.sort(key=lambda piece: -piece.score)
    names = [piece.piece for piece in products]
    if max(map(len, names), default=0) > LONGEST_PIECE:
        raise _refused(f"it has a piece of more than {LONGEST_PIECE} characters")
    known = set(names)
    pairs = []
    for name in names:
        for cut in range(len(name) - 1, 0, -1):
            pair = (name[:cut], name[cut:])
            if known.issuperset(pair):
                pairs.append(pair)
    return pairs


# --- tokenizer.json -------------------------------------------------------------------------------


def _check_table(table: bytes) -> None:
    """Raises `ValueError` if references in this normalisation table are not sound: `tokenizers`
    follows them unchecked. The table is the size of a trie, the trie (darts-clone: 32-bit units),
    and the texts, each ending in a zero, that its leaves point at."""
    size = int.from_bytes(table[:4], "little")
    trie = table[4 : 4 + size]
    texts = table[4 + size :]
    texts.decode()
    units = np.frombuffer(trie, "<u4").astype(np.int64)
    inner = np.flatnonzero(units < 1 << 31)
    children = inner ^ ((units[inner] >> 10) << ((units[inner] & 0x200) >> 6))
    has_leaf = (units[inner] >> 8 & 1).astype(bool)
    leaves = units[children[has_leaf & (children < len(units))]] & ((1 << 31) - 1)
    starts = np.flatnonzero(np.frombuffer(texts, np.uint8) & 0xC0 != 0x80)  # of characters
    are_inside = children.max(initial=0) < len(units) and np.isin(leaves, starts).all()
    if not size or size % 1024 or texts[-1:] != b"\0" or not are_inside:
        raise ValueError("the normalisation table is damaged")


def _prefix_pattern(added: list[dict]) -> str:
    """The start of every text except the empty one and user-defined symbols, which the library also
    normalises by themselves, to look for them in normalised text."""
    symbols = "|".join(re.escape(token["content"]) for token in added if token["normalized"])
    return rf"\A(?!(?:{symbols})?\z)"


def _with_symbols(source: _TokenizerJson, added: list[str]) -> dict:
    """The content of a tokenizer.json with further user-defined pieces, then `<blank>`. A space is
    put before the first word of a text only, not after every one of these pieces, too."""
    size = len(source.pieces)
    symbols = [_added(size + i, piece, False, True) for i, piece in enumerate(added)]
    model = source.content["model"]
    if source.is_bpe:
        vocab = {**model["vocab"], **{token["content"]: token["id"] for token in symbols}}
    else:
        vocab = [*model["vocab"], *([piece, 0.0] for piece in added)]
    everything = [*source.added, *symbols]
    normalizer = []
    for step in source.normalizer:
        if step.get("pattern") == {"Regex": _prefix_pattern(source.added)}:
            step = _replace({"Regex": _prefix_pattern(everything)}, SPACE)
        normalizer.append(step)
    splitter = []
    for step in source.splitter:
        if step.get("prepend_scheme", "always") == "always" and step.get("add_prefix_space", True):
            step = {**step, "prepend_scheme": "first"}
        splitter.append(step)
    everything.append(_added(size + len(added), BLANK))
    model = {**model, "vocab": vocab}
    return _content(model, everything, normalizer, splitter, source.decoder)


def _steps(component, plural: str, patterns: tuple[str, ...] = ()) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder. Raises `UsageError` for one that
    Parakeet's do not have, and for other `patterns`."""
    waiting = [component]
    steps = []
    while waiting:
        step = waiting.pop()
        if step is None:
            continue
        if step["type"] == "Sequence":
            waiting += reversed(step[plural])
            continue
        pattern = step.get("pattern", {}).get("Regex")
        steps.append(step)
        is_known = step["type"] in STEPS and pattern in (None, *patterns)
        if not is_known or len(steps) > MOST_STEPS:
            raise _refused(
                f"its tokenizer.json has a step that Parakeet's do not have: {str(step)[:80]!r}"
            )
    return steps


def _to_json(tokenizer: SentencePieceTokenizer) -> dict:
    """The content of a tokenizer.json with `<blank>` after the pieces."""
    try:
        proto = sentencepiece_messages().ModelProto.FromString(tokenizer.model)
        surface = proto.trainer_spec.unk_surface
    except Exception as error:  # protobuf has several, and text can be something else than UTF-8
        raise _refused(first_line(error)[:100]) from None
    _check_features(proto)
    added = []
    for number, piece in enumerate(proto.pieces):
        if piece.type not in (NORMAL, BYTE):
            is_symbol = piece.type == USER_DEFINED
            is_special = not is_symbol or piece.piece == PAD
            added.append(_added(number, piece.piece, is_special, is_symbol))
    spec = proto.normalizer_spec
    normalizer = []
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizer.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        normalizer.append(_replace({"Regex": OUTER_SPACES}, ""))
        normalizer.append(_replace({"Regex": RUN_OF_SPACES}, " "))
    if spec.add_dummy_prefix:
        normalizer.append(_replace({"Regex": _prefix_pattern(added)}, SPACE))
    normalizer.append(_replace({"String": " "}, SPACE))
    unknown = tokenizer.pieces[tokenizer.unknown]
    has_bytes = any(piece.type == BYTE for piece in proto.pieces)
    decoder = [_replace({"String": SPACE}, " "), _replace({"String": unknown}, surface)]
    if has_bytes:
        decoder.append({"type": "ByteFallback"})
    decoder.append({"type": "Fuse"})
    if spec.add_dummy_prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    added.append(_added(len(proto.pieces), BLANK))
    return _content(_json_model(proto, tokenizer, has_bytes), added, normalizer, [], decoder)


def _check_features(proto) -> None:
    """Raises `UsageError` for a SentencePiece model that no tokenizer.json can express."""
    trainer = proto.trainer_spec
    unsupported = {
        "pieces of words": trainer.model_type == WORD,
        "unused pieces": any(piece.type == UNUSED for piece in proto.pieces),
        "spaces at the ends of words": trainer.treat_whitespace_as_suffix,
        "plain spaces": not proto.normalizer_spec.escape_whitespaces,
        "a denormalizer": proto.denormalizer_spec.precompiled_charsmap,
        f"a piece {BLANK}": any(piece.piece == BLANK for piece in proto.pieces),
        "scores that are not finite": not all(math.isfinite(piece.score) for piece in proto.pieces),
    }
    for name, is_present in unsupported.items():
        if is_present:
            raise _refused(f"a tokenizer.json cannot express {name}")


def _json_model(proto, tokenizer: SentencePieceTokenizer, has_bytes: bool) -> dict:
    if proto.trainer_spec.model_type == UNIGRAM:
        return {
            "type": "Unigram",
            "unk_id": tokenizer.unknown,
            "vocab": [[piece.piece, piece.score] for piece in proto.pieces],
            "byte_fallback": has_bytes,
        }
    merges = []
    if proto.trainer_spec.model_type == BPE:
        merges = [list(pair) for pair in _merges(proto.pieces)]
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": tokenizer.pieces[tokenizer.unknown],
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": has_bytes,
        "ignore_merges": False,
        "vocab": {name: i for i, name in enumerate(tokenizer.pieces)},
        "merges": merges,
    }


def _content(
    model: dict,
    added: list[dict],
    normalizer: list[dict],
    splitter: list[dict],
    decoder: list[dict],
) -> dict:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": _sequence("normalizers", normalizer),
        "pre_tokenizer": _sequence("pretokenizers", splitter),
        "post_processor": None,
        "decoder": _sequence("decoders", decoder),
        "model": model,
    }


def _sequence(plural: str, steps: list[dict]) -> dict | None:
    return {"type": "Sequence", plural: steps} if steps else None


def _added(number: int, name: str, special: bool = True, normalized: bool = False) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": number, "content": name, **flags, "normalized": normalized, "special": special}


def _replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}
