"""Audio files that cannot be read, on their way through training global batches and evaluation
batches."""

import re

import numpy as np
import pytest
import torch

from common import batches
from common.device import Setup
from common.errors import DataError
from speech.signal.audio import read_audio
from tests import small
from tests.speech.signal.test_audio import bad_file

ADVICE = "; fix or remove it, or skip such files with --skip_bad_audio"


class Files:
    """A data set of which the items in `bad` are read from these files."""

    def __init__(self, bad: dict[int, str]):
        self.bad = bad

    def __len__(self) -> int:
        return 20

    def seconds(self, epoch: int) -> np.ndarray:
        return np.linspace(1, 3, 20)

    def item(self, index: int, epoch: int) -> dict:
        audio = read_audio(self.bad[index], 16_000) if index in self.bad else torch.ones(10 + index)
        return {"name": str(index), "audio": audio}


def collate(items: list[dict]) -> dict:
    audio, lengths = batches.pad([item["audio"] for item in items])
    names = [item["name"] for item in items]
    return {"names": names, "seconds": [1.0] * len(items), "audio": audio, "audio_lengths": lengths}


def epoch(bad: dict[int, str], *flags: str, workers: int = 0) -> list[batches.GlobalBatch]:
    args = small.make_args("unused", *flags)
    made = batches.GlobalBatches(args, Files(bad), collate, Setup(workers=workers))
    source = made.iterate()
    global_batches = [next(source) for _ in range(made.per_epoch)]
    source.close()
    return global_batches


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_file_stops_the_run_with_its_name(tmp_path, no_hang, workers):
    path = bad_file(tmp_path / "my audio", "flac cut")
    message = f"{path} is truncated or damaged: flac decoder lost sync{ADVICE}"
    with pytest.raises(DataError, match=f"^{re.escape(message)}$"):
        epoch({7: path}, workers=workers)


@pytest.mark.parametrize("workers", [0, 1])
def test_bad_files_are_skipped_and_named(tmp_path, no_hang, workers):
    folder = tmp_path / "my audio"
    bad = {3: bad_file(folder, "wav not a number"), 7: bad_file(folder, "flac cut")}
    made = epoch(bad, "--skip_bad_audio", workers=workers)
    parts = [batch["names"] for each in made for batch in each.micro_batches]
    names = [name for part in parts for name in part]
    assert sorted(names, key=int) == [str(number) for number in range(20) if number not in bad]
    assert dict(skipped for each in made for skipped in each.skipped) == {
        bad[3]: f"{bad[3]} holds samples that are not finite (NaN or infinity)",
        bad[7]: f"{bad[7]} is truncated or damaged: flac decoder lost sync",
    }
