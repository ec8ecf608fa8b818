"""New tokens in the vocabulary of a released model: which rows of its tensors are kept, and which
are new. A family says which tokens there are, by a command or a flag, and where a new row begins.

`info` stands for a `ModelInfo` with `new_pieces`, the ids of tokens whose rows are not trained
yet. These have a separate learning rate."""

import dataclasses

import torch

from common.parts.new_rows import NewRows


def sources(tokens: list[str], old: list[str]) -> list[int | None]:
    """The row that each of the `tokens` has among the `old` ones; None for a new token."""
    places = {token: row for row, token in enumerate(old)}
    return [places.get(token) for token in tokens]


def noted(info, old, rows: list[int | None], size: int):
    """`info`, of a vocabulary of `size` tokens, with its `new_pieces`: tokens whose row, of `rows`,
    is new, or was new in the `old` info. Says how many are new."""
    added = rows.count(None)
    print(
        f"new vocabulary: {size} pieces; rows of {size - added} are the released model's,"
        f" {added} are new"
    )
    untrained = {None, *old.new_pieces}
    new_pieces = [row for row, source in enumerate(rows) if source in untrained]
    return dataclasses.replace(info, new_pieces=new_pieces)


def with_rows(old: torch.Tensor, rows: list[int | None], first: torch.Tensor) -> torch.Tensor:
    """The rows of `old`, weights (V, ...) or biases (V,), with these numbers; where there is None,
    the row of `first`, which has as many as there are numbers."""
    kept = old[torch.tensor([row or 0 for row in rows])]
    is_new = torch.tensor([row is None for row in rows]).view(-1, *[1] * (old.dim() - 1))
    return torch.where(is_new, first, kept)


def for_task(
    pieces: list[int], tensors: tuple[str, ...], model: torch.nn.Module, rate: float
) -> NewRows | None:
    """`Task.new_rows`: the rows of `pieces` in those of the `tensors` that the model has, with
    their peak learning rate."""
    if not pieces:
        return None
    names = [name for name, _ in model.named_parameters() if name in tensors]
    return NewRows(dict.fromkeys(names, pieces), rate)
