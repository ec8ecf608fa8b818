"""The Whisper model (Radford et al. 2022) at variable length: log-mel, encoder, decoder with a key/value cache, losses.

Weights have the names that transformers gives them (without its leading "model."), so a checkpoint of either is one of
the other. What is beyond an utterance's end is masked through convolutions and attention: padding changes nothing."""

import math

import torch
import torch.nn.functional as F
import torchaudio
from torch import nn
from torch.utils.checkpoint import checkpoint

from common import batches
from common.device import downcast, full_fp32, upcast
from speech.audio import SAMPLE_RATE
from speech.features import spec_augment, valid_mask

N_FFT, HOP = 400, 160  # samples: 25 ms windows every 10 ms
FRAME = 2 * HOP  # samples in an encoder frame, 20 ms
LOGITS_AT_ONCE = 1 << 24  # elements: above it the output layer's loss is computed in pieces, recomputed in backward


class LogMel(nn.Module):
    """Waveforms (B, T) at 16 kHz to Whisper's features (B, n_mels, T / 160): power in Slaney's mel bands, log10 clamped
    to 8 below the utterance's maximum, (x + 4) / 4. As transformers' WhisperFeatureExtractor computes them for waveforms
    that are filled with zeros up to `longest` samples; always in fp32 or better."""

    def __init__(self, n_mels: int, longest: int):
        super().__init__()
        self.longest = longest
        # fp32 would lose up to 2e-5 of a narrow band's weight, and torchaudio computes in the default type only.
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(torch.float64)
            filters = torchaudio.functional.melscale_fbanks(N_FFT // 2 + 1, 0.0, 8000.0, n_mels, SAMPLE_RATE, "slaney", "slaney")  # fmt: skip
        finally:
            torch.set_default_dtype(before)
        self.register_buffer("filters", filters.to(before), persistent=False)  # (N_FFT / 2 + 1, M)
        # A band covers few bins: quarters of the bands, each with the bins that it needs, are a third of the work.
        self.parts = []
        for part in torch.arange(n_mels).chunk(4):
            bins = self.filters[:, part].any(1).nonzero()
            self.parts.append((slice(int(bins.min()), int(bins.max()) + 1), slice(int(part[0]), int(part[-1]) + 1)))
        self.register_buffer("taper", torch.hann_window(N_FFT), persistent=False)

    def forward(self, waveforms: torch.Tensor) -> torch.Tensor:
        edge, after = N_FFT // 2, N_FFT // 2 + 2 * HOP  # windows that begin after the end may hold the maximum, too
        with torch.autocast(waveforms.device.type, enabled=False):
            x = upcast(waveforms)
            # Zeros follow the end, but at the very end of the longest window the reference reflects.
            missing, (rows, length) = self.longest - x.shape[1], x.shape
            end = edge + length + min(missing, after)
            padded = x.new_zeros(rows, end if missing >= after else end + edge)
            padded[:, edge : edge + length] = x
            padded[:, :edge] = x[:, 1 : edge + 1].flip(1)
            if missing < after:
                padded[:, end:] = padded[:, end - edge - 1 : end - 1].flip(1)
            spectrum = torch.stft(padded, N_FFT, HOP, window=self.taper, center=False, return_complex=True)
            real, imaginary = torch.view_as_real(spectrum.transpose(1, 2)[:, : self.longest // HOP]).unbind(-1)
            power = real.square().addcmul_(imaginary, imaginary)  # (B, F, N_FFT / 2 + 1); abs() would draw roots
            with full_fp32(power.device):
                mel = torch.cat([power[..., bins] @ self.filters[bins, bands] for bins, bands in self.parts], dim=-1)
            log = mel.clamp_(min=1e-10).log10_()  # (B, F, M)
            log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)[:, : length // HOP]
            return log.add_(4.0).div_(4.0).transpose(1, 2)


class KeyValues:
    """Keys and values of one attention during decoding, (B, H, T, D / H)."""

    def __init__(self):
        self.keys: torch.Tensor | None = None
        self.values: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], 2), torch.cat([self.values, values], 2)
        self.keys, self.values = keys.contiguous(), values.contiguous()  # the encoder's are read at every step
        return self.keys, self.values

    def select(self, rows: torch.Tensor) -> None:
        self.keys, self.values = self.keys[rows], self.values[rows]


class Cache:
    """What decoding keeps between steps: for every decoder layer its own past and the encoder's keys and values. Each
    utterance may have several rows (beams), next to each other; the encoder's part exists once for all of them."""

    def __init__(self, layers: int):
        self.past = [KeyValues() for _ in range(layers)]
        self.source = [KeyValues() for _ in range(layers)]

    @property
    def length(self) -> int:
        return 0 if self.past[0].keys is None else self.past[0].keys.shape[2]

    def reorder(self, rows: torch.Tensor) -> None:
        """Continues row i from what row `rows[i]` has decoded."""
        for layer in self.past:
            layer.select(rows)

    def keep(self, utterances: torch.Tensor) -> None:
        """Keeps the encoder's part of these utterances only; `reorder` has left their rows."""
        for layer in self.source:
            layer.select(utterances)


class Attention(nn.Module):
    """Multi-head attention of (B, U, D) over `source` (B, T, D), itself by default. Attention weights have no dropout."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(d, d), nn.Linear(d, d, bias=False)
        self.v_proj, self.out_proj = nn.Linear(d, d), nn.Linear(d, d)

    def split(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D / H)

    def forward(
        self, x: torch.Tensor, source: torch.Tensor | None = None, mask: torch.Tensor | None = None,
        causal: bool = False, cache: KeyValues | None = None,
    ) -> torch.Tensor:  # fmt: skip
        x, source = downcast(x), None if source is None else downcast(source)
        q = self.split(self.q_proj(x))
        if cache is None:
            over = x if source is None else source
            y = F.scaled_dot_product_attention(
                q, self.split(self.k_proj(over)), self.split(self.v_proj(over)), attn_mask=mask, is_causal=causal
            )
        else:
            y = self.attend_cached(q, x, source, mask, cache)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def attend_cached(self, q, x: torch.Tensor, source: torch.Tensor | None, mask, cache: KeyValues) -> torch.Tensor:
        """(B, H, U, D / H) of the queries over what the cache holds and, unless it is the encoder's and there already,
        `x` or `source`, which go into it."""
        first = cache.keys is None
        if source is None or first:
            over = x if source is None else source
            k, v = cache.append(self.split(self.k_proj(over)), self.split(self.v_proj(over)))
        else:
            k, v = cache.keys, cache.values
        # After the first call there is one query a row, which sees all that is before it.
        causal, beams = source is None and first and q.shape[2] > 1, q.shape[0] // k.shape[0]
        if beams > 1:  # beams of an utterance as further queries: the encoder's keys need no copies
            q = q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)  # (B, H, K U, D / H)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return y.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1) if beams > 1 else y


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward, (B, T, D) to (B, T, D)."""

    def __init__(self, d: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = Attention(d, heads), nn.LayerNorm(d)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(d, ffn), nn.Linear(ffn, d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), mask=mask))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))))


