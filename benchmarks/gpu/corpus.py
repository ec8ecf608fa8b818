"""A corpus that needs no data and no synthesis of speech: each character of a text is a tone."""

import json
from pathlib import Path

import numpy as np

from speech.signal.audio import write_wav

SECONDS = 0.08  # of a character
RATE = 16_000
LOWEST, STEP, TONES = 200, 130, 29  # Hz, Hz, and how many tones there are
WORDS = (2, 5)  # in a sentence


def tones(text: str, random: np.random.Generator) -> np.ndarray:
    """(T,) samples: a tone for each character, with a little noise."""
    time = np.arange(round(SECONDS * RATE)) / RATE
    parts = [
        np.sin(2 * np.pi * (LOWEST + STEP * (ord(character) % TONES)) * time) for character in text
    ]
    samples = 0.3 * np.concatenate(parts)
    return samples + random.normal(0, 0.01, len(samples))


def write_corpus(folder: Path, words: list[str], sizes: dict[str, int]) -> dict[str, Path]:
    """Writes `sizes` sentences of random `words` for each split and returns the manifests."""
    random = np.random.default_rng(1)
    (folder / "audio").mkdir(parents=True)
    manifests = {}
    for split, count in sizes.items():
        lines = []
        for number in range(count):
            text = " ".join(random.choice(words, random.integers(WORDS[0], WORDS[1] + 1)))
            name = f"audio/{split}_{number}.wav"
            write_wav(folder / name, tones(text, random), RATE)
            lines.append(json.dumps({"audio_filepath": name, "text": text}))
        manifests[split] = folder / f"{split}.json"
        manifests[split].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return manifests
