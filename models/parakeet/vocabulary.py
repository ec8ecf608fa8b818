"""The vocabulary of a Parakeet: another one, from a file or made from texts, and pieces that are
added; and the rows that the pieces have in the weights. extend.py has the command's flags.

`info` stands for a `ModelInfo` of start.py. The functions return new ones; those that they are
given stay as they are."""

import dataclasses
import os
import shlex
from collections import Counter
from collections.abc import Iterable

import numpy as np
import torch

from common import files
from common.errors import UsageError
from models import new_rows
from models.parakeet import formats, settings
from models.parakeet.tokenizer import (
    BLANK,
    PAD,
    SPACE,
    ParakeetTokenizer,
    add_pieces,
    pad_pieces,
    pieces,
    read_as,
)
from speech.data.columns import Corpus
from speech.writing import text, unknown

# The tensors with a row for each token.
ROWS = (
    "decoder.embedding.weight",
    "joint.head.weight",
    "joint.head.bias",
    "ctc_head.weight",
    "ctc_head.bias",
)
# Of new pieces. After 64 updates of 4 utterances the loss of a small model was 4.3 with 3e-5 (the
# rate of its other weights), 3.4 with 1e-3, 3.0 with 3e-3, 2.3 with 1e-2; a model from scratch has
# 5e-4 to 2e-3.
NEW_ROWS_RATE = 3e-3
NOISE = 0.1  # their first deviation from the mean of the old rows, in deviations of these
COMMAND = "python -m models.extend parakeet"
NEW_VOCABULARY = (
    f"make a model with a new vocabulary from the training texts, with {COMMAND} MODEL TEXTS"
    " --train_tokenizer char or, with many hours of speech, bpe"
)
SOME_TEXTS = 1000
MOST = settings.CONFIG["vocabulary"][-1]  # pieces

# --- tokenizers -----------------------------------------------------------------------------------


def read_pieces(value: str) -> tuple[str, ...]:
    """The pieces of --add_tokens, each once, or in the file that it names. Raises `UsageError`."""
    flag = "--add_tokens"
    names = value.split()
    if len(value) > 1 and os.path.exists(value):
        names = [line.strip() for line in files.read_text(value, flag).splitlines()]
    elif value.endswith(".txt"):
        raise UsageError(f"{flag} {value}: no such file")
    names = tuple(dict.fromkeys(filter(None, names)))
    for piece in names:
        reason = ""
        if SPACE in piece or len(piece.split()) > 1:
            reason = "it has a space in it, which no piece may have"
        elif text.normalise(piece) != piece:
            reason = "texts are read in NFC and without control characters, so they never have it"
        elif piece in (BLANK, PAD):
            reason = "it is a special token"
        if reason:
            raise UsageError(f"{flag}: the piece {piece[:20]!r} cannot be added: {reason}")
    if not names:
        raise UsageError(f"{flag} {value!r} names no piece")
    return names


def adding_command(tokenizer: ParakeetTokenizer, asked, counts: Counter[str]) -> str:
    """The command that adds the characters that the vocabulary lacks, as it reads them, to the
    model that the flags (`start.ParakeetOptions`) name; "" if they are too many."""
    forms = read_as(tokenizer.state(), counts)
    lacking = Counter()
    for character, count in counts.items():
        for part in forms[character]:
            lacking[part] += count * (tokenizer.unknown in tokenizer.encode(part))
    value = unknown.as_value(+lacking)
    if not value:
        return ""
    words = [asked.origin.path or "MODEL", *(asked.train_manifest or ["TEXTS"])]
    checks = asked.data.checks
    for name in ("audio_root", "text_column", "max_duration"):
        if name in asked.origin.given:
            words += [f"--{name}", f"{getattr(checks, name)}"]
    words += ["--tier", *checks.tiers] if checks.tiers else []
    words += ["--use_chunking"] if checks.use_chunking else []
    return f"{COMMAND} {shlex.join(words)} --add_tokens {value} --export NEW_FOLDER"


