"""The vocabulary of a Parakeet: another one, from a file or made from the training texts, and
pieces that are added; and the rows that the pieces have in the weights.

`info` stands for a `ModelInfo` of start.py. The functions return new ones; those that they are
given stay as they are."""

import dataclasses
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from common import files, options
from common.errors import UsageError
from speech import model_files, text, unknown
from speech.parakeet import archive, formats, settings
from speech.parakeet.tokenizer import (
    BLANK,
    PAD,
    SPACE,
    ParakeetTokenizer,
    add_pieces,
    pad_pieces,
    pieces,
    read_as,
)

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
NEW_PIECES = 1024  # of --train_tokenizer bpe
NEW_VOCABULARY = (
    "train with a new vocabulary, made from the training texts: --train_tokenizer char or, with"
    " many hours of speech, bpe"
)
MOST = settings.CONFIG["vocabulary"][-1]  # pieces
LONGEST = 64  # characters of a piece that is added

# Rows for common.options.
TRAINING = ("tokenizer", "add_tokens", "train_tokenizer", "vocab_size", "freeze_encoder_steps")
EXCLUDES = (
    ("vocab_size", "train_tokenizer char", "the second has the characters of the training texts"),
    ("vocab_size", "tokenizer", "the second has its own number of pieces"),
    ("tokenizer", "train_tokenizer", "both make a new vocabulary; give one of them"),
    *((flag, options.COMMAND, options.TRAINS) for flag in TRAINING),
)


@dataclass(frozen=True)
class Asked:
    """What the flags ask for. `kind`: of the pieces that are made from the training texts, "bpe" or
    "char"; `size`: how many, None for the usual number; `file`: whose vocabulary is taken; `added`:
    pieces that follow those of the vocabulary."""

    kind: str | None = None
    size: int | None = None
    file: str | None = None
    added: tuple[str, ...] = ()

    @property
    def is_new(self) -> bool:
        """Whether the model's own vocabulary is left."""
        return bool(self.kind or self.file)


# --- flags ----------------------------------------------------------------------------------------


def add_arguments(parser) -> None:
    group = parser.add_argument_group("vocabulary (a checkpoint's is kept when resuming)")
    group.add_argument(
        "--tokenizer",
        type=options.path,
        metavar="PATH",
        help=(
            "take the vocabulary of a SentencePiece .model, a tokenizer.json, or a released model;"
            " rows of pieces that the model has are kept"
        ),
    )
    group.add_argument(
        "--train_tokenizer",
        choices=["bpe", "char"],
        help=(
            "make a new vocabulary from the training texts, for a script that the released model"
            " cannot write (on from scratch)"
        ),
    )
    group.add_argument(
        "--vocab_size",
        type=options.number(int, 2, MOST),
        metavar="N",
        help=(
            f"pieces of --train_tokenizer bpe ({NEW_PIECES}; from scratch by --model_size; demo:"
            " characters)"
        ),
    )
    group.add_argument(
        "--add_tokens",
        metavar="PIECES",
        help=(
            "add pieces, divided by spaces, or those of a file, one a line; all others keep their"
            ' rows. For example "( ) %%"'
        ),
    )
    group.add_argument(
        "--freeze_encoder_steps",
        type=options.number(int, 0),
        metavar="N",
        help=(
            "leave the encoder as it is in the first N updates (as many as the warm-up has if"
            " pieces are new, otherwise 0)"
        ),
    )


def resolve(args) -> Asked:
    """What the flags ask for. Raises `UsageError`."""
    added = read_pieces(args.add_tokens) if args.add_tokens is not None else ()
    return Asked(args.train_tokenizer, args.vocab_size, args.tokenizer, added)


