"""wav2vec 2.0 in ONNX: a folder with one graph for sherpa-onnx and for onnx-asr.

sherpa-onnx (`from_omnilingual_asr_ctc`) decodes one recording at a time, none below 400 samples. It
gives the first input only, the waveform, which it has normalised itself, and takes the first
output. onnx-asr (its type `wav2vec2-ctc`) decodes batches: it gives waveforms as they are, with
their lengths by name. So the lengths are an input with a value, which a program may leave out; ONNX
Runtime loads such a graph with a warning. Group norm is no difficulty: it is over valid frames.

Tried with sherpa-onnx 2.0.1, and with onnx-asr's repository of July 2026: releases up to 0.12 lack
the type. onnx-asr leaves out the space before a word that begins with a mark, such as 'yan."""

import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.errors import UsageError
from models import model_files, onnx_files
from models.wav2vec2.model import Wav2Vec2, frame_samples, frames, normalised, shortest
from models.wav2vec2.settings import META_EPSILON
from models.wav2vec2.tokenizer import SPECIAL, Wav2Vec2Tokenizer, make_tokenizer
from speech.signal.audio import SAMPLE_RATE
from speech.signal.features import valid_mask

USE = """
import sherpa_onnx
import soundfile

recognizer = sherpa_onnx.OfflineRecognizer.from_omnilingual_asr_ctc(
    model="FOLDER/model.onnx", tokens="FOLDER/tokens.txt"
)
stream = recognizer.create_stream()
samples, sample_rate = soundfile.read("recording.wav", dtype="float32")
stream.accept_waveform(sample_rate, samples)
recognizer.decode_stream(stream)
print(stream.result.text)
"""  # of a model card
THEIR_EPSILON = META_EPSILON  # which sherpa-onnx adds to every waveform's variance
NO_LENGTH = -1  # the value of lengths that are left out


class WaveformGraph(nn.Module):
    """Waveforms (B, T) and lengths (B,) to log-probabilities (B, ceil(T / 320), V), with blanks
    beyond the valid frames. Without lengths, the waveforms are normalised and have no padding."""

    def __init__(self, model: Wav2Vec2):
        super().__init__()
        self.model = model
        self.epsilon = model.config["normalize_eps"]

    def forward(self, audio: Tensor, lengths: Tensor) -> Tensor:
        is_whole = lengths < 0
        lengths = torch.where(is_whole, audio.shape[1], lengths)
        audio = torch.where(
            is_whole[:, None],
            self.with_our_epsilon(audio),
            normalised(audio, lengths, self.epsilon),
        )
        # Room for the first frame. What it adds to longer waveforms is no valid frame.
        audio = F.pad(audio, (0, shortest(self.model.config) - 1))
        x = self.model.feature_projection(self.model.feature_extractor(audio, lengths))
        counts = frames(lengths, self.model.config)
        encoded = self.model.encoder(x, valid_mask(counts, x.shape[1]))
        log_probs = self.model.ctc_log_probs(encoded)
        return onnx_files.with_blanks(log_probs, counts, self.model.blank)

    def with_our_epsilon(self, audio: Tensor) -> Tensor:
        """Waveforms (B, T) that sherpa-onnx has normalised, as if it had added the model's epsilon
        to their variance v. It left a variance u = v / (v + theirs) of them."""
        variance = audio.square().mean(1, keepdim=True)
        ratio = self.epsilon / THEIR_EPSILON
        return audio * (variance + ratio * (1 - variance)).rsqrt()


def check(config: dict) -> None:
    """Raises `UsageError` for a model that sherpa-onnx would decode wrongly, and `RunError` if a
    package is missing."""
    if not config["do_normalize"]:
        raise UsageError(
            "no export to ONNX: the model takes waveforms as they are (do_normalize is false), and"
            " sherpa-onnx normalises them; leave out --export_format to export it for transformers"
        )
    onnx_files.require_packages("--export_format onnx")


def export(
    folder: str | Path,
    weights: dict[str, Tensor],
    config: dict,
    tokenizer: dict,
    card: dict[str, str],
) -> list[str]:
    """Writes a folder that sherpa-onnx and onnx-asr can load, in fp32 and with weights of 8 bits,
    and returns the file names. Arguments, what is replaced, and errors: as in `formats.export`."""
    check(config)
    tensors = model_files.on_host(weights)
    written = make_tokenizer(tokenizer, config["vocabulary"])
    silence_special(tensors, written)
    model = model_files.with_weights(lambda: Wav2Vec2(config), tensors)
    program = onnx_files.export(graph(model.requires_grad_(False)))
    settings = {"model_type": "wav2vec2-ctc", "subsampling_factor": frame_samples(config)}
    lines = onnx_files.token_lines(printed_pieces(written))
    texts = {
        "tokens.txt": lines,
        "vocab.txt": lines,
        "config.json": json.dumps(settings, indent=1) + "\n",
    }
    return model_files.write_export(
        folder, lambda aside: onnx_files.save(program, aside / "model.onnx"), texts | card
    )


def graph(model: Wav2Vec2) -> onnx_files.Graph:
    """The graph of a model in fp32 on the host."""
    lengths = torch.tensor([SAMPLE_RATE, SAMPLE_RATE // 2])
    inputs = {
        "input_values": (torch.zeros(2, SAMPLE_RATE), {0: "batch", 1: "samples"}),
        "input_lengths": (lengths, {0: "batch"}),
    }
    usual = {"input_lengths": torch.tensor([NO_LENGTH])}
    return onnx_files.Graph(WaveformGraph(model), inputs, ("logprobs",), usual)


def silence_special(tensors: dict[str, Tensor], tokenizer: Wav2Vec2Tokenizer) -> None:
    """Replaces the head's bias, so that no frame is a special piece, which programs would print."""
    bias = tensors["lm_head.bias"].clone()
    for number, piece in enumerate(tokenizer.pieces):
        if piece in SPECIAL and number not in (tokenizer.blank, tokenizer.unknown):
            bias[number] = onnx_files.NEVER
    tensors["lm_head.bias"] = bias


def printed_pieces(tokenizer: Wav2Vec2Tokenizer) -> list[str]:
    """The pieces by id as the programs print them, with the blank's name there."""
    pieces = [piece.lower() if tokenizer.is_lower else piece for piece in tokenizer.pieces]
    pieces[tokenizer.blank] = onnx_files.BLANK
    if tokenizer.unknown is None:
        # sherpa-onnx takes pieces for parts of letters if their highest byte is 0xC6, as in Latin
        # with ƙ, ơ or ƒ. A piece beyond the model's, which has a higher byte, prevents it.
        pieces.append(onnx_files.UNKNOWN)
    else:
        pieces[tokenizer.unknown] = onnx_files.UNKNOWN
    return pieces