def read_tokenizer(path: str) -> dict:
    """The state of the tokenizer that --tokenizer names: a SentencePiece .model, a tokenizer.json,
    or a released model's. Raises `UsageError`."""
    flag = f"--tokenizer {path}"
    if os.path.isdir(path) or path.endswith(".nemo"):
        state = formats.read_tokenizer(path)
    elif path.endswith(".json"):
        state = {"json": files.read_text(path, "--tokenizer")}
    else:
        file = files.require_file(path, "--tokenizer")
        state = {"sentencepiece": formats.read_sentencepiece(file)}
    try:
        names = pieces(state)
    except UsageError as error:
        takes = "the flag takes a SentencePiece .model, a tokenizer.json, or a released model"
        raise UsageError(f"{flag}: {error}; {takes}") from None
    if BLANK in names:
        raise UsageError(f"{flag}: it has a piece {BLANK}, which is the model's own")
    return state


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> dict:
    """The state of a tokenizer made from `texts`. It has `vocab_size` pieces for "bpe", also if the
    texts are too short for so many, and as many as there are characters for "char"."""
    made = text.train_tokenizer(texts, kind, vocab_size)
    model = made.model
    if kind == "bpe" and made.size < vocab_size:
        model = pad_pieces(model, vocab_size)
    return {"sentencepiece": model.hex()}


def add_lacking(state: dict, added: Iterable[str]) -> dict:
    """The state with those of the pieces `added` that it lacks. Raises `UsageError`."""
    known = set(pieces(state))
    lacking = [piece for piece in added if piece not in known]
    if not lacking:
        raise UsageError("--add_tokens: the vocabulary has all of these pieces; leave it out")
    return add_pieces(state, lacking)


# --- rows -----------------------------------------------------------------------------------------


def with_new_vocabulary(info, weights: dict[str, torch.Tensor], state: dict):
    """A trained model with the tokenizer of `state`: its info and its weights. Rows of pieces that
    it has are kept, as are those of blank and durations. The others begin near the mean of all
    pieces' rows, in the output layers until `scratch.fit_new_rows` fits them to training data.
    Pieces that were new in `info` still are. Raises `UsageError` if the pieces are too many."""
    size = len(pieces(state))
    if size > MOST:
        raise UsageError(f"the new vocabulary has more than {MOST:,} pieces")
    new = dataclasses.replace(
        info,
        config={**info.config, "vocabulary": size},
        tokenizer=state,
        source=without_token_ids(info.source),
    )
    names = row_names(info)
    rows = new_rows.sources(row_names(new), names)
    changed = dict(weights)
    for name in ROWS:
        if name in weights:
            old = weights[name]
            # An embedding and a CTC head end with the blank, and have no rows of durations.
            count = len(rows) - (len(names) - len(old))
            pieces_of_it = old[: info.config["vocabulary"]]
            noise = torch.randn(count, *old.shape[1:]) * NOISE * pieces_of_it.std(0, correction=0)
            first = pieces_of_it.mean(0) + noise
            changed[name] = new_rows.with_rows(old, rows[:count], first)
    return new_rows.noted(new, info, rows, size), changed


def without_token_ids(source: dict) -> dict:
    """Settings of a released model without ids of its vocabulary."""
    kept = dict(source)
    for name in ("config", "generation"):
        if kept.get(name):
            kept[name] = {k: value for k, value in kept[name].items() if "token_id" not in k}
    return kept


def row_names(info) -> list[str]:
    """The meaning of each row of the joint network's output. An embedding and a CTC head have the
    first of them, up to the blank."""
    durations = [f"<duration {frames}>" for frames in info.config["durations"]]
    return [*pieces(info.tokenizer), BLANK, *durations]


def some_texts(corpus: Corpus, seed: int) -> list[str]:
    """A random part of the texts, because millions would take minutes."""
    chosen = np.random.default_rng(seed).permutation(len(corpus))[:SOME_TEXTS]
    return [corpus.texts[int(row)] for row in chosen]


def shares(tokenizer: ParakeetTokenizer, texts: Iterable[str], chosen: list[int]) -> torch.Tensor:
    """The share of each of the `chosen` pieces in the ids of `texts`, above zero."""
    counts = Counter()
    for line in texts:
        counts.update(tokenizer.encode(line))
    occurrences = torch.tensor([counts[piece] + 1.0 for piece in chosen])
    return occurrences / (counts.total() + tokenizer.size)
