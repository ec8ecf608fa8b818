"""Checks of a recipe: of its batches, of what its `evaluate` returns, and of its loss."""

import copy
from collections.abc import Callable

import numpy as np
import torch

from common.batches import split_batch, to_device
from common.device import rng_state, set_rng_state
from common.errors import DataError, RunError, UsageError

TRIES = 10  # utterances that may be unreadable before a check of batches is left out
LOSS_TOLERANCE = 1e-6  # of a float64 loss, relative to its size; parts of a model may be in fp32
TRIAL_TOLERANCE = 1e-4  # of a loss in the model's own type
# Parameters of a model whose loss is tried before training: a larger one would take seconds.
MOST_PARAMETERS = 20_000_000


def check_batch(batch: dict, loss_weights: dict[str, float]) -> None:
    """Raises `UsageError` for a batch that breaks the contract of batches.py, with the key."""
    if missing := sorted(loss_weights.keys() - batch["counts"].keys()):
        raise UsageError(
            f"collate: batch['counts'] lacks {missing[0]!r}, which is a term of loss_weights: it"
            " must be the number of the term's targets"
        )
    count = len(batch["names"])
    for key, value in batch.items():
        if key == "counts":
            continue
        has_rows = isinstance(value, list) or (isinstance(value, torch.Tensor) and value.dim())
        if not has_rows or len(value) != count:
            raise UsageError(
                f"collate: batch[{key!r}] must be a tensor or a list with a row for each of the"
                f" {count} utterances, because a batch that does not fit into memory is split"
            )


