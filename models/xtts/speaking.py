"""Texts to speech with a trained GPT: sentences, the voice of reference clips, waveforms, and the
held-out sentences that a training ends with."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import memory, options
from common.device import Setup
from common.errors import UsageError
from common.options import ALONE, USUAL, flag
from models.xtts import decoding
from models.xtts.codec import SAMPLE_RATE, code_count
from models.xtts.decoding import Sampling, Speech
from models.xtts.formats import Conditioning, Voice
from models.xtts.frozen import Frozen
from models.xtts.texts import Texts
from models.xtts.vocoder import OUTPUT_RATE
from speech.data.columns import Corpus
from speech.decoding import judge
from speech.signal.audio import int16, read_audio, read_utterance
from speech.writing.sentences import split_sentences

TOGETHER = 2 * decoding.ROWS  # texts whose sentences are sorted by length
SHORTEST_SECONDS = 0.33  # of a chunk, as in Coqui's code

FRAME_SECONDS = 0.01
QUIET = 0.01  # level of a frame relative to the loudest one (-40 dB)
SILENT = 1e-4  # level of a frame that is quiet in any clip (-80 dB of full scale)
QUIET_SECONDS = 0.3  # kept at the end; a natural end has 0.12 to 0.18 s
FADE_SECONDS = 0.005

EXPORTED_SECONDS = 10.0  # the length that the clip of a speaker in an export should have
HELD_OUT = 2  # sentences that are spoken after training
SHORTEST_LIMIT = 40  # codes that a held-out sentence may have
LIMIT = 2  # times the codes of its recording, if that is more

# Rows for `Parser.refuse`: flags that need another one.
NEEDS = (
    ("synthesize", ("speaker_wav",), "a reference clip of the voice"),
    ("speaker_wav", ("synthesize", "export"), ""),
    ("output", ("synthesize",), ""),
    ("temperature", ("synthesize",), ""),
    ("top_k", ("synthesize",), ""),
    ("top_p", ("synthesize",), ""),
    ("repetition_penalty", ("synthesize",), ""),
)


@dataclass(frozen=True)
class Synthesiser:
    """A GPT with the frozen parts, and a `Texts` that reads texts and encodes them. Sentences of
    more than `longest` tokens are cut. `lengths`: how much of reference clips is heard."""

    model: torch.nn.Module
    frozen: Frozen
    texts: Texts
    longest: int
    lengths: Conditioning


# --- flags ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpeakingFlags:
    """Flags of speaking."""

    # fmt: off
    synthesize: list[str] | None = flag(
        None, None, "TEXT",
        "speak texts, or a file with a text in each line, with the weights of --resume"
        " (OUTPUT_DIR/checkpoints/best.safetensors)", USUAL, ALONE, nargs="+")
    speaker_wav: list[str] | None = flag(
        options.path, None, "FILE",
        "reference clips of the voice; with --export, clips of one voice each, which get the names"
        " of the files", USUAL, nargs="+")
    output: str = flag(
        options.file, "speech.wav", "FILE",
        "the wav; several texts get numbers (speech.wav)", USUAL)
    temperature: float = flag(options.number(float, 0.0, 10.0, open_low=True), 0.75, "X",
        "how freely codes are drawn: lower is more alike each time (0.75)")
    top_k: int = flag(options.COUNT, 50, "N", "draw among the N likeliest codes; 0 = all (50)")
    top_p: float = flag(
        options.number(float, 0.0, 1.0, open_low=True), 0.85, "P",
        "draw among the likeliest codes with this probability in all (0.85)")
    repetition_penalty: float = flag(
        options.number(float, 1.0, 100.0), 5.0, "X",
        "divides the scores of codes that have been spoken (5)")


def add_arguments(parser) -> None:
    options.add_record(parser, "speaking", SpeakingFlags)
    parser.refuse((), NEEDS)


def resolve(args, count: int) -> tuple[Sampling, list[Path]]:
    """Checks the flags of --synthesize for `count` texts. Returns how codes are drawn, and the file
    for each text. Raises `UsageError`."""
    outputs = judge.outputs_of(args.output, count, options.paths_in(args, "output"))
    sampling = Sampling(
        args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed
    )
    return sampling, outputs


# --- voices and texts -----------------------------------------------------------------------------


def read_references(paths: list[str], device: torch.device) -> list[Tensor]:
    """The clips (T,) of --speaker_wav at 22.05 kHz. Raises `UsageError` and `DataError`."""
    for path in paths:
        if not os.path.isfile(path):
            raise UsageError(f"--speaker_wav {path}: no such file")
    clips = [read_audio(path, SAMPLE_RATE).to(device) for path in paths]
    for path, clip in zip(paths, clips, strict=True):
        if len(clip) < SHORTEST_SECONDS * SAMPLE_RATE:
            raise UsageError(f"--speaker_wav {path}: it is shorter than {SHORTEST_SECONDS} s")
    return clips


def speakers_of(corpus: Corpus) -> dict[str, np.ndarray]:
    """A reference clip of each speaker, the one that is nearest to 10 s: int16 samples (T,) at
    22.05 kHz. Who speaks most is the first. Prints who has no clip that is long enough."""
    off = np.abs(corpus.seconds - EXPORTED_SECONDS)
    best: dict[str, int] = {}
    spoken: Counter[str] = Counter()
    for index, speaker in enumerate(corpus.speakers):
        name = speaker or "speaker"
        spoken[name] += corpus.seconds[index]
        if name not in best or off[index] < off[best[name]]:
            best[name] = index
    clips = {}
    for name, _ in spoken.most_common():
        clip = read_utterance(corpus, best[name], SAMPLE_RATE)
        if len(clip) >= SHORTEST_SECONDS * SAMPLE_RATE:
            clips[name] = int16(clip)
    if short := ", ".join(name for name in best if name not in clips):
        print(f"no voice for {short}: no clip of {SHORTEST_SECONDS} s")
    return clips


def named_clips(paths: list[str]) -> dict[str, np.ndarray]:
    """The clips of --speaker_wav as `speakers_of` returns them, by the names of the files. Raises
    `UsageError` and `DataError`."""
    files_of: dict[str, str] = {}
    for path in paths:
        name = Path(path).stem
        if other := files_of.get(name):
            raise UsageError(
                f"--speaker_wav {other} and {path}: both would be the voice {name}; rename one"
            )
        files_of[name] = path
    clips = read_references(paths, torch.device("cpu"))
    return dict(zip(files_of, map(int16, clips), strict=True))


def voice_of(synthesiser: Synthesiser, waveforms: Sequence[Tensor]) -> Voice:
    """The voice of reference clips (T,) at 22.05 kHz, none shorter than 0.33 s."""
    frozen = synthesiser.frozen
    lengths = synthesiser.lengths
    clips = [waveform[: lengths.max_ref_len * SAMPLE_RATE] for waveform in waveforms]
    latents = latents_of(synthesiser.model, frozen.conditioning_mel, torch.cat(clips), lengths)
    return Voice(latents, frozen.speaker(clips))


def voice_of_clip(synthesiser: Synthesiser, samples: np.ndarray) -> Voice:
    """The voice of a clip of `speakers_of` or `named_clips`."""
    device = next(synthesiser.model.parameters()).device
    return voice_of(synthesiser, [torch.from_numpy(samples).to(device) / 2**15])


@torch.no_grad()
def latents_of(
    model, mel: Callable[[Tensor], Tensor], waveform: Tensor, lengths: Conditioning
) -> Tensor:
    """Conditioning latents (1, L, d) of a voice from reference clips in a row (T,) at 22.05 kHz:
    the mean over chunks of the first seconds, as in Coqui's code. `mel` maps (1, T) to
    "conditioning" features (1, M, F). A remainder of at least 0.33 s is a chunk without padding; a
    shorter one is ignored."""
    heard = waveform[: lengths.gpt_cond_len * SAMPLE_RATE]
    chunks = [
        chunk
        for chunk in heard.split(lengths.gpt_cond_chunk_len * SAMPLE_RATE)
        if len(chunk) >= SHORTEST_SECONDS * SAMPLE_RATE
    ]
    return torch.stack([model.condition(mel(chunk[None])) for chunk in chunks]).mean(0)


@torch.no_grad()
def speak(
    synthesiser: Synthesiser,
    lines: Sequence[str],
    voice: Voice,
    settings: Sampling,
    language: str | None = None,
) -> Iterator[Tensor]:
    """Texts as samples (T,) at OUTPUT_RATE, in order. Sentences of several texts are sampled
    together, which changes none of them."""
    model = synthesiser.model
    frozen = synthesiser.frozen
    for first in range(0, len(lines), TOGETHER):
        some = lines[first : first + TOGETHER]
        part = [_sentences(synthesiser, line, language) for line in some]
        texts, tokens = zip(
            *(sentence for sentences in part for sentence in sentences), strict=True
        )
        spoken = decoding.sample(model, model.config, voice.latents, tokens, settings, texts)
        spoken = iter(spoken)
        for sentences in part:
            waveforms = [_waveform(frozen, next(spoken), voice) for _ in sentences]
            yield torch.cat([finish(waveform) for waveform in waveforms])


def _sentences(
    synthesiser: Synthesiser, text: str, language: str | None
) -> list[tuple[str, list[int]]]:
    """The sentences of a text, as they are read, with their tokens."""

    def encode(sentence: str) -> list[int]:
        return synthesiser.texts.encode_read(sentence, language)

    read = synthesiser.texts.read(text, language)
    sentences = split_sentences(read, synthesiser.longest, lambda piece: len(encode(piece)))
    return [(sentence, encode(sentence)) for sentence in sentences]


def _waveform(frozen: Frozen, speech: Speech, voice: Voice) -> Tensor:
    if not len(speech.codes):
        return voice.latents.new_zeros(0)
    return frozen.vocoder(speech.latents[None], voice.speaker)[0]


# --- waveforms ------------------------------------------------------------------------------------


def finish(waveform: Tensor) -> Tensor:
    """A waveform (T,) that is cut 0.3 s after it becomes quiet, and faded out in 5 ms."""
    size = round(FRAME_SECONDS * OUTPUT_RATE)
    frames = F.pad(waveform, (0, -len(waveform) % size)).view(-1, size)
    levels = frames.square().mean(1).sqrt()
    end = 0
    if len(levels):
        loud = (levels > max(SILENT, QUIET * float(levels.max()))).nonzero()
        end = (int(loud[-1]) + 1) * size if len(loud) else 0
    waveform = waveform[: end + round(QUIET_SECONDS * OUTPUT_RATE)].clone()
    fade = min(len(waveform), round(FADE_SECONDS * OUTPUT_RATE))
    factors = torch.linspace(1, 0, fade + 1, dtype=waveform.dtype, device=waveform.device)
    waveform[len(waveform) - fade :] *= factors[1:]
    return waveform


# --- held-out sentences ---------------------------------------------------------------------------


@torch.no_grad()
def speak_corpus(
    folder: Path,
    synthesiser: Synthesiser,
    corpus: Corpus,
    references: dict[str, np.ndarray],
    settings: Sampling,
) -> str:
    """Speaks the sentences of a corpus with the voices of `references`, of `speakers_of`, and makes
    their recordings anew from their codes. Writes wav files into `folder`, and the manifests
    reference.csv, resynthesis.csv and synthesis.csv. Returns a message, with the similarity of the
    voices. Raises `RunError` if the files cannot be written."""
    frozen = synthesiser.frozen
    device = next(synthesiser.model.parameters()).device
    voices: dict[str, Voice] = {}
    made = []
    similarities = []
    for index, text in enumerate(corpus.texts):
        name = corpus.speakers[index] or "speaker"
        if name not in voices:
            first = next(iter(references.values()))
            voices[name] = voice_of_clip(synthesiser, references.get(name, first))
        recording = read_utterance(corpus, index, SAMPLE_RATE).to(device)
        codes = frozen.codes(recording[None])[0, : code_count(len(recording))]
        most = max(SHORTEST_LIMIT, LIMIT * len(codes))
        limited = replace(settings, max_codes=min(most, settings.max_codes))
        language = corpus.languages[index]
        [spoken] = speak(synthesiser, [text], voices[name], limited, language)
        if len(spoken) > OUTPUT_RATE // 2:
            heard = frozen.speaker([spoken], OUTPUT_RATE)
            similarities.append(float(F.cosine_similarity(heard, voices[name].speaker)[0]))
        made.append(
            {
                "reference": (int16(recording), SAMPLE_RATE),
                "resynthesis": (int16(frozen.resynthesise(codes)), SAMPLE_RATE),
                "synthesis": (int16(spoken), OUTPUT_RATE),
            }
        )
    judge.write_corpus(folder, corpus, made)
    message = (
        f"{len(corpus)} held-out sentences spoken: {folder}/*_synthesis.wav; manifests beside them"
    )
    if similarities:
        mean = sum(similarities) / len(similarities)
        message += (
            f"\nspeaker similarity: {mean:.2f} (cosine between vectors of the speaker encoder)"
        )
    return message


def speak_held_out(
    asked: judge.HeldOut,
    setup: Setup,
    synthesiser: Synthesiser,
    corpus: Corpus,
    clips: dict[str, np.ndarray],
) -> None:
    """Speaks the first sentences of `corpus`, each in the voice of its speaker's clip in `clips`,
    of `speakers_of`, and prints how well the judge understands them."""
    count = HELD_OUT if asked.speak_held_out is None else asked.speak_held_out
    if not (count and clips):
        return
    corpus = corpus.select(np.arange(min(count, len(corpus))))
    folder = judge.folder_of(asked.output_dir)
    synthesiser.frozen.to(setup.device)
    with setup.autocast():
        print(speak_corpus(folder, synthesiser, corpus, clips, Sampling(seed=asked.seed)))
    if asked.judge:
        synthesiser.model.cpu()
        synthesiser.frozen.to(torch.device("cpu"))
        memory.free_memory(setup.device)  # the judge is another process
        print(judge.judged(asked.judge, judge.RECIPES, folder, list(corpus.texts), asked.device))