class DecoderLayer(nn.Module):
    """Pre-norm causal self-attention, attention over the encoder's (B, T, D), feed-forward; (B, U, D) to (B, U, D)."""

    def __init__(self, d: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.self_attn, self.self_attn_layer_norm = Attention(d, heads), nn.LayerNorm(d)
        self.encoder_attn, self.encoder_attn_layer_norm = Attention(d, heads), nn.LayerNorm(d)
        self.fc1, self.fc2, self.final_layer_norm = nn.Linear(d, ffn), nn.Linear(ffn, d), nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, x: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None,
        past: KeyValues | None = None, source: KeyValues | None = None,
    ) -> torch.Tensor:  # fmt: skip
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), causal=True, cache=past))
        x = x + self.dropout(self.encoder_attn(self.encoder_attn_layer_norm(x), encoded, mask, cache=source))
        return x + self.dropout(self.fc2(F.gelu(self.fc1(self.final_layer_norm(x)))))


def angular_speeds(d: int) -> torch.Tensor:
    """(d / 2,) radians a frame of the encoder's sines: wavelengths from 2 pi to 10000 * 2 pi."""
    return torch.exp(-math.log(10_000) / (d // 2 - 1) * torch.arange(d // 2))


def sinusoids(length: int, d: int) -> torch.Tensor:
    """(length, d) of the encoder's positions: sines, then cosines, of `angular_speeds`."""
    angles = torch.arange(length)[:, None] * angular_speeds(d)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def source_mask(frames: torch.Tensor, size: int) -> torch.Tensor:
    """(B, 1, 1, size), True for the encoder frames of utterances of so many feature frames (B,)."""
    return valid_mask((frames + 1) // 2, size)[:, None, None, :]


class Encoder(nn.Module):
    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.conv1 = nn.Conv1d(config["num_mel_bins"], d, 3, padding=1)
        self.conv2 = nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config["max_source_positions"], d)
        self.embed_positions.weight.data = sinusoids(config["max_source_positions"], d)
        self.embed_positions.weight.requires_grad = False
        heads, ffn = config["encoder_attention_heads"], config["encoder_ffn_dim"]
        self.layers = nn.ModuleList([EncoderLayer(d, heads, ffn, dropout) for _ in range(config["encoder_layers"])])
        self.layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor, lengths: torch.Tensor | None = None) -> torch.Tensor:
        """Features (B, M, F) to (B, T, D), T = F / 2 rounded up. `lengths` (B,): feature frames of each utterance, where
        some are shorter than F; what lies beyond is not seen."""
        mask = None
        x = features
        if lengths is not None:
            beyond = ~valid_mask(lengths, x.shape[2])[:, None, :]
            x = x.masked_fill(beyond, 0.0)
        x = F.gelu(self.conv1(x))
        if lengths is not None:
            x = x.masked_fill(beyond, 0.0)
        x = F.gelu(self.conv2(x)).transpose(1, 2)
        if lengths is not None:
            mask = source_mask(lengths, x.shape[1])
        x = self.dropout(x + self.embed_positions.weight[: x.shape[1]])
        for layer in self.layers:
            x = layer(x, mask)
        return self.layer_norm(x)


class Decoder(nn.Module):
    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], d)
        self.embed_positions = nn.Embedding(config["max_target_positions"], d)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)  # tied to the output: std 1 would break training
        nn.init.normal_(self.embed_positions.weight, std=0.02)
        heads, ffn = config["decoder_attention_heads"], config["decoder_ffn_dim"]
        self.layers = nn.ModuleList([DecoderLayer(d, heads, ffn, dropout) for _ in range(config["decoder_layers"])])
        self.layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens: torch.Tensor, encoded: torch.Tensor, mask: torch.Tensor | None, cache: Cache | None = None
    ) -> torch.Tensor:
        """Tokens (B, U) over the encoder's (B, T, D), whose `mask` (B, 1, 1, T) is None where nothing is padded, to
        (B, U, D). With a cache `tokens` are those that follow what it holds, one a row after the first call."""
        start, encoded = cache.length if cache else 0, downcast(encoded)  # once for all layers
        positions = self.embed_positions.weight[start : start + tokens.shape[1]]
        x = self.dropout(self.embed_tokens(tokens) + positions)
        for number, layer in enumerate(self.layers):
            if cache:
                x = layer(x, encoded, mask, cache.past[number], cache.source[number])
            else:
                x = layer(x, encoded, mask)
        return self.layer_norm(x)


