"""Do the stock programs read the recipes' exports, and write the same texts? A table of recipes,
forms of their exports and programs.

    python benchmarks/handover.py                                     # trains all of UPDATES
    python benchmarks/handover.py parakeet_tdt --updates 600          # one of them, longer
    python benchmarks/handover.py --run parakeet_tdt=runs/parakeet_tdt    # a run that is there
    python benchmarks/handover.py --python nemo-toolkit=nemo/bin/python   # a program elsewhere

A recogniser is trained on its demo's corpus and exported, then held-out clips of the demo go
through ours and through each program, as the files are. XTTS, which begins with random weights,
speaks sentences by --synthesize and by each program, and the waveforms are compared; both take the
likeliest code. A program that is not installed has a row that says so. Each reads in a process of
its own, because some end the process if a file displeases them.

A new row is a line of `ROWS`: its function takes an export and files and returns texts."""

import json
import os
import subprocess
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ["HF_HUB_OFFLINE"] = "1"

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import soundfile
import torch

from common import checkpoint
from common.errors import RunError, UsageError, exit_with_one_line, first_line
from speech.data.demo import AMHARIC_WORDS
from speech.signal.audio import SAMPLE_RATE, read_audio

ANSWER = "texts: "  # begins the line that a reading process prints
SECONDS = 1800  # of a process
UPDATES = {  # of a recipe's demo
    "parakeet_tdt": 500,
    "wav2vec2_ctc": 800,
    "konkani_conformer": 1200,
    "whisper_vietnamese": 900,  # the end of it is in windows of 30 s, as others read
}
# What our --transcribe gets, so that it decodes as the programs do.
DECODING = {"konkani_conformer": "--decoding greedy"}
GREEDY = "--top_k 1 --top_p 1 --repetition_penalty 1"  # of XTTS
SAME_SPEECH = 0.01  # of the loudest sample, that two waveforms may differ by
QUIET = 0.05  # of the loudest sample, after the end of speech


def samples_of(path: Path) -> np.ndarray:
    return np.asarray(read_audio(str(path), SAMPLE_RATE), dtype=np.float32)


# --- the programs ---------------------------------------------------------------------------------


def pipeline(folder: Path, files: list[Path], **generating) -> list[str]:
    from transformers import pipeline

    recogniser = pipeline("automatic-speech-recognition", str(folder), device="cpu")
    return [
        recogniser({"raw": samples_of(path), "sampling_rate": SAMPLE_RATE}, **generating)["text"]
        for path in files
    ]


def nemo(folder: Path, files: list[Path]) -> list[str]:
    from nemo.collections.asr.models import ASRModel

    model = ASRModel.restore_from(str(folder / "model.nemo"), map_location="cpu")
    return [result.text for result in model.transcribe([str(path) for path in files])]


def sherpa(folder: Path, files: list[Path], kind: str, bits: str = "") -> list[str]:
    """`kind`: of model, in sherpa-onnx's words."""
    import sherpa_onnx

    make = getattr(sherpa_onnx.OfflineRecognizer, f"from_{kind}")
    if kind == "transducer":
        parts = ("encoder", "decoder", "joiner")
        model = {part: str(folder / f"{part}{bits}.onnx") for part in parts}
        model["model_type"] = "nemo_transducer"
    else:
        model = {"model": str(folder / f"model{bits}.onnx")}
    recognizer = make(**model, tokens=str(folder / "tokens.txt"))
    texts = []
    for path in files:
        stream = recognizer.create_stream()
        stream.accept_waveform(SAMPLE_RATE, samples_of(path))
        recognizer.decode_stream(stream)
        texts.append(stream.result.text)
    return texts


def onnx_asr(folder: Path, files: list[Path], bits: str | None = None) -> list[str]:
    import onnx_asr

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = onnx_asr.load_model(kind, folder, quantization=bits)
    return [model.recognize(samples_of(path), sample_rate=SAMPLE_RATE) for path in files]


