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
    """Answers of a recipe that only a dry run needs."""

    # what --freeze_encoder does; None: no such flag, or the encoder is random and must be trained
    freeze: Callable[[torch.nn.Module], None] | None = None
    # Is planned in place of an `evaluate` that takes minutes without values: it makes only the last
    # steps of a long search, which need the most memory.
    last_steps: Callable[[torch.nn.Module, Iterable[dict]], dict] | None = None
    compares: bool = False  # another model of this size decodes at the end, too, with fp32 weights
    # those that --lora of this rank adds; None: no such flag
    adapters: Callable[[int], Any] | None = None


@dataclass(frozen=True)
class Task:
    """All that the loop knows of a recipe."""

    name: str
    # Returns {term: sum over the batch}.
    compute_loss: Callable[[torch.nn.Module, dict], dict[str, torch.Tensor]]
    loss_weights: dict[str, float]  # a term without one is not trained
    # Returns {name: (numerator, denominator)}, so that the results of several ranks add up.
    evaluate: Callable[[torch.nn.Module, Iterable[dict]], dict[str, tuple[float, float]]]
    # Dataclasses, which are saved with all weights: what it takes to rebuild the model, and what
    # else later commands must know of the run.
    model_info: object
    run_info: object
    # The weights of the evaluation with its lowest value, or the highest, are kept as
    # best.safetensors; among equal ones, the first.
    metric: str
    higher_is_better: bool
    # Sets what a new model takes from the training data, such as the statistics of its features.
    # `train` calls it once, before the model moves to its device and gets the weights of
    # --init_from; not for a resumed run, and not in a dry run.
    fit: Callable[[torch.nn.Module, object], None] | None
    learning_rate: float | None = None  # the peak rate unless --learning_rate is given
    # The types of the layers that --gradient_checkpointing recomputes, and in which
    # --use_cpu_offload weights keeps 16-bit copies.
    checkpointed: tuple[type, ...] = ()
    # The types of the layers that --torch_compile compiles: none with a convolution, for which
    # torch compiles anew at every length.
    compiled: tuple[type, ...] = ()
    # the betas, and whether embeddings have weight decay
    adamw: optim.AdamWSettings = field(default_factory=optim.AdamWSettings)
    evaluate_first: bool = False  # a new run evaluates the model before its first update
    # The model began from released weights: the length of the run, its evaluations and its patience
    # follow the hours of speech.
    fine_tunes: bool = False
    updates: tuple[int, int] = run_length.UPDATES  # of a fine-tuning: the fewest; from an hour on
    # The share of the training set that is augmented (`data.augmented_share`) from the next epoch
    # on, by the best value of the metric, the present share, and whether the model overfits: the
    # loss of the last evaluation had risen. It never falls. None: all are augmented from the first
    # update on.
    augmented_share: Callable[[float, float, bool], float] | None = None
    # A sentence of advice if this value of the metric, after a fifth of the updates, says that the
    # model has not begun to learn; else None.
    not_begun: Callable[[float], str | None] | None = None
    # The tokens of the model and of --init_from; without it, tensors with a row for each token are
    # copied by number.
    vocabulary: checkpoint.Vocabulary | None = None
    # Files and folders that the recipe writes, by their names in the log folder or by their
    # absolute paths; a new run moves an earlier run's aside.
    reports: tuple[str, ...] = ()
    # files kept beside the best weights, {name: text}
    beside: dict[str, str] = field(default_factory=dict)
    # Rows of weights that learn at a rate of their own (`parts.new_rows`); of a new run only,
    # because a resumed run has them in its checkpoint.
    new_rows: Any = None
    further: Any = None  # sets that are evaluated with the evaluation set (`parts.watching`)
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
    """A run that has begun. `train` empties `resumed` and `initial`."""

    setup: Setup
    resumed: checkpoint.Saved | None = None  # the checkpoint that it resumes
    initial: checkpoint.Saved | None = None  # the weights of --init_from
    locks: list = field(default_factory=list)  # they hold the folders as long as they exist
    is_planned: bool = False  # nothing is trained, as with --dry_run and --verify_gpu
    card: Any = None  # the GPU that is planned for, None if --verify_gpu finds none
    keeps_folder: bool = True  # whether this rank looks after the folders of its machine
    restarted: bool = False  # whether torchrun has started the processes anew

    def model_device(self) -> contextlib.AbstractContextManager:
        """Make the model, and read released weights, in this context. In a dry run they are on the
        device "meta", where they take neither memory nor time; otherwise on the CPU."""
        return torch.device("meta") if self.is_planned else contextlib.nullcontext()
