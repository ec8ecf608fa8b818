"""The start of an XTTS's training and its export: flags, the parts that are frozen, languages,
learning rate."""

import argparse
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import torchaudio

from common import checkpoint, options
from common.errors import UsageError
from speech import model_files, recogniser
from speech.audio import int16, read_utterance
from speech.columns import Corpus
from speech.layers import full_fp32
from speech.model_files import require_room
from speech.xtts import codec_training, formats, texts
from speech.xtts.codec import DVAE, SAMPLE_RATE, SAMPLES_PER_CODE, Mel
from speech.xtts.texts import CARRIER, OTHER_NAMES, add_language
from speech.xtts.vocabulary import LANGUAGE, Vocabulary, new_vocabulary
from speech.xtts.vocoder import OUTPUT_RATE, SPEAKER_RATE, HifiDecoder

RECIPE = "xtts_amharic"  # in checkpoints
DVAE_FOLDER = "dvae"  # beside them, for the DVAE of a model from scratch
VERSIONS = {
    "v2.0.0": 6153,
    "v2.0.1": 6153,
    "v2.0.2": 6681,
    "v2.0.3": 6681,
}  # rows of the text embedding
FINE_TUNING_RATE, SCRATCH_RATE = 5e-6, 2e-3
FITTED = 64  # utterances to which a random conditioning encoder is fitted
REFERENCE_SECONDS = 10.0  # of the clip of a speaker that an export holds
SLICES = {
    "full": [66_150, 132_300],
    "demo": [11_025, 22_050],
}  # the shortest and longest conditioning slice, samples
MARGIN = (
    16 * SAMPLES_PER_CODE
)  # zeros after every clip, so that its codes do not depend on the batch
SEED = 0  # of the frozen parts of a model from scratch, which every run has to make again
TRAINING = ("from_scratch", "freeze_layers", "dropout", "sdpa", "condition", "speak_held_out")
TEXT_FLAGS = {"use_amharic_g2p", "extend_vocab"}
SPEAKING = ("speaker_wav", "output", "temperature", "top_k", "top_p", "repetition_penalty")

METADATA = {
    "recipe": str,
    "stage?": {"gpt"},
    "config": formats.CONFIG,
    "vocab": str,
    "language": str,
    "settings": dict,
    "licence": bool,
    "pretrained": bool,
    "dvae": str,
    "carried": bool,
    "model_dir": (str, type(None)),
    "held_out?": [str],
    "text?": texts.SCHEMA,
    "condition?": {"same", "other"},
    "slice?": [int],
    "reads_stop?": bool,
}
DVAE_METADATA = {"recipe": str, "stage": {*codec_training.STEPS}, "config": dict, "updates?": int}
EXCLUDES = (
    (
        "model_dir",
        "from_scratch",
        "the second starts without released weights; leave one of them out",
    ),
    ("model_dir", "model_size", "a released model has its own shape; leave one of them out"),
    ("custom_model", "from_scratch", "the first is an already tuned model; leave one of them out"),
    ("synthesize", "export", "give one of them"),
    ("synthesize", "evaluate", "give one of them"),
    ("evaluate", "export", "give one of them"),
    *((flag, "synthesize", options.TRAINS) for flag in (*options.TRAINING, *TRAINING)),
    *((flag, "evaluate", options.TRAINS) for flag in TRAINING),
    *texts.EXCLUDES,
)
NEEDS = (
    ("custom_model", ("model_dir",), "it holds the GPT only"),
    ("synthesize", ("speaker_wav",), "a reference clip of the voice"),
    *((flag, ("synthesize",), "") for flag in SPEAKING),
    ("model_size", ("from_scratch",), ""),
    *texts.NEEDS,
)


@dataclass(frozen=True)
class Start:
    """Where the model starts, as the flags ask. `given`: the flags on the command line.
    `checkpoints`: the folder of the checkpoint of `resume`, or that of this run."""

    given: frozenset[str]
    model_dir: str | None
    custom_model: str | None
    from_scratch: bool
    size: str
    language: str
    version: str | None
    resume: str | None
    checkpoints: Path
    export: str | None
    condition: str | None
    text: texts.TextOptions


