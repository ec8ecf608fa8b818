"""Folders of Morse recordings."""

import csv
from pathlib import Path

import soundfile

from speech.morse import synthesis
from speech.morse.scores import TAGS

HEADER = ["id", "audio_file", "text", "duration", *TAGS]


def write_set(folder: Path, count: int, mix: list[synthesis.Conditions]) -> list:
    """Writes `count` clips, divided 80/10/10, with their tables; returns the samples."""
    (folder / "audio").mkdir(parents=True)
    (folder / "splits").mkdir()
    samples = [
        synthesis.synthesise(9, index, synthesis.draw_conditions(mix, 9, index))
        for index in range(count)
    ]
    rows = []
    for index, sample in enumerate(samples):
        row = {name: getattr(sample, name, "") for name in HEADER}
        row |= {"id": index, "audio_file": f"audio/{index}.wav", "duration": sample.seconds}
        rows.append(row | {"callsigns": " ".join(sample.callsigns)})
        soundfile.write(folder / row["audio_file"], sample.audio, 16_000)
    names = ["train"] * 8 + ["validation", "test"]
    for name in ("train", "validation", "test"):
        with open(folder / "splits" / f"{name}.csv", "w", newline="") as file:
            writer = csv.DictWriter(file, HEADER)
            writer.writeheader()
            writer.writerows(row for row in rows if names[row["id"] % 10] == name)
    return samples
