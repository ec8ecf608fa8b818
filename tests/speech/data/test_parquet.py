"""The import of Parquet files as Hugging Face's `datasets` writes them."""

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import soundfile

from common.errors import DataError, RunError, UsageError
from speech.data import parquet
from speech.data.columns import Rejections
from speech.data.loading import Checks, load_corpus
from speech.signal.audio import read_audio

AUDIO = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


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
    pq.write_table(table, file, row_group_size=group)
    return file


def inside(*contents: bytes | None) -> list[dict]:
    return [{"bytes": content, "path": f"{row}.wav"} for row, content in enumerate(contents)]


def imported(folder: Path, *names) -> tuple[list[dict], Rejections]:
    """The rows of the manifest in the folder, which `write` fills, and what it left out."""
    folder.mkdir()
    rejected = Rejections()
    count = parquet.write(folder, parquet.shards(list(map(str, names))), rejected)
    lines = (folder / "manifest.jsonl").read_text().splitlines()
    assert count == len(lines)
    return [json.loads(line) for line in lines], rejected


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


def test_the_command_makes_a_data_set(shards, tmp_path):
    folder = tmp_path / "made"
    command = [sys.executable, "-m", "speech.data.parquet", shards, str(folder)]
    for _ in range(2):  # the second replaces the first
        run = subprocess.run(command, capture_output=True, text=True, check=True)
        assert run.stdout.splitlines()[-1] == f"--train_manifest {folder}/manifest.jsonl"
    corpus, rejected = load_corpus(f"{folder}/manifest.jsonl", str, Checks(listen=True))
    assert not rejected.total
    assert list(corpus.texts) == [f"sentence {row}" for row in range(7)]
    assert list(corpus.speakers) == [f"speaker {row % 2}" for row in range(7)]
    for row in range(7):
        (tmp_path / "clip.wav").write_bytes(clip(1 + row / 10, row))
        expected = read_audio(str(tmp_path / "clip.wav"), 16_000)
        assert read_audio(corpus.paths[row], 16_000).equal(expected)
    (folder / "notes.txt").write_text("mine")
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 2 and "files that are not replaced (notes.txt)" in run.stderr


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), AUDIO])
def test_kinds_of_audio(tmp_path, kind):
    contents = [clip(1.0), clip(1.5, kind="OGG"), clip(2.0, kind="FLAC")]
    audio = inside(*contents) if kind == AUDIO else contents
    rows, _ = imported(tmp_path / "made", write(tmp_path / "a.parquet", audio, kind))
    names = [row["audio_filepath"] for row in rows]
    assert names == ["00000/000000.wav", "00000/000001.ogg", "00000/000002.flac"]
    assert [(tmp_path / "made" / name).read_bytes() for name in names] == contents


def test_columns_beside_audio(tmp_path, capsys):
    audio = write(
        tmp_path / "a.parquet",
        inside(clip(1.0), clip(1.0)),
        Text=["word", None],
        duration=[1.0, None],
        label=[3, 4],
        price=[1, 2],
        begin_time=[8.0, 9.5],
        vectors=[[0.5], [0.25]],
    )
    rows, _ = imported(tmp_path / "made", audio)
    keys = ("audio_filepath", "text", "duration", "label", "price", "source_begin_time")
    assert rows == [
        dict(zip(keys, ("00000/000000.wav", "word", 1.0, 3, 1, 8.0), strict=True)),
        dict(zip(keys, ("00000/000001.wav", None, None, 4, 2, 9.5), strict=True)),
    ]
    assert capsys.readouterr().out.endswith(
        "; columns left out: vectors; the audio of a row is the clip itself, so its place elsewhere"
        " is in source_begin_time\n"
    )
    _, rejected = load_corpus(f"{tmp_path}/made/manifest.jsonl", str, Checks())
    assert rejected.source.endswith("text, duration; not used: label, price, source_begin_time")


def test_columns_of_one_name_and_several_texts_are_refused(tmp_path):
    audio = write(tmp_path / "a.parquet", inside(clip(1.0)), Text=["a"], text=["b"])
    with pytest.raises(DataError, match=r"two of its columns are called text$"):
        imported(tmp_path / "twice", audio)
    columns = {"sentence": [None, "a"], "transcription": ["b", None]}
    audio = write(tmp_path / "a.parquet", inside(clip(1.0), clip(1.0)), **columns)
    imported(tmp_path / "made", audio)
    with pytest.raises(UsageError, match="which column has the texts, transcription"):
        load_corpus(f"{tmp_path}/made/manifest.jsonl", str, Checks())