@dataclass
class Frozen:
    """The parts that are not trained: waveforms to features and codes, and codes to waveforms."""

    dvae_mel: Mel
    conditioning_mel: Mel
    dvae: DVAE
    vocoder: HifiDecoder | None

    @property
    def rate(self) -> int:
        """Hz of the speech."""
        return OUTPUT_RATE if self.vocoder else SAMPLE_RATE

    def to(self, device: torch.device, speaking: bool = True) -> "Frozen":
        """All parts on a device, for training only those that make features and codes."""
        listening = (self.dvae_mel, self.conditioning_mel, self.dvae.encoder, self.dvae.codebook)
        for part in (*listening, self.dvae, self.vocoder) if speaking else listening:
            if part is not None:
                part.to(device).eval().requires_grad_(False)
        return self

    @torch.no_grad()
    def codes(self, waveforms: torch.Tensor) -> torch.Tensor:
        """The codes (B, n) of waveforms (B, T), in fp32. What follows a clip is silence, whatever
        else is in the batch."""
        return self.dvae.codes(self.dvae_mel(F.pad(waveforms, (0, MARGIN))))

    def speaker(self, waveforms: list[torch.Tensor], rate: int = SAMPLE_RATE) -> torch.Tensor:
        """The mean speaker vector (1, 512) of waveforms (T,) at `rate` Hz, of 30 s of each."""
        with (
            torch.autocast(waveforms[0].device.type, enabled=False),
            full_fp32(waveforms[0].device),
        ):
            clips = [
                torchaudio.functional.resample(w[: 30 * rate], rate, SPEAKER_RATE)
                for w in waveforms
            ]
        return torch.stack([self.vocoder.speaker_vector(clip[None]) for clip in clips]).mean(0)


def add_arguments(parser) -> None:
    start = parser.add_argument_group(
        "model: where it starts (its shape comes from the checkpoint when resuming)"
    )
    start.add_argument(
        "--model_dir",
        type=options.path,
        metavar="DIR",
        help=(
            "fine-tune XTTS-v2 in Coqui's form: model.pth, config.json, vocab.json, dvae.pth,"
            " mel_stats.pth; with --synthesize or --export, use it"
        ),
    )
    start.add_argument(
        "--custom_model",
        type=options.path,
        metavar="FILE",
        help="take the GPT from an already tuned .pth, and the rest from --model_dir",
    )
    start.add_argument("--from_scratch", action=options.OnOff, default=False, help="random weights")
    start.add_argument(
        "--model_size", choices=list(formats.SIZES), help="shape of a model from scratch (demo)"
    )
    start.add_argument(
        "--language",
        default="am",
        metavar="CODE",
        help="language of the texts; one that the vocabulary lacks gets a token (am)",
    )
    start.add_argument(
        "--condition",
        choices=["same", "other"],
        help=(
            "the voice comes from the clip that is learned, or from another one of its speaker"
            " (same; other from scratch)"
        ),
    )
    start.add_argument(
        "--version",
        choices=list(VERSIONS),
        help="the version that the weights should have; another is an error",
    )
    start.add_argument(
        "--export",
        type=options.path,
        metavar="DIR",
        help=(
            "write a folder that Coqui's XTTS loads; after training, or alone with --resume PATH or"
            " --model_dir"
        ),
    )
    texts.add_arguments(parser)
    speaking = parser.add_argument_group("speaking")
    speaking.add_argument(
        "--synthesize",
        nargs="+",
        metavar="TEXT",
        help=(
            "speak texts, or a file with a text in each line, with the weights of --resume"
            " (CHECKPOINT_DIR/best.safetensors)"
        ),
    )
    speaking.add_argument(
        "--speaker_wav",
        nargs="+",
        type=options.path,
        metavar="FILE",
        help="reference clips of the voice",
    )
    speaking.add_argument(
        "--output",
        type=options.path,
        default="speech.wav",
        metavar="FILE",
        help="the wav; several texts get numbers (speech.wav)",
    )
    speaking.add_argument(
        "--temperature",
        type=options.number(float, 0.0, 10.0, open_low=True),
        default=0.75,
        metavar="X",
        help="(0.75)",
    )
    speaking.add_argument(
        "--top_k",
        type=options.COUNT,
        default=50,
        metavar="N",
        help="draw among the N likeliest codes; 0 = all (50)",
    )
    speaking.add_argument(
        "--top_p",
        type=options.number(float, 0.0, 1.0, open_low=True),
        default=0.85,
        metavar="P",
        help="draw among the likeliest codes with this probability in all (0.85)",
    )
    speaking.add_argument(
        "--repetition_penalty",
        type=options.number(float, 1.0, 100.0),
        default=5.0,
        metavar="X",
        help="divides the scores of codes that have been spoken (5)",
    )
    hidden = {
        "default": argparse.SUPPRESS,
        "help": (
            "another name of the flag without enable_ or of --train_manifest, --val_manifest,"
            " --output_dir, --gradient_accumulation_steps"
        ),
    }
    parser.add_argument("--enable_sdpa", dest="sdpa", action=options.OnOff, **hidden)
    parser.add_argument(
        "--enable_grad_checkpoint", dest="gradient_checkpointing", action=options.OnOff, **hidden
    )
    parser.add_argument(
        "--enable_mixed_precision",
        dest="mixed_precision",
        action="store_const",
        const="auto",
        **hidden,
    )
    parser.add_argument(
        "--train_csv", dest="train_manifest", type=options.path, metavar="FILE", **hidden
    )
    parser.add_argument(
        "--eval_csv", dest="val_manifest", type=options.path, metavar="FILE", **hidden
    )
    parser.add_argument(
        "--output_path", dest="output_dir", type=options.path, metavar="DIR", **hidden
    )
    parser.add_argument(
        "--grad_acumm",
        dest="gradient_accumulation_steps",
        type=options.POSITIVE,
        metavar="N",
        **hidden,
    )


