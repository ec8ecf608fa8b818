"""A second Matcha-TTS, of single utterances without padding, written as formulas over tensors by
their names in the released checkpoints."""

import math

import torch
import torch.nn.functional as F

Weights = dict[str, torch.Tensor]


def part(weights: Weights, name: str) -> Weights:
    """The tensors below a name."""
    return {k.removeprefix(f"{name}."): w for k, w in weights.items() if k.startswith(f"{name}.")}


def convolution(x: torch.Tensor, w: Weights, **settings) -> torch.Tensor:
    return F.conv1d(x[None], w["weight"], w.get("bias"), **settings)[0]


def channel_norm(x: torch.Tensor, w: Weights) -> torch.Tensor:
    centred = x - x.mean(0)
    normed = centred / (centred.square().mean(0) + 1e-4).sqrt()
    return normed * w["gamma"][:, None] + w["beta"][:, None]


def rotate(x: torch.Tensor) -> torch.Tensor:
    """Queries or keys (U, D): the first half of the channels as complex numbers that are turned by
    the position."""
    quarter = x.shape[1] // 4
    turns = torch.arange(len(x), dtype=torch.float64)[:, None] * 10_000.0 ** (
        -torch.arange(quarter, dtype=torch.float64) / quarter
    )
    numbers = torch.complex(x[:, :quarter], x[:, quarter : 2 * quarter])
    numbers = numbers * torch.polar(torch.ones_like(turns), turns)
    return torch.cat([numbers.real, numbers.imag, x[:, 2 * quarter :]], 1)


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return (q @ k.t() / math.sqrt(q.shape[1])).softmax(1) @ v


def encoder(weights: Weights, config: dict, tokens: torch.Tensor, vector=None) -> tuple:
    """Means (80, U) and logarithms of durations (U,)."""
    w = part(weights, "encoder")
    x = w["emb.weight"][tokens].t() * math.sqrt(config["width"])
    y = x
    for layer in range(3):
        y = convolution(y, part(w, f"prenet.conv_layers.{layer}"), padding=2)
        y = channel_norm(y, part(w, f"prenet.norm_layers.{layer}")).relu()
    x = x + convolution(y, part(w, "prenet.proj"))
    if vector is not None:
        x = torch.cat([x, vector[:, None].expand(-1, x.shape[1])])
    for layer in range(config["layers"]):
        own = part(w, f"encoder.attn_layers.{layer}")
        q, k, v = (convolution(x, part(own, f"conv_{name}")) for name in "qkv")
        size = len(x) // config["heads"]
        heads = [
            attention(rotate(a.t()), rotate(b.t()), c.t()).t()
            for a, b, c in zip(q.split(size), k.split(size), v.split(size), strict=True)
        ]
        x = x + convolution(torch.cat(heads), part(own, "conv_o"))
        x = channel_norm(x, part(w, f"encoder.norm_layers_1.{layer}"))
        own = part(w, f"encoder.ffn_layers.{layer}")
        y = convolution(x, part(own, "conv_1"), padding=1).relu()
        x = x + convolution(y, part(own, "conv_2"), padding=1)
        x = channel_norm(x, part(w, f"encoder.norm_layers_2.{layer}"))
    y = x
    for number in (1, 2):
        y = convolution(y, part(w, f"proj_w.conv_{number}"), padding=1).relu()
        y = channel_norm(y, part(w, f"proj_w.norm_{number}"))
    return convolution(x, part(w, "proj_m")), convolution(y, part(w, "proj_w.proj"))[0]


def group_norm(x: torch.Tensor, w: Weights) -> torch.Tensor:
    groups = [(g - g.mean()) / (g.var(correction=0) + 1e-5).sqrt() for g in x.chunk(8)]
    return torch.cat(groups) * w["weight"][:, None] + w["bias"][:, None]


def block(x: torch.Tensor, w: Weights) -> torch.Tensor:
    x = group_norm(convolution(x, part(w, "block.0"), padding=1), part(w, "block.1"))
    return x * torch.log(1 + x.exp()).tanh()


def resnet(x: torch.Tensor, w: Weights, time: torch.Tensor) -> torch.Tensor:
    time = time * torch.log(1 + time.exp()).tanh()
    y = block(x, part(w, "block1"))
    y = y + (w["mlp.1.weight"] @ time + w["mlp.1.bias"])[:, None]
    return block(y, part(w, "block2")) + convolution(x, part(w, "res_conv"))


def transformer(x: torch.Tensor, w: Weights, heads: int) -> torch.Tensor:
    x = x.t()
    normed = F.layer_norm(x, x.shape[1:], w["norm1.weight"], w["norm1.bias"])
    q, k, v = (normed @ w[f"attn1.to_{name}.weight"].t() for name in "qkv")
    parts = zip(q.chunk(heads, 1), k.chunk(heads, 1), v.chunk(heads, 1), strict=True)
    y = torch.cat([attention(*each) for each in parts], 1)
    x = x + y @ w["attn1.to_out.0.weight"].t() + w["attn1.to_out.0.bias"]
    normed = F.layer_norm(x, x.shape[1:], w["norm3.weight"], w["norm3.bias"])
    y = normed @ w["ff.net.0.proj.weight"].t() + w["ff.net.0.proj.bias"]
    y = y + torch.sin(y * w["ff.net.0.alpha"].exp()) ** 2 / (w["ff.net.0.beta"].exp() + 1e-9)
    return (x + y @ w["ff.net.2.weight"].t() + w["ff.net.2.bias"]).t()


def velocity(weights: Weights, config: dict, x: torch.Tensor, time: float) -> torch.Tensor:
    """The flow's velocity (80, F), F even, of noisy frames, means and vector (160 + S, F)."""
    w = part(weights, "decoder.estimator")
    heads = config["decoder_heads"]
    half = len(x) // 2
    angles = [1000 * time * math.exp(-math.log(10_000) * i / (half - 1)) for i in range(half)]
    t = torch.tensor([f(angle) for f in (math.sin, math.cos) for angle in angles], dtype=x.dtype)
    t = w["time_mlp.linear_1.weight"] @ t + w["time_mlp.linear_1.bias"]
    t = w["time_mlp.linear_2.weight"] @ (t * t.sigmoid()) + w["time_mlp.linear_2.bias"]

    def stage(x: torch.Tensor, name: str) -> torch.Tensor:
        return transformer(resnet(x, part(w, f"{name}.0"), t), part(w, f"{name}.1.0"), heads)

    first = stage(x, "down_blocks.0")
    second = stage(
        convolution(first, part(w, "down_blocks.0.2.conv"), stride=2, padding=1), "down_blocks.1"
    )
    x = convolution(second, part(w, "down_blocks.1.2"), padding=1)
    x = stage(stage(x, "mid_blocks.0"), "mid_blocks.1")
    x = stage(torch.cat([x, second]), "up_blocks.0")
    up = part(w, "up_blocks.0.2.conv")
    x = F.conv_transpose1d(x[None], up["weight"], up["bias"], stride=2, padding=1)[0]
    x = stage(torch.cat([x, first]), "up_blocks.1")
    x = convolution(x, part(w, "up_blocks.1.2"), padding=1)
    return convolution(block(x, part(w, "final_block")), part(w, "final_proj"))