def faster_whisper(folder: Path, files: list[Path]) -> list[str]:
    from faster_whisper import WhisperModel

    converted = folder.parent / "ct2"
    words = f"--model {folder} --output_dir {converted} --force --copy_files".split()
    words += ["tokenizer.json", "preprocessor_config.json"]
    call([sys.executable, "-m", "ctranslate2.converters.transformers", *words])
    model = WhisperModel(str(converted), device="cpu", compute_type="float32")
    texts = []
    for path in files:
        segments, _ = model.transcribe(
            samples_of(path),
            language=language_of(folder),
            # By default it suppresses the first token of " ♪", among others, which in this
            # vocabulary is the space.
            suppress_tokens=[],
            without_timestamps=True,  # which a model from scratch does not have
            beam_size=1,
            temperature=0,
        )
        texts.append("".join(segment.text for segment in segments))
    return texts


def language_of(folder: Path) -> str:
    """The language of an exported Whisper, without the marks around it."""
    return json.loads((folder / "generation_config.json").read_text())["language"].strip("<|>")


def coqui(folder: Path, files: list[Path], from_clip: bool = False) -> list[str]:
    """Speaks the texts in `files` and returns wav files. The voice is the first of
    speakers_xtts.pth, or that of reference.wav."""
    from TTS.tts.configs.xtts_config import XttsConfig
    from TTS.tts.models.xtts import Xtts

    config = XttsConfig()
    config.load_json(str(folder / "config.json"))
    model = Xtts(config)
    model.load_checkpoint(config, checkpoint_dir=str(folder))
    voice = next(iter(model.speaker_manager.speakers.values())).values()
    if from_clip:
        voice = model.get_conditioning_latents(
            audio_path=[str(folder / "reference.wav")],
            max_ref_length=config.max_ref_len,
            gpt_cond_len=config.gpt_cond_len,
            gpt_cond_chunk_len=config.gpt_cond_chunk_len,
        )
    greedy = {"top_k": 1, "top_p": 1.0, "repetition_penalty": 1.0}
    spoken = []
    for path in files:
        text = path.read_text(encoding="utf-8")
        waveform = model.inference(text, "en", *voice, **greedy)["wav"]
        spoken.append(str(path.with_suffix(".wav")))
        soundfile.write(spoken[-1], np.asarray(waveform), 24_000, subtype="FLOAT")
    return spoken


# --- ours -----------------------------------------------------------------------------------------


@torch.no_grad()
def windows(folder: Path, files: list[Path], zeros: bool = False) -> list[str]:
    """The texts that our code writes of clips in windows of 30 s with an exported Whisper: with
    silence after a clip, or with `zeros` for features, as faster-whisper fills them."""
    from models.whisper import decoding, formats
    from models.whisper.model import HOP, Whisper
    from models.whisper.tokenizer import read_tokenizer

    weights, config, extras = formats.read_model(folder)
    tokenizer = read_tokenizer(extras["tokenizer"], language_of(folder), config["vocab_size"])
    model = Whisper(config).eval()
    checkpoint.load_weights(model, weights)
    model.pad_to_longest = True
    search = decoding.make_search(tokenizer, extras["generation"], config["vocab_size"], "greedy")
    texts = []
    for path in files:
        samples = torch.from_numpy(samples_of(path))[None]
        lengths = torch.tensor([samples.shape[1]])
        batch = {"audio": samples, "audio_lengths": lengths, "audio_lengths_host": lengths}
        if zeros:
            batch["fill_from"] = lengths // HOP
        texts += decoding.greedy_texts(model, tokenizer, *model.encode(batch), search)
    return texts


@dataclass(frozen=True)
class Row:
    """`form` are the flags of the export, `package` is the program's distribution, and `read` takes
    the exported folder and files. `ours`: what reads the same beside it, in place of
    --transcribe."""

    recipe: str
    form: str
    program: str
    package: str
    read: Callable[[Path, list[Path]], list[str]]
    ours: Callable[[Path, list[Path]], list[str]] | None = None


