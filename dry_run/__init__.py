"""Predicts the peak of GPU memory of a training step, without a GPU: the step runs on tensors
without values."""

from dry_run.cards import choose_card
from dry_run.hollow import CannotPlan
from dry_run.training import Training, longest_items

__all__ = ["CannotPlan", "Training", "choose_card", "longest_items"]
