"""The tokenizer of a Parakeet model: a SentencePiece model (`.nemo`) or a tokenizer.json (Hugging Face), and both conversions.

A tokenizer is kept in checkpoints as its state, a dict that fits `STATE`:
{"sentencepiece": hexadecimal bytes of the .model, "json": text of tokenizer.json, "files": {name: text} of FILES}.
It has at least one of the first two. V is the number of pieces; the model's blank is V and not one of them.

Both forms give the same ids for a text, unless
- it spells out a special token, the unknown token or a byte (<0x41>), which are plain text for SentencePiece and tokens for
  transformers, or it consists of one user-defined symbol, which then has no prefix;
- the model has a normalisation table and changes a character that a combining mark follows: `tokenizers` drops the mark;
- two ways of building the same piece overlap, such as ab+a and a+ba in ababa: SentencePiece prefers the left one.
If transformers' own converter made the tokenizer.json, it also strips other white space at the end, keeps one leading space
if the model keeps spaces, and puts a space between a user-defined symbol and the text after it. A decoded text differs only
if the text has U+2581 itself.
"""

import base64
import itertools
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from common.checkpoint import COUNT, NUMBER, mismatch
from common.errors import RunError, UsageError, first_line, require
from speech.text import SentencePieceTokenizer

SPACE = "\u2581"
BLANK, PAD = "<blank>", "<pad>"
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # types of SentencePiece's pieces
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # types of its models
LONGEST_PIECE = 512  # characters of a piece that merges make
MOST_STEPS = 32  # of a normalizer or decoder
# Patterns of normalizers. A tokenizer.json with other ones is refused, because a pattern can take exponential time.
RUN_OF_SPACES = " {2,}"
OUTER_SPACES = rf"\A +|[ {SPACE}]+\z"
STATE = {
    "sentencepiece?": str, "json?": str,
    "files?": lambda files: {*files} <= {*FILES} and all(isinstance(text, str) for text in files.values()),
}  # fmt: skip
_ABSENT = (type(None), lambda value: value in ("", False))
_FLAG = (type(None), bool)
_NAME = (lambda text: isinstance(text, str) and text,)
_ADDED = {
    "id": COUNT, "content": _NAME, **dict.fromkeys(("special?", "normalized?"), bool),
    **dict.fromkeys(("lstrip?", "rstrip?", "single_word?"), _ABSENT),
}  # fmt: skip
_BPE = {
    "type": {"BPE"}, "unk_token?": (type(None), str), **dict.fromkeys(("byte_fallback?", "fuse_unk?"), _FLAG),
    **dict.fromkeys(("dropout?", "continuing_subword_prefix?", "end_of_word_suffix?", "ignore_merges?"), _ABSENT),
    "vocab": lambda vocab: all(type(i) is int and i >= 0 for i in vocab.values()),
    "merges": [lambda pair: len(pair.split(" ") if isinstance(pair, str) else pair) == 2 and "".join(pair)],
}  # fmt: skip
_UNIGRAM = {
    "type": {"Unigram"}, "unk_id?": (type(None), COUNT), "byte_fallback?": _FLAG,
    "vocab": [lambda pair: len(pair) == 2 and isinstance(pair[0], str) and isinstance(pair[1], NUMBER) and math.isfinite(pair[1])],
}  # fmt: skip
_JSON = {"model": (_BPE, _UNIGRAM), "added_tokens?": [_ADDED]}
_METASPACE = {
    "type": {"Metaspace"}, "replacement": {SPACE}, "prepend_scheme?": {"always", "first", "never"},
    "add_prefix_space?": bool, "split?": bool,
}  # fmt: skip
_NORMALIZERS = (
    {"type": {"Precompiled"}, "precompiled_charsmap": str},
    {"type": {"Strip"}, "strip_left": bool, "strip_right": bool},
    {"type": {"Prepend"}, "prepend": {SPACE}},
    {"type": {"Replace"}, "pattern": {"String": {" "}}, "content": {SPACE}},
    {"type": {"Replace"}, "pattern": {"Regex": {RUN_OF_SPACES}}, "content": {SPACE, " "}},
    {"type": {"Replace"}, "pattern": {"Regex": {OUTER_SPACES}}, "content": {""}},
)
_DECODERS = (
    {"type": {"ByteFallback", "Fuse"}},
    {"type": {"Strip"}, "content": {" "}, "start": COUNT, "stop": COUNT},
    {"type": {"Replace"}, "pattern": {"String": _NAME}, "content": lambda text: isinstance(text, str) and len(text) <= 64},
    _METASPACE,
)  # fmt: skip


