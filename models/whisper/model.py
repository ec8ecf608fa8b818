"""The Whisper model (Radford et al. 2022) at variable length: log-mel, encoder, decoder with a
key/value cache, losses.

Weights are named as in transformers, without its leading "model.". Convolutions and attention mask
everything beyond an utterance's end, so padding a batch does not change the results."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common.device import full_fp32, upcast
from common.layers import downcast, lean_chain
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import spec_augment, valid_mask
from speech.signal.spectra import mel_filters

N_FFT = 400  # samples, 25 ms
HOP = 160  # samples, 10 ms
FRAME = 2 * HOP  # samples per encoder frame, 20 ms, because the second convolution has stride 2
# Elements. The loss of more logits is computed in pieces, which backward recomputes.
LOGITS_AT_ONCE = 1 << 23


@functools.cache
def gpu_lengths(longest: int) -> list[int]:
    """Twelve lengths in samples, from `longest` / 16 to `longest`, to which waveforms are padded on
    a GPU, because each new shape costs a search for kernels. They grow by a constant factor (for 30
    s: 1.9, 2.4, 3.1 ... 18.1, 23.3, 30), so padding adds at most 29 % to a length above the first,
    14 % on average. Equal steps would add 67 % to a clip of 3 s."""
    return [math.ceil(longest * 16 ** (number / 11 - 1) / FRAME) * FRAME for number in range(12)]


class LogMel(nn.Module):
    """Waveforms (B, T) at 16 kHz to Whisper's features (B, n_mels, T / 160): power in Slaney's mel
    bands, log10 clamped to 8 below the utterance's maximum, (x + 4) / 4. The same as transformers'
    WhisperFeatureExtractor for waveforms padded with zeros to `longest` samples. Always in fp32 or
    better."""

    def __init__(self, n_mels: int, longest: int):
        super().__init__()
        self.longest = longest
        filters = mel_filters(N_FFT // 2 + 1, 8000.0, n_mels, SAMPLE_RATE, "slaney", True)
        self.register_buffer("filters", filters, persistent=False)  # (N_FFT / 2 + 1, M)
        # A band covers few bins. Four groups of bands, each with the bins that it needs, take a
        # third of the work.
        self.parts = []
        for part in torch.arange(n_mels, device="cpu").chunk(4):
            bins = self.filters[:, part].any(1).nonzero()
            needed = slice(int(bins.min()), int(bins.max()) + 1)
            bands = slice(int(part[0]), int(part[-1]) + 1)
            self.parts.append((needed, bands))
        self.register_buffer("taper", torch.hann_window(N_FFT), persistent=False)

    def forward(self, waveforms: Tensor) -> Tensor:
        edge = N_FFT // 2
        after = edge + 2 * HOP  # STFT windows that begin after the end may hold the maximum, too
        with torch.autocast(waveforms.device.type, enabled=False):
            x = upcast(waveforms)
            rows, length = x.shape
            # Zeros follow the waveform, but the reference reflects at the end of the longest input.
            missing = self.longest - length
            end = edge + length + min(missing, after)
            padded = x.new_zeros(rows, end if missing >= after else end + edge)
            padded[:, edge : edge + length] = x
            padded[:, :edge] = x[:, 1 : edge + 1].flip(1)
            if missing < after:
                padded[:, end:] = padded[:, end - edge - 1 : end - 1].flip(1)
            spectrum = torch.stft(
                padded, N_FFT, HOP, window=self.taper, center=False, return_complex=True
            )
            spectrum = spectrum.transpose(1, 2)[:, : self.longest // HOP]
            real, imaginary = torch.view_as_real(spectrum).unbind(-1)
            # (B, F, N_FFT / 2 + 1). abs() would take roots.
            power = real.square().addcmul_(imaginary, imaginary)
            with full_fp32(power.device):
                mels = [power[..., bins] @ self.filters[bins, bands] for bins, bands in self.parts]
                mel = torch.cat(mels, dim=-1)
            log = mel.clamp_(min=1e-10).log10_()  # (B, F, M)
            log = torch.maximum(log, log.amax((1, 2), keepdim=True) - 8.0)[:, : length // HOP]
            return log.add_(4.0).div_(4.0).transpose(1, 2)


class KeyValues:
    """The cached keys and values of an attention module, (B, H, T, D / H), or None."""

    def __init__(self):
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def append(self, keys: Tensor, values: Tensor) -> None:
        if self.keys is not None:
            keys = torch.cat([self.keys, keys], 2)
            values = torch.cat([self.values, values], 2)
        self.keys = keys.contiguous()  # the encoder's are read at every step
        self.values = values.contiguous()

    def select(self, rows: Tensor) -> None:
        self.keys = self.keys[rows]
        self.values = self.values[rows]


class KVCache:
    """Keys and values of every decoder layer. Each utterance may have several adjacent rows
    (beams); cross-attention's keys and values, which come from the encoder, exist once for all of
    them."""

    def __init__(self, layers: int):
        self.self_attention = [KeyValues() for _ in range(layers)]
        self.cross_attention = [KeyValues() for _ in range(layers)]

    @property
    def length(self) -> int:
        """Tokens decoded so far."""
        keys = self.self_attention[0].keys
        return 0 if keys is None else keys.shape[2]

    def reorder(self, rows: Tensor) -> None:
        """Row i continues from the tokens of row `rows[i]`."""
        for layer in self.self_attention:
            layer.select(rows)

    def keep(self, utterances: Tensor) -> None:
        """Drops the encoder's part of all other utterances; `reorder` drops their rows."""
        for layer in self.cross_attention:
            layer.select(utterances)


