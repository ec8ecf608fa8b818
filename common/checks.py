"""Checks of a recipe: of its batches, of what its `evaluate` returns, and of its loss. And of the
values in a network."""

import contextlib
import copy
from collections.abc import Callable, Iterator

import numpy as np
import torch

from common.batches import split_batch, to_device
from common.errors import DataError, RunError, UsageError

TRIES = 10  # utterances that may be unreadable before a check of batches is left out
LARGEST = 1e20  # of a layer's values; a spectrum of the loudest audio has 1e15
LOSS_TOLERANCE = 1e-6  # of a float64 loss, relative to its size; parts of a model may be in fp32


def check_batch(batch: dict, loss_weights: dict[str, float]) -> None:
    """Raises `UsageError` for a batch that breaks the contract at the top of batches.py, with the
    key and what it must be."""
    for key in ("names", "seconds", "counts"):
        if key not in batch:
            raise UsageError(f"collate: the batch has no key {key!r}, which training needs")
    if missing := sorted(loss_weights.keys() - batch["counts"].keys()):
        raise UsageError(
            f"collate: batch['counts'] lacks {missing[0]!r}, which is a term of loss_weights: it"
            " must be the number of the term's targets"
        )
    count = len(batch["names"])
    for key, value in batch.items():
        if key == "counts":
            continue
        size = None
        if isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim()):
            size = len(value)
        if size != count:
            found = type(value).__name__ if size is None else f"{size} rows"
            raise UsageError(
                f"collate: batch[{key!r}] has {found}: it must be a tensor or a list with a row for"
                f" each of the {count} utterances, because a batch that does not fit into memory is"
                " split"
            )


def sample_items(dataset) -> list[dict]:
    """Items of two utterances of different length, short ones to save time; fewer if there are no
    two that can be read. `dataset` is that of `GlobalBatches` or `EvalBatches`."""
    seconds = dataset.data.seconds(0)
    order = np.argsort(seconds, kind="stable")
    places = np.linspace(0, len(order) // 2, TRIES).astype(int)
    chosen: dict[float, dict] = {}
    for index in dict.fromkeys(order[places].tolist()) if len(order) else ():
        length = float(seconds[index])
        if length not in chosen:
            try:
                chosen[length] = dataset.data.item(index, 0)
            except DataError:
                continue  # training itself reports it
        if len(chosen) == 2:
            break
    return list(chosen.values())


def check_collate(dataset, loss_weights: dict[str, float]) -> None:
    """Checks a batch of two utterances, and that each of its padded tensors has its lengths: a
    tensor is padded if it is shorter for one of the two alone. Raises `UsageError`."""
    items = sample_items(dataset)
    if not items:
        return
    batch = dataset.collate(items)
    check_batch(batch, loss_weights)
    alone = [dataset.collate([item]) for item in items]
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or f"{key}_lengths" in batch:
            continue
        if len({each[key].shape[1] for each in alone}) > 1:
            raise UsageError(
                f"collate: batch[{key!r}] is padded, so the batch must have {key + '_lengths'!r}, a"
                " tensor of the utterances' own lengths"
            )


def check_results(task, results: dict[str, tuple[float, float]]) -> None:
    """Raises `UsageError` unless `results` of `task.evaluate` are (numerator, denominator) by name,
    and have the task's metric."""
    for name, pair in results.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise UsageError(
                f"evaluate: the result {name!r} is {str(pair)[:40]}; it must be (numerator,"
                " denominator), sums that can be added over batches and ranks"
            )
    names = set(results)
    if task.loss_weights.keys() <= names:
        names.add("loss")
    if task.metric not in names:
        raise UsageError(
            f"evaluate returns no {task.metric!r}, which is the metric of the Task; it returns"
            f" {', '.join(sorted(names)) or 'nothing'}"
        )


@contextlib.contextmanager
def finite_layers() -> Iterator[None]:
    """Within it a layer that returns NaN, infinity or more than LARGEST when it is used first is an
    error: what is decoded of such values looks like text or speech. Raises `UsageError`."""
    seen = set()

    def check(layer: torch.nn.Module, inputs: tuple, output) -> None:
        if layer in seen or not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return
        seen.add(layer)
        if output.numel() and not float(output.detach().abs().max()) < LARGEST:
            raise UsageError(
                f"the model's values are not finite (in a layer {type(layer).__name__}): its weights"
                " are damaged or not for this network, or 16 bits are too few: try"
                " --no_mixed_precision"
            )

    hook = torch.nn.modules.module.register_module_forward_hook(check)
    try:
        yield
    finally:
        hook.remove()


def check_loss(
    model: torch.nn.Module,
    batch: dict,
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]],
) -> None:
    """Checks that the loss of a batch is the sum of the losses of its utterances, in float64 and in
    evaluation mode. Call it in a test of a new recipe, with a batch from its `collate` of two or
    more utterances of different length.

    Raises `RunError` with the term and both values if it is not. Then either the model sees the
    padding, because a mask is missing, or `compute_loss` returns a mean instead of a sum. Training
    would depend on how a global batch is cut into micro-batches. The model stays as it is."""
    check_batch(batch, {})
    lengths = [value.tolist() for key, value in batch.items() if key.endswith("_lengths")]
    if len(batch["names"]) < 2 or (lengths and all(len(set(each)) == 1 for each in lengths)):
        raise UsageError("check_loss needs a batch of two or more utterances of different length")
    model = copy.deepcopy(model).double().cpu().eval()

    def losses(piece: dict) -> dict[str, float]:
        for key, value in piece.items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                piece = {**piece, key: value.double()}
        (moved,) = to_device([piece], torch.device("cpu"))
        with torch.no_grad():
            return {name: float(value) for name, value in compute_loss(model, moved).items()}

    pieces = [losses(piece) for piece in split_batch(batch, 1)]
    for name, whole in losses(batch).items():
        parts = [piece[name] for piece in pieces]
        if not abs(whole - sum(parts)) <= LOSS_TOLERANCE * sum(map(abs, parts)):
            raise RunError(
                f"compute_loss: {name!r} of a batch of {len(parts)} utterances is {whole:g}, and"
                f" the sum over its utterances is {sum(parts):g}: the padding is seen (a mask is"
                " missing), or the term is a mean and not a sum"
            )
