"""A voice as one file that Piper, Home Assistant and sherpa-onnx speak with: the network, a few
steps of the flow and the vocoder in one graph, which takes the tokens of a text and returns its
samples."""

import copy
import functools
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from common import files
from common.errors import require
from models import card, model_files
from models.matcha import alignment, decoding
from models.matcha.decoding import TEMPERATURE, Voice
from models.matcha.mels import SAMPLE_RATE
from models.matcha.tokenizer import BEGIN, BLANK, END, Composer
from models.matcha.vocoder import ConvolutionalFourier, GriffinLim

OPSET = 17
FLOW_STEPS = 5
USUAL_NOISE = 0.667  # the scale that the programs give unless a user says another; here TEMPERATURE
GRIFFIN_LIM_STEPS = 30
NAME = "voice.onnx"
EXAMPLE = 10  # characters of the text that the graph is made with
CARD = card.Form(
    library="piper",
    task=card.SYNTHESIS,
    family="Matcha-TTS",
    use="""
import wave

from piper import PiperVoice

voice = PiperVoice.load("FOLDER/voice.onnx")
with wave.open("speech.wav", "wb") as file:
    voice.synthesize_wav("TEXT", file)
""",
)


class Graph(nn.Module):
    """What a program has made of a text (1, N), the length of that (1,), the scales (3,) of noise
    and of length and one without use, and with several speakers the number of one (1,), to samples
    (1, 1, T)."""

    def __init__(self, voice: Voice):
        super().__init__()
        self.composer = Composer(voice.tokens) if voice.tokens.pairs else nn.Identity()
        self.model = copy.deepcopy(voice.model).float().cpu().eval()
        self.vocoder = copy.deepcopy(voice.vocoder).float().cpu().eval()
        self.vocoder.fourier = ConvolutionalFourier()
        if isinstance(self.vocoder, GriffinLim):
            self.vocoder.steps = GRIFFIN_LIM_STEPS

    def forward(
        self, numbers: Tensor, length: Tensor, scales: Tensor, speakers: Tensor | None = None
    ) -> Tensor:
        model = self.model
        if speakers is None:
            speakers = torch.zeros(1, dtype=torch.long)
        tokens = self.composer(numbers)
        lengths = length * 0 + tokens.shape[1]  # a program requires every input to have a use
        means, log_frames, vectors = model.encode(tokens, lengths, speakers)
        ends = alignment.ends_of(log_frames, lengths, 1 / scales[1])
        frames = ends[:, -1]
        means = alignment.frames_of(means, alignment.path_of(ends, frames[0]))

        def velocity(x: Tensor, time: float) -> Tensor:
            times = torch.full((1,), time)
            return model.velocity(x, means, times, frames, vectors)

        noise = torch.randn_like(means) * scales[0] * (TEMPERATURE / USUAL_NOISE)
        mels = model.denormalised(decoding.euler(velocity, noise, FLOW_STEPS))
        return self.vocoder(mels)[:, None]


def require_packages() -> None:
    """Raises `RunError` if a package is missing that writes ONNX."""
    for name in ("onnx", "onnxruntime"):
        require(name, "--export", "onnx onnxruntime")


def inputs_of(voice: Voice) -> dict[str, Tensor]:
    """Examples of the graph's inputs, by the names that Piper gives them."""
    inputs = {
        "input": torch.tensor([example_of(voice)]),
        "input_lengths": torch.tensor([len(example_of(voice))]),
        "scales": torch.tensor([USUAL_NOISE, 1.0, 0.0]),
    }
    if has_speakers(voice):
        inputs["sid"] = torch.tensor([0])
    return inputs


def example_of(voice: Voice) -> list[int]:
    return voice.tokens.encode((voice.tokens.symbols[4:] * EXAMPLE)[:EXAMPLE])


def has_speakers(voice: Voice) -> bool:
    return len(voice.speakers) > 1


def metadata_of(voice: Voice) -> dict[str, object]:
    """The metadata that sherpa-onnx reads."""
    numbers = voice.tokens.numbers
    return {
        "model_type": "vits",
        "comment": "piper",
        "frontend": "characters",
        "language": voice.language,
        "voice": voice.language,
        "add_blank": 1,
        "blank_id": numbers[BLANK],
        "bos_id": numbers[BEGIN],
        "eos_id": numbers[END],
        "use_eos_bos": 1,
        "n_speakers": len(voice.speakers),
        "sample_rate": SAMPLE_RATE,
        "version": 1,
    }


def settings_of(voice: Voice) -> dict:
    """The content of voice.onnx.json, which Piper reads. Other keys make some readers fail."""
    return {
        "audio": {"sample_rate": SAMPLE_RATE},
        "espeak": {"voice": voice.language},
        "phoneme_type": "text",
        "num_symbols": len(voice.tokens.readable),
        "num_speakers": len(voice.speakers),
        "speaker_id_map": {name: number for number, name in enumerate(voice.speakers) if name},
        "phoneme_id_map": {symbol: [number] for symbol, number in voice.tokens.map().items()},
        "inference": {"noise_scale": USUAL_NOISE, "length_scale": 1.0, "noise_w": 0.0},
    }


def token_lines(voice: Voice) -> str:
    """The content of tokens.txt: `character token` a line, which sherpa-onnx reads."""
    return "".join(f"{symbol} {number}\n" for symbol, number in voice.tokens.map().items())


def write_graph(path: Path, graph: nn.Module, voice: Voice) -> None:
    """Writes the graph with its metadata. Raises `OSError`."""
    import onnx

    inputs = inputs_of(voice)
    axes = {"input": {0: "batch", 1: "tokens"}, "input_lengths": {0: "batch"}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            graph,
            tuple(inputs.values()),
            str(path),
            input_names=list(inputs),
            output_names=["output"],
            dynamic_axes={**axes, "output": {0: "batch", 2: "samples"}},
            opset_version=OPSET,
            dynamo=False,  # the other exporter cannot make frames of as many as a text needs
        )
    model = onnx.load(str(path))
    metadata = {key: str(value) for key, value in metadata_of(voice).items()}
    onnx.helper.set_model_props(model, metadata)
    onnx.save(model, str(path))


def fill(folder: Path, voice: Voice) -> None:
    """Writes the files of an export in `folder`."""
    write_graph(folder / NAME, Graph(voice), voice)
    settings = files.json_text(settings_of(voice))
    (folder / f"{NAME}.json").write_text(settings, encoding="utf-8")
    (folder / "tokens.txt").write_text(token_lines(voice), encoding="utf-8")


def export(folder: str, consent: str, voice: Voice, is_new: bool, about: card.About) -> None:
    """Writes a voice as a folder, with a model card that has the words of --consent. Raises
    `UsageError` and `RunError`."""
    about = replace(about, languages=(voice.language,), is_new=is_new)
    text = card.readme(Path(folder).resolve().name, about, CARD)
    text += f"\n## Whose voice it is\n\n{card.plain(consent)}\n"
    names = model_files.write_export(Path(folder), functools.partial(fill, voice=voice), text)
    print(f"exported to {folder}: {', '.join(names)}")