def resolve(args) -> Start:
    """Checks these flags and returns what they ask for. Raises `UsageError`."""
    language = OTHER_NAMES.get(args.language.lower(), args.language.lower())
    if not LANGUAGE.fullmatch(f"[{language}]"):
        raise UsageError(f"--language {args.language[:40]}: it must be a code such as am or en")
    if args.model_dir and not os.path.isdir(args.model_dir):
        hub = "hf download coqui/XTTS-v2 --local-dir XTTS-v2"
        raise UsageError(
            f"--model_dir {args.model_dir}: no such folder, and nothing is downloaded here; fetch"
            f" it with: {hub}"
        )
    if args.export:
        model_files.require_export(args.export)
    if options.plans(args):
        args.cache_audio = None  # nothing is written
    if missing := [path for path in args.speaker_wav or () if not os.path.isfile(path)]:
        raise UsageError(f"--speaker_wav {missing[0]}: no such file")
    if args.synthesize and (
        os.path.isdir(args.output) or not os.access(Path(args.output).parent, os.W_OK)
    ):
        raise UsageError(
            f"--output {args.output}: it must be a file in a folder that exists and can be written"
        )
    goals = args.resume or args.synthesize or args.evaluate or args.show_text or args.check_data
    if not (args.model_dir or args.from_scratch or goals):
        raise UsageError(
            "training needs a model to start from: add --model_dir DIR (Coqui's files) or"
            " --from_scratch"
        )
    if args.extend_vocab and recogniser.exports_only(
        args.export, args.resume, args.model_dir, args.given
    ):
        raise UsageError(
            "--extend_vocab is for training, and --export alone trains nothing: add"
            " --train_manifest"
        )
    text, is_synthetic = (
        texts.resolve(args, language),
        not (args.train_manifest or args.test_manifest),
    )
    if (
        args.model_dir
        and is_synthetic
        and not (args.synthesize or args.show_text or TEXT_FLAGS & args.given)
    ):
        text = replace(
            text, g2p=language == texts.AMHARIC
        )  # a released vocabulary lacks the letters of synthetic data
    return Start(
        given=args.given,
        model_dir=args.model_dir,
        custom_model=args.custom_model,
        from_scratch=args.from_scratch,
        size=args.model_size or "demo",
        language=language,
        version=args.version,
        resume=args.resume,
        checkpoints=(
            Path(args.resume).parent if args.resume not in (None, "auto") else args.checkpoint_dir
        ),
        export=args.export,
        condition=args.condition,
        text=text,
    )


