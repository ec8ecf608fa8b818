"""Held-out sentences: what a person and a judge hear of a voice that has learned, and a picture of
its alignment."""

from pathlib import Path

import numpy as np
import torch

from common import files, memory
from common.device import Setup
from common.errors import require
from models.matcha import alignment, decoding
from models.matcha.decoding import SpeakingSettings, Voice
from models.matcha.mels import SAMPLE_RATE, LogMel, with_edges
from models.matcha.texts import speaker_numbers
from speech.data.columns import Corpus
from speech.decoding import judge
from speech.signal.audio import int16, read_utterance

PICTURE = "alignment.png"
USUAL = 20  # sentences after training


def reports(output_dir: str) -> tuple[str, ...]:
    """What a run writes beside its logs, for the loop."""
    return PICTURE, str(judge.folder_of(output_dir))


@torch.no_grad()
def draw(path: Path, voice: Voice, corpus: Corpus) -> None:
    """Draws which tokens of the first sentence are probable at which frames of its recording: a
    sharp diagonal, once the voice has learned to align. Beside it the durations that it
    predicts."""
    model = voice.model
    device = model.mel_mean.device
    tokens = torch.tensor([voice.tokens.encode(corpus.read[0])], device=device)
    waveform = with_edges(read_utterance(corpus, 0, SAMPLE_RATE)).to(device)
    frames = model.normalised(LogMel().to(device)(waveform[None]))
    lengths = torch.tensor([tokens.shape[1]], device=device)
    counts = torch.tensor([frames.shape[1]], device=device)
    speaker = torch.from_numpy(speaker_numbers(corpus, voice.speakers)[:1]).to(device)
    means, log_frames, _ = model.encode(tokens, lengths, speaker)
    searched = alignment.search(means, frames, lengths, counts)[0]
    predicted = alignment.path_of(alignment.ends_of(log_frames, lengths, 1.0), frames.shape[1])[0]
    likely = (-torch.cdist(frames, means).square() / 2)[0].softmax(1)
    matplotlib = require("matplotlib", PICTURE)
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    axes.imshow(
        likely.t().float().cpu().numpy(), origin="lower", aspect="auto", cmap="gray_r", vmax=1
    )
    axes.plot(searched.tolist(), label="found in the recording", linewidth=1)
    axes.plot(predicted.tolist(), label="predicted", linewidth=1, linestyle="--")
    axes.set(xlabel="frames", ylabel="tokens", title="Which token each frame belongs to")
    axes.legend(loc="upper left")
    files.write_file(path, lambda p: figure.savefig(p, format="png", dpi=100), durable=False)
    plt.close(figure)


@torch.no_grad()
def speak_held_out(asked: judge.HeldOut, setup: Setup, voice: Voice, corpus: Corpus) -> None:
    """Speaks the first sentences of `corpus` and prints how well the judge understands them, beside
    their recordings, and beside the waveforms that are made of the recordings' mel frames."""
    count = USUAL if asked.speak_held_out is None else asked.speak_held_out
    if not count:
        return
    corpus = corpus.select(np.arange(min(count, len(corpus))))
    folder = judge.folder_of(asked.output_dir)
    numbers = speaker_numbers(corpus, voice.speakers).tolist()
    spoken = decoding.speak(voice, list(corpus.texts), SpeakingSettings(seed=asked.seed), numbers)
    log_mel = LogMel().to(setup.device)
    made = []
    for index, synthesis in enumerate(spoken):
        recording = read_utterance(corpus, index, SAMPLE_RATE).to(setup.device)
        frames = log_mel(with_edges(recording)[None])[0]
        waveforms = (recording, voice.vocode(frames), synthesis)
        clips = [(int16(waveform), SAMPLE_RATE) for waveform in waveforms]
        made.append(dict(zip(judge.KINDS, clips, strict=True)))
    judge.write_corpus(folder, corpus, made)
    print(f"{len(corpus)} held-out sentences spoken: {folder}/*_synthesis.wav")
    if asked.judge:
        voice.model.cpu()
        memory.free_memory(setup.device)  # the judge is another process
        print(judge.judged(asked.judge, judge.RECIPES, folder, list(corpus.texts), asked.device))