@dataclass(frozen=True)
class Description:
    """A tokenizer independent of its form. `merges` (pairs, by priority) are those of a BPE, and `scores` those of Unigram."""

    model_type: int
    pieces: list[str]
    types: list[int]
    scores: list[float]
    merges: list[tuple[str, str]]
    unknown: int
    unk_surface: str = " \u2047 "  # what SentencePiece decodes the unknown token to
    charsmap: bytes = b""
    dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True

    @property
    def byte_fallback(self) -> bool:
        return BYTE in self.types


class ParakeetTokenizer:
    """Attributes: `size` (V), `unknown` (an id, or None), `pieces` (V strings, with U+2581 for a space), `spaces` (ids of the
    pieces of spaces alone)."""

    def __init__(self, state: dict, backend):
        self._state = state
        self._backend = backend
        self.pieces = backend.pieces
        self.size = len(self.pieces)
        self.unknown = backend.unknown
        self.spaces = {i for i, piece in enumerate(self.pieces) if not piece.strip(SPACE)}

    def encode(self, text: str) -> list[int]:
        """The ids of `text`, below V, in which special tokens are plain text."""
        return self._backend.encode(text)

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of ids below V, without special tokens; U+2047 or what the model has instead for the unknown token."""
        return self._backend.decode([int(token) for token in tokens])

    def state(self) -> dict:
        return self._state


class _TokenizerJson:
    """A tokenizer.json in the library `tokenizers`, of which only the checked parts that concern plain text are kept.

    `pieces`: neither `<blank>` nor what follows it, nor a `<pad>` that was added after the last piece, are among them."""

    def __init__(self, text: str):
        tokenizers = require("tokenizers", "the tokenizer")
        try:
            self._read(json.loads(text))
        except (ValueError, RecursionError):
            raise _refused("its tokenizer.json is not valid JSON") from None
        size, unknown = len(self.pieces), self.unknown_piece
        added = [{**token, "special": token["special"] or token["id"] >= size} for token in self.added]
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps({**self.content, "added_tokens": added}))
        except Exception as error:  # the library has no exception type of its own
            raise _refused(first_line(error)[:100]) from None
        ids = self.tokenizer.get_vocab()
        if any(ids.get(piece) != i for i, piece in enumerate(self.pieces)):
            raise _refused("the ids of its tokenizer.json are not in order")
        self.tokenizer.encode_special_tokens = True  # as plain text
        self.special = {token["id"] for token in added if token["special"] and token["content"] != unknown}
        self.unknown = None if unknown is None else self.pieces.index(unknown)
        # What the decoder of transformers' converter lacks. A second replacement has no effect.
        steps = [self.tokenizer.decoder] if self.decoder else []
        if unknown is not None:
            steps.append(tokenizers.decoders.Replace(unknown, Description.unk_surface))
        if self.content["model"].get("byte_fallback") and {"type": "ByteFallback"} not in self.decoder:
            steps.append(tokenizers.decoders.ByteFallback())
        self.tokenizer.decoder = tokenizers.decoders.Sequence(steps)

    def _read(self, content) -> None:
        if reason := mismatch(content, _JSON, "tokenizer.json"):
            raise _refused(reason)
        model = content["model"]
        self.is_bpe = model["type"] == "BPE"
        self.added = [{"special": False, "normalized": False, **token} for token in content.get("added_tokens") or []]
        symbols = [token["content"] for token in self.added if token["normalized"]]
        prefix = {"type": {"Replace"}, "pattern": {"Regex": {_prefix_pattern(symbols)}}, "content": {SPACE}}
        self.normalizer = _steps(content.get("normalizer"), "normalizers", (*_NORMALIZERS, prefix))
        self.splitter = _steps(content.get("pre_tokenizer"), "pretokenizers", (_METASPACE,))
        self.decoder = _steps(content.get("decoder"), "decoders", _DECODERS)
        tables = [step["precompiled_charsmap"] for step in self.normalizer if step["type"] == "Precompiled"]
        if len(tables) > 1:
            raise _refused("its tokenizer.json has several normalisation tables")
        self.charsmap = _checked_table(base64.b64decode(tables[0], validate=True)) if tables else b""
        self.content = {
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": self.added,
            "normalizer": _sequence("normalizers", self.normalizer), "post_processor": None,
            "pre_tokenizer": _sequence("pretokenizers", self.splitter), "decoder": _sequence("decoders", self.decoder),
            "model": model,
        }  # fmt: skip
        vocab = model["vocab"] if self.is_bpe else {piece: i for i, (piece, _) in enumerate(model["vocab"])}
        self.ids = dict(vocab)
        if any(self.ids.setdefault(token["content"], token["id"]) != token["id"] for token in self.added):
            raise _refused("a token of its tokenizer.json has two ids")
        own = {piece: i for piece, i in self.ids.items() if i < self.ids.get(BLANK, math.inf)}
        self.pieces = sorted(own, key=own.get)
        if self.pieces[-1:] == [PAD] and PAD not in vocab:
            self.pieces.pop()
        size = len(self.pieces)
        repeats = not self.is_bpe and len(vocab) < len(model["vocab"])
        if (
            not size
            or "" in own
            or repeats
            or [*map(own.get, self.pieces)] != [*range(size)]
            or not vocab.keys() <= {*self.pieces, BLANK}
        ):
            raise _refused("the ids of its tokenizer.json have gaps, or repeat")
        unknown = model.get("unk_token" if self.is_bpe else "unk_id")
        if not self.is_bpe and unknown is not None:
            unknown = self.pieces[unknown] if unknown < size else ""
        if unknown not in ((None, *self.pieces) if self.is_bpe else self.pieces):
            raise _refused("its tokenizer.json lacks the unknown token")
        self.unknown_piece = unknown
        "".join(self.pieces).encode()  # half of a surrogate pair is a ValueError

    def encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        return [i for i in ids if i < len(self.pieces)]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode([i for i in tokens if i not in self.special], skip_special_tokens=False)


def make_tokenizer(state: dict, vocabulary: int) -> ParakeetTokenizer:
    """The tokenizer of a state. Raises `UsageError` if it is damaged or has not as many pieces as the model, `vocabulary`."""
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
    """The SentencePiece .model of a state, converted from tokenizer.json if it has none. Raises `UsageError` if a .model
    cannot express that tokenizer."""
    model, content = _open(state)
    return model.model if model else _load_model(_to_model(_from_json(content))).model


def pad_pieces(model: bytes, count: int) -> bytes:
    """A SentencePiece .model with `count` pieces: those of `model`, and others that no text has."""
    proto = _messages().ModelProto.FromString(model)
    lowest = min(piece.score for piece in proto.pieces)
    for number in range(count - len(proto.pieces)):
        proto.pieces.add(piece=f"<unused_{number}>", score=lowest - 1 - number)
    proto.trainer_spec.vocab_size = count
    return proto.SerializeToString()


def hf_files(state: dict) -> dict[str, str]:
    """The tokenizer files of a Hugging Face folder, name to text, for ParakeetTokenizer and AutoTokenizer of transformers.
    A tokenizer.json of the state is unchanged if `<blank>` has the id V in it. The pad token is a piece `<pad>`, or `<blank>`
    if there is none. Raises `UsageError`."""
    model, content = _open(state)
    others = {}
    if content is None:
        description = _from_model(model.model)
        names, unknown = description.pieces, description.pieces[description.unknown]
        text = _text(_to_json(description))
    else:
        names, unknown, text = content.pieces, content.unknown_piece, state["json"]
        if content.ids.get(BLANK) == len(names):
            others = state.get("files", {})
        else:
            text = _text(_with_blank(content))
    config = {
        "tokenizer_class": "ParakeetTokenizer", "processor_class": "ParakeetProcessor", "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000, "unk_token": unknown, "pad_token": PAD if PAD in names else BLANK,
    }  # fmt: skip
    return {"tokenizer.json": text, "tokenizer_config.json": _text(config), **others}


def _text(content: dict) -> str:
    return json.dumps(content, ensure_ascii=False, indent=1) + "\n"


def _open(state: dict) -> tuple[SentencePieceTokenizer | None, _TokenizerJson | None]:
    if reason := mismatch(state, STATE, "it"):
        raise _refused(reason)
    if not {"sentencepiece", "json"} & state.keys():
        raise _refused("it is neither a SentencePiece model nor a tokenizer.json")
    model = _load_model(state["sentencepiece"]) if "sentencepiece" in state else None
    return model, _TokenizerJson(state["json"]) if "json" in state else None


def _refused(reason: str) -> UsageError:
    return UsageError(f"the model's tokenizer cannot be used ({reason}): take the tokenizer files of the model again")


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def _load_model(model: str | bytes) -> SentencePieceTokenizer:
    """`model`: bytes, or these in hexadecimal."""
    try:
        tokenizer = SentencePieceTokenizer(model if isinstance(model, bytes) else bytes.fromhex(model))
        "".join(tokenizer.pieces)  # ones that are not UTF-8 are a ValueError
        return tokenizer
    except (RuntimeError, ValueError) as error:
        raise _refused(first_line(error)[:100]) from None


def _checked_table(table: bytes) -> bytes:
    """`table`, if all references within this normalisation table are sound; `tokenizers` follows them unchecked. It is
    the size of a trie, the trie (darts-clone: 32-bit units), and the texts, each ending in a zero, that its leaves point at."""
    size, start = int.from_bytes(table[:4], "little"), 4
    texts = table[start + size :]
    try:
        texts.decode()
        units = np.frombuffer(table[start : start + size], "<u4").astype(np.int64)
    except ValueError:
        size = 0
    if size == 0 or len(table) <= start + size or size % 1024 or texts[-1]:
        raise _refused("its normalisation table is damaged")
    inner = np.flatnonzero(units < 1 << 31)
    children = inner ^ ((units[inner] >> 10) << ((units[inner] & 0x200) >> 6))
    leaves = children[(units[inner] >> 8 & 1).astype(bool) & (children < len(units))]
    targets = units[leaves] & ((1 << 31) - 1)
    is_start = np.frombuffer(texts, np.uint8) & 0xC0 != 0x80
    if children.max(initial=0) >= len(units) or targets.max(initial=0) >= len(texts) or not is_start[targets].all():
        raise _refused("its normalisation table is damaged")
    return table


def _messages():
    require("sentencepiece", "the tokenizer")
    try:
        return require("sentencepiece.sentencepiece_model_pb2", "the tokenizer's conversion")
    except RunError as error:
        if "google" not in str(error):
            raise
        raise RunError("the tokenizer's conversion needs the package protobuf: pip install protobuf") from None


def _from_model(model: bytes) -> Description:
    messages = _messages()
    try:
        proto = messages.ModelProto.FromString(model)
        surface = proto.trainer_spec.unk_surface
    except Exception as error:  # protobuf has several, and text can be something else than UTF-8
        raise _refused(first_line(error)[:100]) from None
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    types, scores = [piece.type for piece in proto.pieces], [piece.score for piece in proto.pieces]
    unsupported = {
        "pieces of words": trainer.model_type == WORD, "unused pieces": UNUSED in types,
        "spaces at the ends of words": trainer.treat_whitespace_as_suffix, "plain spaces": not normalizer.escape_whitespaces,
        "a denormalizer": proto.denormalizer_spec.precompiled_charsmap,
        "scores that are not finite": not all(map(math.isfinite, scores)),
    }  # fmt: skip
    if reason := next((name for name, is_present in unsupported.items() if is_present), None):
        raise _refused(f"a tokenizer.json cannot express {reason}")
    names = [piece.piece for piece in proto.pieces]
    return Description(
        trainer.model_type, names, types, scores, _merges(names, types, scores) if trainer.model_type == BPE else [],
        types.index(UNKNOWN), surface, normalizer.precompiled_charsmap, normalizer.add_dummy_prefix,
        normalizer.remove_extra_whitespaces,
    )  # fmt: skip


def _merges(names: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """All pairs of pieces that make another one, in the order in which SentencePiece prefers them."""
    normal = {name for name, kind in zip(names, types, strict=True) if kind == NORMAL}
    if max(map(len, normal), default=0) > LONGEST_PIECE:
        raise _refused(f"it has a piece of more than {LONGEST_PIECE} characters")
    order = sorted(range(len(names)), key=lambda i: -scores[i])
    products = [names[i] for i in order if types[i] == NORMAL]
    pairs = ((name[:cut], name[cut:]) for name in products for cut in range(len(name) - 1, 0, -1))
    return [pair for pair in pairs if normal.issuperset(pair)]


def _to_model(description: Description) -> bytes:
    proto = _messages().ModelProto()
    for name, kind, score in zip(description.pieces, description.types, description.scores, strict=True):
        proto.pieces.add(piece=name, type=kind, score=score)
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    trainer.model_type = description.model_type
    trainer.vocab_size = len(description.pieces)
    trainer.unk_id = description.unknown
    trainer.unk_piece = description.pieces[description.unknown]
    trainer.unk_surface = description.unk_surface
    trainer.byte_fallback = description.byte_fallback
    trainer.bos_id = trainer.eos_id = trainer.pad_id = -1
    normalizer.name = "precompiled" if description.charsmap else "identity"
    normalizer.precompiled_charsmap = description.charsmap
    normalizer.add_dummy_prefix = description.dummy_prefix
    normalizer.remove_extra_whitespaces = description.remove_extra_whitespaces
    return proto.SerializeToString(deterministic=True)


# --- tokenizer.json --------------------------------------------------------------------------------------------------


def _prefix_pattern(symbols: Iterable[str]) -> str:
    """The start of every text except the empty one and `symbols`, which the library normalises by themselves, too, to look for
    them in normalised text."""
    return rf"\A(?!(?:{'|'.join(map(re.escape, symbols))})?\z)"


def _steps(component, plural: str, allowed: tuple) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder, all of which have to be `allowed`."""
    waiting, steps = [component], []
    while waiting and len(steps) <= MOST_STEPS:
        step = waiting.pop()
        if isinstance(step, dict) and step.get("type") == "Sequence" and isinstance(step.get(plural), list):
            waiting += reversed(step[plural])
        elif step is not None:
            steps.append(step)
    for step in steps:
        if mismatch(step, allowed, ""):
            raise _refused(f"its tokenizer.json has a step that Parakeet's do not have: {str(step)[:80]!r}")
    if len(steps) > MOST_STEPS:
        raise _refused("its tokenizer.json has too many steps")
    return steps