class Whisper(nn.Module):
    """`config`: transformers' names, see whisper_files.SIZES. `ctc_head`: an output layer of the encoder beside
    Whisper's own parts, which helps it to align when it is trained from scratch; its blank is its last output."""

    def __init__(self, config: dict, dropout: float = 0.0, label_smoothing: float = 0.0, ctc_tokens: int = 0):
        super().__init__()
        self.config, self.label_smoothing = config, label_smoothing
        self.log_mel = LogMel(config["num_mel_bins"], config["max_source_positions"] * FRAME)
        self.encoder, self.decoder = Encoder(config, dropout), Decoder(config, dropout)
        self.ctc_head = nn.Linear(config["d_model"], ctc_tokens + 1) if ctc_tokens else None
        self.encoder_frozen = False
        self.pad_to_longest = False  # whether `encode` fills every window, as the released models are used to

    def freeze_encoder(self) -> None:
        """The encoder keeps its weights, and its activations are not kept for backward."""
        self.encoder_frozen = True
        self.encoder.requires_grad_(False)

    def train(self, mode: bool = True):
        super().train(mode)
        if self.encoder_frozen:
            self.encoder.eval()  # no dropout in what does not learn
        return self

    @property
    def longest(self) -> int:
        """Samples in the longest window, 30 s in every released model."""
        return self.log_mel.longest

    def encode(self, batch: dict) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The batch's waveforms to (B, T, D) and the attention mask (B, 1, 1, T) over them (None where no utterance is
        padded). On a GPU their common length is raised to one of twelve; with `pad_to_longest` to the longest window,
        and nothing is masked."""
        waveforms, lengths, host = batch["audio"], batch["audio_lengths"], batch["audio_lengths_host"]
        size = self.longest
        if not self.pad_to_longest:
            # On a GPU every new shape costs a search for kernels; a CPU has no such habit.
            length = waveforms.shape[1]
            size = min(
                size, batches.quantise(length, FRAME, size) if waveforms.is_cuda else -(-length // FRAME) * FRAME
            )
        mels = self.log_mel(F.pad(waveforms, (0, size - waveforms.shape[1])))  # (B, M, F)
        frames = (lengths + HOP - 1) // HOP
        if "time_masks" in batch:
            mels = spec_augment(mels.transpose(1, 2), frames, batch["frequency_masks"], batch["time_masks"]).transpose(1, 2)  # fmt: skip
        padded = not self.pad_to_longest and int(host.min()) <= size - HOP
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder_frozen):
            encoded = self.encoder(mels, frames if padded else None)
        return encoded, source_mask(frames, encoded.shape[1]) if padded else None

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The decoder's (..., D) to (..., V)."""
        return F.linear(x, self.decoder.embed_tokens.weight)

    def forward(self, features: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Features (B, M, F) and tokens (B, U) to logits (B, U, V), without any mask: transformers' own forward."""
        return self.logits(self.decoder(tokens, self.encoder(features), None))


CHECKPOINTED = (EncoderLayer, DecoderLayer)  # what --gradient_checkpointing recomputes and --torch_compile compiles


def token_loss(model: Whisper, batch: dict, encoded: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Cross-entropy summed over the labels (B, U) within their lengths: the end of the text and what pads it have the
    same number in Whisper, so padding is told by length, not by number."""
    x = model.decoder(batch["tokens"], encoded, mask).flatten(0, 1)
    width = batch["tokens"].shape[1]
    rows = [torch.arange(n) + row * width for row, n in enumerate(batch["labels_lengths_host"].tolist())]
    kept = torch.cat(rows)
    kept = (kept.pin_memory() if x.is_cuda else kept).to(x.device, non_blocking=True)
    x, labels = x[kept], batch["labels"].flatten()[kept]  # (N, D), (N,)
    step = max(1, LOGITS_AT_ONCE // model.config["vocab_size"])
    if len(x) <= step:
        return output_loss(model, x, labels)
    pieces = zip(x.split(step), labels.split(step), strict=True)
    return sum(checkpoint(output_loss, model, *piece, use_reentrant=False) for piece in pieces)


def output_loss(model: Whisper, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Summed cross-entropy of the decoder's (N, D) against (N,)."""
    return F.cross_entropy(upcast(model.logits(x)), labels, reduction="sum", label_smoothing=model.label_smoothing)


def ctc_loss(model: Whisper, batch: dict, encoded: torch.Tensor) -> torch.Tensor:
    """CTC's loss of the encoder's head against `ctc_tokens` (B, S), summed over the batch, in fp32 or better. It ends
    where the utterance does (`heard_lengths`, samples), also where silence follows to fill the window."""
    log_probs = upcast(model.ctc_head(encoded)).log_softmax(-1).transpose(0, 1)  # (T, B, V + 1)
    frames = (batch["heard_lengths_host"] + FRAME - 1) // FRAME
    blank = model.ctc_head.out_features - 1
    return F.ctc_loss(log_probs, batch["ctc_tokens"], frames, batch["ctc_tokens_lengths_host"], blank, "sum", zero_infinity=True)  # fmt: skip


def alignment_loss(model: Whisper, batch: dict, encoded: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of the encoder's head against `alignment` (B, T), what each encoder frame says, summed over the
    batch. Frames beyond an utterance's are -100."""
    logits = upcast(model.ctc_head(encoded[:, : batch["alignment"].shape[1]]))
    return F.cross_entropy(logits.flatten(0, 1), batch["alignment"].flatten(), ignore_index=-100, reduction="sum")
