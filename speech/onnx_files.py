"""ONNX files for programs that run models without torch: a graph with the metadata that they read,
its copy in 8 bits, the list of tokens; all of it for a CTC model."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from common.errors import require
from speech.features import valid_mask

PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18  # the lowest that torch's exporter writes by itself
BLANK = "<blk>"
UNKNOWN = "\ufffd"
SPACE = "\u2581"  # in place of a space, which separates a piece from its id
IMPOSSIBLE = -1e4  # log-probability: infinity is not a number in every program's sums


def require_packages() -> None:
    """Raises `RunError` if a package is missing that writes ONNX."""
    for package in PACKAGES:
        require(package, "an export to ONNX")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of exporters: of packages that are not needed, of changes to come."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def write_tokens(pieces: list[str], *files: Path) -> None:
    """Writes `piece id` a line, and the blank last. The pieces are in the order of their ids, with
    U+2581 for a space. A program prints a piece as it is, so an unknown character gets the sign
    that stands for one here, too."""
    lines = []
    for number, piece in enumerate([*pieces, BLANK]):
        # No text has other white space than single spaces; a vocabulary file may.
        shown = "".join(SPACE if c.isspace() else c for c in piece)
        if piece == "<unk>":
            shown = UNKNOWN
        lines.append(f"{shown} {number}\n")
    for file in files:
        file.write_text("".join(lines), encoding="utf-8", newline="\n")


def save_graph(
    network: nn.Module,
    inputs: dict[str, torch.Tensor],
    dynamic: dict[str, tuple[int, ...]],
    outputs: tuple[str, ...],
    file: Path,
) -> None:
    """Writes the graph that `network` computes from `inputs`, examples by name. `dynamic` has the
    dimensions of each input that may have any size. Nothing in the file says where or by which
    lines it was made."""
    onnx = require("onnx", "an export to ONNX")
    sizes = {}
    for name in inputs:
        sizes[name] = dict.fromkeys(dynamic.get(name, ()), torch.export.Dim.DYNAMIC)
    with torch.no_grad(), quiet():
        program = torch.onnx.export(
            network,
            kwargs=inputs,
            input_names=list(inputs),
            output_names=list(outputs),
            opset_version=OPSET,
            dynamic_shapes=sizes,
            dynamo=True,
            verbose=False,
        )
    model = program.model_proto
    for part in (model.graph, *model.graph.node, *model.graph.value_info):
        del part.metadata_props[:]
        part.doc_string = ""
    onnx.save(model, file)


def add_metadata(file: Path, metadata: dict[str, object]) -> None:
    """Adds what a program reads about a graph beside its shapes."""
    onnx = require("onnx", "an export to ONNX")
    model = onnx.load(file)
    onnx.helper.set_model_props(model, {name: str(value) for name, value in metadata.items()})
    onnx.save(model, file)


def quantise(source: Path, target: Path) -> None:
    """Writes a copy of a graph whose matrices have 8 bits: a quarter of the size. Convolutions stay
    as they are."""
    quantization = require("onnxruntime.quantization", "an export to ONNX in 8 bits")
    with quiet():
        quantization.quantize_dynamic(
            source,
            target,
            op_types_to_quantize=["MatMul"],
            weight_type=quantization.QuantType.QUInt8,
        )


# --- a CTC model ----------------------------------------------------------------------------------


class Ctc(nn.Module):
    """The graph of a CTC model in NeMo's form: features `audio_signal` (B, M, F) and their
    `length` (B,) to `logprobs` (B, T, V + 1), the blank last.

    `model.ctc_log_probs(features, lengths)` returns the log-probabilities of features (B, F, M),
    and the lengths that are valid. The programs compute lengths themselves, sherpa-onnx F //
    subsampling, onnx-asr that rounded up, and repeats the blank there."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, audio_signal: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        log_probs, lengths = self.model.ctc_log_probs(audio_signal.transpose(1, 2), length)
        silent = torch.full_like(log_probs[:1, :1], IMPOSSIBLE)
        silent[..., -1] = 0.0
        valid = valid_mask(lengths, log_probs.shape[1])[:, :, None]
        return torch.where(valid, log_probs, silent)


def fill_ctc(
    folder: Path, model: nn.Module, pieces: list[str], num_mel_bins: int, subsampling: int
) -> None:
    """Writes what sherpa-onnx (model.onnx or model.int8.onnx, tokens.txt) and onnx-asr (vocab.txt,
    config.json) read of a CTC model in `folder`. `model`: as in `Ctc`, in fp32 on the host; its
    features are `speech.parakeet.features.MelFeatures`."""
    graph = Ctc(model.eval())
    # Two utterances of an odd length: sizes of 0 and 1 would become constants.
    inputs = {
        "audio_signal": torch.randn(2, num_mel_bins, 203),
        "length": torch.tensor([203, 101]),
    }
    dynamic = {"audio_signal": (0, 2), "length": (0,)}
    file = folder / "model.onnx"
    save_graph(graph, inputs, dynamic, ("logprobs",), file)
    metadata = {
        "model_type": "EncDecCTCModelBPE",
        "vocab_size": len(pieces),
        "subsampling_factor": subsampling,
        "normalize_type": "per_feature",
        "feat_dim": num_mel_bins,
    }
    add_metadata(file, metadata)
    quantise(file, folder / "model.int8.onnx")
    write_tokens(pieces, folder / "tokens.txt", folder / "vocab.txt")
    config = {
        "model_type": "nemo-conformer-ctc",
        "features_size": num_mel_bins,
        "subsampling_factor": subsampling,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
