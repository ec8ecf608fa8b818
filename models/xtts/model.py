"""XTTS's GPT: text and a voice to the codes of a clip.

GPT-2 (Radford et al. 2019) over latents, text and codes. A Perceiver (Jaegle et al. 2021) makes the
latents of a voice's mel spectrogram, as in Tortoise (Betker 2023) and XTTS (Casanova et al. 2024).
Names and shapes of the tensors are those in Coqui's model.pth."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.device import upcast
from models.model_files import with_weights

CONDITIONING_BLOCKS = 6
PERCEIVER_LAYERS = 2
INITIAL_DEVIATION = 0.02  # of embeddings and of GPT-2's linear layers
KERNELS = {0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN"}  # by torch's SDPBackend


class Conv1D(nn.Module):
    """A linear layer with a weight (in, out), as in GPT-2's files."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs).normal_(std=INITIAL_DEVIATION))
        self.bias = nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)


class Attention(nn.Module):
    """Causal self-attention, (B, T, D) to (B, T, D), fused or, without `sdpa`, explicit."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.heads = config["heads"]
        self.dropout = dropout
        self.sdpa = True
        self.c_attn = Conv1D(d, 3 * d)
        self.c_proj = Conv1D(d, d)

    def forward(self, x: Tensor, cache: list | None = None, heard: Tensor | None = None) -> Tensor:
        """`cache` holds the keys and values (B, H, P, D / H) of earlier positions; this call
        appends its own. `heard` (B, P + 1), for one position: which keys are not padding."""
        heads = self.c_attn(x).unflatten(-1, (3, self.heads, -1))
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        if cache:
            k = torch.cat([cache[0], k], dim=2)
            v = torch.cat([cache[1], v], dim=2)
        if cache is not None:
            cache[:] = k, v
        dropout = self.dropout if self.training else 0.0
        is_one = q.shape[2] == 1  # a single query attends to all keys
        if heard is not None:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=heard[:, None, None])
        elif self.sdpa and (is_one or q.shape == k.shape):
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=not is_one)
        else:
            y = explicit_attention(q, k, v, dropout)
        return self.c_proj(y.transpose(1, 2).flatten(2))


def explicit_attention(q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
    """Causal attention with all scores in memory: queries (B, H, T, D / H), keys and values
    (B, H, S, D / H), S >= T. The queries are the last T of S positions."""
    scores = q / math.sqrt(q.shape[-1]) @ k.transpose(-1, -2)
    t, s = scores.shape[-2:]
    future = torch.ones(t, s, dtype=torch.bool, device=q.device).triu(1 + s - t)
    weights = upcast(scores.masked_fill(future, -torch.inf)).softmax(-1).to(v.dtype)
    return F.dropout(weights, dropout) @ v


class MLP(nn.Module):
    """GPT-2's feed-forward layer."""

    def __init__(self, d: int, dropout: float):
        super().__init__()
        self.c_fc = Conv1D(d, 4 * d)
        self.c_proj = Conv1D(4 * d, d)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(self.c_proj(F.gelu(self.c_fc(x), approximate="tanh")))


class Block(nn.Module):
    """A layer of GPT-2."""

    def __init__(self, config: dict, dropout: float):
        super().__init__()
        d = config["d_model"]
        self.ln_1 = nn.LayerNorm(d)
        self.attn = Attention(config, dropout)
        self.ln_2 = nn.LayerNorm(d)
        self.mlp = MLP(d, dropout)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, cache: list | None = None, heard: Tensor | None = None) -> Tensor:
        x = x + self.dropout(self.attn(self.ln_1(x), cache, heard))
        return x + self.mlp(self.ln_2(x))


