"""A run as it is planned: its longest micro-batch, its settings, and the answer."""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from dry_run.advice import SLOWER, Measures, PlannedSettings, advise
from dry_run.cards import Card, workspace
from dry_run.fake_tensors import SMALL, CannotPlan
from dry_run.peak import Peak
from dry_run.plan import Plan
from dry_run.report import describe, verdict
from dry_run.sharding import Sharding, shard_bytes, shard_numel

EPOCHS, UTTERANCES = 10, 20  # that are looked at
SECONDS = 1200.0  # of audio that is read for a plan, unless two utterances are longer
# Utterances of a larger micro-batch that are planned first, and the factor by which they become
# more as long as they fit: a plan takes longer, the more utterances it has.
FIRST, MORE = 256, 4


def longest_items(dataset, epochs: int, fault: type[Exception]) -> list[dict]:
    """Items of the longest utterances of a data set, each in the epoch of eleven in which it is
    longest. The longest comes first, the one with the most targets second. `dataset` is the loop's:
    `data` has `seconds(epoch)` (N,) and `item(index, epoch)`, `collate(items)` makes a batch, and
    with `skip_bad` a run skips items that raise a `fault`. If `data` has `text_length(index)`, it
    decides among utterances of the same length, and the longest text is looked at, too."""
    data = dataset.data
    longest = torch.as_tensor(data.seconds(0))
    epoch_of = torch.zeros(len(longest), dtype=torch.long)
    for epoch in sorted({round(i * (epochs - 1) / EPOCHS) for i in range(1, EPOCHS + 1)} - {0}):
        seconds = torch.as_tensor(data.seconds(epoch))
        epoch_of[seconds > longest] = epoch
        longest = longest.maximum(seconds)
    lengths = torch.zeros(len(longest))
    if hasattr(data, "text_length"):
        lengths = torch.tensor([data.text_length(index) for index in range(len(longest))])
    by_text = lengths.argsort(descending=True, stable=True)
    order = by_text[longest[by_text].argsort(descending=True, stable=True)]
    items = []
    count = UTTERANCES
    if len(order):
        count = min(count, max(2, int(SECONDS // longest[order[0]])))
    for index in dict.fromkeys([*order[:count].tolist(), *by_text[:1].tolist()]):
        try:
            items.append(data.item(index, int(epoch_of[index])))
        except fault:
            if not dataset.skip_bad:
                raise
    targets = [sum(dataset.collate([item])["counts"].values()) for item in items]
    most = targets.index(max(targets)) if items else 0
    if most:
        items.insert(1, items.pop(most))
    return items


def repeated(batch: dict, count: int, size: int) -> dict:
    """The batch that `collate` would make of `size` items if its `count` items came again and
    again. Large tensors of floating type, whose values a plan does not need, are on the device
    "meta", so that a batch takes neither memory nor time for its audio."""
    rows = torch.arange(size) % count
    larger = {}
    for key, value in batch.items():
        if key == "counts":
            larger[key] = {term: targets * size // count for term, targets in value.items()}
        elif not isinstance(value, torch.Tensor):
            larger[key] = [value[row] for row in rows.tolist()]
        elif value.is_floating_point() and value[0].numel() * size > SMALL:
            larger[key] = value.new_empty(size, *value.shape[1:], device="meta")
        else:
            larger[key] = value[rows]
    return larger


def leave(parameter: torch.nn.Parameter) -> None:
    """A gradient leaves the GPU."""
    parameter.grad = None


def completed(peak: Peak, states: dict, optimizer: str, size: int, stage: str) -> Peak:
    """A peak with the `states` of an optimizer, (bytes on the GPU, on the host) by its name."""
    on_gpu, on_host = states[optimizer]
    parts = {**peak.parts, "optimizer states": on_gpu}
    return replace(peak, parts=parts, utterances=size, stage=stage, host=on_host)


def smallest(
    peak: Callable[[PlannedSettings, int], Peak], settings: PlannedSettings, card: Card
) -> Peak:
    """The peak of the settings' micro-batches, or of fewer utterances that are too many already."""
    size = min(FIRST, settings.batch_size)
    planned = peak(settings, size)
    while size < settings.batch_size and not verdict(planned, card)[1]:
        size = min(MORE * size, settings.batch_size)
        planned = peak(settings, size)
    return planned


@dataclass(frozen=True)
class Evaluation:
    """The evaluations of a run: `evaluate(batches, level)` of batches that `collate` makes of
    `items`, the longest first of `count`, with a level of offloading or ""."""

    evaluate: Callable[[list[dict], str], object]
    items: list[dict]
    count: int
    collate: Callable[[list[dict]], dict]


@dataclass(frozen=True)
class PlannedRun:
    """A run that is planned."""

    model: torch.nn.Module
    step: Callable[[list[dict]], object]  # forward and backward with batches on the host
    items: list[dict]  # the longest first
    count: int  # utterances of a rank
    states: Callable[[str], int]  # bytes of an optimizer's states
    collate: Callable[[list[dict]], dict]
    checkpoint: Callable[[], None] | None = None  # makes the layers recompute their activations
    freeze: Callable[[], None] | None = None  # its encoder; None: it cannot
    parts: object = None  # other modules that the step uses
    evaluation: Evaluation | None = None
    host: Callable[[str], int] = lambda optimizer: 0  # and those on the host
    # with the type `halves` on the GPU if weights are offloaded
    castable: Callable[[], list[torch.nn.Parameter]] = list
    halves: torch.dtype | None = None
    compares: bool = False  # another model of this size, with fp32 weights, decodes at the end
    ranks: int = 1
    layers: tuple[type, ...] = ()  # the types of modules that --sharded divides
    # Adds low-rank adapters and returns the flag that would; None: it has some, or cannot.
    adapt: Callable[[], str] | None = None

    def planned(self, args, card: Card) -> Measures:
        """Measures of two micro-batches: at the second one all gradients are there, and the next
        micro-batch is copied while one computes. The peak is that of fewer utterances if these are
        already too many for the card. Measures of an evaluation, in which there are states but no
        gradients. They raise `CannotPlan`."""
        if not self.items:
            raise CannotPlan("none of the longest utterances can be read")
        plan = Plan(card.capability, self.model, self.parts)

        @functools.cache
        def without_states(
            size: int, count: int, checkpointing: bool, frozen: bool, level: str, sharded: bool
        ) -> tuple:
            items = self.items[:size]
            batch = repeated(self.collate(items), len(items), size)
            with self.settled(checkpointing, frozen), self.offloaded(plan, level):
                sharding = Sharding(plan.fakes, self.model, self.layers, self.ranks)
                with sharding.applied() if sharded else contextlib.nullcontext():
                    return plan.measure(self.step, [batch] * count), self.all_states(sharded)

        @functools.cache
        def of_evaluation(size: int, frozen: bool, level: str, sharded: bool) -> tuple:
            given = self.evaluation
            items = given.items[:size]
            batch = repeated(given.collate(items), len(items), size)
            shards = 0
            if sharded:  # beside them a rank has the whole model, as with this level
                shards = shard_bytes(self.model.parameters(), self.ranks)
                level = "weights"
            with self.settled(False, frozen), self.offloaded(plan, level):
                step = functools.partial(given.evaluate, level=level)
                evaluated = plan.measure(step, [batch])
                parts = {**evaluated.parts, "weights": evaluated.parts["weights"] + shards}
                return replace(evaluated, parts=parts), self.all_states(sharded)

        def peak(settings: PlannedSettings, size: int) -> Peak:
            count = min(2, settings.accumulation)
            settled = settings.checkpointing, settings.frozen, settings.level, settings.sharded
            found = without_states(size, count, *settled)
            return completed(*found, settings.optimizer, size, "training")

        def evaluation_peak(settings: PlannedSettings) -> Peak:
            size = settings.eval_batch_size
            largest = of_evaluation(size, settings.frozen, settings.level, settings.sharded)
            largest = completed(*largest, settings.optimizer, size, "evaluation")
            if not (self.compares and (settings.level == "weights" or settings.sharded)):
                return largest  # which includes states, and is not less than the comparison
            other = of_evaluation(size, settings.frozen, "gradients", False)
            other = completed(*other, "gradients", size, "the comparison at the end")
            other = replace(other, host=largest.host)
            return max(largest, other, key=lambda peak: peak.total)

        has_evaluation = self.evaluation and self.evaluation.items
        return Measures(
            lambda settings: smallest(peak, settings, card),
            evaluation_peak if has_evaluation else None,
        )

    def all_states(self, sharded: bool) -> dict[str, tuple[int, int]]:
        """The bytes of each optimizer's states, on the GPU and on the host."""
        if sharded:  # AdamW's two averages
            trained = [p for p in self.model.parameters() if p.requires_grad]
            return {"adamw": (8 * sum(shard_numel(p, self.ranks) for p in trained), 0)}
        return {each: (self.states(each), self.host(each)) for each in SLOWER}

    @property
    def seconds(self) -> float:
        return self.collate(self.items[:1])["seconds"][0]

    @contextlib.contextmanager
    def settled(self, checkpointing: bool, frozen: bool) -> Iterator[None]:
        """The model in training, with checkpointed layers or a frozen encoder; then as it was."""
        fields = dict(vars(self.model))
        trained = [(p, p.requires_grad) for p in self.model.parameters()]
        if frozen and self.freeze:
            self.freeze()
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

    @contextlib.contextmanager
    def offloaded(self, plan: Plan, level: str) -> Iterator[None]:
        """The model's gradients leave the GPU as soon as they are there, and with "weights" the
        castable parameters have 16 bits; then as it was."""
        hooks = []
        full = {}
        if level:
            for parameter in self.model.parameters():
                if parameter.requires_grad:
                    hooks.append(parameter.register_post_accumulate_grad_hook(leave))
        if level == "weights" and self.halves:
            for parameter in self.castable():
                if parameter.dtype is not torch.float32:
                    continue
                full[parameter] = parameter.data
                plan.fakes.uncount(parameter.data)
                parameter.data = plan.fakes.like(parameter.data, "weights", self.halves)
        try:
            yield
        finally:
            for parameter, data in full.items():
                parameter.data = data
                plan.fakes.note_read(data)
            for hook in hooks:
                hook.remove()

    @property
    def is_frozen(self) -> bool:
        """Whether `freeze` would freeze nothing more."""
        trained = [p.requires_grad for p in self.model.parameters()]
        with self.settled(checkpointing=False, frozen=True):
            still_trained = [p.requires_grad for p in self.model.parameters()]
        return trained == still_trained

    def settings(self, args) -> PlannedSettings:
        """The flags that memory depends on. Data and --max_batch_seconds limit a micro-batch."""
        update = min(args.batch_size * args.gradient_accumulation_steps, self.count)
        size = min(args.batch_size, update)
        if args.max_batch_seconds:
            size = min(size, max(1, int(args.max_batch_seconds // self.seconds)))
        evaluated = args.eval_batch_size
        if self.evaluation:
            evaluated = min(evaluated, self.evaluation.count)
        return PlannedSettings(
            batch_size=size,
            accumulation=math.ceil(update / size),
            checkpointing=args.gradient_checkpointing,
            optimizer=args.use_cpu_offload or args.optimizer,
            frozen=self.freeze is not None and self.is_frozen,
            eval_batch_size=evaluated,
            sharded=args.sharded,
        )

    def needs(self, args, card: Card) -> tuple[int, str]:
        """Bytes that a run with these flags needs, and the verdict. Raises `CannotPlan`."""
        peak = self.planned(args, card).largest(self.settings(args))
        return peak.total + workspace(card), verdict(peak, card)[0]

    def answer(self, args, card: Card, dtype: str) -> int:
        """Prints the plan of a run with these flags and, if it does not fit on the card, the flags
        with which it does. Returns the exit status. Raises `CannotPlan`."""
        measures = self.planned(args, card)
        settings = self.settings(args)
        training = measures.training(settings)
        peak = measures.largest(settings)
        what = f"{training.utterances} x {self.seconds:.1f} s, accumulation {settings.accumulation}"
        if card.count > 1:
            kind = "sharded" if settings.sharded else "replicated"
            what = f"on each of {card.count} GPUs ({kind}) {what}"
        others = [each for each in measures.stages(settings) if each.stage != peak.stage]
        text = describe(peak, card, f"{what}, {dtype.removeprefix('torch.')}", others)
        print(text, flush=True)
        if training.utterances < settings.batch_size:
            print(f"That is a part of the micro-batch: all {settings.batch_size} need more")
        if args.torch_compile:
            print("Planned without --torch_compile: what the compiler keeps is not known")
        status = verdict(peak, card)[1]
        if status:
            can = {"optimizer", "weights"} if self.halves else {"optimizer"}
            if settings.sharded:
                can = set()
            elif self.ranks > 1:
                can.add("sharded")
            if self.checkpoint:
                can.add("checkpointing")
            if self.freeze:
                can.add("frozen")
            print(advise(measures, settings, can, card))
            if self.adapt:
                flag = self.adapt()
                print(f"Or with {flag}, which trains adapters beside a released model:")
                alone = replace(settings, optimizer="adamw", sharded=False)
                print(advise(self.planned(args, card), alone, can & {"checkpointing"}, card))
        return status