def choose(
    start: Start, resumed: dict | None, train_dvae: Callable[[dict], Path] | None = None
) -> tuple[dict, dict | None, Frozen]:
    """The metadata of the model, the GPT's weights (None: random ones), and the frozen parts.
    `resumed` is the content of a checkpoint. `train_dvae(config)` returns the folder of a DVAE for
    a new model without a vocoder; without it the DVAE is random. Raises `UsageError`."""
    if resumed:
        metadata = dict(resumed["metadata"])
        metadata = {"condition": "same", "slice": SLICES["full"], **metadata}
        check_resumed(start, metadata, resumed["model"])
        model_dir = start.model_dir or metadata["model_dir"]
        if metadata["pretrained"]:
            groups = released(model_dir)[0]
        else:
            beside = (
                [] if start.model_dir else [start.checkpoints / DVAE_FOLDER]
            )  # the folder may have moved
            groups = own_parts(metadata["config"], [*beside, model_dir] if model_dir else [])
        tensors = resumed["model"]
    elif start.model_dir:
        groups, config, extras = released(start.model_dir)
        check_version(start, config)
        tensors = (
            formats.read_custom(start.custom_model, config) if start.custom_model else groups["gpt"]
        )
        metadata = {
            "config": config,
            "vocab": extras["vocab"],
            "language": start.language,
            "settings": extras["config"],
            "licence": extras["licence"],
            "pretrained": True,
            "dvae": digest(groups["dvae"]),
            "model_dir": os.path.abspath(start.model_dir),
            "carried": False,
            "condition": start.condition or "same",
            "slice": SLICES["full"],
        }
        add_language(metadata, tensors)
    elif start.from_scratch:
        config = formats.SIZES[start.size]
        require_vocoder(start, config["hifigan"])
        require_room(
            sum(
                math.prod(s)
                for part in formats.expected_shapes(config).values()
                for s in part.values()
            )
        )
        folder = (
            os.path.abspath(train_dvae(config)) if train_dvae and not config["hifigan"] else None
        )
        groups, tensors = own_parts(config, [folder] if folder else []), None
        vocab = new_vocabulary(texts.CHARACTERS, [CARRIER, start.language], config["text_tokens"])
        metadata = {
            "config": {**config, "start_text": Vocabulary(vocab).start},
            "vocab": vocab,
            "language": start.language,
            "settings": {},
            "licence": False,
            "pretrained": False,
            "dvae": digest(groups["dvae"]),
            "model_dir": folder,
            "carried": start.language != CARRIER,
            "condition": start.condition or "other",
            "reads_stop": True,
            "slice": SLICES[start.size],
        }
    else:
        raise UsageError(
            "there is no checkpoint to resume, and nothing says where the model starts: --model_dir"
            " DIR or --from_scratch"
        )
    if not resumed:
        metadata["text"] = start.text.metadata()
    if digest(groups["dvae"]) not in ("", metadata["dvae"]):
        raise UsageError(
            "the DVAE is not the one that this GPT learned the codes of: name the same --model_dir"
            " as before"
        )
    frozen = frozen_parts(metadata["config"], groups)
    require_vocoder(start, frozen.vocoder is not None)
    return metadata, tensors, frozen


def metadata_of(start: Start) -> dict:
    """What is known of the model that the flags name: its metadata, or only a configuration and how
    a new model would read. Raises `UsageError`."""
    if start.resume and start.resume != "auto":
        metadata = checkpoint.read_weights(start.resume, RECIPE, METADATA)[1]
        if conflicts := texts.conflicts(start.given, start.text, metadata):
            raise UsageError(f"{', '.join(conflicts)} conflicts with the checkpoint: leave it out")
        return metadata
    if start.model_dir:
        return choose(start, None)[0]
    return {
        "config": formats.SIZES["full"],
        "language": start.language,
        "text": start.text.metadata(),
    }


def check_initial(path: str | None, metadata: dict) -> None:
    """Raises `UsageError` if the model of --init_from has learned other codes or other tokens of
    the same numbers."""
    other = checkpoint.read_weights(path, RECIPE, METADATA, "--init_from")[1] if path else metadata
    if metadata["dvae"] not in ("", other["dvae"]):
        raise UsageError(
            f"--init_from {path}: its model has learned the codes of another DVAE; name the same"
            " --model_dir"
        )
    same_size = other["config"]["text_tokens"] == metadata["config"]["text_tokens"]
    if same_size and other["vocab"] != metadata["vocab"]:
        raise UsageError(
            f"--init_from {path}: its vocabulary has as many tokens, but others; continue it with"
            " --resume"
        )