class Attention(nn.Module):
    """Multi-head attention of (B, U, D) to `source` (B, T, D), or to itself. Its weights have no
    dropout."""

    def __init__(self, d: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q_proj = nn.Linear(d, d)
        self.k_proj = nn.Linear(d, d, bias=False)
        self.v_proj = nn.Linear(d, d)
        self.out_proj = nn.Linear(d, d)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)  # (B, H, T, D / H)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: KeyValues | None = None,
    ) -> Tensor:
        x = downcast(x)
        source = None if source is None else downcast(source)
        q = self.split(self.q_proj(x))
        if cache is None:
            attended = x if source is None else source
            k = self.split(self.k_proj(attended))
            v = self.split(self.v_proj(attended))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        else:
            y = self.attend_cached(q, x, source, mask, cache)
        return self.out_proj(y.transpose(1, 2).flatten(2))

    def attend_cached(
        self, q: Tensor, x: Tensor, source: Tensor | None, mask: Tensor | None, cache: KeyValues
    ) -> Tensor:
        """Attention of the queries (N, H, U, D / H) to the cache, of the same shape. Self-attention
        (`source` is None) first adds the keys and values of `x`; cross-attention adds those of
        `source` in the first call only."""
        is_first = cache.keys is None
        if source is None or is_first:
            attended = x if source is None else source
            cache.append(self.split(self.k_proj(attended)), self.split(self.v_proj(attended)))
        # After the first call each row has one query, which sees all tokens before it.
        causal = source is None and is_first and q.shape[2] > 1
        beams = q.shape[0] // cache.keys.shape[0]
        if beams > 1:
            # The beams of an utterance become further queries: the encoder's keys are not copied.
            q = q.unflatten(0, (-1, beams)).transpose(1, 2).flatten(2, 3)  # (B, H, K U, D / H)
        y = F.scaled_dot_product_attention(
            q, cache.keys, cache.values, attn_mask=mask, is_causal=causal
        )
        return y.unflatten(2, (beams, -1)).transpose(1, 2).flatten(0, 1) if beams > 1 else y


