"""Parquet files as Hugging Face's `datasets` writes them, as manifests."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from common import batches
from common.device import Setup
from common.errors import DataError, RunError, UsageError
from speech import hours, parquet
from speech.audio import BadAudio, read_audio, read_cached, read_utterance
from speech.headers import probe
from speech.loading import Checks, load_corpus
from speech.manifest import find_audio
from speech.splits import read_manifests
from tests import small

AUDIO = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
# What `datasets` writes beside the columns.
FEATURES = {
    "info": {
        "features": {
            "audio": {"sampling_rate": 16_000, "_type": "Audio"},
            "sentence": {"dtype": "string", "_type": "Value"},
        }
    }
}


def clip(seconds: float, seed: int = 0, kind: str = "WAV") -> bytes:
    random = np.random.default_rng(seed)
    content = io.BytesIO()
    soundfile.write(content, random.normal(0, 0.1, int(16_000 * seconds)), 16_000, format=kind)
    return content.getvalue()


def write(file: Path, audio: list, kind=AUDIO, group: int = 2, **columns) -> Path:
    """A file with these columns; without others, with sentences."""
    file.parent.mkdir(exist_ok=True)
    columns = columns or {"sentence": [f"sentence {row}" for row in range(len(audio))]}
    table = pa.table({"audio": pa.array(audio, kind), **columns})
    table = table.replace_schema_metadata({"huggingface": json.dumps(FEATURES)})
    pq.write_table(table, file, row_group_size=group)
    return file


def inside(*contents: bytes | None) -> list[dict]:
    return [{"bytes": content, "path": f"{row}.wav"} for row, content in enumerate(contents)]


def load(path, **checks):
    return load_corpus(str(path), str, Checks(**checks))


@pytest.fixture
def shards(tmp_path) -> str:
    """Seven clips of 1.0 to 1.6 s in three files."""
    for shard, rows in enumerate([(0, 1, 2), (3,), (4, 5, 6)]):
        write(
            tmp_path / f"shards/train-{shard}.parquet",
            inside(*(clip(1 + row / 10, row) for row in rows)),
            sentence=[f"sentence {row}" for row in rows],
            client_id=[f"speaker {row % 2}" for row in rows],
            path=[f"{row}.mp3" for row in rows],  # as in Common Voice: a name, no file
        )
    return str(tmp_path / "shards/*.parquet")


def test_shards_are_one_manifest(shards):
    corpus, rejected = load(shards, listen=True)
    assert not rejected.total
    assert list(corpus.texts) == [f"sentence {row}" for row in range(7)]
    assert list(corpus.speakers) == [f"speaker {row % 2}" for row in range(7)]
    np.testing.assert_allclose(corpus.seconds, 1 + np.arange(7) / 10)
    folder = Path(shards).parent
    assert corpus.where(2) == f"{folder}/train-0.parquet row 2"
    assert corpus.where(4) == f"{folder}/train-2.parquet row 0"


def test_a_row_is_read_as_the_file_would_be(shards, tmp_path):
    corpus, _ = load(shards)
    corpus.offsets[3] = 0.25
    corpus.durations[3] = 0.5
    for row in (6, 3, 0, 4):
        file = tmp_path / "clip.wav"
        file.write_bytes(clip(1 + row / 10, row))
        place = (0.25, 0.5) if row == 3 else (0.0, None)
        expected = read_audio(str(file), 8_000, *place)
        assert read_utterance(corpus, row, 8_000).equal(expected)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), AUDIO])
def test_kinds_of_audio_columns(tmp_path, kind):
    contents = [clip(1.0), clip(1.5, kind="OGG"), clip(2.0, kind="FLAC")]
    audio = inside(*contents) if kind == AUDIO else contents
    corpus, rejected = load(write(tmp_path / "a.parquet", audio, kind))
    assert not rejected.total
    assert corpus.seconds.round(2).tolist() == [1.0, 1.5, 2.0]


def test_a_path_is_read_only_where_there_are_no_bytes(tmp_path):
    for name in ("0.wav", "1.wav"):
        (tmp_path / name).write_bytes(clip(2.0))
    audio = [
        {"bytes": clip(1.0), "path": "0.wav"},
        {"bytes": None, "path": "1.wav"},
        {"bytes": None, "path": None},
        None,
        {"bytes": None, "path": "\0"},
        {"bytes": None, "path": "../../" * 50 + "none.wav"},
    ]
    path = write(tmp_path / "a.parquet", audio)
    corpus, rejected = load(path)
    assert corpus.seconds.tolist() == [1.0, 2.0]
    assert list(corpus.paths) == [f"{path} row 0", str(tmp_path / "1.wav")]
    assert rejected.counts == {"no audio path": 3, "file is missing": 1}
    assert rejected.examples["no audio path"][0] == f"{path} row 2"


def test_paths_in_patterns_of_folders(tmp_path):
    """A path belongs to the folder of its file, not to that of the pattern."""
    for name in "ab":
        write(tmp_path / f"{name}/a.parquet", [{"bytes": None, "path": "clip.wav"}])
        (tmp_path / f"{name}/clip.wav").write_bytes(clip(1.0))
    corpus, _ = load(tmp_path / "*/a.parquet")
    assert list(corpus.paths) == [str(tmp_path / "a/clip.wav"), str(tmp_path / "b/clip.wav")]


def test_a_table_of_paths(tmp_path):
    (tmp_path / "a.wav").write_bytes(clip(1.0))
    table = pa.table({"Audio_FilePath": ["a.wav"], "text": ["word"], "duration": [0.5]})
    pq.write_table(table, tmp_path / "a.parquet")
    corpus, _ = load(tmp_path / "a.parquet")
    assert (corpus.paths[0], corpus.seconds[0]) == (str(tmp_path / "a.wav"), 0.5)


def test_bad_audio_names_its_row(tmp_path, no_ffmpeg):
    silence = io.BytesIO()
    soundfile.write(silence, np.zeros(16_000), 16_000, format="WAV")
    contents = [clip(1.0), b"no audio", b"", silence.getvalue(), clip(1.0)[:9000], clip(0.01)]
    path = write(tmp_path / "a.parquet", inside(*contents))
    corpus, rejected = load(path, listen=True)
    assert len(corpus) == 1
    examples = {reason.split(" (")[0]: text for reason, (text,) in rejected.examples.items()}
    assert examples["audio is unreadable"].startswith(f"{path} row 1")
    assert examples["audio is empty"].startswith(f"{path} row 2")
    assert examples["audio is silent"].startswith(f"{path} row 3: at most -200 dB")
    assert examples["audio is truncated"].startswith(f"{path} row 4")
    assert examples["shorter than 0.1 s"] == f"{path} row 5 (0.01 s)"
    with pytest.raises(BadAudio, match=rf"^{re.escape(str(path))} row 1 cannot be read: Format"):
        read_audio(f"{path} row 1", 16_000)


def test_a_file_of_audio_alone(tmp_path):
    pq.write_table(pa.table({"audio": [clip(1.0)]}), tmp_path / "a.parquet")
    _, rejected = load(tmp_path / "a.parquet")
    assert rejected.examples == {"no text field": [f"{tmp_path}/a.parquet row 0"]}


def test_texts_that_cannot_be_used(tmp_path):
    texts = pa.array([b"word", b"\xff", None, b"word"], pa.binary())
    texts = pa.StringArray.from_buffers(4, *texts.buffers()[1:], texts.buffers()[0])
    path = write(tmp_path / "a.parquet", inside(*[clip(1.0)] * 4), text=texts)
    corpus, rejected = load(path)
    assert corpus.lines.tolist() == [1, 4]
    assert rejected.examples == {
        "line is not UTF-8": [f"{path} row 1"],
        "text is empty": [f"{path} row 2 (1.00 s)"],
    }


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"sound": pa.array([[1.0]])}, "has no column of audio, .* it has sound: list<"),
        ({"audio": [{"array": [0.1], "sampling_rate": 8}]}, "it has audio: struct<array: list<"),
        ({"audio": [[{"bytes": b"a"}]]}, "it has audio: list<"),
        ({"wav": [b"a"], "audio_mp3": [b"b"]}, "which of its columns wav, audio_mp3 is audio"),
        ({"text": [b"a"]}, "it has text: binary"),
        ({"audio": [b"a"], "Audio": [b"b"]}, "it has two columns called audio"),
        ({"text": ["word"]}, "has no column of audio"),
    ],
)
def test_other_columns_are_refused_in_one_line(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/a.parquet.*{message}[^\n]*$"):
        load(tmp_path / "a.parquet")


@pytest.mark.parametrize("left", [0, 3, 1000, -1])
def test_truncated_files_are_refused_in_one_line(tmp_path, left):
    path = write(tmp_path / "a.parquet", inside(clip(1.0)))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match=rf"^{path} is not Parquet that can be read: [^\n]*$"):
        load(path)


def test_statistics_at_which_pyarrow_aborts(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", inside(clip(1.0)))
    monkeypatch.setattr(parquet, "_be_quiet", lambda: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(DataError, match=rf"^{path} is damaged: pyarrow cannot read it$"):
        load(path)


def test_a_damaged_row_group_is_rejected(tmp_path):
    path = write(tmp_path / "a.parquet", inside(*(clip(1.0, row) for row in range(6))))
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    content = bytearray(path.read_bytes())
    start = column.dictionary_page_offset or column.data_page_offset
    content[start : start + 40] = b"\xff" * 40
    path.write_bytes(content)
    corpus, rejected = load(path)
    assert corpus.lines.tolist() == [1, 2, 5, 6]
    ((reason, examples),) = rejected.examples.items()
    assert reason.startswith("row group cannot be read: ") and "\n" not in reason
    assert examples == [f"{path} row 2", f"{path} row 3"]


def test_names_without_a_file(tmp_path):
    with pytest.raises(UsageError, match="no file has such a name"):
        load(tmp_path / "*.parquet")
    with pytest.raises(UsageError, match="no file has such a name"):
        load(tmp_path / "train-*")
    with pytest.raises(UsageError, match=r"manifest .*a\.parquet: No such file"):
        load(tmp_path / "a.parquet")
    (tmp_path / "a.parquet").mkdir()
    with pytest.raises(UsageError, match="it is a folder"):
        load(tmp_path / "*.parquet")
    with pytest.raises(DataError, match=r"is Parquet: its name has to end in \.parquet$"):
        load(write(tmp_path / "c", inside(clip(1.0))))
    path = write(tmp_path / "b.parquet", inside(clip(1.0)))
    assert len(load(tmp_path / "b*")[0]) == 1
    assert probe(f"{path} row 0") == (1.0, "")
    assert probe(f"{path} row 1")[1] == "the file has no such row with audio"
    assert probe(f"{tmp_path}/none.parquet row 0")[1] == "file is missing"


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", inside(clip(1.0)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(RunError, match=r"reading Parquet needs the package pyarrow .*pip install"):
        load(path)


def test_headers_are_read_once_a_row_group(shards, tmp_path, monkeypatch):
    read = []
    before = parquet._read_group

    def counted(shard, group):
        read.append(group)
        return before(shard, group)

    monkeypatch.setattr(parquet, "_read_group", counted)
    cache = tmp_path / "cache"
    first, _ = load(shards, cache_dir=cache)
    assert sorted(read) == [0, 0, 0, 1, 1]  # groups of two rows in files of three, one and three
    again, _ = load(shards, cache_dir=cache)
    assert len(read) == 5
    assert again.fingerprint() == first.fingerprint()


def test_a_file_that_changes_is_read_again(tmp_path):
    path = write(tmp_path / "a.parquet", inside(clip(1.0, 1)))
    name = f"{path} row 0"
    first = read_cached(str(tmp_path / "cache"), name, 16_000)
    assert read_cached(str(tmp_path / "cache"), name, 16_000).equal(first)
    write(path, inside(clip(1.2, 2)))
    assert len(read_cached(str(tmp_path / "cache"), name, 16_000)) == 19_200
    assert len(read_audio(name, 16_000)) == 19_200


class Rows:
    """The data set of a corpus."""

    def __init__(self, corpus):
        self.corpus = corpus

    def __len__(self) -> int:
        return len(self.corpus)

    def seconds(self, epoch: int) -> np.ndarray:
        return self.corpus.seconds

    def item(self, index: int, epoch: int) -> dict:
        return {"name": str(index), "audio": read_utterance(self.corpus, index, 16_000)}


def collate(items: list[dict]) -> dict:
    audio, lengths = batches.pad([item["audio"] for item in items])
    return {"names": [item["name"] for item in items], "audio": audio, "audio_lengths": lengths}


def test_workers_read_the_same_rows(shards, no_hang):
    """They begin with what the main process has opened and read while it checked the data."""
    data = Rows(load(shards)[0])
    epochs = []
    for workers in (0, 2):
        args = small.make_args("unused", "--batch_size", "2")
        made = batches.GlobalBatches(args, data, collate, Setup(workers=workers))
        source = made.iterate()
        epoch = [next(source).micro_batches for _ in range(made.per_epoch)]
        source.close()
        epochs.append([batch for micro_batches in epoch for batch in micro_batches])
    alone, together = epochs
    assert [batch["names"] for batch in alone] == [batch["names"] for batch in together]
    for one, other in zip(alone, together, strict=True):
        assert one["audio"].equal(other["audio"])


def test_more_files_than_are_kept_open(shards, monkeypatch):
    monkeypatch.setattr(parquet, "OPEN_FILES", 1)
    corpus, _ = load(shards)
    assert [len(read_utterance(corpus, row, 1000)) for row in (0, 6, 1)] == [1000, 1600, 1100]


def test_rows_that_are_drawn_held_out_and_measured(shards):
    corpora = read_manifests({"train": shards}, str, Checks(max_samples=4))
    assert len(corpora["train"]) == 3 and len(corpora["val"]) == 1
    assert hours.hours_of(Path(shards)) == pytest.approx(9.1 / 3600)


def test_a_row_can_be_named_in_other_manifests(shards, tmp_path):
    """So transcripts of an evaluation, say, can be corrected and used."""
    folder = Path(shards).parent
    assert (
        find_audio("shards/train-0.parquet row 2", str(tmp_path))
        == f"{folder}/train-0.parquet row 2"
    )
    row = {"audio_filepath": "shards/train-0.parquet row 2", "text": "other", "offset": 0.5}
    (tmp_path / "train.json").write_text(json.dumps(row))
    corpus, _ = load(tmp_path / "train.json")
    assert (corpus.texts[0], round(corpus.seconds[0], 3)) == ("other", 0.7)


def test_large_row_groups_get_a_note(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "a.parquet", inside(*(clip(1.0, row) for row in range(4))), group=4)
    load(path)
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(parquet, "SLOW_BYTES", 1 << 15)
    load(path)
    assert "row groups have 4 rows" in capsys.readouterr().out
    load(path, cache_audio=str(tmp_path / "cache"))
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("kind", ["zeros", "one value", "text"])
def test_a_small_file_that_would_fill_the_memory_is_refused(kind, tmp_path, monkeypatch):
    """Compressed zeros take nothing in a file, and so does a value that repeats itself."""
    monkeypatch.setattr(parquet, "SLOW_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "INFLATED", 10)
    path = tmp_path / "a.parquet"
    large = 1 << (20 if kind == "zeros" else 17)
    audio = inside(*[bytes(20 if kind == "text" else large)] * 40)
    texts = ["a" * (large if kind == "text" else 1)] * 40
    table = pa.table({"audio": pa.array(audio, AUDIO), "sentence": texts})
    pq.write_table(table, path, use_dictionary=kind != "zeros", compression="zstd")
    assert path.stat().st_size < 1 << 16
    if kind == "one value":
        with pytest.raises(ValueError, match="far more than its file"):
            parquet.read(parquet.name_of(str(path), 3))
    else:
        with pytest.raises(DataError, match=r"far more than its file|MiB of text"):
            load(path)