def _sequence(plural: str, steps: list[dict]) -> dict | None:
    return {"type": "Sequence", plural: steps} if steps else None


def _from_json(source: _TokenizerJson) -> Description:
    model, names = source.content["model"], source.pieces
    if source.unknown is None or (source.is_bpe and not model.get("fuse_unk")):
        raise _refused("a SentencePiece model needs an unknown token, and takes several in a row for one")
    patterns = [step["pattern"] for step in source.normalizer if step["type"] == "Replace"]
    if not source.splitter and {"String": " "} not in patterns:
        raise _refused("its tokenizer.json does not replace spaces")
    trims = {"Regex": RUN_OF_SPACES} in patterns
    prefix = any(pattern.get("Regex") not in (None, RUN_OF_SPACES, OUTER_SPACES) for pattern in patterns)
    prefix |= any(step["type"] == "Prepend" for step in source.normalizer)
    for step in source.splitter:
        scheme = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never")
        prefix |= scheme != "never"
    types = _types(source)
    normal = {piece for piece, kind in zip(names, types, strict=True) if kind == NORMAL}
    joins = any(SPACE in piece[1:] and (piece.strip(SPACE) or not trims) for piece in normal)
    if joins and any(step.get("split", True) for step in source.splitter):
        raise _refused("a SentencePiece model would join words that its tokenizer.json keeps apart")
    if source.is_bpe:
        pairs = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
        merges = [(left, right) for left, right in pairs if {left, right, left + right} <= normal]
        scores, kind = _scores(names, types, merges), BPE if merges else CHAR
    else:
        kind, merges = UNIGRAM, []
        given = {piece: float(score) for piece, score in model["vocab"]}
        scores = [given.get(piece, 0.0) for piece in names]
    surfaces = [step["content"] for step in source.decoder if step.get("pattern") == {"String": source.unknown_piece}]
    surface = surfaces[0] if surfaces else Description.unk_surface
    return Description(kind, names, types, scores, merges, source.unknown, surface, source.charsmap, prefix, trims)