GREEDILY = partial(pipeline, generate_kwargs={"num_beams": 1})  # its own way is a beam of five
OMNILINGUAL = partial(sherpa, kind="omnilingual_asr_ctc")
TRANSDUCER = partial(sherpa, kind="transducer")
WITH_ZEROS = partial(windows, zeros=True)
PARAKEET, WAV2VEC2, KONKANI = "parakeet_tdt", "wav2vec2_ctc", "konkani_conformer"
WHISPER, XTTS = "whisper_vietnamese", "xtts_amharic"
HF, NEMO, ONNX = (f"--export_format {name}" for name in ("hf", "nemo", "onnx"))
ROWS = (
    Row(PARAKEET, HF, "transformers", "transformers", pipeline),
    Row(PARAKEET, NEMO, "NeMo", "nemo-toolkit", nemo),
    Row(PARAKEET, ONNX, "sherpa-onnx", "sherpa-onnx", TRANSDUCER),
    Row(PARAKEET, ONNX, "sherpa-onnx, int8", "sherpa-onnx", partial(TRANSDUCER, bits=".int8")),
    Row(PARAKEET, ONNX, "onnx-asr", "onnx-asr", onnx_asr),
    Row(PARAKEET, ONNX, "onnx-asr, int8", "onnx-asr", partial(onnx_asr, bits="int8")),
    Row(WAV2VEC2, HF, "transformers", "transformers", pipeline),
    Row(WAV2VEC2, ONNX, "sherpa-onnx", "sherpa-onnx", OMNILINGUAL),
    Row(WAV2VEC2, ONNX, "sherpa-onnx, int8", "sherpa-onnx", partial(OMNILINGUAL, bits=".int8")),
    Row(KONKANI, "", "sherpa-onnx", "sherpa-onnx", partial(sherpa, kind="nemo_ctc")),
    Row(KONKANI, "", "onnx-asr", "onnx-asr", onnx_asr),
    Row(WHISPER, "", "transformers", "transformers", GREEDILY, windows),
    Row(WHISPER, "", "faster-whisper", "faster-whisper", faster_whisper, WITH_ZEROS),
    Row(XTTS, "", "Coqui, speakers_xtts.pth", "coqui-tts", coqui),
    Row(XTTS, "", "Coqui, reference.wav", "coqui-tts", partial(coqui, from_clip=True)),
)  # fmt: skip


# --- the recipes' commands ------------------------------------------------------------------------


def call(command: list[str]) -> str:
    """The stdout of a process. Raises `RunError` with the last line of its stderr."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if result.returncode:
        lines = [f"it ended with status {result.returncode}"]
        lines += [line for line in result.stderr.splitlines() if line.strip()]
        raise RunError(lines[-1].removeprefix("error: ")[:200])
    return result.stdout


def recipe_of(name: str, *flags: object) -> str:
    file = ROOT / "recipes" / f"{name}.py"
    return call([sys.executable, str(file), "--device", "cpu", *map(str, flags)])


def random_xtts(folder: Path) -> None:
    """Writes a small folder in Coqui's form, with random weights and a vocoder."""
    from models.xtts import formats, frozen, texts
    from models.xtts.model import GPT
    from models.xtts.tokenizer import new_vocabulary

    torch.manual_seed(0)
    parts = {"code_dim": 64, "dvae_hidden": 128}
    config = formats.make_config(128, 4, 2, text_tokens=512, codes=512, **parts)
    groups = {"gpt": GPT(config).state_dict(), **frozen.make_frozen(config).groups()}
    vocab = new_vocabulary(texts.CHARACTERS, [texts.CARRIER, "am"], config["text_tokens"])
    formats.export(folder, groups, config, {"config": {}, "vocab": vocab, "licence": False}, {})