def released(model_dir: str | None) -> tuple[dict, dict, dict]:
    if not model_dir or not os.path.isdir(model_dir):
        raise UsageError(
            f"the frozen parts come from {model_dir}, which is not there: name the folder with"
            " --model_dir"
        )
    return formats.read_model(model_dir)


def own_parts(config: dict, folders: list[str | Path]) -> dict:
    """The frozen parts of a model from scratch: the DVAE that was trained into the first of
    `folders` that has one; random ones without folders. Raises `UsageError`."""
    if not folders:
        return random_parts(config)
    path = next(
        filter(os.path.exists, (Path(folder) / "best.safetensors" for folder in folders)), None
    )
    if not path:
        raise UsageError(
            f"the DVAE of this model is not in {folders[-1]}: name its folder with --model_dir"
        )
    tensors, metadata = checkpoint.read_weights(path, RECIPE, DVAE_METADATA, "--model_dir")
    if metadata.get("updates", codec_training.STEPS["dvae"]) < codec_training.STEPS["dvae"]:
        updates = f"{metadata['updates']} of {codec_training.STEPS['dvae']} updates"
        print(
            f"warning: the DVAE of this model had {updates}, so speech is rough; a new --output_dir"
            " trains another"
        )
    tensors = {name: tensor.to(torch.get_default_device()) for name, tensor in tensors.items()}
    dvae = {
        name.removeprefix("dvae."): tensor
        for name, tensor in tensors.items()
        if name.startswith("dvae.")
    }
    stats = tensors.get("mel.mel_stats", torch.zeros(0))
    model_files.check_shapes(dvae, formats.expected_shapes(config)["dvae"], path, "XTTS")
    if stats.shape != (config["mel_channels"],):
        raise UsageError(f"{path}: it has not the deviations of {config['mel_channels']} bands")
    return {"dvae": dvae, "hifigan_decoder": {}, "mel_stats": stats}


