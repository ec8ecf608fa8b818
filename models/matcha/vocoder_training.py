"""Training of a vocoder on the recordings of a voice: crops, and the error of their mel spectra in
three resolutions. There are no discriminators, so a little buzz stays."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import checkpoint, memory
from common.device import full_fp32, upcast
from models.matcha.mels import EDGE, HOP, SAMPLE_RATE, LogMel, log_bands, with_edges
from models.matcha.vocoder import CONFIG, SIZES, Vocos
from speech.data.columns import Corpus
from speech.data.splits import RunInfo
from speech.signal.audio import read_utterance
from speech.signal.spectra import mel_filters

FOLDER = "vocoder"  # in the folder of checkpoints
FRAMES = 64  # of a crop, 0.74 s
CROP = FRAMES * HOP  # samples
LOSS_WEIGHTS = {"mel": 1.0}
BETAS = (0.8, 0.9)
FLAGS = {
    "learning_rate": 5e-4, "warmup_steps": None, "gradient_checkpointing": False, "init_from": None,
    "early_stopping_patience": 0, "torch_compile": False, "max_grad_norm": 1.0,
}  # fmt: skip
RESOLUTIONS = {512: 40, 1024: 80, 2048: 160}  # samples of a window, and mel bands


def flags(steps: int) -> dict:
    """The flags of a training of so many updates, in place of the voice's."""
    return {**FLAGS, "max_steps": steps, "num_epochs": None, "eval_every": max(1, steps // 6)}


@dataclass(frozen=True)
class ModelInfo:
    """A vocoder's record in its checkpoints."""

    vocoder: Annotated[dict, CONFIG]


class Crops:
    """A set of utterances as the vocoder takes them: crops with their edges (CROP + 768,), whose
    place depends on (seed, epoch, index) alone; in evaluation the middle of the clip."""

    def __init__(self, corpus: Corpus, seed: int, training: bool):
        self.corpus = corpus
        self.seed = seed
        self.training = training

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def hours(self) -> float:
        return float(self.corpus.seconds.sum()) / 3600

    def seconds(self, epoch: int) -> np.ndarray:
        return np.full(len(self), CROP / SAMPLE_RATE)

    def item(self, index: int, epoch: int) -> dict:
        waveform = with_edges(read_utterance(self.corpus, index, SAMPLE_RATE))
        room = max(0, len(waveform) - CROP - 2 * EDGE)
        begin = room // 2
        if self.training:
            begin = int(np.random.default_rng([self.seed, epoch, index]).integers(room + 1))
        crop = waveform[begin : begin + CROP + 2 * EDGE]
        return {
            "audio": F.pad(crop, (0, CROP + 2 * EDGE - len(crop))),
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    return {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [CROP / SAMPLE_RATE] * len(items),
        "audio": torch.stack([item["audio"] for item in items]),
        "counts": {"mel": len(items)},
    }


class VocoderInTraining(nn.Module):
    """A vocoder in training, with the mel spectra that it is compared by."""

    def __init__(self, config: dict):
        super().__init__()
        self.vocoder = Vocos(config)
        self.log_mel = LogMel()
        for size, bands in RESOLUTIONS.items():
            filters = mel_filters(
                size // 2 + 1, SAMPLE_RATE / 2, bands, SAMPLE_RATE, "slaney", True
            )
            self.register_buffer(f"filters_{size}", filters, persistent=False)
            self.register_buffer(f"window_{size}", torch.hann_window(size), persistent=False)

    def spectra(self, waveforms: Tensor) -> list[Tensor]:
        """The logarithms of magnitudes in mel bands of (B, T), in each resolution."""
        spectra = []
        for size in RESOLUTIONS:
            window = self.get_buffer(f"window_{size}")
            filters = self.get_buffer(f"filters_{size}")
            spectra.append(log_bands(waveforms, window, size // 4, filters))
        return spectra


def compute_loss(model: VocoderInTraining, batch: dict) -> dict[str, Tensor]:
    """The sum over the batch of each crop's mean error in all resolutions."""
    audio = batch["audio"]
    made = model.vocoder(model.log_mel(audio))
    with torch.autocast(audio.device.type, enabled=False), full_fp32(audio.device):
        wanted = model.spectra(upcast(audio[:, EDGE:-EDGE]))
        spectra = model.spectra(made)
    errors = [(a - b).abs().mean((1, 2)) for a, b in zip(spectra, wanted, strict=True)]
    return {"mel": sum(errors).sum() / len(RESOLUTIONS)}


def evaluate(
    model: VocoderInTraining, eval_batches: Iterable[dict]
) -> dict[str, tuple[float, float]]:
    total = 0.0
    count = 0
    losses_of = functools.partial(compute_loss, model)
    for batch, results in memory.evaluated(losses_of, model, eval_batches):
        total += sum(float(losses["mel"]) for losses in results)
        count += len(batch["names"])
    return {"mel": (total, count)}


def size_of(channels: int) -> dict:
    """The configuration of the vocoder of a voice whose decoder has so many channels."""
    return SIZES["full" if channels >= 256 else "demo"]


def reports(checkpoint_dir: Path) -> tuple[str, ...]:
    """The folders of a run's vocoder, for the loop: a new voice moves earlier ones aside."""
    return FOLDER, str((checkpoint_dir / FOLDER).absolute())


def read_vocoder(folder: Path, recipe: str) -> Vocos | None:
    """The vocoder that was trained beside the checkpoints in a folder; None if there is none.
    Raises `UsageError`."""
    path = folder / FOLDER / "best.safetensors"
    if not path.exists():
        return None
    saved = checkpoint.read_weights(path, recipe)
    info, _ = checkpoint.read_infos(saved, ModelInfo, RunInfo)
    checkpoint.check_network(saved, lambda: VocoderInTraining(info.vocoder))
    model = VocoderInTraining(info.vocoder)
    checkpoint.load_weights(model, saved.model)
    return model.vocoder.eval()