def read_pieces(value: str) -> tuple[str, ...]:
    """The pieces of --add_tokens, each once, or those in the file that it names. Raises
    `UsageError`."""
    flag = "--add_tokens"
    found = value.split()
    if len(value) > 1 and os.path.exists(value):
        found = [line.strip() for line in files.read_text(value, flag).splitlines()]
    elif value.endswith(".txt"):
        raise UsageError(f"{flag} {value}: no such file")
    found = tuple(dict.fromkeys(filter(None, found)))
    for piece in found:
        reason = ""
        if len(piece) > LONGEST:
            reason = f"it has more than {LONGEST} characters"
        elif SPACE in piece or len(piece.split()) > 1:
            reason = "it has a space in it, which no piece may have"
        elif text.normalise(piece) != piece:
            reason = "texts are read in NFC and without control characters, so they never have it"
        elif piece in (BLANK, PAD):
            reason = "it is a special token"
        if reason:
            raise UsageError(f"{flag}: the piece {piece[:20]!r} cannot be added: {reason}")
    if not found:
        raise UsageError(f"{flag} {value!r} names no piece")
    return found


def adding_flag(tokenizer: ParakeetTokenizer, before: tuple[str, ...], counts: Counter[str]) -> str:
    """--add_tokens with characters that the vocabulary lacks, as it reads them, after the pieces
    that were given `before`; "" if they are too many, or cannot be added."""
    try:
        forms = read_as(tokenizer.state(), counts)
    except UsageError:
        return ""
    lacking = Counter()
    for character, count in counts.items():
        for each in forms[character]:
            lacking[each] += count * (tokenizer.unknown in tokenizer.encode(each))
    value = unknown.as_value(+lacking, before)
    return f"--add_tokens {value}" if value else ""


# --- tokenizers -----------------------------------------------------------------------------------


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
        model_files.refuse_pointer(file)
        if file.stat().st_size > archive.TEXT_BYTES:
            raise UsageError(f"{flag}: it is too large for a SentencePiece model")
        state = {"sentencepiece": file.read_bytes().hex()}
    try:
        names = pieces(state)
    except UsageError as error:
        takes = "the flag takes a SentencePiece .model, a tokenizer.json, or a released model"
        raise UsageError(f"{flag}: {error}; {takes}") from None
    if BLANK in names:
        raise UsageError(f"{flag}: it has a piece {BLANK}, which is the model's own")
    return state


def new_state(
    asked: Asked,
    state: dict | None,
    texts: Callable[[], Iterable[str]] = tuple,
    size: int = NEW_PIECES,
) -> dict:
    """The state of the tokenizer that the flags ask for in place of `state`, the model's. `texts()`
    returns the training texts, of which `size` pieces are made if no number is given. Raises
    `UsageError`."""
    if asked.file:
        state = read_tokenizer(asked.file)
    elif asked.kind:
        state = train_tokenizer(texts(), asked.kind, asked.size or size)
    if asked.added:
        known = set(pieces(state))
        lacking = [piece for piece in asked.added if piece not in known]
        if not lacking:
            raise UsageError("--add_tokens: the vocabulary has all of these pieces; leave it out")
        state = add_pieces(state, lacking)
    if len(pieces(state)) > MOST:
        raise UsageError(f"the new vocabulary has more than {MOST:,} pieces")
    return state


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> dict:
    """The state of a tokenizer made from `texts`. It has `vocab_size` pieces for "bpe", also if the
    texts are too short for so many, and as many as there are characters for "char"."""
    made = text.train_tokenizer(texts, kind, vocab_size)
    model = made.model
    if kind == "bpe" and made.size < vocab_size:
        model = pad_pieces(model, vocab_size)
    return {"sentencepiece": model.hex()}


