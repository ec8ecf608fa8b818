"""The tokenizer of a Parakeet model: a SentencePiece model (of a `.nemo`) or a tokenizer.json (of
Hugging Face).

A tokenizer is kept in checkpoints as its state, a dict that fits `STATE` and has at least one of
the first two keys: {"sentencepiece": hexadecimal bytes of the .model, "json": text of
tokenizer.json, "files": {name: text} of FILES}. V is the number of pieces; the model's blank is V
and not one of them.

Both forms give the same ids for a text, unless
- it spells out a special token, the unknown token or a byte (<0x41>), which are plain text for SentencePiece and tokens
  for transformers, or it consists of one user-defined symbol, which then has no prefix;
- the model has a normalisation table and changes a character before a combining mark: `tokenizers` drops the mark;
- two ways of building the same piece overlap, such as ab+a and a+ba in ababa: SentencePiece prefers the left one.
A tokenizer.json of transformers' own converter also strips other white space at the end, keeps one
leading space if the model keeps spaces, and puts a space after a user-defined symbol. A decoded
text differs only if it has U+2581 itself.
"""

import base64
import importlib
import itertools
import json
import math
import re
from collections.abc import Iterable

import numpy as np

from common.checkpoint import COUNT, NUMBER, mismatch
from common.errors import RunError, UsageError, first_line, require
from speech.text import SentencePieceTokenizer

SPACE = "\u2581"
BLANK, PAD = "<blank>", "<pad>"
FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(
    1, 7
)  # types of SentencePiece's pieces
UNIGRAM, BPE, WORD, CHAR = range(1, 5)  # types of its models
SURFACE = (  # what SentencePiece decodes the unknown token to, unless the model says otherwise
    " \u2047 "
)
LONGEST_PIECE = 512  # characters of a piece that merges make
MOST_STEPS = 32  # of a normalizer or decoder
# Patterns of normalizers. A tokenizer.json with other ones is refused, because a pattern can take
# exponential time.
RUN_OF_SPACES = " {2,}"
OUTER_SPACES = rf"\A +|[ {SPACE}]+\z"
STATE = {
    "sentencepiece?": str,
    "json?": str,
    "files?": lambda files: (
        {*files} <= {*FILES} and all(isinstance(text, str) for text in files.values())
    ),
}
_ABSENT = (type(None), lambda value: value in ("", False))
_FLAG = (type(None), bool)
_NAME = (lambda text: isinstance(text, str) and text,)
_ADDED = {
    "id": COUNT, "content": _NAME, **dict.fromkeys(("special?", "normalized?"), bool),
    **dict.fromkeys(("lstrip?", "rstrip?", "single_word?"), _ABSENT),
}  # fmt: skip
_BPE = {
    "type": {"BPE"},
    "unk_token": str,
    **dict.fromkeys(("byte_fallback?", "fuse_unk?"), _FLAG),
    **dict.fromkeys(
        ("dropout?", "continuing_subword_prefix?", "end_of_word_suffix?", "ignore_merges?"), _ABSENT
    ),
    "vocab": lambda vocab: all(type(i) is int and i >= 0 for i in vocab.values()),
    "merges": [
        lambda pair: len(pair.split(" ") if isinstance(pair, str) else pair) == 2 and "".join(pair)
    ],
}
_UNIGRAM = {
    "type": {"Unigram"},
    "unk_id": COUNT,
    "byte_fallback?": _FLAG,
    "vocab": [
        lambda p: (
            len(p) == 2
            and isinstance(p[0], str)
            and isinstance(p[1], NUMBER)
            and math.isfinite(p[1])
        )
    ],
}
_JSON = {"model": (_BPE, _UNIGRAM), "added_tokens?": (type(None), [_ADDED])}
_METASPACE = {
    "type": {"Metaspace"}, "replacement": {SPACE}, "prepend_scheme?": {"always", "first", "never"},
    "add_prefix_space?": bool, "split?": bool,
}  # fmt: skip
_NORMALIZERS = (
    {"type": {"Precompiled"}, "precompiled_charsmap": str},
    {"type": {"Strip"}, "strip_left": bool, "strip_right": bool},
    {"type": {"Replace"}, "pattern": {"String": {" "}}, "content": {SPACE}},
    {"type": {"Replace"}, "pattern": {"Regex": {RUN_OF_SPACES}}, "content": {SPACE, " "}},
    {"type": {"Replace"}, "pattern": {"Regex": {OUTER_SPACES}}, "content": {""}},
)
_DECODERS = (
    {"type": {"ByteFallback", "Fuse"}},
    {"type": {"Strip"}, "content": {" "}, "start": COUNT, "stop": COUNT},
    {
        "type": {"Replace"},
        "pattern": {"String": _NAME},
        "content": lambda text: isinstance(text, str) and len(text) <= 64,
    },
    _METASPACE,
)


