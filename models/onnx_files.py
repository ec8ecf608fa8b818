"""ONNX files for programs that run models without torch, sherpa-onnx and onnx-asr: graphs, their
copies with weights of 8 bits, lists of tokens. And all files of a CTC model."""

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from common.errors import first_line, require
from speech.signal.features import valid_mask

USE = """
import onnx_asr

print(onnx_asr.load_model("TYPE", "FOLDER").recognize("recording.wav"))
"""  # of a model card
MODULES = ("onnx", "onnxscript", "onnxruntime", "onnxruntime.quantization")
PACKAGES = "onnx onnxscript onnxruntime"
OPSET = 18
# Bytes of weights in one file with their graph. Protobuf's limit is 2 GiB.
MOST_BYTES = 1_800_000_000
BLANK = "<blk>"
UNKNOWN = "\ufffd"  # programs print a piece as it is, and this is what is printed here
SPACE = "\u2581"  # in a piece: a space separates a piece from its id
FRAMES = 203  # of the example that a CTC graph is made from: not a multiple of the subsampling
NEVER = -1e4  # a log-probability; some programs cannot calculate with infinity


@dataclass(frozen=True)
class Graph:
    """A graph that becomes a file. `inputs`: by name an example and its axes of any size, with
    names. Examples have sizes above 1, which would become constants. `usual`: the values of inputs
    that a program may leave out."""

    module: nn.Module
    inputs: dict[str, tuple[Tensor, dict[int, str]]]
    outputs: tuple[str, ...]
    usual: dict[str, Tensor] = field(default_factory=dict)


def require_packages(flag: str) -> None:
    """Raises `RunError` if a package is missing that `flag` needs to write ONNX."""
    for module in MODULES:
        require(module, flag, PACKAGES)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without the warnings of torch's exporter and of the quantisation."""
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def export(graph: Graph, metadata: dict[str, object] | None = None):
    """torch's program of a graph, with references to the weights. `metadata`: about the model."""
    with torch.no_grad(), torch.autocast("cpu", enabled=False), quiet():
        program = torch.onnx.export(
            graph.module.eval(),
            tuple(example for example, _ in graph.inputs.values()),
            input_names=list(graph.inputs),
            output_names=list(graph.outputs),
            dynamic_shapes=tuple(axes for _, axes in graph.inputs.values()),
            opset_version=OPSET,
            dynamo=True,
            verbose=False,
        )
    # A slice of a weight becomes a weight, whatever its size, or it would never have 8 bits.
    optimizer = require("onnxscript.optimizer", "an export to ONNX")
    limits = {"input_size_limit": MOST_BYTES, "output_size_limit": MOST_BYTES}
    optimizer.fold_constants(program.model, **limits)
    tensor = require("onnxscript.ir", "an export to ONNX").tensor
    for value in program.model.graph.inputs:
        if value.name in graph.usual:
            value.const_value = tensor(graph.usual[value.name].numpy(), name=value.name)
            program.model.graph.register_initializer(value)
    program.model.graph.metadata_props.clear()
    for node in program.model.graph:
        node.metadata_props.clear()  # lines of this code, with the folders of this machine
    program.model.metadata_props.update({n: str(value) for n, value in (metadata or {}).items()})
    return program


def save(program, path: Path) -> None:
    """Writes a graph, and beside it the same with weights of 8 bits. Convolutions stay as they
    are. Raises `OSError`, also for a file in between that a full disk has cut short in silence."""
    quantization = require("onnxruntime.quantization", "an export to ONNX")
    size = sum(each.const_value.nbytes for each in program.model.graph.initializers.values())
    with quiet():
        program.save(path, external_data=size > MOST_BYTES)
        try:
            quantization.quantize_dynamic(
                path,
                path.with_suffix(".int8.onnx"),
                op_types_to_quantize=["MatMul"],
                weight_type=quantization.QuantType.QUInt8,  # int8 overflows without VNNI
            )
        except OSError:
            raise
        except Exception as error:  # of protobuf
            reason = f"no copy with weights of 8 bits: {first_line(error)} (is a disk full?)"
            raise OSError(0, reason) from None


def token_lines(pieces: list[str]) -> str:
    """`piece id` a line. `pieces`: by id, with BLANK, and with U+2581 for a space."""
    lines = []
    for number, piece in enumerate(pieces):
        # No text has other white space than single spaces; a vocabulary file may.
        shown = "".join(SPACE if c.isspace() else c for c in piece)
        lines.append(f"{shown} {number}\n")
    return "".join(lines)


# --- a CTC model ----------------------------------------------------------------------------------


class CtcGraph(nn.Module):
    """Features (B, M, F) and lengths (B,) to log-probabilities (B, T, V + 1), the blank last.

    `model.ctc_log_probs(features, lengths)` returns those of features (B, F, M), and the numbers of
    valid frames. The programs count frames themselves, sherpa-onnx F // subsampling, onnx-asr the
    same rounded up: beyond the valid ones there are blanks."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, features: Tensor, lengths: Tensor) -> Tensor:
        log_probs, lengths = self.model.ctc_log_probs(features.transpose(1, 2), lengths)
        return with_blanks(log_probs, lengths, -1)


def with_blanks(log_probs: Tensor, lengths: Tensor, blank: int) -> Tensor:
    """Log-probabilities (B, T, V), blanks beyond the valid frames (B,)."""
    row = torch.full_like(log_probs[:1, :1], NEVER)
    row[..., blank] = 0.0
    valid = valid_mask(lengths, log_probs.shape[1])[:, :, None]
    return torch.where(valid, log_probs, row)


def fill_ctc(
    folder: Path, model: nn.Module, pieces: list[str], num_mel_bins: int, subsampling: int
) -> None:
    """Writes what sherpa-onnx (model.onnx or model.int8.onnx, tokens.txt) and onnx-asr (vocab.txt,
    config.json) read of a CTC model in `folder`. `model`: as in `CtcGraph`, in fp32 on the host;
    its features are those of `speech.signal.nemo_features`."""
    features = torch.zeros(2, num_mel_bins, FRAMES)
    inputs = {
        "audio_signal": (features, {0: "batch", 2: "frames"}),
        "length": (torch.tensor([FRAMES, FRAMES // 2]), {0: "batch"}),
    }
    metadata = {  # which sherpa-onnx reads
        "model_type": "EncDecCTCModelBPE",
        "vocab_size": len(pieces),
        "subsampling_factor": subsampling,
        "normalize_type": "per_feature",
        "feat_dim": num_mel_bins,
    }
    settings = {
        "model_type": "nemo-conformer-ctc",
        "features_size": num_mel_bins,
        "subsampling_factor": subsampling,
    }
    save(export(Graph(CtcGraph(model), inputs, ("logprobs",)), metadata), folder / "model.onnx")
    printed = [UNKNOWN if piece == "<unk>" else piece for piece in pieces]
    lines = token_lines([*printed, BLANK])
    (folder / "tokens.txt").write_text(lines, encoding="utf-8")
    (folder / "vocab.txt").write_text(lines, encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