class ConditioningBlock(nn.Module):
    """Self-attention of mel frames (B, D, F). The residual is the normalised input."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        self.heads = config["heads"]
        self.norm = nn.GroupNorm(group_count(d), d)
        self.qkv = nn.Conv1d(d, 3 * d, 1)
        self.proj_out = nn.Conv1d(d, d, 1)
        nn.init.zeros_(self.proj_out.weight)
        nn.init.zeros_(self.proj_out.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        heads = self.qkv(x).unflatten(1, (self.heads, 3, -1))
        # Fused kernels need the values of a head side by side.
        q, k, v = heads.permute(2, 0, 1, 4, 3).contiguous()  # each (B, H, F, D / H)
        y = F.scaled_dot_product_attention(q, k, v)
        return x + self.proj_out(y.transpose(-1, -2).flatten(1, 2))


def group_count(channels: int) -> int:
    """The number of groups of a GroupNorm, as in Tortoise."""
    if channels > 64:
        groups = 32
    elif channels > 16:
        groups = 16
    else:
        groups = 8
    while channels % groups:
        groups //= 2
    return groups


class PerceiverAttention(nn.Module):
    """Attention of latents (B, L, D) to themselves and to a context (B, F, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        inner = config["perceiver_heads"] * config["perceiver_head_dim"]
        self.heads = config["perceiver_heads"]
        self.to_q = nn.Linear(d, inner, bias=False)
        self.to_kv = nn.Linear(d, 2 * inner, bias=False)
        self.to_out = nn.Linear(inner, d, bias=False)

    def forward(self, latents: Tensor, context: Tensor) -> Tensor:
        pairs = self.to_kv(torch.cat([latents, context], dim=1)).unflatten(-1, (2, self.heads, -1))
        k, v = pairs.permute(2, 0, 3, 1, 4)
        q = self.to_q(latents).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class GEGLU(nn.Module):
    """A gated GELU (Shazeer 2020), (..., 2 D) to (..., D)."""

    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return F.gelu(gate) * x


class RMSNorm(nn.Module):
    def __init__(self, d: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(d))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(upcast(x), dim=-1) * math.sqrt(x.shape[-1]) * self.gamma


class Perceiver(nn.Module):
    """A context (B, F, D) of any length to L latents (B, L, D)."""

    def __init__(self, config: dict):
        super().__init__()
        d = config["d_model"]
        inner = int(d * 4 * 2 / 3)
        latents = torch.empty(config["latents"], d).normal_(std=INITIAL_DEVIATION)
        self.latents = nn.Parameter(latents)
        self.layers = nn.ModuleList()
        for _ in range(PERCEIVER_LAYERS):
            feed_forward = nn.Sequential(nn.Linear(d, 2 * inner), GEGLU(), nn.Linear(inner, d))
            self.layers.append(nn.ModuleList([PerceiverAttention(config), feed_forward]))
        self.norm = RMSNorm(d)

    def forward(self, context: Tensor) -> Tensor:
        x = self.latents.expand(len(context), -1, -1)
        for attention, feed_forward in self.layers:
            x = attention(x, context) + x
            x = feed_forward(x) + x
        return self.norm(x)


class Transformer(nn.Module):
    def __init__(self, config: dict, dropout: float):
        super().__init__()
        self.h = nn.ModuleList([Block(config, dropout) for _ in range(config["layers"])])
        self.ln_f = nn.LayerNorm(config["d_model"])


class GPT(nn.Module):
    """Text and a voice's latents to audio codes. `config`: see `formats.CONFIG`."""

    def __init__(self, config: dict, dropout: float = 0.0):
        super().__init__()
        d = config["d_model"]
        self.config = config
        blocks = [ConditioningBlock(config) for _ in range(CONDITIONING_BLOCKS)]
        first = nn.Conv1d(config["mel_channels"], d, 1)
        self.conditioning_encoder = nn.Sequential(
            OrderedDict(init=first, attn=nn.Sequential(*blocks))
        )
        self.conditioning_perceiver = Perceiver(config)
        self.text_embedding = nn.Embedding(config["text_tokens"], d)
        self.mel_embedding = nn.Embedding(config["audio_tokens"], d)
        self.text_pos_embedding = nn.ModuleDict({"emb": nn.Embedding(config["text_positions"], d)})
        self.mel_pos_embedding = nn.ModuleDict({"emb": nn.Embedding(config["mel_positions"], d)})
        self.dropout = nn.Dropout(dropout)
        self.gpt = Transformer(config, dropout)
        self.final_norm = nn.LayerNorm(d)
        self.text_head = nn.Linear(d, config["text_tokens"])
        self.mel_head = nn.Linear(d, config["audio_tokens"])
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.normal_(module.weight, std=INITIAL_DEVIATION)

    def condition(self, mels: Tensor) -> Tensor:
        """Conditioning mels (B, 80, F) of a voice to its latents (B, L, D)."""
        return self.conditioning_perceiver(self.conditioning_encoder(mels).transpose(1, 2))

    def embed_text(self, tokens: Tensor) -> Tensor:
        """Tokens (B, U) to embeddings with positions (B, U, D)."""
        positions = self.text_pos_embedding["emb"].weight[: tokens.shape[1]]
        return self.text_embedding(tokens) + positions

    def embed_mel(self, codes: Tensor, first: int = 0) -> Tensor:
        """Codes (B, N) to embeddings with positions (B, N, D). `first`: position of the first."""
        positions = self.mel_pos_embedding["emb"].weight[first : first + codes.shape[1]]
        return self.mel_embedding(codes) + positions

    def hidden(self, x: Tensor) -> Tensor:
        """Embeddings (B, T, D) to causal hidden states (B, T, D) after the last norm."""
        x = self.dropout(x)
        for block in self.gpt.h:
            x = block(x)
        return self.final_norm(self.gpt.ln_f(x))

    def run(
        self, x: Tensor, cache: list | None = None, heard: Tensor | None = None
    ) -> tuple[Tensor, list]:
        """Hidden states as `hidden` returns them, of positions that follow those in `cache`, and
        the extended cache: keys and values of each layer. `heard` (B, P + 1), for a position after
        others of different lengths: which of the P + 1 are not padding."""
        cache = [[] for _ in self.gpt.h] if cache is None else cache
        for block, past in zip(self.gpt.h, cache, strict=True):
            x = block(x, past, heard)
        return self.final_norm(self.gpt.ln_f(x)), cache

    def mel_logits(self, hidden: Tensor) -> Tensor:
        """Logits (B, T, codes + 2) of hidden states (B, T, D)."""
        return upcast(self.mel_head(hidden))


CHECKPOINTED = (Block, ConditioningBlock, Perceiver)  # recomputed by --gradient_checkpointing
COMPILED = (MLP,)  # compiled by --torch_compile


def make_model(config: dict, weights: dict[str, Tensor] | None = None, dropout: float = 0.0) -> GPT:
    """A GPT with `weights`, which become its parameters, or with random ones."""
    return with_weights(lambda: GPT(config, dropout), weights)


def use_sdpa(model: GPT, sdpa: bool) -> None:
    """Fused attention, or all scores in memory."""
    for block in model.gpt.h:
        block.attn.sdpa = sdpa


def attention_kernel(model: GPT, device: torch.device, dtype: torch.dtype | None) -> str:
    """The kernel that the GPT's attention uses in training on `device`, in words."""
    attention = model.gpt.h[0].attn
    if not attention.sdpa:
        return "the explicit product (--no_sdpa)"
    if device.type == "meta":
        return "fused"
    width = model.config["d_model"] // attention.heads
    shape = (1, attention.heads, 64, width)
    q = torch.zeros(shape, device=device, dtype=dtype, requires_grad=True)
    choice = torch._fused_sdp_choice(q, q, q, dropout_p=attention.dropout, is_causal=True)
    return KERNELS.get(choice, f"kernel {choice}")