class ParakeetTokenizer:
    """Attributes: `size` (V), `unknown` (an id), `pieces` (V strings, with U+2581 for a space),
    `spaces` (ids of the pieces of spaces alone)."""

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
        """The text of ids below V, without special tokens; U+2047, or the model's own text, for
        unknown tokens."""
        return self._backend.decode([int(token) for token in tokens])

    def state(self) -> dict:
        return self._state


class _TokenizerJson:
    """A tokenizer.json in the library `tokenizers`. `content`: only its checked parts and its V
    pieces, which are without `<blank>`, what follows it, and a `<pad>` that was added after the
    last piece. `ids` has all tokens."""

    def __init__(self, text: str):
        tokenizers = require("tokenizers", "the tokenizer")
        try:
            self._read(json.loads(text))
            "".join(self.pieces).encode()  # half of a surrogate pair is a ValueError
        except (ValueError, RecursionError):
            raise _refused("its tokenizer.json is damaged") from None
        # What the decoder of transformers' converter lacks. A second replacement has no effect.
        unknown = self.pieces[self.unknown]
        decoder = [*self.decoder, _replace({"String": unknown}, SURFACE)]
        if self.content["model"].get("byte_fallback") and {"type": "ByteFallback"} not in decoder:
            decoder.append({"type": "ByteFallback"})
        content = {**self.content, "decoder": _sequence("decoders", decoder)}
        try:
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library has no exception type of its own
            raise _refused(first_line(error)[:100]) from None
        ids = self.tokenizer.get_vocab()
        if any(ids.get(piece) != i for i, piece in enumerate(self.pieces)):
            raise _refused("the ids of its tokenizer.json are not in order")
        self.tokenizer.encode_special_tokens = True  # as plain text
        self.special = {token["id"] for token in self.added if token["special"]} - {self.unknown}

    def _read(self, content) -> None:
        if reason := mismatch(content, _JSON, "tokenizer.json"):
            raise _refused(reason)
        model = content["model"]
        self.is_bpe = model["type"] == "BPE"
        vocab = (
            model["vocab"]
            if self.is_bpe
            else {piece: i for i, (piece, _) in enumerate(model["vocab"])}
        )
        added = [
            {"special": False, "normalized": False, **token}
            for token in content.get("added_tokens") or []
        ]
        self.ids = dict(vocab)
        if any(
            self.ids.setdefault(token["content"], token["id"]) != token["id"] for token in added
        ):
            raise _refused("a token of its tokenizer.json has two ids")
        own = {piece: i for piece, i in self.ids.items() if i < self.ids.get(BLANK, math.inf)}
        self.pieces = sorted(own, key=own.get)
        if self.pieces[-1:] == [PAD] and PAD not in vocab:
            self.pieces.pop()
        size = len(self.pieces)
        is_whole = [own[piece] for piece in self.pieces] == [*range(size)] and vocab.keys() <= {
            *self.pieces,
            BLANK,
        }
        if not is_whole or "" in own or len(vocab) < len(model["vocab"]):
            raise _refused("the ids of its tokenizer.json have gaps, or repeat")
        self.unknown = own.get(model["unk_token"], size) if self.is_bpe else model["unk_id"]
        if self.unknown >= size:
            raise _refused("its tokenizer.json lacks the unknown token")
        self.added = [token for token in added if token["id"] < size]
        prefix = {
            "type": {"Replace"},
            "pattern": {"Regex": {_prefix_pattern(self.added)}},
            "content": {SPACE},
        }
        self.normalizer = _steps(content.get("normalizer"), "normalizers", (*_NORMALIZERS, prefix))
        self.splitter = _steps(content.get("pre_tokenizer"), "pretokenizers", (_METASPACE,))
        self.decoder = _steps(content.get("decoder"), "decoders", _DECODERS)
        tables = [
            step["precompiled_charsmap"]
            for step in self.normalizer
            if step["type"] == "Precompiled"
        ]
        if len(tables) > 1:
            raise _refused("its tokenizer.json has several normalisation tables")
        self.charsmap = (
            _checked_table(base64.b64decode(tables[0], validate=True)) if tables else b""
        )
        kept = (
            {piece: i for piece, i in vocab.items() if i < size}
            if self.is_bpe
            else model["vocab"][:size]
        )
        self.content = _content(
            {**model, "vocab": kept}, self.added, self.normalizer, self.splitter, self.decoder
        )

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(
            [i for i in tokens if i not in self.special], skip_special_tokens=False
        )


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
    """The SentencePiece .model of a state, converted from tokenizer.json if it has none. Raises
    `UsageError` if a .model cannot express that tokenizer."""
    model, content = _open(state)
    return model.model if model else _load_model(_to_model(content)).model