class EncoderLayer(nn.Module):
    """Pre-norm self-attention and feed-forward, (B, T, D) to (B, T, D)."""

    def __init__(self, d: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.self_attn = Attention(d, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, ffn)
        self.fc2 = nn.Linear(ffn, d)
        self.final_layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.dropout(self.self_attn(self.self_attn_layer_norm(x), mask=mask))
        return x + self.dropout(lean_chain(x, self.final_layer_norm, self.fc1, F.gelu, self.fc2))


class DecoderLayer(nn.Module):
    """Pre-norm causal self-attention, cross-attention to the encoder's output (B, T, D), and
    feed-forward; (B, U, D) to (B, U, D)."""

    def __init__(self, d: int, heads: int, ffn: int, dropout: float):
        super().__init__()
        self.self_attn = Attention(d, heads)
        self.self_attn_layer_norm = nn.LayerNorm(d)
        self.encoder_attn = Attention(d, heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, ffn)
        self.fc2 = nn.Linear(ffn, d)
        self.final_layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        encoded: Tensor,
        mask: Tensor | None,
        self_cache: KeyValues | None = None,
        cross_cache: KeyValues | None = None,
    ) -> Tensor:
        x = x + self.dropout(
            self.self_attn(self.self_attn_layer_norm(x), causal=True, cache=self_cache)
        )
        x = x + self.dropout(
            self.encoder_attn(self.encoder_attn_layer_norm(x), encoded, mask, cache=cross_cache)
        )
        return x + self.dropout(lean_chain(x, self.final_layer_norm, self.fc1, F.gelu, self.fc2))


# The layers that --gradient_checkpointing recomputes and --torch_compile compiles.
LAYERS = (EncoderLayer, DecoderLayer)


