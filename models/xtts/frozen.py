"""The parts of an XTTS that are not trained with its GPT: features, the DVAE, the vocoder."""

import hashlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from common.device import full_fp32
from models.xtts import codec
from models.xtts.codec import DVAE, SAMPLE_RATE, SAMPLES_PER_CODE, Mel
from models.xtts.vocoder import SPEAKER_RATE, HifiDecoder
from speech.signal import spectra

# Zeros after every clip: its codes must not depend on what else is in the batch.
MARGIN = 16 * SAMPLES_PER_CODE


@dataclass
class Frozen:
    """Waveforms to features and codes, and codes to waveforms."""

    dvae_mel: Mel
    conditioning_mel: Mel
    dvae: DVAE
    vocoder: HifiDecoder

    def to(self, device: torch.device, speaking: bool = True) -> "Frozen":
        """Moves all parts to a device or, unless `speaking`, those that make features and codes."""
        parts = [self.dvae_mel, self.conditioning_mel, self.dvae.encoder, self.dvae.codebook]
        if speaking:
            parts += [self.dvae, self.vocoder]
        for part in parts:
            part.to(device).eval().requires_grad_(False)
        return self

    @torch.no_grad()
    def codes(self, waveforms: torch.Tensor) -> torch.Tensor:
        """Codes (B, N) of waveforms (B, T), computed in fp32."""
        return self.dvae.codes(self.dvae_mel(F.pad(waveforms, (0, MARGIN))))

    def resynthesise(self, codes: torch.Tensor) -> torch.Tensor:
        """The waveform (T,) at 22.05 kHz that Griffin-Lim makes of codes (N,)."""
        return codec.griffin_lim(self.dvae.decode(codes[None])[0], self.dvae_mel.mel_stats)

    def speaker(self, waveforms: list[torch.Tensor], rate: int = SAMPLE_RATE) -> torch.Tensor:
        """The mean speaker vector (1, 512) of waveforms (T,) at `rate` Hz."""
        device = waveforms[0].device
        with torch.autocast(device.type, enabled=False), full_fp32(device):
            clips = [spectra.resample(waveform, rate, SPEAKER_RATE) for waveform in waveforms]
        return torch.stack([self.vocoder.speaker_vector(clip[None]) for clip in clips]).mean(0)

    def groups(self) -> dict:
        """The weights of the parts, as `formats.read_frozen` returns them."""
        return {
            "dvae": self.dvae.state_dict(),
            "hifigan_decoder": self.vocoder.state_dict(),
            "mel_stats": self.dvae_mel.mel_stats,
        }


def make_frozen(config: dict, groups: dict | None = None) -> Frozen:
    """The parts with these weights, or with random ones, on the default device."""
    dvae = DVAE(config)
    vocoder = HifiDecoder(config["d_model"])
    stats = torch.ones(config["mel_channels"])
    if groups:
        dvae.load_state_dict(groups["dvae"])
        vocoder.load_state_dict(groups["hifigan_decoder"])
        stats = groups["mel_stats"]
    frozen = Frozen(Mel("dvae", stats), Mel("conditioning", stats), dvae, vocoder)
    return frozen.to(torch.get_default_device())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of the values of tensors; empty in a dry run, where they have no values."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return ""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:32]