def test_what_is_not_audio_is_left_out(tmp_path):
    contents = [clip(1.0), b"no audio", b"", None, b"#EXTM3U\n/etc/passwd\n", clip(1.0)]
    path = write(tmp_path / "a.parquet", [*inside(*contents), None])
    rows, rejected = imported(tmp_path / "made", path)
    assert [row["sentence"] for row in rows] == ["sentence 0", "sentence 5"]
    assert rejected.counts == {parquet.NOT_AUDIO: 2, parquet.NO_BYTES: 3}
    assert rejected.examples[parquet.NOT_AUDIO] == [f"{path} row 1", f"{path} row 4"]
    assert len(list((tmp_path / "made/00000").iterdir())) == 2
    write(path, inside(None))
    with pytest.raises(DataError, match=r"nothing of this can be used: row has no bytes of audio$"):
        imported(tmp_path / "again", path)


@pytest.mark.parametrize(
    "columns, message",
    [
        ({"sound": pa.array([[1.0]])}, "has no column of audio, .* it has sound: list<"),
        ({"audio": [{"array": [0.1], "sampling_rate": 8}]}, "it has audio: struct<array: list<"),
        ({"wav": [b"a"], "audio_mp3": [b"b"]}, "which of wav, audio_mp3 is audio"),
        ({"text": [b"a"]}, "it has text: binary"),
        ({"text": ["word"]}, "has no column of audio"),
    ],
)
def test_other_columns_are_refused_in_one_line(tmp_path, columns, message):
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"^{tmp_path}/a.parquet.*{message}[^\n]*$"):
        imported(tmp_path / "made", tmp_path / "a.parquet")


@pytest.mark.parametrize("left", [0, 1000, -1])
def test_truncated_files_are_refused_in_one_line(tmp_path, left):
    path = write(tmp_path / "a.parquet", inside(clip(1.0)))
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataError, match=rf"^{path} is not Parquet that can be read: [^\n]*$"):
        imported(tmp_path / "made", path)


def test_names_without_a_file(tmp_path):
    with pytest.raises(UsageError, match="no file has such a name"):
        parquet.shards([str(tmp_path / "*.parquet")])
    with pytest.raises(UsageError, match=r"a\.parquet: No such file"):
        parquet.shards([str(tmp_path / "a.parquet")])


def test_without_pyarrow(tmp_path, monkeypatch):
    path = write(tmp_path / "a.parquet", inside(clip(1.0)))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(RunError, match=r"reading Parquet needs the package pyarrow .*pip install"):
        imported(tmp_path / "made", path)


@pytest.mark.parametrize("name", ["a.parquet", "train-*.parquet"])
def test_a_manifest_in_parquet_names_the_command(name, tmp_path):
    write(tmp_path / "a.parquet", inside(clip(1.0)))
    with pytest.raises(UsageError, match=r'is Parquet: python -m speech.data.parquet ".*" FOLDER'):
        load_corpus(f"{tmp_path}/{name}", str, Checks())


@pytest.mark.parametrize("kind", ["zeros", "one value", "text"])
def test_a_small_file_that_would_fill_memory_or_disk_is_refused(kind, tmp_path, monkeypatch):
    """Compressed zeros take nothing in a file, and so does a value that repeats itself."""
    monkeypatch.setattr(parquet, "FEW_BYTES", 1 << 20)
    monkeypatch.setattr(parquet, "INFLATED", 10)
    path = tmp_path / "a.parquet"
    large = 1 << (20 if kind == "zeros" else 17)
    audio = inside(*[bytes(20 if kind == "text" else large)] * 40)
    texts = ["a" * (large if kind == "text" else 1)] * 40
    table = pa.table({"audio": pa.array(audio, AUDIO), "sentence": texts})
    pq.write_table(table, path, use_dictionary=kind != "zeros", compression="zstd")
    assert path.stat().st_size < 1 << 16
    with pytest.raises(DataError, match=r"far larger than its file|far more bytes than the file"):
        imported(tmp_path / "made", path)