def random_parts(config: dict) -> dict:
    """The frozen parts of a model from scratch: always the same random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEED)
        dvae, vocoder = DVAE(config), HifiDecoder(config["d_model"]) if config["hifigan"] else None
    return {
        "dvae": dvae.state_dict(),
        "hifigan_decoder": vocoder.state_dict() if vocoder else {},
        "mel_stats": torch.ones(config["mel_channels"]),
    }


def frozen_parts(config: dict, groups: dict) -> Frozen:
    dvae, vocoder = DVAE(config), None
    dvae.load_state_dict(groups["dvae"])
    if groups["hifigan_decoder"]:
        vocoder = HifiDecoder(config["d_model"])
        vocoder.load_state_dict(groups["hifigan_decoder"])
    stats = groups["mel_stats"]
    frozen = Frozen(Mel("dvae", stats), Mel("conditioning", stats), dvae, vocoder)
    return frozen.to(torch.get_default_device())


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """A hash of the values of tensors; empty for those of a planned run, which have none."""
    if any(tensor.is_meta for tensor in tensors.values()):
        return ""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].detach().cpu().contiguous().numpy().tobytes())
    return total.hexdigest()[:32]


def require_vocoder(start: Start, has_vocoder: bool) -> None:
    """Raises `UsageError` if --export is given for a model without a vocoder."""
    if start.export and not has_vocoder:
        raise UsageError(
            "--export: the model has no vocoder, which Coqui's XTTS needs; a released model has one"
        )


def check_version(start: Start, config: dict) -> None:
    if start.version and VERSIONS[start.version] != config["text_tokens"]:
        rows = (
            f"its vocabulary has {VERSIONS[start.version]} tokens, and these weights have"
            f" {config['text_tokens']}"
        )
        raise UsageError(f"--version {start.version}: {rows}")


def check_resumed(start: Start, metadata: dict, tensors: dict) -> None:
    """Raises `UsageError` for flags that contradict a checkpoint, and if its metadata and weights
    are not those of one model."""
    config = metadata["config"]
    formats.check_config(config, "the saved model")
    model_files.check_shapes(
        tensors, formats.expected_shapes(config)["gpt"], "the saved model", "XTTS"
    )
    if Vocabulary(metadata["vocab"]).size != config["text_tokens"]:
        raise UsageError(
            f"the saved model has {config['text_tokens']} text tokens, and its vocabulary"
            f" {Vocabulary(metadata['vocab']).size}"
        )
    conflicts = []
    if "language" in start.given and start.language != metadata["language"]:
        conflicts.append(f"--language {start.language} (the checkpoint has {metadata['language']})")
    if start.model_dir and not metadata["pretrained"] and not metadata["model_dir"]:
        conflicts.append(
            f"--model_dir {start.model_dir} (the checkpoint's model began from scratch)"
        )
    if start.condition not in (None, metadata["condition"]):
        conflicts.append(
            f"--condition {start.condition} (the checkpoint has {metadata['condition']})"
        )
    if start.from_scratch and metadata["pretrained"]:
        conflicts.append("--from_scratch (the checkpoint's model began from released weights)")
    if "model_size" in start.given and formats.SIZES[start.size]["d_model"] != config["d_model"]:
        conflicts.append(
            f"--model_size {start.size} (the checkpoint's model is {config['d_model']} wide)"
        )
    conflicts += texts.conflicts(start.given, start.text, metadata)
    if conflicts:
        raise UsageError(
            f"{', '.join(conflicts)} conflicts with the checkpoint: leave it out to continue, or"
            " choose another --output_dir"
        )


@torch.no_grad()
def fit_conditioning(model, frozen: Frozen, utterances) -> None:
    """Scales the first layer of a random conditioning encoder on the CPU, so that its outputs for
    slices of the first utterances have mean 0 and deviation 1. What all voices share would be much
    larger than their differences otherwise, and a short training learns to ignore the voice
    then."""
    slices = [utterances.item(i, 0)["slice"] for i in range(min(FITTED, len(utterances)))]
    first = model.conditioning_encoder.init
    deviation, mean = torch.std_mean(
        first(frozen.conditioning_mel(torch.stack(slices))), dim=(0, 2)
    )
    first.weight.div_(deviation[:, None, None])
    first.bias.sub_(mean).div_(deviation)


def learning_rate(metadata: dict) -> float:
    return FINE_TUNING_RATE if metadata["pretrained"] else SCRATCH_RATE


def numbered(output: str, number: int, count: int) -> Path:
    path = Path(output)
    return (
        path
        if count == 1
        else path.with_name(f"{path.stem}_{number + 1:03d}{path.suffix or '.wav'}")
    )


def speakers_of(corpus: Corpus) -> dict[str, tuple[np.ndarray, int]]:
    """A reference clip of each speaker, the one that is nearest to 10 s: int16 samples (T,) and
    Hz."""
    best: dict[str, int] = {}
    for index, speaker in enumerate(corpus.speakers):
        name, off = speaker or "speaker", abs(corpus.seconds[index] - REFERENCE_SECONDS)
        if name not in best or off < abs(corpus.seconds[best[name]] - REFERENCE_SECONDS):
            best[name] = index
    clips = {name: read_utterance(corpus, index, SAMPLE_RATE) for name, index in best.items()}
    return {name: (int16(clip), SAMPLE_RATE) for name, clip in clips.items()}


def export(folder: str, tensors: dict, frozen: Frozen, metadata: dict, speakers: dict) -> None:
    """Writes a trained model as a folder for Coqui."""
    groups = {
        "gpt": tensors,
        "dvae": frozen.dvae.state_dict(),
        "mel_stats": frozen.dvae_mel.mel_stats,
        "hifigan_decoder": frozen.vocoder.state_dict() if frozen.vocoder else {},
    }
    extras = {
        "config": metadata["settings"],
        "vocab": metadata["vocab"],
        "licence": metadata["licence"],
    }
    config = {**metadata["config"], "hifigan": bool(frozen.vocoder)}
    print(
        f"exported to {folder}:"
        f" {', '.join(formats.export(folder, groups, config, extras, speakers))}"
    )