def held_out(run: Path, name: str, count: int) -> list[dict]:
    """Rows of a set of the demo that a run made; the paths are whole."""
    manifests = sorted(run.glob(f"data/*/{name}.json"))
    if not manifests:
        raise UsageError(f"{run}: there is no demo corpus in it")
    rows = map(json.loads, manifests[0].read_text(encoding="utf-8").splitlines()[:count])
    return [{**row, "audio_filepath": manifests[0].parent / row["audio_filepath"]} for row in rows]


def transcribed(recipe: str, weights: list, files: list[Path], folder: Path) -> list[str]:
    """The texts that our --transcribe writes."""
    output = folder / "ours.jsonl"
    flags = [*weights, "--output", output, *DECODING.get(recipe, "").split()]
    recipe_of(recipe, "--transcribe", *files, *flags)
    rows = [json.loads(line) for line in output.read_text(encoding="utf-8").splitlines()]
    found = {Path(row["file"]).name: row["text"] for row in rows}
    return [found[path.name] for path in files]


def sentences_of(weights: list, texts: list[str], folder: Path) -> list[Path]:
    """Files with a sentence each as Coqui's code takes it: --show_text's, behind the language."""
    shown = recipe_of(XTTS, "--show_text", *texts, *weights)
    files = [folder / f"{number:03d}.txt" for number in range(1, len(texts) + 1)]
    for path, line in zip(files, shown.splitlines()[-len(texts) :], strict=True):
        path.write_text(f"[am]{line}", encoding="utf-8")
    return files


def spoken(weights: list, texts: list[str], voice: Path, folder: Path) -> list[str]:
    """The wav files that our --synthesize writes."""
    flags = ["--speaker_wav", voice, "--output", folder / "ours.wav", *GREEDY.split()]
    recipe_of(XTTS, "--synthesize", *texts, *weights, *flags)
    return [str(path) for path in sorted(folder.glob("ours*.wav"))]


# --- the table ------------------------------------------------------------------------------------


def version_of(package: str, python: str) -> str | None:
    code = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    try:
        return call([python, "-c", code]).strip()
    except RunError:
        return None


def read(row: Row, python: str, folder: Path, files: list[Path]) -> list[str]:
    """The texts of a row, read in a separate process."""
    out = call([python, __file__, "--read", str(ROWS.index(row)), str(folder), *map(str, files)])
    (line,) = [line for line in out.splitlines() if line.startswith(ANSWER)]
    return json.loads(line.removeprefix(ANSWER))


def compared(texts: list[str], ours: list[str]) -> str:
    """The table's cell for a program's texts."""
    pairs = [(each.split(), our.split()) for each, our in zip(texts, ours, strict=True)]
    differing = [(" ".join(each), " ".join(our)) for each, our in pairs if each != our]
    if not any(ours):
        return "our own texts are empty: train longer (--updates)"
    if not differing:
        return f"the same texts, {len(ours)} of {len(ours)}"
    each, our = differing[0]
    same = len(ours) - len(differing)
    return f"{same} of {len(ours)} the same; {each[:60]!r} for {our[:60]!r}"


def compared_speech(spoken: list[str], ours: list[str]) -> str:
    """The table's cell for a program's waveforms. Ours end with a short fade where they have become
    quiet, so only what is before it is compared, and theirs must be quiet after it."""
    shares = []
    seconds = 0.0
    for each, our in zip(spoken, ours, strict=True):
        (theirs, rate), (made, our_rate) = (soundfile.read(path) for path in (each, our))
        kept = len(made) - rate // 100
        loudest = abs(made).max()
        rest = abs(theirs[len(made) :]).max(initial=0)
        if rate != our_rate or len(theirs) < len(made) or rest > QUIET * loudest:
            lengths = f"{len(theirs) / rate:.2f} s for {len(made) / our_rate:.2f} s"
            return f"{Path(our).name}: another length, {lengths}"
        shares.append(float(abs(theirs[:kept] - made[:kept]).max() / loudest))
        seconds += kept / rate
    same = sum(share < SAME_SPEECH for share in shares)
    return (
        f"the same waveform, {same} of {len(ours)} ({seconds:.1f} s): samples differ by at most"
        f" {100 * max(shares):.2g} % of the loudest"
    )


