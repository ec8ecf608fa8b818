"""The vocabulary of a Parakeet: one made from the training texts, and the rows that its pieces have
in the weights.

`info` stands for a `ModelInfo` of start.py. The functions return new ones; those that they are given
stay as they are."""

import dataclasses
from collections.abc import Iterable

import torch

from speech import text
from speech.parakeet.tokenizer import BLANK, pad_pieces, pieces

# The tensors with a row for each token.
ROWS = (
    "decoder.embedding.weight",
    "joint.head.weight",
    "joint.head.bias",
    "ctc_head.weight",
    "ctc_head.bias",
)
# Of the pieces that --train_tokenizer adds. After 64 updates of 4 utterances the loss of a small model
# was 4.3 with 3e-5 (the rate of its other weights), 3.4 with 1e-3, 3.0 with 3e-3, 2.3 with 1e-2; a
# model from scratch has 5e-4 to 2e-3.
NEW_ROWS_RATE = 3e-3
NOISE = 0.1  # their first deviation from the mean of the old rows, in deviations of these
NEW_PIECES = 1024  # of --train_tokenizer bpe
NEW_VOCABULARY = (
    "train with a new vocabulary, made from the training texts: --train_tokenizer char or, with many"
    " hours of speech, bpe"
)


def train_tokenizer(texts: Iterable[str], kind: str, vocab_size: int) -> tuple[dict, int]:
    """The state of a tokenizer made from `texts`, and its size: `vocab_size` for "bpe", also if the
    texts are too short for so many pieces, as many as there are characters for "char"."""
    made = text.train_tokenizer(texts, kind, vocab_size)
    model = made.model
    size = made.size
    if kind == "bpe" and size < vocab_size:
        model = pad_pieces(model, vocab_size)
        size = vocab_size
    return {"sentencepiece": model.hex()}, size


def with_new_vocabulary(
    info, weights: dict[str, torch.Tensor], kind: str, vocab_size: int | None, texts: Iterable[str]
):
    """A trained model with a vocabulary from `texts`. Rows of pieces that it has are kept, as are
    those of blank and durations. The others begin near the mean of all pieces' rows, in the output
    layers until `scratch.fit_new_rows` fits them to the training data."""
    state, size = train_tokenizer(texts, kind, vocab_size or NEW_PIECES)
    new = dataclasses.replace(
        info,
        config={**info.config, "vocabulary": size},
        tokenizer=state,
        source=without_token_ids(info.source),
        own_vocabulary=True,
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


def tokenizer_kind(info) -> str:
    """What `train_tokenizer` made the vocabulary of: "char" if no piece after the first, which is
    the unknown one, has more than a character."""
    is_longer = any(len(piece) > 1 for piece in pieces(info.tokenizer)[1:])
    return "bpe" if is_longer else "char"
