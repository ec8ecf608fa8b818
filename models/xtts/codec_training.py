"""Training of a DVAE for an XTTS from scratch: crops of speech, the losses of a vector-quantised
autoencoder (van den Oord et al. 2017), and k-means for its first codebook."""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import checkpoint, memory, records
from common.device import upcast
from common.errors import UsageError
from models import model_files
from models.xtts.codec import DVAE, HOP, SAMPLE_RATE, SAMPLES_PER_CODE, Mel, nearest
from speech.data.columns import Corpus
from speech.data.splits import some_items
from speech.signal.audio import read_utterance

STEPS = {"autoencoder": 300, "dvae": 900}  # updates of the two runs that make a DVAE
FLAGS = {  # of these runs, in place of the GPT's
    "learning_rate": 1e-3, "weight_decay": 0.0, "warmup_steps": None, "early_stopping_patience": 0,
    "gradient_checkpointing": False, "torch_compile": False, "init_from": None,
}  # fmt: skip
FRAMES = 96  # of a crop, 1.1 s
CROP = FRAMES * HOP  # samples
SILENCE = 4 * SAMPLES_PER_CODE  # samples after a clip in a crop: codes at the end depend on them
LOSS_WEIGHTS = {"l1": 1.0, "codebook": 1.0, "commitment": 0.25}
FITTED = 512  # crops that the first codebook and the deviations of the bands are made of
LEAST_DEVIATION = 0.1  # of a band, which may have the same power throughout
ROUNDS = 20  # of k-means


@dataclass(frozen=True)
class ModelInfo:
    """A DVAE's record in its checkpoints. `updates`: the length of its run."""

    stage: Annotated[str, {*STEPS}]
    config: dict
    updates: int


# --- data -----------------------------------------------------------------------------------------


class Crops:
    """A set of utterances as the DVAE takes them: crops (CROP,), whose place depends on (seed,
    epoch, index) alone; in evaluation the beginning of the clip."""

    def __init__(self, corpus: Corpus, seed: int, training: bool):
        self.corpus = corpus
        self.seed = seed
        self.training = training

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        return np.full(len(self), CROP / SAMPLE_RATE)

    def item(self, index: int, epoch: int) -> dict:
        waveform = F.pad(read_utterance(self.corpus, index, SAMPLE_RATE), (0, SILENCE))
        begin = 0
        if self.training:
            room = max(0, len(waveform) - CROP)
            random = np.random.default_rng([self.seed, epoch, index])
            begin = int(random.integers(room + 1))
        crop = waveform[begin : begin + CROP]
        return {
            "audio": F.pad(crop, (0, CROP - len(crop))),
            "name": self.corpus.where(index),
            "index": index,
        }


def collate(items: list[dict]) -> dict:
    return {
        "names": [item["name"] for item in items],
        "indices": [item["index"] for item in items],
        "seconds": [CROP / SAMPLE_RATE] * len(items),
        "audio": torch.stack([item["audio"] for item in items]),
        "counts": dict.fromkeys(LOSS_WEIGHTS, len(items)),
    }


# --- model and loss -------------------------------------------------------------------------------


class Coder(nn.Module):
    """A DVAE in training, with the mels that it codes. Unless it is `quantised`, the encoder's
    vectors are decoded as they are. A codebook is a parameter here: moving averages would depend on
    how an update is cut into micro-batches."""

    def __init__(self, config: dict, quantised: bool):
        super().__init__()
        self.dvae = DVAE(config)
        self.mel = Mel("dvae", torch.ones(config["mel_channels"]))
        self.quantised = quantised
        if quantised:
            codebook = self.dvae.codebook
            initial = codebook.embed
            del codebook.embed
            codebook.embed = nn.Parameter(initial)

    def features(self, audio: torch.Tensor) -> torch.Tensor:
        """(B, CROP) to (B, M, FRAMES)."""
        return self.mel(audio)[:, :, :FRAMES]