def angular_speeds(d: int) -> Tensor:
    """(d / 2,) of the encoder's sinusoids, radians a frame: wavelengths from 2 pi to 20000 pi."""
    return torch.exp(-math.log(10_000) / (d // 2 - 1) * torch.arange(d // 2))


def sinusoids(length: int, d: int) -> Tensor:
    """The encoder's positions (length, d): sines, then cosines, of `angular_speeds`."""
    angles = torch.arange(length)[:, None] * angular_speeds(d)
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def source_mask(frames: Tensor, size: int) -> Tensor:
    """The attention mask (B, 1, 1, size) over encoder frames; `frames` (B,): feature frames."""
    return valid_mask((frames + 1) // 2, size)[:, None, None, :]


class Encoder(nn.Module):
    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        heads = config["encoder_attention_heads"]
        ffn = config["encoder_ffn_dim"]
        self.conv1 = nn.Conv1d(config["num_mel_bins"], d, 3, padding=1)
        self.conv2 = nn.Conv1d(d, d, 3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config["max_source_positions"], d)
        self.embed_positions.weight.data = sinusoids(config["max_source_positions"], d)
        self.embed_positions.weight.requires_grad = False
        self.layers = nn.ModuleList(
            [EncoderLayer(d, heads, ffn, dropout) for _ in range(config["encoder_layers"])]
        )
        self.layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Features (B, M, F) to (B, T, D), T = F / 2 rounded up. `lengths` (B,): feature frames of
        each utterance; everything beyond is masked. None if all have F frames."""
        x = features
        mask = None
        if lengths is not None:
            padding = ~valid_mask(lengths, x.shape[2])[:, None, :]
            x = x.masked_fill(padding, 0.0)
        x = F.gelu(self.conv1(x))
        if lengths is not None:
            x = x.masked_fill(padding, 0.0)
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
        heads = config["decoder_attention_heads"]
        ffn = config["decoder_ffn_dim"]
        self.embed_tokens = nn.Embedding(config["vocab_size"], d)
        self.embed_positions = nn.Embedding(config["max_target_positions"], d)
        # Tied to the output: a deviation of 1 would break training.
        nn.init.normal_(self.embed_tokens.weight, std=0.02)
        nn.init.normal_(self.embed_positions.weight, std=0.02)
        self.layers = nn.ModuleList(
            [DecoderLayer(d, heads, ffn, dropout) for _ in range(config["decoder_layers"])]
        )
        self.layer_norm = nn.LayerNorm(d)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self, tokens: Tensor, encoded: Tensor, mask: Tensor | None, kv_cache: KVCache | None = None
    ) -> Tensor:
        """Tokens (B, U) and the encoder's output (B, T, D) to (B, U, D). `mask` (B, 1, 1, T) is
        None if nothing is padded. With a cache, `tokens` follow the cached ones: any number in the
        first call, then one per row."""
        start = kv_cache.length if kv_cache else 0
        encoded = downcast(encoded)  # once for all layers
        positions = self.embed_positions.weight[start : start + tokens.shape[1]]
        x = self.dropout(self.embed_tokens(tokens) + positions)
        for number, layer in enumerate(self.layers):
            if kv_cache:
                x = layer(
                    x,
                    encoded,
                    mask,
                    kv_cache.self_attention[number],
                    kv_cache.cross_attention[number],
                )
            else:
                x = layer(x, encoded, mask)
        return self.layer_norm(x)


class Whisper(nn.Module):
    """Whisper by transformers' configuration names (see `SIZES` in formats.py). `ctc_tokens`:
    outputs, without the blank, of an additional layer on the encoder, whose loss helps a model from
    scratch to align; the blank is last."""

    def __init__(
        self, config: dict, dropout: float = 0.0, label_smoothing: float = 0.0, ctc_tokens: int = 0
    ):
        super().__init__()
        self.config = config
        self.label_smoothing = label_smoothing
        self.log_mel = LogMel(config["num_mel_bins"], config["max_source_positions"] * FRAME)
        self.encoder = Encoder(config, dropout)
        self.decoder = Decoder(config, dropout)
        self.ctc_head = nn.Linear(config["d_model"], ctc_tokens + 1) if ctc_tokens else None
        self.encoder_frozen = False
        # Whether `encode` pads to the longest input when it evaluates, as the released models were
        # trained. (What is padded in training, a data set pads itself.)
        self.pad_to_longest = False

    def freeze_encoder(self) -> None:
        """Stops training the encoder. Its activations are not kept for backward."""
        self.encoder_frozen = True
        self.encoder.requires_grad_(False)

    def train(self, mode: bool = True):
        super().train(mode)
        if self.encoder_frozen:
            self.encoder.eval()  # no dropout in layers that are not trained
        return self

    @property
    def longest(self) -> int:
        """Samples of the longest input, 30 s in every released model."""
        return self.log_mel.longest

    def encode(self, batch: dict) -> tuple[Tensor, Tensor | None]:
        """The encoder's output (B, T, D) for the batch's waveforms and its attention mask (B, 1, 1,
        T), None if no utterance is padded, or in evaluation if `pad_to_longest` is set, in which
        case padding is heard as silence. `fill_from` (B,), if a batch has it: the features are
        zeros from these frames on."""
        pads = self.pad_to_longest and not self.training
        waveforms = batch["audio"]
        size = self.longest if pads else self._padded_length(waveforms)
        mels = self.log_mel(F.pad(waveforms, (0, size - waveforms.shape[1])))  # (B, M, F)
        frames = (batch["audio_lengths"] + HOP - 1) // HOP
        if "time_masks" in batch:
            augmented = spec_augment(
                mels.transpose(1, 2), frames, batch["frequency_masks"], batch["time_masks"]
            )
            mels = augmented.transpose(1, 2)
        if "fill_from" in batch:
            heard = valid_mask(batch["fill_from"], mels.shape[2])
            mels = mels.masked_fill(~heard[:, None, :], 0.0)
        is_padded = not pads and int(batch["audio_lengths_host"].min()) <= size - HOP
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.encoder_frozen):
            encoded = self.encoder(mels, frames if is_padded else None)
        mask = source_mask(frames, encoded.shape[1]) if is_padded else None
        return encoded, mask

    def _padded_length(self, waveforms: Tensor) -> int:
        length = waveforms.shape[1]
        if waveforms.is_cuda:
            # A GPU searches for kernels at every new shape, so it gets one of twelve lengths.
            return next(size for size in gpu_lengths(self.longest) if size >= length)
        return min(self.longest, -(-length // FRAME) * FRAME)

    def logits(self, x: Tensor) -> Tensor:
        """The decoder's (..., D) to (..., V)."""
        return F.linear(x, self.decoder.embed_tokens.weight)

    def forward(self, features: Tensor, tokens: Tensor) -> Tensor:
        """Features (B, M, F) and tokens (B, U) to logits (B, U, V) without masks, as in
        transformers."""
        return self.logits(self.decoder(tokens, self.encoder(features), None))


def token_loss(model: Whisper, batch: dict, encoded: Tensor, mask: Tensor | None) -> Tensor:
    """The decoder's cross-entropy, summed over the labels (B, U) within their lengths, without the
    first ones of each row if there are `unscored_lengths` (B,). Whisper uses one token id for
    end-of-text and padding, so padding is identified by length."""
    x = model.decoder(batch["tokens"], encoded, mask).flatten(0, 1)
    width = batch["tokens"].shape[1]
    ends = batch["labels_lengths_host"].tolist()
    starts = [0] * len(ends)
    if "unscored_lengths" in batch:
        starts = batch["unscored_lengths_host"].tolist()
    spans = enumerate(zip(starts, ends, strict=True))
    kept = torch.cat([torch.arange(start, end) + row * width for row, (start, end) in spans])
    kept = (kept.pin_memory() if x.is_cuda else kept).to(x.device, non_blocking=True)
    x = x[kept]  # (N, D)
    labels = batch["labels"].flatten()[kept]  # (N,)
    weight = downcast(model.decoder.embed_tokens.weight)  # once for all pieces
    step = max(1, LOGITS_AT_ONCE // model.config["vocab_size"])
    if len(x) <= step:
        return output_loss(weight, x, labels, model.label_smoothing)
    pieces = zip(x.split(step), labels.split(step), strict=True)
    return sum(
        checkpoint(output_loss, weight, *piece, model.label_smoothing, use_reentrant=False)
        for piece in pieces
    )


def output_loss(weight: Tensor, x: Tensor, labels: Tensor, smoothing: float) -> Tensor:
    """Summed cross-entropy of the decoder's output (N, D), by the output layer's `weight` (V, D),
    and the labels (N,)."""
    return F.cross_entropy(
        upcast(F.linear(x, weight)), labels, reduction="sum", label_smoothing=smoothing
    )


def ctc_loss(model: Whisper, batch: dict, encoded: Tensor) -> Tensor:
    """CTC loss of the encoder's head and `ctc_tokens` (B, S), summed over the batch, in fp32 or
    better. Only the frames of the utterance itself count (`heard_lengths`, samples), not the
    silence that it is padded with."""
    log_probs = upcast(model.ctc_head(encoded)).log_softmax(-1).transpose(0, 1)  # (T, B, V + 1)
    frames = ((batch["heard_lengths_host"] + FRAME - 1) // FRAME).tolist()
    blank = model.ctc_head.out_features - 1
    lengths = batch["ctc_tokens_lengths_host"].tolist()
    return F.ctc_loss(
        log_probs, batch["ctc_tokens"], frames, lengths, blank, "sum", zero_infinity=True
    )


def alignment_loss(model: Whisper, batch: dict, encoded: Tensor) -> Tensor:
    """Cross-entropy of the encoder's head and `alignment` (B, T), the label of each encoder frame,
    summed over the batch. Frames beyond an utterance's end are labelled -100."""
    logits = upcast(model.ctc_head(encoded[:, : batch["alignment"].shape[1]]))
    return F.cross_entropy(
        logits.flatten(0, 1), batch["alignment"].flatten(), ignore_index=-100, reduction="sum"
    )
