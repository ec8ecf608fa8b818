"""XTTS's tokenizer: Coqui's vocab.json, a byte-pair encoding in the format of the library
`tokenizers`, and larger vocabularies.

Special tokens stand for the language, which comes first, and for spaces:
"[en]how[SPACE]are[SPACE]you". V is the number of rows that the model's embedding needs: the largest
id plus one."""

import json
import re
from collections.abc import Iterable, Mapping

import torch

from common.errors import UsageError, first_line, require
from common.records import mismatch

START = "[START]"
STOP = "[STOP]"
UNKNOWN = "[UNK]"
SPACE = "[SPACE]"
LANGUAGE = re.compile(r"\[([a-z]{2,3}(?:-[a-z]{2,4})?)\]")
MOST_TOKENS = 1 << 17
_SPECIAL = {
    **dict.fromkeys(("normalized", "lstrip", "rstrip", "single_word"), False), "special": True,
}  # fmt: skip
_ABSENT = (type(None), lambda value: value in ("", False))
# Anything else, such as a normaliser, would make other tokens than the model was trained on, and a
# pattern can take exponential time. `tokenizers` checks the rest.
_CONTENT = {
    **dict.fromkeys(("truncation?", "padding?", "normalizer?", "post_processor?"), type(None)),
    "added_tokens?": (type(None), list),
    "pre_tokenizer": {"type": {"Whitespace"}},
    "model": {
        "type?": {"BPE"},
        "unk_token": {UNKNOWN},
        **dict.fromkeys(("dropout?", "continuing_subword_prefix?", "end_of_word_suffix?"), _ABSENT),
        **dict.fromkeys(("byte_fallback?", "ignore_merges?"), _ABSENT),
        "vocab": dict,
        "merges": list,
    },
}


class Vocabulary:
    """Attributes: `size` (V), the ids `start`, `stop` and `unknown`, and `languages`, the codes
    that have a token. `text`: of vocab.json. Raises `UsageError`."""

    def __init__(self, text: str):
        tokenizers = require("tokenizers", "the vocabulary")
        content = _parse(text)
        model = content["model"]
        settings = {
            key: model[key]
            for key in ("unk_token", "fuse_unk", "vocab", "merges")
            if model.get(key) is not None
        }
        added = content.get("added_tokens") or []
        checked = {
            "version": "1.0",
            "added_tokens": added,
            "pre_tokenizer": {"type": "Whitespace"},
            "model": {"type": "BPE", **settings},
        }
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(json.dumps(checked))
        except Exception as error:  # the library raises nothing more special
            raise _refused(first_line(error)[:100]) from None
        ids = self._tokenizer.get_vocab()
        self._special = {token["content"] for token in added}
        for token, names in {START: ids, STOP: ids, SPACE: ids, UNKNOWN: model["vocab"]}.items():
            if token not in names:
                raise _refused(f"it has no {token}")
        self.size = max(ids.values()) + 1
        self.start = ids[START]
        self.stop = ids[STOP]
        self.unknown = ids[UNKNOWN]
        matches = [LANGUAGE.fullmatch(token) for token in self._special]
        self.languages = sorted(match[1] for match in matches if match)

    def encode(self, text: str, language: str) -> list[int]:
        """The ids of a text, below V, which begin with the language's and are without START and
        STOP. Special tokens in the text are tokens, so "[am]..." in English begins with two
        languages. Raises `UsageError` for an unknown language."""
        if language not in self.languages:
            known = ", ".join(self.languages) or "none"
            raise UsageError(
                f"vocab.json has no language {language[:20]!r} (it has {known}): add the token"
                f" [{language[:20]}]"
            )
        return self._tokenizer.encode(f"[{language}]{text}".replace(" ", SPACE)).ids

    def lacking(self, text: str) -> list[str]:
        """The characters of a text that the vocabulary lacks, in order."""
        spaced = text.replace(" ", SPACE)
        encoding = self._tokenizer.encode(spaced)
        lacking = []
        for token, (first, last) in zip(encoding.ids, encoding.offsets, strict=True):
            if token == self.unknown:
                lacking += spaced[first:last]
        return lacking

    def tokens(self) -> list[str]:
        """The V tokens, by id."""
        return [self._tokenizer.id_to_token(i) or f"[no token {i}]" for i in range(self.size)]


def _refused(reason: str) -> UsageError:
    return UsageError(f"vocab.json is refused: {reason}; take the one that came with the weights")


def _parse(text: str) -> dict:
    try:
        content = json.loads(text)
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is a ValueError
    except (ValueError, RecursionError):
        raise _refused("it is damaged or not JSON") from None
    if reason := mismatch(content, _CONTENT, "its content"):
        raise _refused(reason)
    return content


