"""A training as it is planned: its longest micro-batch, its settings, and what a plan answers."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dry_run.advice import STATES, Settings, advise
from dry_run.cards import Card, workspace
from dry_run.hollow import CannotPlan
from dry_run.peak import Peak
from dry_run.plan import Plan
from dry_run.report import describe, verdict

EPOCHS, UTTERANCES = 10, 20  # that are looked at
# Flags that name a trained model, whose encoder may be frozen; and data, without which there may be
# any number of utterances.
TRAINED, DATA = ("model_dir", "model_file", "resume", "init_from"), ("train_manifest", "data_dir")


def longest_items(dataset, epochs: int, fault: type[Exception]) -> list[dict]:
    """Items of the longest utterances of a data set, each in the epoch of eleven in which it is
    longest, longest first; but the second has the most targets. `dataset` is the loop's: `data` has
    `seconds(epoch)` (N,) and `item(index, epoch)`, `collate(items)` makes a batch, and with
    `skip_bad` a run skips items that raise a `fault`. Where `data.corpus.texts` has the texts, they
    decide among utterances of the same length, and the longest text is looked at, too."""
    data, collate = dataset.data, dataset.collate
    longest = torch.as_tensor(data.seconds(0))
    epoch_of = torch.zeros(len(longest), dtype=torch.long)
    for epoch in sorted({round(i * (epochs - 1) / EPOCHS) for i in range(1, EPOCHS + 1)} - {0}):
        seconds = torch.as_tensor(data.seconds(epoch))
        epoch_of[seconds > longest] = epoch
        longest = longest.maximum(seconds)
    texts = getattr(getattr(data, "corpus", None), "texts", None) or [""] * len(longest)
    letters = torch.tensor([len(text) for text in texts])
    order = letters.argsort(descending=True, stable=True)
    longest_text, order = int(order[0]), order[longest[order].argsort(descending=True, stable=True)]
    items = []
    for index in dict.fromkeys([*order[:UTTERANCES].tolist(), longest_text]):
        with contextlib.suppress(*[fault] * dataset.skip_bad):
            items.append(data.item(index, int(epoch_of[index])))
    if any(
        isinstance(value, torch.Tensor) and value.is_meta
        for item in items
        for value in item.values()
    ):
        reason = (
            "the data set uses tensors that it made before `train`, and in a plan these have no"
            " values"
        )
        raise fault(f'{reason}: make them with device="cpu", or with numpy')
    targets = [sum(collate([item])["counts"].values()) for item in items]
    most = targets.index(max(targets)) if items else 0
    return items if most == 0 else [items[0], items[most], *items[1:most], *items[most + 1 :]]


@dataclass(frozen=True)
class Training:
    """What is planned. `step(batches)` is forward and backward of `model` with batches on the host,
    which `collate` makes of `items`, the longest first of `count`; `states(optimizer)` are the
    bytes of an optimizer's states; `checkpoint()` makes the model's layers recompute their
    activations (None: it has none); `parts` holds other modules that the step uses."""

    model: torch.nn.Module
    step: Callable[[list[dict]], object]
    items: list[dict]
    count: int
    states: Callable[[str], int]
    checkpoint: Callable[[], None] | None
    collate: Callable[[list[dict]], dict]
    parts: object = None

    def planned(self, args, card: Card) -> Callable[[Settings], Peak]:
        """A function from settings to the peak of two micro-batches: at the second one all
        gradients are there, and the next micro-batch is copied while one computes. It raises
        `CannotPlan`."""
        if not self.items:
            raise CannotPlan("none of the longest utterances can be read")
        plan = Plan(card.capability, self.model, self.parts)

        @functools.cache
        def without_states(
            size: int, count: int, checkpointing: bool, frozen: bool
        ) -> tuple[Peak, dict[str, int]]:
            batch = self.collate([self.items[i % len(self.items)] for i in range(size)])
            with self.settled(checkpointing, frozen):
                states = {optimizer: self.states(optimizer) for optimizer in STATES}
                return plan.measure(self.step, [batch] * count), states

        def peak(settings: Settings) -> Peak:
            count = min(2, settings.accumulation)
            found, states = without_states(
                settings.batch_size, count, settings.checkpointing, settings.frozen
            )
            return replace(
                found, parts={**found.parts, "optimizer states": states[settings.optimizer]}
            )

        return peak

    @property
    def seconds(self) -> float:
        return self.collate(self.items[:1])["seconds"][0]

    @contextlib.contextmanager
    def settled(self, checkpointing: bool, frozen: bool) -> Iterator[None]:
        """The model in training, with checkpointed layers or a frozen encoder; then as it was."""
        fields, trained = (
            dict(vars(self.model)),
            [(p, p.requires_grad) for p in self.model.parameters()],
        )
        if frozen:
            self.model.freeze_encoder()
        self.model.train()
        if checkpointing:
            self.checkpoint()
        try:
            yield
        finally:
            for module in self.model.modules():
                vars(module).pop("forward", None)
            for parameter, was_trained in trained:
                parameter.requires_grad_(was_trained)
            vars(self.model).update(fields)

    def settings(self, args) -> Settings:
        """The flags that memory depends on. A micro-batch is no larger than the data or
        --max_batch_seconds allow."""
        most = self.count if any(getattr(args, name, None) for name in DATA) else math.inf
        update = min(args.batch_size * args.gradient_accumulation_steps, most)
        at_once = (
            max(1, args.max_batch_seconds // self.seconds) if args.max_batch_seconds else math.inf
        )
        size = min(args.batch_size, update, at_once)
        optimizer = "offload" if args.use_cpu_offload else args.optimizer
        frozen = getattr(args, "freeze_encoder", False)
        return Settings(
            int(size), math.ceil(update / size), args.gradient_checkpointing, optimizer, frozen
        )

    def needs(self, args, card: Card) -> tuple[int, str]:
        """Bytes that must be free for a run with these flags, and the verdict. Raises
        `CannotPlan`."""
        peak = self.planned(args, card)(self.settings(args))
        return peak.total + workspace(card), verdict(peak, card)[0]

    def answer(self, args, card: Card, dtype: str, error: type[Exception]) -> int:
        """Prints the plan of a run with these flags and, if it does not fit on the card, the flags
        with which it does. Returns the exit status. Raises an `error` of this type."""
        try:
            return self._answer(args, card, dtype)
        except CannotPlan as reason:
            raise error(f"this run cannot be planned: {reason}") from None

    def _answer(self, args, card: Card, dtype: str) -> int:
        measure = self.planned(args, card)
        settings = self.settings(args)
        peak = measure(settings)
        what = f"{settings.batch_size} x {self.seconds:.1f} s, accumulation {settings.accumulation}"
        print(describe(peak, card, f"{what}, {dtype.removeprefix('torch.')}"), flush=True)
        if args.torch_compile:
            print("Planned without --torch_compile: what the compiler keeps is not known")
        status = verdict(peak, card)[1]
        if status:
            can = {"optimizer", *["checkpointing"] * (self.checkpoint is not None)}
            if hasattr(self.model, "freeze_encoder") and any(
                getattr(args, name, None) for name in TRAINED
            ):
                can.add("frozen")
            print(advise(measure, settings, can, card))
        return status
