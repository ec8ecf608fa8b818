"""The contract between a recipe and the loop: what a recipe says of its task, and the run that
`setting_up.begin` starts for it."""

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from common import checkpoint, optim, run_length
from common.device import Setup


@dataclass(frozen=True)
class ForPlans:
    """Answers of a recipe that only a dry run needs. `freeze(model)` is what --freeze_encoder does;
    None if there is no such flag, or if the encoder is random and must be trained. `last_steps` is
    planned in place of an `evaluate` that takes minutes without values: it makes only the last
    steps of a long search, which need the most memory. With `compares`, another model of this size
    decodes at the end, too, with fp32 weights. `adapters(rank)` are those that --lora adds; None if
    there is no such flag."""

    freeze: Callable[[torch.nn.Module], None] | None = None
    last_steps: Callable[[torch.nn.Module, Iterable[dict]], dict] | None = None
    compares: bool = False
    adapters: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Task:
    """All that the loop knows of a recipe.

    `compute_loss(model, batch)` returns {term: sum over the batch}; a term without an entry in
    `loss_weights` is not trained. `evaluate(model, batches)` returns {name: (numerator,
    denominator)}, so that the results of several ranks add up. `model_info` and `run_info` are
    dataclasses, which are saved with all weights: what it takes to rebuild the model, and what else
    later commands must know of the run. The weights of the evaluation with the lowest `metric`, or
    the highest with `higher_is_better`, are kept as best.safetensors; among equal ones, the first.

    `fit(model, data)` sets what a new model takes from the training data, such as the statistics of
    its features. `train` calls it once, before the model moves to its device and gets the weights
    of --init_from; not for a resumed run, and not in a dry run.

    The rest has defaults:
    `learning_rate`      the peak rate unless --learning_rate is given
    `checkpointed`       the types of the layers that --gradient_checkpointing recomputes, and in
                         which --use_cpu_offload weights keeps 16-bit copies
    `compiled`           the types of the layers that --torch_compile compiles: none with a
                         convolution, for which torch compiles anew at every length
    `adamw`              the optimizer's betas, and whether embeddings have weight decay
    `evaluate_first`     a new run evaluates the model before its first update
    `fine_tunes`         the model began from released weights: the length of the run, its
                         evaluations and its patience follow the hours of speech
    `updates`            of a fine-tuning: the fewest, and those from an hour of speech on
    `augmented_share`    the share of the training set that is augmented (`data.augmented_share`)
                         from the next epoch on, by the best value of the metric; it never falls.
                         Without it all are, from the first update on
    `not_begun`          a sentence of advice if this value of the metric, after a fifth of the
                         updates, says that the model has not begun to learn; else None
    `vocabulary`         the tokens of the model and of --init_from; without it, tensors with a row
                         for each token are copied by number
    `reports`            files and folders that the recipe writes, by their names in the log folder
                         or by their absolute paths; a new run moves an earlier run's aside
    `beside`             files that are kept beside the best weights, {name: text}
    `new_rows`           rows of weights that learn at a rate of their own (`parts.new_rows`); of a
                         new run only, because a resumed run has them in its checkpoint
    `further`            sets that are evaluated with the evaluation set (`parts.watching`)
    `plans`              what only a dry run asks"""

    name: str
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]]
    loss_weights: dict[str, float]
    evaluate: Callable[[torch.nn.Module, Iterable[dict]], dict[str, tuple[float, float]]]
    model_info: object
    run_info: object
    metric: str
    higher_is_better: bool
    fit: Callable[[torch.nn.Module, object], None] | None
    learning_rate: float | None = None
    checkpointed: tuple[type, ...] = ()
    compiled: tuple[type, ...] = ()
    adamw: optim.AdamWSettings = field(default_factory=optim.AdamWSettings)
    evaluate_first: bool = False
    fine_tunes: bool = False
    updates: tuple[int, int] = run_length.UPDATES
    augmented_share: Callable[[float], float] | None = None
    not_begun: Callable[[float], str | None] | None = None
    vocabulary: checkpoint.Vocabulary | None = None
    reports: tuple[str, ...] = ()
    beside: dict[str, str] = field(default_factory=dict)
    new_rows: Any = None
    further: Any = None
    plans: ForPlans = ForPlans()

    def is_better(self, value: float, other: float) -> bool:
        """Whether a value of the metric is better than another one."""
        return value > other if self.higher_is_better else value < other

    @property
    def evaluates_first(self) -> bool:
        """Whether a new run evaluates the model before its first update. It does with further sets,
        whose results are compared with those from before."""
        return self.evaluate_first or self.further is not None


@dataclass(frozen=True)
class Run:
    """A run that has begun: where it computes, the checkpoint that it resumes (or None), and the
    weights of --init_from (or None); `train` empties both. `locks` hold the folders as long as they
    exist. `is_planned`: nothing is trained, as with --dry_run and --verify_gpu; `card`: the GPU
    that is planned for, None if --verify_gpu finds none. `keeps_folder`: whether this rank looks
    after the folders of its machine. `restarted`: whether torchrun has started the processes of
    this run anew."""

    setup: Setup
    resumed: checkpoint.Saved | None = None
    initial: checkpoint.Saved | None = None
    locks: list = field(default_factory=list)
    is_planned: bool = False
    card: Any = None
    keeps_folder: bool = True
    restarted: bool = False

    def model_device(self) -> contextlib.AbstractContextManager:
        """Make the model, and read released weights, in this context. In a dry run they are on the
        device "meta", where they take neither memory nor time; otherwise on the CPU."""
        return torch.device("meta") if self.is_planned else contextlib.nullcontext()