def recogniser(args, recipe: str, folder: Path) -> tuple[list, list[Path], list[str]]:
    """The flags that name a recogniser, which is trained unless there is a run; held-out clips; and
    the texts that ours writes of them."""
    run = args.run.get(recipe)
    if run is None:
        run = folder / "run"
        recipe_of(recipe, "--output_dir", run, "--max_steps", args.updates or UPDATES[recipe])
    weights = ["--resume", run / "checkpoints/best.safetensors"]
    files = [row["audio_filepath"] for row in held_out(run, "test", args.clips)]
    return weights, files, transcribed(recipe, weights, files, folder)


def voice(args, folder: Path) -> tuple[list, list[Path], list[str]]:
    """The flags that name a voice, sentences, and the waveforms that ours speaks."""
    random_xtts(folder / "start")
    random = np.random.default_rng(0)
    clip = folder / "voice.wav"
    soundfile.write(clip, random.normal(0, 0.1, 4 * 24_000), 24_000)
    weights = ["--model_dir", folder / "start", "--language", "am"]
    texts = [" ".join(random.choice(AMHARIC_WORDS, 4)) for _ in range(args.clips)]
    files = sentences_of(weights, texts, folder)
    return [*weights, "--speaker_wav", clip], files, spoken(weights, texts, clip, folder)


def results(args, recipe: str, folder: Path) -> None:
    """Prints the rows of a recipe."""
    folder = folder / recipe
    folder.mkdir()
    if recipe == XTTS:
        (weights, files, ours), judge = voice(args, folder), compared_speech
    else:
        (weights, files, ours), judge = recogniser(args, recipe, folder), compared
    for row in (row for row in ROWS if row.recipe == recipe):
        python = args.python.get(row.package, sys.executable)
        version = version_of(row.package, python)
        exported = folder / f"form{row.form.replace(' ', '_')}" / "export"
        try:
            if not exported.exists():
                recipe_of(recipe, "--export", exported, *row.form.split(), *weights)
            beside = row.ours(exported, files) if row.ours else ours
            outcome = "not installed"
            if version:
                outcome = judge(read(row, python, exported, files), beside)
        except (RunError, subprocess.TimeoutExpired) as error:
            outcome = f"failed: {first_line(error)}"
        form = f"`{row.form or '--export'}`"
        print(f"| {recipe} | {form} | {row.program} | {version or '-'} | {outcome} |", flush=True)


def main(args) -> None:
    if args.read:
        number, folder, *files = args.read
        texts = ROWS[int(number)].read(Path(folder), [Path(file) for file in files])
        print(ANSWER + json.dumps(texts), flush=True)
        return
    print("| recipe | form | program | version | result |\n| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for recipe in args.recipes or [*UPDATES, XTTS]:
            results(args, recipe, Path(folder))


def pair_of(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


if __name__ == "__main__":
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    names = ", ".join([*UPDATES, XTTS])
    parser.add_argument("recipes", nargs="*", metavar="RECIPE", help=f"{names} (all)")
    parser.add_argument("--updates", type=int, help="of the training, instead of the usual ones")
    parser.add_argument("--clips", type=int, default=10)
    parser.add_argument(
        "--run", type=pair_of, action="append", default=[], metavar="RECIPE=DIR",
        help="the --output_dir of a trained demo, instead of a training",
    )  # fmt: skip
    parser.add_argument(
        "--python", type=pair_of, action="append", default=[], metavar="PACKAGE=FILE",
        help="the Python in which a program is installed, such as nemo-toolkit or coqui-tts",
    )  # fmt: skip
    parser.add_argument("--read", nargs="+", help=SUPPRESS)
    given = parser.parse_args()
    given.run = {name: Path(folder).absolute() for name, folder in given.run}
    given.python = dict(given.python)
    exit_with_one_line(main, given)