def pad_pieces(model: bytes, count: int) -> bytes:
    """A SentencePiece .model with `count` pieces: those of `model`, and others that no text has."""
    proto = _messages().ModelProto.FromString(model)
    lowest = min(piece.score for piece in proto.pieces)
    for number in range(count - len(proto.pieces)):
        proto.pieces.add(piece=f"<unused_{number}>", score=lowest - 1 - number)
    proto.trainer_spec.vocab_size = count
    return proto.SerializeToString()


def hf_files(state: dict) -> dict[str, str]:
    """The tokenizer files of a Hugging Face folder, name to text, for transformers'
    ParakeetTokenizer and AutoTokenizer. A tokenizer.json of the state is unchanged if `<blank>` has
    the id V in it. The pad token is a piece `<pad>`, or `<blank>` if there is none. Raises
    `UsageError`."""
    model, content = _open(state)
    names, unknown = (content or model).pieces, (content or model).unknown
    others = {}
    if content is None:
        text = _text(_to_json(model))
    elif content.ids.get(BLANK) == len(names):
        text, others = state["json"], state.get("files", {})
    else:
        text = _text(
            {**content.content, "added_tokens": [*content.added, _added(len(names), BLANK)]}
        )
    config = {
        "tokenizer_class": "ParakeetTokenizer",
        "processor_class": "ParakeetProcessor",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1_000_000_000,
        "unk_token": names[unknown],
        "pad_token": PAD if PAD in names else BLANK,
    }
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
    return UsageError(
        f"the model's tokenizer cannot be used ({reason}): take the tokenizer files of the model"
        " again"
    )


# --- SentencePiece --------------------------------------------------------------------------------


def _load_model(model: str | bytes) -> SentencePieceTokenizer:
    """`model`: bytes, or these in hexadecimal."""
    try:
        tokenizer = SentencePieceTokenizer(
            model if isinstance(model, bytes) else bytes.fromhex(model)
        )
        "".join(tokenizer.pieces)  # ones that are not UTF-8 are a ValueError
        return tokenizer
    except (RuntimeError, ValueError) as error:
        raise _refused(first_line(error)[:100]) from None


def _messages():
    try:
        return importlib.import_module("sentencepiece.sentencepiece_model_pb2")
    except ImportError:
        needed = "the tokenizer's conversion needs the packages sentencepiece and protobuf"
        raise RunError(f"{needed}: pip install sentencepiece protobuf") from None


def _merges(model_pieces) -> list[tuple[str, str]]:
    """All pairs of pieces that make another one, in the order in which SentencePiece prefers
    them."""
    products = sorted((p for p in model_pieces if p.type == NORMAL), key=lambda p: -p.score)
    names = [p.piece for p in products]
    if max(map(len, names), default=0) > LONGEST_PIECE:
        raise _refused(f"it has a piece of more than {LONGEST_PIECE} characters")
    pairs = ((name[:cut], name[cut:]) for name in names for cut in range(len(name) - 1, 0, -1))
    return [*filter({*names}.issuperset, pairs)]