def add_tokens(text: str, tokens: list[str]) -> str:
    """The text of a vocab.json in which `tokens` are special added tokens, which are never split.
    Those that are in the vocabulary keep their ids, the others get V, V + 1, ... in order. Raises
    `UsageError`."""
    content, size = _with_all_ids(text)
    added = content.get("added_tokens") or []
    content["added_tokens"] = added
    special = {token["content"] for token in added}
    ids = content["model"]["vocab"]
    for token in dict.fromkeys(tokens):
        if token in special:
            continue
        size += _number(ids, token, size)
        added.append({"id": ids[token], "content": token, **_SPECIAL})
    return _checked(content)


def add_pieces(text: str, characters: Iterable[str], merges: Iterable[tuple[str, str]]) -> str:
    """The text of a vocab.json that also has `characters` and, after its own, `merges`, which are
    pairs of its tokens. New tokens get V, V + 1, ... in order. Raises `UsageError`."""
    content, size = _with_all_ids(text)
    ids = content["model"]["vocab"]
    known = content["model"]["merges"]
    has_lists = bool(known) and isinstance(known[0], list)  # as newer versions of the library write
    pairs = {_pair(merge) for merge in known}
    for character in characters:
        size += _number(ids, character, size)
    for pair in merges:
        size += _number(ids, "".join(pair), size)
        if pair not in pairs:
            known.append(list(pair) if has_lists else " ".join(pair))
    return _checked(content)


def _with_all_ids(text: str) -> tuple[dict, int]:
    """The content of a vocab.json in which special tokens have ids too, and V. Those that are not
    in `vocab` are numbered after it, and would move. Raises `UsageError`."""
    old = Vocabulary(text)
    content = _parse(text)
    ids = content["model"]["vocab"]
    ids |= {token: old._tokenizer.token_to_id(token) for token in old._special}
    if len({*ids.values()}) < len(ids):
        raise _refused("two of its tokens have one id")
    return content, old.size


def _pair(merge: str | list[str]) -> tuple[str, ...]:
    """The two tokens of a merge in either form of vocab.json."""
    return tuple(merge.split(" ") if isinstance(merge, str) else merge)


def _number(ids: dict[str, int], token: str, size: int) -> int:
    """Gives a token without an id the id `size`. Returns the number of new ids, 0 or 1."""
    return int(ids.setdefault(token, size) == size)


def _checked(content: dict) -> str:
    text = json.dumps(content, ensure_ascii=False)
    Vocabulary(text)
    return text


def learn_merges(words: Mapping[str, int], count: int) -> list[tuple[str, str]]:
    """The merges of a byte-pair encoding that makes at most `count` tokens of the characters of
    `words`, which are given with their frequencies. Pairs that occur once are not merged."""
    tokenizers = require("tokenizers", "the vocabulary")
    if not words:
        return []
    learner = tokenizers.Tokenizer(tokenizers.models.BPE())
    characters = set().union(*words)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=len(characters) + count, min_frequency=2, show_progress=False
    )
    repeated = (word for word, times in words.items() for _ in range(times))
    learner.train_from_iterator(repeated, trainer)
    return [_pair(merge) for merge in json.loads(learner.to_str())["model"]["merges"]]


def new_vocabulary(characters: str, languages: list[str], size: int) -> str:
    """The text of a vocab.json of `size` rows for a model that starts from random weights: special
    tokens as in the released one, a token a character, and unused tokens that no text becomes."""
    names = [STOP, UNKNOWN, SPACE, *dict.fromkeys(characters.replace(" ", ""))]
    special = [STOP, UNKNOWN, SPACE, START, *(f"[{language}]" for language in languages)]
    names += [name for name in special if name not in names]
    names += [f"[unused {i}]" for i in range(len(names), size)]
    usual = min(261, size - 1)  # START's id in the released vocabulary
    names[names.index(START)] = names[usual]
    names[usual] = START
    ids = {name: i for i, name in enumerate(names)}
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": ids[name], "content": name, **_SPECIAL} for name in special],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": UNKNOWN,
            "fuse_unk": False,
            "vocab": ids,
            "merges": [],
        },
    }
    return json.dumps(content, ensure_ascii=False)


def new_rows(weight: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` rows for an embedding or head (V, D), or for its bias (V,): drawn from a normal
    distribution with the mean and the standard deviation that each column has over the existing
    rows."""
    deviation = weight.std(0, correction=0)
    noise = torch.randn(
        count, *weight.shape[1:], generator=generator, dtype=weight.dtype, device=generator.device
    )
    return weight.mean(0) + deviation * noise.to(weight.device)