def _types(source: _TokenizerJson) -> list[int]:
    types = {token["content"]: CONTROL if token["special"] else USER_DEFINED for token in source.added}
    all_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    if source.content["model"].get("byte_fallback") and all_bytes.issubset(source.pieces):
        types |= dict.fromkeys(all_bytes, BYTE)
    types[source.unknown_piece] = UNKNOWN
    return [types.get(piece, NORMAL) for piece in source.pieces]


def _scores(names: list[str], types: list[int], merges: list[tuple[str, str]]) -> list[float]:
    """Scores that make SentencePiece merge in this order. Its pieces have one score, however they are made."""
    products = [product for product, _ in itertools.groupby(left + right for left, right in merges)]
    ranks = {product: -float(rank) for rank, product in enumerate(products)}
    scores = [ranks.get(name, -float(len(ranks) + i)) for i, name in enumerate(names)]
    if len(ranks) < len(products) or (merges and {*merges} != {*_merges(names, types, scores)}):
        raise _refused("a SentencePiece model cannot express its merges")
    return scores


def _to_json(description: Description) -> dict:
    """The content of a tokenizer.json with `<blank>` after the pieces."""
    names, unknown = description.pieces, description.pieces[description.unknown]
    if BLANK in names:
        raise _refused(f"it has a piece {BLANK} of its own")
    added = [
        _added(i, name, special=kind != USER_DEFINED or name == PAD, normalized=kind == USER_DEFINED)
        for i, (name, kind) in enumerate(zip(names, description.types, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]
    symbols = [token["content"] for token in added if token["normalized"]]
    replacements = []
    if description.remove_extra_whitespaces:
        replacements += [({"Regex": OUTER_SPACES}, ""), ({"Regex": RUN_OF_SPACES}, " ")]
    if description.dummy_prefix:
        replacements.append(({"Regex": _prefix_pattern(symbols)}, SPACE))
    normalizer = [_replace(*pair) for pair in [*replacements, ({"String": " "}, SPACE)]]
    if description.charsmap:
        charsmap = base64.b64encode(description.charsmap).decode()
        normalizer.insert(0, {"type": "Precompiled", "precompiled_charsmap": charsmap})
    decoder = [_replace({"String": SPACE}, " "), _replace({"String": unknown}, description.unk_surface)]
    decoder += [{"type": "ByteFallback"}] * description.byte_fallback + [{"type": "Fuse"}]
    if description.dummy_prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [*added, _added(len(names), BLANK)],
        "normalizer": _sequence("normalizers", normalizer), "pre_tokenizer": None, "post_processor": None,
        "decoder": _sequence("decoders", decoder), "model": _json_model(description),
    }  # fmt: skip


def _json_model(description: Description) -> dict:
    names = description.pieces
    if description.model_type == UNIGRAM:
        vocab = [list(pair) for pair in zip(names, description.scores, strict=True)]
        is_bytes = description.byte_fallback
        return {"type": "Unigram", "unk_id": description.unknown, "vocab": vocab, "byte_fallback": is_bytes}
    return {
        "type": "BPE", "dropout": None, "unk_token": names[description.unknown], "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": description.byte_fallback, "ignore_merges": False,
        "vocab": {name: i for i, name in enumerate(names)}, "merges": [list(pair) for pair in description.merges],
    }  # fmt: skip


def _added(number: int, name: str, special: bool = True, normalized: bool = False) -> dict:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    return {"id": number, "content": name, **flags, "normalized": normalized, "special": special}


def _replace(pattern: dict, content: str) -> dict:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _with_blank(source: _TokenizerJson) -> dict:
    """The content of a tokenizer.json, with `<blank>` in place of all tokens after the pieces."""
    size, model = len(source.pieces), dict(source.content["model"])
    if source.is_bpe:
        model["vocab"] = {piece: i for piece, i in model["vocab"].items() if piece != BLANK}
    added = [token for token in source.added if token["id"] < size]
    return {**source.content, "added_tokens": [*added, _added(size, BLANK)], "model": model}
