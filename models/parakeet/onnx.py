"""Parakeet in ONNX, as sherpa-onnx and onnx-asr load it: a folder with a graph for each part of a
transducer, or with one graph of a CTC model.

Both programs compute the features themselves: onnx-asr as `features.MelFeatures` does, sherpa-onnx
with frames that begin 5 ms later, another window and other mel bands. They take the place of a
duration in the list for its frames. sherpa-onnx goes by the order of inputs and outputs, and by the
metadata of the encoder; onnx-asr goes by names, and by config.json."""

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from common.errors import UsageError
from models import model_files, onnx_files
from models.onnx_files import Graph
from models.parakeet.model import Parakeet, relative_positions
from models.parakeet.settings import is_transducer, kind_of
from speech.signal.features import valid_mask

FRAMES = 80  # of the example that a graph is made from, before the subsampling
MEL_BINS = (80, 128)  # that onnx-asr has features of
# Names for both programs. Weights too large for one file are in encoder-model.onnx.data.
SECOND_NAMES = {
    "encoder-model.onnx": "encoder.onnx",
    "encoder-model.int8.onnx": "encoder.int8.onnx",
}


class EncoderGraph(nn.Module):
    """Features (B, M, F) and lengths (B,) to (B, D, T) and lengths. Whatever lies beyond a length
    changes nothing."""

    def __init__(self, model: Parakeet):
        super().__init__()
        self.encoder = model.encoder

    def forward(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        x = features.transpose(1, 2)
        x = x.masked_fill(~valid_mask(lengths, x.shape[1])[:, :, None], 0.0)
        x = self.encoder.subsampling(x, lengths) * self.encoder.scale
        lengths = self.encoder.subsampling.frames(lengths)
        padding = ~valid_mask(lengths, x.shape[1])[:, :, None]
        hidden = padding[:, None, None, :, 0]
        frames = x.shape[1]
        positions = relative_positions(x, frames, frames)[None]  # a MatMul, which 8 bits can have
        for layer in self.encoder.layers:
            x = layer(x, positions, padding, hidden)
        return x.transpose(1, 2), lengths


class DecoderGraph(nn.Module):
    """The prediction network for one label: targets (B, 1), their lengths (B,), and the LSTM's
    states (L, B, H) to (B, H, 1), lengths and states. It is written out, because torch's exporter
    mixes up the states of an LSTM's layers."""

    def __init__(self, model: Parakeet):
        super().__init__()
        self.embedding = model.decoder.embedding
        self.lstm = model.decoder.lstm

    def forward(
        self, targets: Tensor, lengths: Tensor, hidden: Tensor, cells: Tensor
    ) -> tuple[Tensor, ...]:
        x = self.embedding(targets)  # (B, 1, H)
        new_hidden = []
        new_cells = []
        for number, weights in enumerate(self.lstm.all_weights):
            of_input, of_hidden, bias, second_bias = weights
            gates = x @ of_input.T + hidden[number][:, None] @ of_hidden.T + (bias + second_bias)
            enter, forget, candidate, leave = gates.chunk(4, dim=-1)
            cell = forget.sigmoid() * cells[number][:, None]
            cell = cell + enter.sigmoid() * candidate.tanh()
            x = leave.sigmoid() * cell.tanh()
            new_hidden.append(x[:, 0])
            new_cells.append(cell[:, 0])
        # Not the input itself, whose name torch 2.8 changes if it is an output.
        lengths = lengths.clamp(min=0)
        return x.transpose(1, 2), lengths, torch.stack(new_hidden), torch.stack(new_cells)


class JoinerGraph(nn.Module):
    """The joint network with both projections: (B, D, T) and (B, H, U) to logits (B, T, U, V + 1 +
    durations)."""

    def __init__(self, model: Parakeet):
        super().__init__()
        self.encoder_projector = model.encoder_projector
        self.decoder_projector = model.decoder.decoder_projector
        self.joint = model.joint

    def forward(self, encoded: Tensor, predicted: Tensor) -> Tensor:
        encoded = self.encoder_projector(encoded.transpose(1, 2))[:, :, None]
        predicted = self.decoder_projector(predicted.transpose(1, 2))[:, None]
        return self.joint.logits(encoded, predicted)


class DecoderJointGraph(nn.Module):
    """Prediction and joint network in one, for onnx-asr."""

    def __init__(self, model: Parakeet):
        super().__init__()
        self.decoder = DecoderGraph(model)
        self.joiner = JoinerGraph(model)

    def forward(
        self, encoded: Tensor, targets: Tensor, lengths: Tensor, hidden: Tensor, cells: Tensor
    ) -> tuple[Tensor, ...]:
        predicted, lengths, hidden, cells = self.decoder(targets, lengths, hidden, cells)
        return self.joiner(encoded, predicted), lengths, hidden, cells


class CtcModel(nn.Module):
    """Encoder and CTC head, for `onnx_files.CtcGraph`."""

    def __init__(self, model: Parakeet):
        super().__init__()
        self.encoder = EncoderGraph(model)
        self.model = model

    def ctc_log_probs(self, features: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        encoded, lengths = self.encoder(features.transpose(1, 2), lengths)
        return self.model.ctc_log_probs(encoded.transpose(1, 2)), lengths


def check(config: dict) -> None:
    """Raises `UsageError` for a model that the two programs would decode wrongly, and `RunError` if
    a package is missing."""
    if "streaming" in config:
        raise UsageError("no export to ONNX: a streaming model; export it in the form hf or nemo")
    durations = config["durations"]
    if durations != list(range(len(durations))):
        raise UsageError(
            f"no export to ONNX: the model's durations are {durations}, and sherpa-onnx and"
            " onnx-asr know 0, 1, 2, ... only"
        )
    onnx_files.require_packages("--export_format onnx")


def prepare(
    tensors: dict[str, Tensor], config: dict, pieces: list[str]
) -> tuple[Callable[[Path], None], dict[str, str]]:
    """The function that writes files in a folder, and the texts of other files by their names.
    `tensors`: fp32 weights on the host."""
    if config["num_mel_bins"] not in MEL_BINS:
        print(
            f"onnx-asr cannot load the export: the model has {config['num_mel_bins']} mel bins, and"
            f" onnx-asr features of {' and '.join(map(str, MEL_BINS))} only"
        )
    model = model_files.with_weights(lambda: Parakeet(config), tensors)
    model.eval().requires_grad_(False)
    if not is_transducer(config):
        fill_ctc = functools.partial(
            onnx_files.fill_ctc,
            model=CtcModel(model),
            pieces=pieces,
            num_mel_bins=config["num_mel_bins"],
            subsampling=config["subsampling"],
        )
        return fill_ctc, {}
    programs = {}
    for name, graph in graphs(model).items():
        about = metadata(config) if name == "encoder-model.onnx" else None
        programs[name] = onnx_files.export(graph, about)

    def fill(folder: Path) -> None:
        for name, program in programs.items():
            onnx_files.save(program, folder / name)
        for name, second in SECOND_NAMES.items():
            give_second_name(folder / name, folder / second)

    return fill, text_files(config, pieces)


def graphs(model: Parakeet) -> dict[str, Graph]:
    """The graphs by file name. The names of inputs and outputs are onnx-asr's, their order is
    sherpa-onnx's."""
    config = model.config
    layers = config["prediction_layers"]
    width = config["prediction_width"]
    features = torch.zeros(2, config["num_mel_bins"], FRAMES)
    encoded = torch.zeros(2, config["d_model"], 2)
    targets = torch.zeros(2, 1, dtype=torch.int32)
    target_length = torch.ones(2, dtype=torch.int32)
    label = {
        "targets": (targets, {0: "batch"}),
        "target_length": (target_length, {0: "batch"}),
        "input_states_1": (torch.zeros(layers, 2, width), {1: "batch"}),
        "input_states_2": (torch.zeros(layers, 2, width), {1: "batch"}),
    }
    encoder_outputs = (encoded, {0: "batch", 2: "frames"})
    after = ("prednet_lengths", "output_states_1", "output_states_2")
    encoder = {
        "audio_signal": (features, {0: "batch", 2: "frames"}),
        "length": (torch.tensor([FRAMES, FRAMES // 2]), {0: "batch"}),
    }
    joiner = {
        "encoder_outputs": encoder_outputs,
        "decoder_outputs": (torch.zeros(2, width, 3), {0: "batch", 2: "labels"}),
    }
    fused = {"encoder_outputs": encoder_outputs, **label}
    return {
        "encoder-model.onnx": Graph(EncoderGraph(model), encoder, ("outputs", "encoded_lengths")),
        "decoder.onnx": Graph(DecoderGraph(model), label, ("outputs", *after)),
        "joiner.onnx": Graph(JoinerGraph(model), joiner, ("outputs",)),
        "decoder_joint-model.onnx": Graph(DecoderJointGraph(model), fused, ("outputs", *after)),
    }


def metadata(config: dict) -> dict[str, object]:
    """The metadata that sherpa-onnx reads in the encoder."""
    return {
        "model_type": "EncDecRNNTBPEModel",
        "version": "2",
        "url": f"parakeet-{kind_of(config)}",  # sherpa-onnx takes "tdt" in it for a TDT model
        "vocab_size": config["vocabulary"],
        "normalize_type": "per_feature",
        "pred_rnn_layers": config["prediction_layers"],
        "pred_hidden": config["prediction_width"],
        "subsampling_factor": config["subsampling"],
        "feat_dim": config["num_mel_bins"],
    }


def text_files(config: dict, pieces: list[str]) -> dict[str, str]:
    """The pieces for both programs, and onnx-asr's config.json."""
    lines = onnx_files.token_lines([*pieces, onnx_files.BLANK])
    settings = {
        "model_type": f"nemo-conformer-{kind_of(config)}",
        "features_size": config["num_mel_bins"],
        "subsampling_factor": config["subsampling"],
        "max_tokens_per_step": config["max_symbols"],
    }
    return {
        "tokens.txt": lines,
        "vocab.txt": lines,
        "config.json": json.dumps(settings, indent=1) + "\n",
    }


def give_second_name(file: Path, name: Path) -> None:
    """A second name of a file; a copy where a file system has no such names."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copy(file, name)
