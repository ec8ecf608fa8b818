"""Which utterances are padded to the longest input of a Whisper in training, because programs that
decode always pad, and how."""

import functools

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from models.whisper.model import HOP
from speech.signal.audio import SAMPLE_RATE

LONGER = 1.1  # times as much audio: worth a line


@functools.lru_cache(maxsize=4)
def drawn(seed: int, epoch: int, count: int, share: float) -> np.ndarray:
    """(N,) a `share` of the utterances. A smaller share is of the same ones."""
    return np.random.default_rng([seed, epoch, 11]).random(count) < share


def middle_epoch(updates: int, per_epoch: int) -> int:
    """The epoch from which --pad_share applies, in a run of so many updates with `per_epoch` in an
    epoch. Before the model can read anything, 30 s of mostly silence teach it little and cost as
    much as ten short utterances."""
    return int(updates / per_epoch / 2)


def note_longer_epochs(global_batches, begin: int) -> None:
    """Prints by how much the epochs of a training set become longer at the epoch `begin`, which an
    estimate of the time left cannot know before."""
    if begin == 0:
        return
    seconds = global_batches.data.seconds
    ratio = float(seconds(begin).sum() / seconds(begin - 1).sum())
    if ratio > LONGER:
        first = global_batches.count(0, begin) + 1
        print(
            f"padding: from update {first} on (--pad_share), an epoch has {ratio:.1f} times the"
            " audio, and updates take longer than the time left says before"
        )


class Padding:
    """Pads all of `count` utterances to the `longest` input in seconds (`always`), or a `share` of
    them from the epoch `begin` on."""

    def __init__(self, seed: int, count: int, longest: float, share: float, always: bool):
        self.seed = seed
        self.count = count
        self.longest = longest
        self.share = 1.0 if always else share
        self.always = always
        self.begin = 0

    def padded(self, epoch: int) -> np.ndarray:
        """(N,) which utterances are padded in an epoch."""
        if self.always or epoch < self.begin:
            return np.full(self.count, self.always)
        return drawn(self.seed, epoch, self.count, self.share)

    def filled(self, epoch: int) -> np.ndarray:
        """(N,) which of the padded utterances have zeros for features after their end, as in
        faster-whisper and openai-whisper's `transcribe`: half of them. The others have silence, as
        in transformers and whisper.cpp."""
        return drawn(self.seed, epoch, self.count, self.share / 2)

    def lengths(self, seconds: np.ndarray, epoch: int) -> np.ndarray:
        """(N,) lengths of so many seconds (N,) in an epoch."""
        return np.where(self.padded(epoch), self.longest, seconds)

    def pad(self, waveform: Tensor, index: int, epoch: int) -> dict:
        """ "audio", (T,) the waveform in an epoch, and "fill_from", the frame from which the
        features are zeros. The silence is heard: it is not masked."""
        limit = round(self.longest * SAMPLE_RATE)
        if not self.padded(epoch)[index]:
            return {"audio": waveform, "fill_from": limit // HOP}
        is_filled = self.filled(epoch)[index]
        padded = F.pad(waveform, (0, limit - len(waveform)))
        return {"audio": padded, "fill_from": len(waveform if is_filled else padded) // HOP}
