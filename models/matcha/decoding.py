"""Texts to speech with a trained Matcha-TTS: sentences in batches, the flow from noise to mel
frames by Euler's method, and waveforms."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from common import memory
from models.matcha import alignment
from models.matcha.mels import SAMPLE_RATE
from models.matcha.model import BANDS, Matcha
from models.matcha.tokenizer import Tokens, read
from speech.writing.sentences import split_sentences

STEPS = 10  # of Euler's method
# The authors' is 0.667. A voice that has learned for some minutes cannot remove so much noise: of
# the demo's sentences a recogniser gets 35 % of the characters wrong then, and 5 % at 0.3.
TEMPERATURE = 0.3
LONGEST = 300  # characters that are spoken at once; a longer sentence is cut
ROWS = 16  # sentences that are spoken at once
PAUSE_SECONDS = 0.2  # between sentences
MOST_FRAMES = 50  # of a token, on average: untrained durations may be without limit


@dataclass(frozen=True)
class Voice:
    """A model with its tokens and the `language` of its texts. `vocoder` turns mel frames
    (B, F, 80) into waveforms (B, 256 F)."""

    model: Matcha
    tokens: Tokens
    language: str
    speakers: list[str]
    vocoder: torch.nn.Module

    @torch.no_grad()
    def vocode(self, mels: Tensor) -> Tensor:
        """The waveform (256 F,) of mel frames (F, 80)."""
        return self.vocoder.to(mels.device)(mels[None])[0]


@dataclass(frozen=True)
class SpeakingSettings:
    """How sentences are spoken. `speed`: 2 is twice as fast; `temperature`: of the noise that the
    flow starts at."""

    speed: float = 1.0
    temperature: float = TEMPERATURE
    seed: int = 0
    steps: int = STEPS


def speak(
    voice: Voice,
    texts: Sequence[str],
    settings: SpeakingSettings,
    speakers: Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """The waveforms (T,) of texts in order, on the model's device, each by the speaker of that
    number (the first one). The sentences of up to 16 texts are spoken together, fewer if these do
    not fit into memory, which changes none of them. Raises `RunError` for one that does not fit
    alone."""
    device = voice.model.mel_mean.device

    def spoken(batch: dict) -> list[Tensor]:
        return [voice.vocode(mel) for mel in mels_of(voice.model, batch["rows"], settings)]

    pause = torch.zeros(round(PAUSE_SECONDS * SAMPLE_RATE), device=device)
    for first in range(0, len(texts), ROWS):
        rows = []
        names = []
        counts = []
        for number, text in enumerate(texts[first : first + ROWS], first):
            # Numbers and abbreviations have full stops until they are read.
            parts = split_sentences(text, LONGEST, lambda part: len(read(part, voice.language)))
            sentences = [*filter(None, (read(part, voice.language) for part in parts))]
            speaker = speakers[number] if speakers else 0
            rows += [(voice.tokens.encode(sentence), speaker) for sentence in sentences]
            names += [f"the sentence {sentence[:40]!r}" for sentence in sentences]
            counts.append(len(sentences))
        waveforms = []
        for start in range(0, len(rows), ROWS):
            part = slice(start, start + ROWS)
            batch = {"names": names[part], "rows": rows[part]}
            for results in memory.split_on_oom(spoken, batch, device):
                waveforms += results
        made = iter(waveforms)
        for count in counts:
            parts = [pause] * (2 * count - 1)
            parts[::2] = itertools.islice(made, count)
            yield torch.cat(parts)


@torch.no_grad()
def mels_of(
    model: Matcha, sentences: Sequence[tuple[list[int], int]], settings: SpeakingSettings
) -> list[Tensor]:
    """The mel frames (F, 80) of sentences, each given as its tokens and the number of its speaker.
    All begin at the same random numbers, whatever they are spoken with."""
    device = model.mel_mean.device
    rows = [torch.tensor(tokens) for tokens, _ in sentences]
    lengths = torch.tensor([len(row) for row in rows], device=device)
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
    speakers = torch.tensor([speaker for _, speaker in sentences], device=device)
    means, log_frames, vectors = model.encode(tokens, lengths, speakers)
    ends = alignment.ends_of(log_frames, lengths, settings.speed)
    ends = ends.minimum(MOST_FRAMES * lengths[:, None])
    frames = ends[:, -1]
    longest = int(frames.max())
    generator = torch.Generator().manual_seed(settings.seed)
    noise = torch.randn(longest, BANDS, generator=generator).to(means) * settings.temperature
    mean_frames = alignment.frames_of(means, alignment.path_of(ends, longest))

    def velocity(x: Tensor, time: float) -> Tensor:
        times = torch.full((len(x),), time, device=device, dtype=x.dtype)
        return model.velocity(x, mean_frames, times, frames, vectors)

    mels = model.denormalised(euler(velocity, noise.expand(len(rows), -1, -1), settings.steps))
    return [mel[:count] for mel, count in zip(mels, frames.tolist(), strict=True)]


def euler(velocity: Callable[[Tensor, float], Tensor], x: Tensor, steps: int) -> Tensor:
    """Where the flow carries `x` from time 0 to 1, by `steps` steps of Euler's method."""
    for step in range(steps):
        x = x + velocity(x, step / steps) / steps
    return x