def compute_loss(model: Coder, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of each crop's mean errors: of the mels, of the codes from the vectors,
    and of the vectors from the codes. The decoder's gradient passes the codes as if they were the
    vectors."""
    mels = model.features(batch["audio"])
    vectors = upcast(model.dvae.encode(mels))
    decoded = vectors
    zero = vectors.new_zeros(len(mels))
    terms = {"codebook": zero, "commitment": zero}
    if model.quantised:
        with torch.autocast(mels.device.type, enabled=False):  # as the GPT's codes will be computed
            codes = model.dvae.codebook.vectors(model.dvae.codebook.nearest(vectors.detach()))
        terms["codebook"] = (codes - vectors.detach()).square().mean((1, 2))
        terms["commitment"] = (vectors - codes.detach()).square().mean((1, 2))
        decoded = vectors + (codes - vectors).detach()
    terms["l1"] = (model.dvae.reconstruct(decoded) - mels).abs().mean((1, 2))
    return {name: values.sum() for name, values in terms.items()}


def evaluate(model: Coder, eval_batches: Iterable[dict]) -> dict[str, tuple[float, float]]:
    """The losses as (sum, count)."""
    sums = dict.fromkeys(LOSS_WEIGHTS, 0.0)
    count = 0
    losses_of = functools.partial(compute_loss, model)
    for batch, results in memory.evaluated(losses_of, model, eval_batches):
        for terms in results:
            sums = {name: total + float(terms[name]) for name, total in sums.items()}
        count += len(batch["names"])
    return {name: (total, count) for name, total in sums.items()}


# --- what is fitted to the data -------------------------------------------------------------------


@torch.no_grad()
def fit(
    seed: int,
    draw_seed: int | None,
    tensors: dict[str, torch.Tensor] | None,
    model: Coder,
    data: Crops,
) -> None:
    """Prepares the DVAE of a new run. The first run gets the deviation of each band, and the bands'
    means as its output. The second run gets `tensors`, the weights of the first, and a codebook by
    k-means of the encoder's vectors. `draw_seed` draws the utterances: see `splits.draw_items`."""
    audio = torch.stack([item["audio"] for item in some_items(data, draw_seed, FITTED)])
    if tensors is None:
        deviation, mean = torch.std_mean(model.mel(audio), dim=(0, 2))
        deviation = deviation.clamp_min(LEAST_DEVIATION)
        model.mel.mel_stats.copy_(deviation)
        model.dvae.decoder[-1].bias.copy_(mean / deviation)
        return
    model.load_state_dict(tensors)
    vectors = [model.dvae.encode(model.features(part)).flatten(0, 1) for part in audio.split(32)]
    codes = model.dvae.codebook.embed
    generator = torch.Generator().manual_seed(seed)
    codes.copy_(kmeans(torch.cat(vectors), codes.shape[1], generator).t())


def kmeans(vectors: torch.Tensor, count: int, generator: torch.Generator) -> torch.Tensor:
    """`count` centres (K, D) of vectors (N, D) by Lloyd's algorithm, from vectors drawn at random.
    A centre without a vector moves to one drawn at random."""
    repeated = vectors.repeat(-(-count // len(vectors)), 1)
    centres = repeated[torch.randperm(len(repeated), generator=generator)[:count]].clone()
    for _ in range(ROUNDS):
        codes = nearest(vectors, centres.t())
        sizes = torch.zeros(count).index_add_(0, codes, torch.ones(len(codes)))
        sums = torch.zeros_like(centres).index_add_(0, codes, vectors)
        drawn = vectors[torch.randint(len(vectors), (count,), generator=generator)]
        centres = torch.where(sizes[:, None] > 0, sums / sizes[:, None].clamp_min(1), drawn)
    return centres


# --- the two runs ---------------------------------------------------------------------------------


def flags(stage: str) -> dict:
    """The flags of one of the two runs, in place of the GPT's."""
    steps = STEPS[stage]
    return {**FLAGS, "max_steps": steps, "eval_every": steps // 4}


def for_task(stage: str, config: dict, updates: int, fit: Callable[[Coder, Crops], None]) -> dict:
    """The fields of the loop's `Task` of one of the two runs, by the names of its fields."""
    return {
        "compute_loss": compute_loss,
        "loss_weights": LOSS_WEIGHTS,
        "evaluate": evaluate,
        "model_info": ModelInfo(stage, config, updates),
        "metric": "l1",
        "higher_is_better": False,
        "fit": fit,
    }


# --- a trained DVAE -------------------------------------------------------------------------------


def read_dvae(recipe: str, config: dict, folder: Path, expected: dict) -> tuple[dict, ModelInfo]:
    """The weights of the DVAE that was trained into `folder`, as `formats.read_frozen` returns
    them, and its info. `expected`: the shapes of its tensors. Raises `UsageError`."""
    path = folder / "best.safetensors"
    if not path.exists():
        raise UsageError(
            f"the DVAE of this model is not in {folder}: name its folder with --model_dir"
        )
    saved = checkpoint.read_weights(path, recipe, "--model_dir")
    info = records.read(ModelInfo, saved.model_info, path)
    # in a dry run without values, on the device "meta"
    tensors = {name: w.to(torch.get_default_device()) for name, w in saved.model.items()}
    stats = tensors.pop("mel.mel_stats", torch.zeros(0))
    dvae = {
        name.removeprefix("dvae."): tensor
        for name, tensor in tensors.items()
        if name.startswith("dvae.")
    }
    model_files.check_shapes(dvae, expected, path, "XTTS")
    if stats.shape != (config["mel_channels"],):
        raise UsageError(f"{path}: it lacks the deviations of {config['mel_channels']} bands")
    return {"dvae": dvae, "hifigan_decoder": {}, "mel_stats": stats}, info