def _to_model(source: _TokenizerJson) -> bytes:
    model, names, unknown = source.content["model"], source.pieces, source.pieces[source.unknown]
    if source.is_bpe and not model.get("fuse_unk"):
        raise _refused("a SentencePiece model takes several unknown tokens in a row for one")
    patterns = [step["pattern"] for step in source.normalizer if step["type"] == "Replace"]
    if not source.splitter and {"String": " "} not in patterns:
        raise _refused("its tokenizer.json does not replace spaces")
    trims = {"Regex": RUN_OF_SPACES} in patterns
    has_prefix = {"Regex": _prefix_pattern(source.added)} in patterns
    for step in source.splitter:
        has_prefix |= step.get("prepend_scheme", step.get("add_prefix_space", True)) not in (
            "never",
            False,
        )
    kinds = {
        token["content"]: CONTROL if token["special"] else USER_DEFINED for token in source.added
    }
    all_bytes = {f"<0x{byte:02X}>" for byte in range(256)}
    if model.get("byte_fallback") and all_bytes.issubset(names):
        kinds |= dict.fromkeys(all_bytes, BYTE)
    kinds[unknown] = UNKNOWN
    normal = {name for name in names if name not in kinds}
    joins = any(SPACE in piece[1:] and (piece.strip(SPACE) or not trims) for piece in normal)
    if joins and any(step.get("split", True) for step in source.splitter):
        raise _refused("a SentencePiece model would join words that its tokenizer.json keeps apart")
    if source.is_bpe:
        pairs = [
            tuple(pair.split(" ") if isinstance(pair, str) else pair) for pair in model["merges"]
        ]
        merges = [(left, right) for left, right in pairs if {left, right, left + right} <= normal]
        products = [product for product, _ in itertools.groupby(map("".join, merges))]
        scores = {
            product: -float(rank) for rank, product in enumerate(products)
        }  # one, however a piece is made
        scores |= {
            name: -float(len(scores) + i) for i, name in enumerate(names) if name not in scores
        }
        model_type = BPE if merges else CHAR
    else:
        merges, model_type, scores = [], UNIGRAM, dict.fromkeys(names, 0.0) | dict(model["vocab"])
    messages = _messages()
    model_pieces = [
        messages.ModelProto.SentencePiece(
            piece=name, type=kinds.get(name, NORMAL), score=scores[name]
        )
        for name in names
    ]
    if merges and (len({*products}) < len(products) or {*merges} != {*_merges(model_pieces)}):
        raise _refused("a SentencePiece model cannot express its merges")
    surfaces = [
        step["content"] for step in source.decoder if step.get("pattern") == {"String": unknown}
    ]
    trainer = messages.TrainerSpec(
        model_type=model_type,
        vocab_size=len(names),
        unk_id=source.unknown,
        unk_piece=unknown,
        bos_id=-1,
        eos_id=-1,
        pad_id=-1,
        unk_surface=[*surfaces, SURFACE][0],
        byte_fallback=BYTE in kinds.values(),
    )
    normalizer = messages.NormalizerSpec(
        name="precompiled" if source.charsmap else "identity",
        precompiled_charsmap=source.charsmap,
        add_dummy_prefix=has_prefix,
        remove_extra_whitespaces=trims,
    )
    proto = messages.ModelProto(
        pieces=model_pieces, trainer_spec=trainer, normalizer_spec=normalizer
    )
    return proto.SerializeToString(deterministic=True)


# --- tokenizer.json -------------------------------------------------------------------------------


def _checked_table(table: bytes) -> bytes:
    """`table`, if all references in this normalisation table are sound, else a ValueError;
    `tokenizers` follows them unchecked. It is the size of a trie, the trie (darts-clone: 32-bit
    units), and the texts, each ending in a zero, that its leaves point at."""
    size = int.from_bytes(table[:4], "little")
    trie, texts = table[4 : 4 + size], table[4 + size :]
    texts.decode()
    units = np.frombuffer(trie, "<u4").astype(np.int64)
    inner = np.flatnonzero(units < 1 << 31)
    children = inner ^ ((units[inner] >> 10) << ((units[inner] & 0x200) >> 6))
    leaves = children[(units[inner] >> 8 & 1).astype(bool) & (children < len(units))]
    starts = np.flatnonzero(np.frombuffer(texts, np.uint8) & 0xC0 != 0x80)  # of characters
    are_inside = (
        children.max(initial=0) < len(units)
        and np.isin(units[leaves] & ((1 << 31) - 1), starts).all()
    )
    if not size or size % 1024 or texts[-1:] != b"\0" or not are_inside:
        raise ValueError("the normalisation table is damaged")
    return table