def conflicts(asked: Asked, info) -> list[str]:
    """The flags that contradict the vocabulary of the checkpoint that is resumed, each with what it
    has. Raises `UsageError`."""
    found = []
    has = pieces(info.tokenizer)
    if lacking := [piece for piece in asked.added if piece not in has]:
        found.append(f"--add_tokens (the checkpoint lacks {lacking[0]!r})")
    of_model = "(the checkpoint has the released model's vocabulary)"
    if asked.file and not info.own_vocabulary:
        found.append(f"--tokenizer {asked.file} {of_model}")
    elif asked.file:
        expected = dict.fromkeys((*pieces(read_tokenizer(asked.file)), *asked.added))
        if [*expected] != has:
            found.append(f"--tokenizer {asked.file} (the checkpoint has another vocabulary)")
    if asked.kind and not info.own_vocabulary:
        found.append(f"--train_tokenizer {asked.kind} {of_model}")
    elif asked.kind:
        # The first piece is the unknown one.
        is_longer = any(len(piece) > 1 for piece in has[1:] if piece not in asked.added)
        kind = "bpe" if is_longer else "char"
        if asked.kind != kind:
            found.append(f"--train_tokenizer {asked.kind} (the checkpoint has {kind})")
    return found


# --- rows -----------------------------------------------------------------------------------------


def with_new_vocabulary(info, weights: dict[str, torch.Tensor], state: dict, is_own: bool):
    """A trained model with the tokenizer of `state`: its info and its weights. Rows of pieces that
    it has are kept, as are those of blank and durations. The others begin near the mean of all
    pieces' rows, in the output layers until `scratch.fit_new_rows` fits them to the training data.
    `is_own`: whether the model's own vocabulary is left."""
    size = len(pieces(state))
    new = dataclasses.replace(
        info,
        config={**info.config, "vocabulary": size},
        tokenizer=state,
        source=without_token_ids(info.source),
        own_vocabulary=info.own_vocabulary or is_own,
    )
    numbers = {name: row for row, name in enumerate(row_names(info))}
    rows = [numbers.get(name) for name in row_names(new)]
    added = [row for row, old in enumerate(rows) if old is None]
    changed = dict(weights)
    for name in ROWS:
        if name in weights:
            # An embedding and a CTC head end with the blank, and have no rows of durations.
            count = len(rows) - (len(numbers) - len(weights[name]))
            changed[name] = with_rows(weights[name], rows[:count], info.config["vocabulary"])
    print(
        f"new vocabulary: {size} pieces; rows of {size - len(added)} are the released model's,"
        f" {len(added)} are new"
    )
    return dataclasses.replace(new, new_pieces=added), changed


def with_rows(old: torch.Tensor, rows: list[int | None], vocabulary: int) -> torch.Tensor:
    """The rows of `old` with these numbers. Those for None are near the mean of its first
    `vocabulary` rows."""
    pieces = old[:vocabulary]
    noise = torch.randn(len(rows), *old.shape[1:]) * NOISE * pieces.std(0, correction=0)
    kept = old[torch.tensor([row or 0 for row in rows])]
    is_new = torch.tensor([row is None for row in rows]).view(-1, *[1] * (old.dim() - 1))
    return torch.where(is_new, pieces.mean(0) + noise, kept)


def without_token_ids(source: dict) -> dict:
    """Settings of a released model without ids of its vocabulary."""
    kept = dict(source)
    for name in ("config", "generation"):
        if kept.get(name):
            kept[name] = {k: value for k, value in kept[name].items() if "token_id" not in k}
    return kept


def row_names(info) -> list[str]:
    """What each row of the joint network's output means. An embedding and a CTC head have the first
    of them, up to the blank."""
    durations = [f"<duration {frames}>" for frames in info.config["durations"]]
    return [*pieces(info.tokenizer), BLANK, *durations]


def shares(tokenizer: ParakeetTokenizer, texts: Iterable[str], chosen: list[int]) -> torch.Tensor:
    """The share of each of the `chosen` pieces in the ids of `texts`, above zero for all of
    them."""
    counts = Counter()
    for each in texts:
        counts.update(tokenizer.encode(each))
    found = torch.tensor([counts[piece] + 1.0 for piece in chosen])
    return found / (counts.total() + tokenizer.size)
