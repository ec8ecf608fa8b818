"""What a DVAE for XTTS is trained on and by: crops of speech, the losses of a vector-quantised
autoencoder (van den Oord et al. 2017), and k-means for its first codebook."""

from collections.abc import Iterable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from common import batches, memory
from common.device import upcast
from speech.audio import read_utterance
from speech.columns import Corpus
from speech.xtts.codec import DVAE, HOP, SAMPLE_RATE, SAMPLES_PER_CODE, Mel, nearest

STEPS = {"autoencoder": 300, "dvae": 900}  # updates of the two runs that make a DVAE
FRAMES = 96  # of a crop, 1.1 s
CROP = FRAMES * HOP  # samples
SILENCE = (
    4 * SAMPLES_PER_CODE
)  # samples after a clip that a crop may reach, because codes of the end see them
LOSS_WEIGHTS = {"l1": 1.0, "codebook": 1.0, "commitment": 0.25}
CLIPS = 512  # of which the first codebook and the bands' deviations are made
LEAST_DEVIATION = 0.1  # of a band, which may have the same power throughout
ROUNDS = 20  # of k-means


class Crops:
    """A set of utterances as the DVAE takes them: (CROP,) samples, at a place that depends on
    (seed, epoch, index) alone; in evaluation the beginning of the clip."""

    def __init__(self, corpus: Corpus, seed: int, cache: str | None, training: bool):
        self.corpus = corpus
        self.seed = seed
        self.cache = cache
        self.training = training

    def __len__(self) -> int:
        return len(self.corpus)

    def fingerprint(self) -> str:
        return self.corpus.fingerprint()

    def seconds(self, epoch: int) -> np.ndarray:
        return np.full(len(self), CROP / SAMPLE_RATE)

    def item(self, index: int, epoch: int) -> dict:
        waveform = F.pad(read_utterance(self.corpus, index, SAMPLE_RATE), (0, SILENCE))
        room = max(0, len(waveform) - CROP)
        begin = (
            int(np.random.default_rng([self.seed, epoch, index]).integers(room + 1))
            if self.training
            else 0
        )
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


class Coder(nn.Module):
    """A DVAE in training, with the mels that it codes. Until it is `quantised`, vectors are decoded
    as they are; from then on the codebook is a parameter, because moving averages would depend on
    how an update is cut into micro-batches."""

    def __init__(self, config: dict, mel_stats: torch.Tensor, quantised: bool):
        super().__init__()
        self.dvae = DVAE(config)
        self.mel = Mel("dvae", mel_stats)
        self.quantised = quantised
        if quantised:
            codebook = self.dvae.codebook
            start = codebook.embed
            del codebook.embed
            codebook.embed = nn.Parameter(start)

    def features(self, audio: torch.Tensor) -> torch.Tensor:
        """(B, CROP) to (B, M, FRAMES)."""
        return self.mel(audio)[:, :, :FRAMES]


def compute_loss(model: Coder, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of each crop's mean errors: of the mels, of the codes from the vectors,
    and of the vectors from the codes. The decoder's gradient passes the codes as if they were the
    vectors."""
    mels = model.features(batch["audio"])
    vectors = upcast(model.dvae.encode(mels))
    decoded, zero = vectors, vectors.new_zeros(len(mels))
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
    device = model.mel.mel_stats.device
    sums, count = dict.fromkeys(LOSS_WEIGHTS, 0.0), 0
    for batch in eval_batches:
        for terms in memory.split_on_oom(
            lambda b: compute_loss(model, next(batches.to_device([b], device))), batch, device
        ):
            sums = {name: sums[name] + float(terms[name]) for name in sums}
        count += len(batch["names"])
    return {name: (total, count) for name, total in sums.items()}


@torch.no_grad()
def first_coder(
    config: dict, crops: Crops, tensors: dict[str, torch.Tensor] | None, seed: int | None
) -> Coder:
    """The DVAE that a run begins with: random ones for mels of deviation 1 in each band, with their
    mean as its output or, from the `tensors` of an earlier run, these with a codebook by k-means of
    the vectors of `CLIPS` crops. Without a `seed` its weights are yet to be loaded."""
    deviation = torch.ones(config["mel_channels"])
    if seed is None:
        return Coder(config, deviation, quantised=tensors is not None)
    audio = torch.stack([crops.item(i, 0)["audio"] for i in range(min(CLIPS, len(crops)))])
    if tensors is None:
        mels = Mel("dvae", deviation)(audio)
        deviation, mean = torch.std_mean(mels, dim=(0, 2))
        deviation = deviation.clamp_min(LEAST_DEVIATION)
        model = Coder(config, deviation, quantised=False)
        model.dvae.decoder[-1].bias.copy_(mean / deviation)
        return model
    model = Coder(config, deviation, quantised=True)
    model.load_state_dict(tensors)
    vectors = torch.cat(
        [model.dvae.encode(model.features(part)).flatten(0, 1) for part in audio.split(32)]
    )
    codes = model.dvae.codebook.embed
    codes.copy_(kmeans(vectors, codes.shape[1], torch.Generator().manual_seed(seed)).t())
    return model


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