def _prefix_pattern(added: list[dict]) -> str:
    """The start of every text except the empty one and user-defined symbols, which the library also
    normalises by themselves, to look for them in normalised text."""
    symbols = "|".join(re.escape(token["content"]) for token in added if token["normalized"])
    return rf"\A(?!(?:{symbols})?\z)"


def _steps(component, plural: str, allowed: tuple) -> list[dict]:
    """The steps of a normalizer, pre-tokenizer or decoder, all of which have to be `allowed`."""
    waiting, steps = [component], []
    while waiting and len(steps) <= MOST_STEPS:
        step = waiting.pop()
        if (
            isinstance(step, dict)
            and step.get("type") == "Sequence"
            and isinstance(step.get(plural), list)
        ):
            waiting += reversed(step[plural])
        elif step is not None:
            steps.append(step)
    if wrong := [step for step in steps if mismatch(step, allowed, "")] or steps[MOST_STEPS:]:
        raise _refused(
            f"its tokenizer.json has a step that Parakeet's do not have: {str(wrong[0])[:80]!r}"
        )
    return steps


def _to_json(tokenizer: SentencePieceTokenizer) -> dict:
    """The content of a tokenizer.json with `<blank>` after the pieces."""
    try:
        proto = _messages().ModelProto.FromString(tokenizer.model)
        surface = proto.trainer_spec.unk_surface
    except Exception as error:  # protobuf has several, and text can be something else than UTF-8
        raise _refused(first_line(error)[:100]) from None
    trainer, spec, names = proto.trainer_spec, proto.normalizer_spec, tokenizer.pieces
    kinds = {piece.type for piece in proto.pieces}
    unsupported = {
        "pieces of words": trainer.model_type == WORD,
        "unused pieces": UNUSED in kinds,
        "spaces at the ends of words": trainer.treat_whitespace_as_suffix,
        "plain spaces": not spec.escape_whitespaces,
        "a denormalizer": proto.denormalizer_spec.precompiled_charsmap,
        f"a piece {BLANK} of its own": BLANK in names,
        "scores that are not finite": not all(math.isfinite(piece.score) for piece in proto.pieces),
    }
    if reason := next((name for name, is_present in unsupported.items() if is_present), None):
        raise _refused(f"a tokenizer.json cannot express {reason}")
    tokens = [
        (i, p.piece, p.type == USER_DEFINED)
        for i, p in enumerate(proto.pieces)
        if p.type not in (NORMAL, BYTE)
    ]
    added = [
        _added(i, name, not is_symbol or name == PAD, is_symbol) for i, name, is_symbol in tokens
    ]
    normalizer, unknown = [], names[tokenizer.unknown]
    if spec.precompiled_charsmap:
        table = base64.b64encode(spec.precompiled_charsmap).decode()
        normalizer.append({"type": "Precompiled", "precompiled_charsmap": table})
    if spec.remove_extra_whitespaces:
        normalizer += [
            _replace({"Regex": OUTER_SPACES}, ""),
            _replace({"Regex": RUN_OF_SPACES}, " "),
        ]
    if spec.add_dummy_prefix:
        normalizer.append(_replace({"Regex": _prefix_pattern(added)}, SPACE))
    normalizer.append(_replace({"String": " "}, SPACE))
    decoder = [_replace({"String": SPACE}, " "), _replace({"String": unknown}, surface)]
    decoder += [{"type": "ByteFallback"}] * (BYTE in kinds) + [{"type": "Fuse"}]
    if spec.add_dummy_prefix:
        decoder.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    if trainer.model_type == UNIGRAM:
        vocab = [[piece.piece, piece.score] for piece in proto.pieces]
        model = {
            "type": "Unigram",
            "unk_id": tokenizer.unknown,
            "vocab": vocab,
            "byte_fallback": BYTE in kinds,
        }
    else:
        model = {
            "type": "BPE",
            "dropout": None,
            "unk_token": unknown,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": BYTE in kinds,
            "ignore_merges": False,
            "vocab": {name: i for i, name in enumerate(names)},
            "merges": (
                [list(pair) for pair in _merges(proto.pieces)] if trainer.model_type == BPE else []
            ),
        }
    return _content(model, [*added, _added(len(names), BLANK)], normalizer, [], decoder)


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