def sample_items(dataset) -> list[dict]:
    """Items of two short utterances of `GlobalBatches.dataset`, of different length unless all are
    alike; fewer if there are no two that can be read."""
    seconds = dataset.data.seconds(0)
    order = np.argsort(seconds, kind="stable")
    places = np.linspace(0, len(order) // 2, TRIES).astype(int)
    lengths: list[float] = []
    items: list[dict] = []
    for index in dict.fromkeys(order[places].tolist()) if len(order) else ():
        length = float(seconds[index])
        if lengths[:2] == [length, length]:
            continue
        try:
            item = dataset.data.item(index, 0)
        except DataError:
            continue  # training itself reports it
        require_repeatable(item, dataset.data.item(index, 0))
        lengths.append(length)
        items.append(item)
        if length != lengths[0]:
            break
    return [*items[:1], *items[1:][-1:]]


def require_repeatable(item: dict, again: dict) -> None:
    """Raises `UsageError` if an item that was drawn twice is not the same: a run that is resumed
    would continue otherwise than without the pause."""

    def is_same(one, other) -> bool:
        if isinstance(one, torch.Tensor):
            return torch.equal(one.nan_to_num(), other.nan_to_num())
        if isinstance(one, np.ndarray):
            return np.array_equal(one, other)
        return not isinstance(one, int | float | str | list | tuple) or one == other

    for key, value in item.items():
        if not is_same(value, again.get(key)):
            raise UsageError(
                f"item: {key!r} is another one when the same utterance is drawn again: whatever is"
                " random must depend on (seed, epoch, index) alone, as with"
                " np.random.default_rng((seed, epoch, index))"
            )


def check_collate(dataset, loss_weights: dict[str, float]) -> list[dict]:
    """Checks a batch of two utterances: its counts are the sums of theirs, and each padded tensor
    has its lengths. A tensor is padded if it is shorter for one of the two alone. Returns the items
    of the two; fewer, as `sample_items` does. Raises `UsageError`."""
    items = sample_items(dataset)
    if not items:
        return []
    batch = dataset.collate(items)
    check_batch(batch, loss_weights)
    alone = [dataset.collate([item]) for item in items]
    check_counts(batch, alone, loss_weights)
    for key, value in batch.items():
        if not isinstance(value, torch.Tensor) or value.dim() < 2 or f"{key}_lengths" in batch:
            continue
        if len({each[key].shape[1] for each in alone}) > 1:
            raise UsageError(
                f"collate: batch[{key!r}] is padded, so the batch must have {key + '_lengths'!r}, a"
                " tensor of the utterances' own lengths"
            )
    return items


def check_counts(batch: dict, alone: list[dict], loss_weights: dict[str, float]) -> None:
    """Raises `UsageError` if a batch has no targets, or others than its utterances `alone`."""
    counts = batch["counts"]
    if loss_weights and not any(counts[name] for name in loss_weights):
        raise UsageError(
            "collate: all of batch['counts'] are 0, so nothing would be trained; they must be the"
            " numbers of the terms' targets"
        )
    for name in loss_weights:
        parts = [each["counts"][name] for each in alone]
        if abs(counts[name] - sum(parts)) > 1e-6 * sum(parts):
            raise UsageError(
                f"collate: batch['counts'][{name!r}] of {len(parts)} utterances is"
                f" {counts[name]:g}, and alone they have {' + '.join(f'{p:g}' for p in parts)}: it"
                " must be the number of the term's targets in the batch"
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

    require_sums(losses(batch), [losses(piece) for piece in split_batch(batch, 1)], LOSS_TOLERANCE)


def require_sums(
    of_batch: dict[str, float], of_pieces: list[dict[str, float]], tolerance: float
) -> None:
    """Raises `RunError` if a term of a batch is not the sum of its utterances' terms."""
    for name, whole in of_batch.items():
        parts = [piece[name] for piece in of_pieces]
        if not abs(whole - sum(parts)) <= tolerance * sum(map(abs, parts)):
            raise RunError(
                f"compute_loss: {name!r} of a batch of {len(parts)} utterances is {whole:g}, and"
                f" the sum over its utterances is {sum(parts):g}: the padding is seen (a mask is"
                " missing), or the term is a mean and not a sum"
            )


def try_loss(model: torch.nn.Module, task, items: list[dict], collate: Callable) -> None:
    """Computes the loss of a few `items` and its gradient once before training, on the host and in
    evaluation mode, for a model of up to `MOST_PARAMETERS`. A loss with random numbers is not
    compared, and what fails here fails in training, too. Prints which parameters have no gradient.
    Model, gradients and random state stay as they are.

    Raises `UsageError` or `RunError` for what training would not notice: a loss without a gradient,
    a term without a count, and what `check_loss` finds."""
    if not items or sum(p.numel() for p in model.parameters()) > MOST_PARAMETERS:
        return
    batch = collate(items)
    kept = {name: value.clone() for name, value in model.named_buffers()}
    modes = [(module, module.training) for module in model.modules()]
    device = torch.device("cpu")
    state = rng_state(device)
    model.eval()
    try:
        (moved,) = to_device([batch], device)
        terms = task.compute_loss(model, moved)
        check_terms(terms, batch["counts"], task.loss_weights)
        with torch.no_grad():
            again, *pieces = (
                {name: float(value) for name, value in task.compute_loss(model, each).items()}
                for each in to_device([batch, *split_batch(batch, 1)], device)
            )
        whole = {name: float(terms[name].detach()) for name in task.loss_weights}
        if all(again[name] == value for name, value in whole.items()):
            require_sums(whole, pieces, TRIAL_TOLERANCE)
        name_unused(model, sum(terms[name] for name in task.loss_weights))
    except (RuntimeError, MemoryError):
        return  # a part of the model may be on the GPU; training itself reports everything else
    finally:
        for module, mode in modes:
            module.training = mode
        for name, buffer in model.named_buffers():
            buffer.copy_(kept[name])
        set_rng_state(state, device)


def check_terms(terms: dict, counts: dict[str, float], loss_weights: dict[str, float]) -> None:
    """Raises `UsageError` unless `compute_loss` returns every term as a tensor with a gradient."""
    for name in loss_weights:
        value = terms.get(name)
        if not isinstance(value, torch.Tensor) or value.dim():
            raise UsageError(
                f"compute_loss: {name!r}, a term of loss_weights, is {str(value)[:40]}: it must"
                " be a tensor without dimensions, the sum over the batch (no .item() or float())"
            )
        if not counts[name] and float(value.detach()):
            raise UsageError(
                f"collate: batch['counts'][{name!r}] is 0, so {name!r} would not be trained, and"
                f" compute_loss returns {float(value.detach()):g}; it must be the number of targets"
            )
    if not any(terms[name].requires_grad for name in loss_weights):
        raise UsageError("compute_loss: no term has a gradient: is there a .detach() or no_grad?")


def name_unused(model: torch.nn.Module, loss: torch.Tensor) -> None:
    """Prints which trained parameters have no part in the loss."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
    unused = [name for name, each in zip(trained, gradients, strict=True) if each is None]
    if unused:
        names = ", ".join(unused[:3]) + (" ..." if len(unused) > 3 else "")
        print(f"the loss does not depend on {len(unused)} of {len(trained)} parameters: {names}")
