"""Texts to speech with a trained GPT: a voice from reference clips, whole texts, and the held-out
sentences after training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from common import files
from common.errors import cannot_write
from speech.audio import int16, read_utterance, write_wav
from speech.columns import Corpus
from speech.xtts import codec, inference
from speech.xtts.codec import SAMPLE_RATE, code_count
from speech.xtts.start import Frozen

HEADER = ("audio_file", "text", "speaker_name")  # of the manifests that are written
SHORTEST_LIMIT, LIMIT = (
    40,
    2,
)  # a held-out sentence may have so many codes, or twice those of its recording


@dataclass(frozen=True)
class Voice:
    """A voice as the model hears it: latents (1, L, d) for the GPT and, if there is a vocoder, a
    speaker vector (1, 512)."""

    latents: torch.Tensor
    speaker: torch.Tensor | None


def voice_of(model, frozen: Frozen, waveforms: Sequence[torch.Tensor]) -> Voice:
    """The voice of reference clips (T,) at 22.05 kHz on the model's device. Raises `UsageError` if
    they are too short."""
    latents = inference.latents(model, frozen.conditioning_mel, waveforms)
    return Voice(latents, frozen.speaker(list(waveforms)) if frozen.vocoder else None)


@torch.no_grad()
def speak(
    model,
    frozen: Frozen,
    encode: Callable[[str], list[int]],
    text: str,
    voice: Voice,
    settings: inference.Sampling,
    longest: int,
) -> torch.Tensor:
    """A text as samples (T,) at `frozen.rate`. Sentences of more than `longest` tokens are cut."""
    sentences = inference.split_sentences(text, longest, lambda piece: len(encode(piece)))
    spoken = inference.sample(
        model, model.config, voice.latents, [encode(each) for each in sentences], settings
    )
    return inference.join([_waveform(frozen, speech, voice) for speech in spoken], frozen.rate)


def _waveform(frozen: Frozen, speech: inference.Speech, voice: Voice) -> torch.Tensor:
    if not len(speech.codes):
        return voice.latents.new_zeros(0)
    if frozen.vocoder:
        return frozen.vocoder(speech.latents[None], voice.speaker)[0]
    return codec.griffin_lim(frozen.dvae.decode(speech.codes[None])[0], frozen.dvae_mel.mel_stats)


@torch.no_grad()
def speak_corpus(
    folder: Path,
    model,
    frozen: Frozen,
    texts,
    corpus: Corpus,
    references: dict[str, tuple[np.ndarray, int]],
    settings: inference.Sampling,
    longest: int,
) -> str:
    """Speaks the sentences of a corpus with the voices of `references` {speaker: (int16 samples,
    rate)}, and makes their recordings anew from their codes, into wav files in `folder` and the
    manifests reference.csv, resynthesis.csv and synthesis.csv. `texts` is a `Texts`. Returns a line
    that says so, with the similarity of the voices if there is a speaker encoder. Raises `RunError`
    if they cannot be written."""
    device = next(model.parameters()).device
    voices: dict[str, Voice] = {}
    rows: dict[str, list[tuple[str, str, str]]] = {
        "reference": [],
        "resynthesis": [],
        "synthesis": [],
    }
    waves: dict[str, tuple[np.ndarray, int]] = {}
    likeness = []
    for index in range(len(corpus)):
        text, name = corpus.texts[index], corpus.speakers[index] or "speaker"
        if name not in voices:
            clip, _ = references.get(name) or next(iter(references.values()))
            voices[name] = voice_of(model, frozen, [torch.from_numpy(clip).to(device) / 32768])
        voice = voices[name]
        recording = read_utterance(corpus, index, SAMPLE_RATE).to(device)
        most = max(SHORTEST_LIMIT, LIMIT * code_count(len(recording)))
        language = corpus.languages[index]
        spoken = speak(
            model,
            frozen,
            lambda t, language=language: texts.encode(t, language),
            texts.read(text, language),
            voice,
            replace(settings, max_codes=min(most, settings.max_codes)),
            longest,
        )
        if frozen.vocoder and len(spoken) > frozen.rate // 2:
            likeness.append(
                float(F.cosine_similarity(frozen.speaker([spoken], frozen.rate), voice.speaker)[0])
            )
        codes = frozen.codes(recording[None])[:, : code_count(len(recording))]
        copy = codec.griffin_lim(frozen.dvae.decode(codes)[0], frozen.dvae_mel.mel_stats)
        outputs = {
            "reference": (recording, SAMPLE_RATE),
            "resynthesis": (copy, SAMPLE_RATE),
            "synthesis": (spoken, frozen.rate),
        }
        for kind, (waveform, rate) in outputs.items():
            rows[kind].append((f"{index + 1:03d}_{kind}.wav", text, name))
            waves[rows[kind][-1][0]] = int16(waveform), rate
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, (samples, rate) in waves.items():
            write_wav(folder / file, samples, rate)
        for kind, lines in rows.items():
            table = ["|".join(cell.replace("|", " ") for cell in row) for row in (HEADER, *lines)]
            files.write_text(folder / f"{kind}.csv", "\n".join(table) + "\n")
    except OSError as error:
        raise cannot_write(folder, error, "--output_dir") from None
    said = (
        f"{len(corpus)} held-out sentences spoken: {folder}/*_synthesis.wav; manifests beside them"
    )
    if likeness:
        said += (
            f"\nspeaker similarity: {sum(likeness) / len(likeness):.2f} (cosine between vectors of"
            " the speaker encoder)"
        )
    return said
