"""A set of utterances of a recogniser, whose sound changes from epoch to epoch in training."""

from collections.abc import Callable

import numpy as np
from torch import Tensor

from speech.data.columns import Corpus
from speech.signal import augment
from speech.signal.audio import change_speed, speed_factors

SPEEDS = (0.9, 1.0, 1.1)  # of --speed_perturbation (Ko et al. 2015)


class AugmentedUtterances:
    """A set of utterances, to which a recipe adds `item`. Only a training set is augmented by
    --speed_perturbation and --wave_augment: a share of it, which the loop may let grow. What is
    changed depends on this share and (seed, epoch, index) alone."""

    augmented_share = 1.0

    def __init__(self, flags, corpus: Corpus, longest: float, training: bool):
        """`flags`: those of augmentation, and the seed. An utterance stays below `longest` seconds,
        whatever becomes of it."""
        self.corpus = corpus
        self.seed = flags.seed
        self.longest = longest
        self.training = training
        self.changes_speed = training and flags.speed_perturbation
        self.augmentation = None
        if training and flags.wave_augment:
            noises = augment.read_noises(flags.noise_dir)
            self.augmentation = augment.Augmentation(self.seed, len(corpus), longest, noises)

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def text_length(self, index: int) -> int:
        return len(self.corpus.texts[index])

    def augmented(self, epoch: int) -> np.ndarray:
        """(N,) which utterances are augmented in an epoch."""
        return augment.chosen(self.seed, epoch, len(self), self.augmented_share)

    def speeds(self, epoch: int) -> np.ndarray:
        """(N,) factors of the speeds."""
        factors = speed_factors(self.seed, epoch, len(self), SPEEDS)
        return np.where(self.augmented(epoch), factors, np.float32(1))

    def seconds(self, epoch: int) -> np.ndarray:
        """(N,) lengths in an epoch."""
        return self.with_silence(self.at_speeds(self.corpus.seconds, epoch), epoch)

    def at_speeds(self, seconds: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) seconds at the speeds of an epoch."""
        if not self.changes_speed:
            return seconds
        return np.minimum(seconds / self.speeds(epoch), self.longest)

    def with_silence(self, seconds: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) seconds with silence at the ends."""
        if not self.augmentation:
            return seconds
        return np.where(self.augmented(epoch), self.augmentation.lengths(seconds, epoch), seconds)

    def at_speed(
        self, waveform: Tensor, index: int, epoch: int, fits: Callable[[int], bool]
    ) -> Tensor:
        """The waveform (T,) of an utterance at its speed in an epoch. One that would have so many
        samples that it does not fit stays as it is, such as a dense one that would become too short
        for its text."""
        if not self.changes_speed:
            return waveform
        changed = change_speed(waveform, float(self.speeds(epoch)[index]))
        return changed if fits(len(changed)) else waveform

    def in_noise(
        self, waveform: Tensor, tokens: list[int], index: int, epoch: int
    ) -> tuple[Tensor, list[int]]:
        """The waveform (T,) with silence, noise and gain of an epoch, and its tokens (U,). Some
        utterances are a pause without a token."""
        if not (self.augmentation and self.augmented(epoch)[index]):
            return waveform, tokens
        if self.augmentation.is_pause(index, epoch):
            waveform, tokens = self.augmentation.pause(waveform, index, epoch), []
        return self.augmentation.apply(waveform, index, epoch), tokens
