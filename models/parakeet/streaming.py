"""A streaming model on audio as it comes. Features, encoder and decoding go on where the last step
ended, and give what `Parakeet.encode` and `decoding.decode` give for the whole recording."""

import dataclasses
import functools

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.parakeet import decoding
from models.parakeet.model import CausalConv2d, Encoder, Parakeet, relative_positions
from speech.decoding.timed import Token
from speech.signal import nemo_features
from speech.signal.nemo_features import HOP, WINDOW


class EncoderStream:
    """The encoder on the features of one recording, chunk by chunk. `frames` is how many frames it
    has made.

    It keeps, for each layer, keys and values (1, H, S, D / H) of the S frames that the next chunk
    sees, and the frames (1, kernel - 1, D) that the convolution sees; for each stage of the
    subsampling, the last frame of its input (1, C, 1, M)."""

    def __init__(self, encoder: Encoder, lookahead: int):
        self.encoder = encoder
        self.frames = 0
        self.chunk = lookahead + 1
        self.left = encoder.streaming["left"] // self.chunk * self.chunk  # frames: whole chunks
        self.stages: dict[int, Tensor] = {}
        self.attended: dict[int, tuple[Tensor, Tensor]] = {}
        self.convolved: dict[int, Tensor] = {}
        like = encoder.layers[0].norm_out.weight
        positions = relative_positions(like, self.chunk, self.left + self.chunk)
        self.distances = [layer.self_attn.distances(positions) for layer in encoder.layers]

    def step(self, x: Tensor, total: int | None = None) -> Tensor:
        """The encoder's next T <= chunk frames (1, T, D) of the next features (1, F, M).
        `total`: the number of features of the recording, if it ends with these. Zeros follow it,
        as many as its last frame sees."""
        x = self._subsample(x, total) * self.encoder.scale
        for number, layer in enumerate(self.encoder.layers):
            attend = functools.partial(self._attend, number)
            x = layer.around(x, attend, functools.partial(self._convolve, number))
        self.frames += x.shape[1]
        return x

    def _subsample(self, x: Tensor, total: int | None) -> Tensor:
        subsampling = self.encoder.subsampling
        valid = None if total is None else self._valid(total)
        x = x[:, None]
        stage = -1
        for layer in subsampling.layers:
            if isinstance(layer, CausalConv2d):
                stage += 1
                zeros = x.new_zeros(1, x.shape[1], 2, x.shape[3])  # before the recording
                x = torch.cat([self.stages.get(stage, zeros), x], dim=2)
                self.stages[stage] = x[:, :, -1:].clone()
                x = layer.step(x)
            else:
                if valid and isinstance(layer, nn.ReLU):
                    x[:, :, valid[stage] :] = 0.0
                x = layer(x)
        return subsampling.linear(x.transpose(1, 2).flatten(2))

    def _valid(self, total: int) -> list[int]:
        """How many of the frames that each stage of the subsampling makes now are not beyond the
        end of a recording with so many features."""
        halved = self.encoder.subsampling.halved
        lengths = []
        made = [self.frames]
        for _ in range(self.encoder.subsampling.stages):
            total = halved(total)
            lengths.append(total)
            made.insert(0, max(0, 2 * made[0] - 1))
        return [length - before for length, before in zip(lengths, made[1:], strict=True)]

    def _attend(self, number: int, x: Tensor) -> Tensor:
        attention = self.encoder.layers[number].self_attn
        q, k, v = attention.projected(x)
        if number in self.attended:
            keys, values = self.attended[number]
            k = torch.cat([keys, k], dim=2)
            v = torch.cat([values, v], dim=2)
        seen = k.shape[2]
        first = max(0, seen - self.left)
        self.attended[number] = (k[:, :, first:], v[:, :, first:])
        here = self.left + self.chunk - 1  # where the distance is 0
        distances = self.distances[number][:, here + 1 - seen : here + x.shape[1]]
        return attention.attend(q, k, v, distances, hidden=None)

    def _convolve(self, number: int, x: Tensor) -> Tensor:
        convolution = self.encoder.layers[number].conv
        x = convolution.gated(x)
        zeros = x.new_zeros(1, convolution.before, x.shape[2])  # before the recording
        x = torch.cat([self.convolved.get(number, zeros), x], dim=1)
        self.convolved[number] = x[:, x.shape[1] - convolution.before :]
        return convolution.step(x)


class Stream:
    """A recording that is recognised while it comes, with one of the model's look-aheads. What it
    keeps does not grow. `samples` and `encoder.frames` are how many there were so far."""

    @torch.no_grad()
    def __init__(self, model: Parakeet, lookahead: int):
        self.model = model
        self.encoder = EncoderStream(model.encoder, lookahead)
        self.memory = decoding.Memory()
        self.samples = 0
        window = model.log_mel.window
        self.device = window.device
        # The samples that features are still to be made of, from the one before the first window.
        self.audio = torch.zeros(1 + WINDOW // 2, dtype=window.dtype)

    @torch.no_grad()
    def push(self, waveform: Tensor) -> list[Token]:
        """The tokens that the next samples (T,) bring, by frames of the recording."""
        self.samples += len(waveform)
        self.audio = torch.cat([self.audio, waveform.to(self.audio)])
        tokens = []
        while len(self.audio) > WINDOW + HOP * (self._needed(self.encoder.chunk) - 1):
            tokens += self._step(self.encoder.chunk)
        return tokens

    @torch.no_grad()
    def finish(self) -> list[Token]:
        """The tokens at the end of the recording."""
        if not self.samples:
            return []
        total = nemo_features.frames(self.samples)
        frames = self.model.encoder.subsampling.frames(total) - self.encoder.frames
        return self._step(frames, total) if frames else []

    def _needed(self, frames: int) -> int:
        """How many features the next `frames` need beyond those that the last ones have seen."""
        factor = self.model.config["subsampling"]
        return factor * frames - (0 if self.encoder.frames else factor - 1)

    def _step(self, frames: int, total: int | None = None) -> list[Token]:
        needed = self._needed(frames)
        first = self.encoder.frames
        before = 0 if first == 0 else self.model.config["subsampling"] * (first - 1) + 1
        count = needed if total is None else total - before
        x = self.model.log_mel.step(self.audio[: WINDOW + HOP * count].to(self.device), count)
        self.audio = self.audio[HOP * needed :]
        x = self.encoder.step(F.pad(x, (0, 0, 0, needed - count)), total)
        if self.model.prompt_projector is not None:
            prompts = torch.tensor([self.model.prompt], device=self.device)
            x = self.model.prompt_projector(x, prompts)
        tokens = decoding.decode(self.model, x, [frames], self.memory)[0]
        return [dataclasses.replace(token, frame=first + token.frame) for token in tokens]
