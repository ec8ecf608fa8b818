"""What the page may read, and what becomes of uploaded files."""

import os

import pytest

from common.errors import UsageError
from speech.data.columns import Rejections
from speech.data.manifest import parse


def rows_of(manifest):
    rejected = Rejections()
    rows = [row for _, row in parse(manifest, rejected)]
    assert not rejected.total
    return rows


def test_paths_inside(here, wav):
    wav(here.data / "clips/a.wav")
    wav(here.runs / "one/a.wav")
    assert here.inside("clips/a.wav") == here.data / "clips/a.wav"
    assert here.inside("one/a.wav") == here.runs / "one/a.wav"
    assert here.inside(here.runs / "one") == here.runs / "one"
    assert here.inside("clips/../clips/a.wav") == here.data / "clips/a.wav"
    assert here.file("clips/a.wav") == here.data / "clips/a.wav"
    for path in (here.data / "clips/a.wav", here.runs / "one/a.wav"):
        assert here.inside(here.name(path)) == path
    wav(here.data / "one/a.wav")  # hides the run's
    assert here.inside("one/a.wav") == here.data / "one/a.wav"
    assert here.inside(here.name(here.runs / "one/a.wav")) == here.runs / "one/a.wav"


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "../elsewhere",
        "../data2",
        "clips/../../elsewhere/a",
        "a\0b",
    ],
)
def test_paths_outside(here, path):
    (here.data / "clips").mkdir()
    with pytest.raises(UsageError):
        here.inside(path)


def test_links_out_are_refused(here, tmp_path, wav):
    outside = wav(tmp_path / "elsewhere/secret.wav")
    (tmp_path / "elsewhere/secret.csv").write_text("audio_file,text\nsecret.wav,one\n")
    (tmp_path / "elsewhere/secret.pt").write_text("")
    wav(here.data / "own.wav")
    (here.data / "link.wav").symlink_to(outside)
    (here.data / "link.csv").symlink_to(tmp_path / "elsewhere/secret.csv")
    (here.data / "link.pt").symlink_to(tmp_path / "elsewhere/secret.pt")
    (here.data / "folder").symlink_to(tmp_path / "elsewhere")
    (here.data / "again.wav").symlink_to(here.data / "own.wav")
    (here.data / "circle").symlink_to(here.data / "circle")
    for path in ("link.wav", "folder", "folder/secret.wav", "folder/secret.csv", "circle"):
        with pytest.raises(UsageError):
            here.file(path)
    assert here.clips() == ["again.wav", "own.wav"]
    assert here.manifests() == [] and here.models() == []
    with pytest.raises(UsageError):
        here.manifests("folder")


def test_what_is_no_file(here):
    os.mkfifo(here.data / "pipe.csv")
    (here.data / "device.wav").symlink_to("/dev/zero")
    for path in ("pipe.csv", "device.wav", "."):
        with pytest.raises(UsageError):
            here.file(path)
    assert here.clips() == [] and here.manifests() == []


def test_what_can_be_chosen(here, json_lines, wav):
    (here.data / "a").mkdir()
    json_lines(here.data / "a/train.jsonl", [{"audio_filepath": "x.wav", "text": "one"}])
    json_lines(here.data / "a/settings.json", [{"layers": 4}])
    (here.data / "lj").mkdir()
    (here.data / "lj/metadata.csv").write_text("LJ001|one|one\n")
    (here.data / "cv").mkdir()
    (here.data / "cv/train.tsv").write_text("client_id\tpath\tsentence\nme\tx.mp3\tone\n")
    (here.data / "prices.csv").write_text("day,price\n1,2\n")
    (here.data / ".hidden").mkdir()
    (here.data / ".hidden/train.csv").write_text("audio_file,text\na.wav,one\n")
    assert here.manifests() == ["a/train.jsonl", "cv/train.tsv", "lj/metadata.csv"]
    assert here.manifests("cv") == ["cv/train.tsv"]
    for name in (b"caf\xe9.csv", b"caf\xe9.wav"):  # no browser could be told this name
        (here.data / os.fsdecode(name)).write_text("audio_file,text\na,b\n")
    assert here.manifests() == ["a/train.jsonl", "cv/train.tsv", "lj/metadata.csv"]
    assert here.clips() == []
    (here.data / "whisper").mkdir()
    (here.data / "whisper/config.json").write_text("{}")
    (here.data / "whisper/model.safetensors").write_text("")
    (here.data / "model.nemo").write_text("")
    (here.runs / "one/checkpoints").mkdir(parents=True)
    (here.runs / "one/checkpoints/checkpoint_step_2.pt").write_text("")
    assert here.models() == ["model.nemo", "whisper"]


def test_upload_of_clips_and_a_table(here, tmp_path, wav):
    source = tmp_path / "elsewhere"
    files = [wav(source / f"{i}.wav") for i in range(3)]
    wav(source / "3.wav", format="FLAC")
    table = source / "0.csv"
    table.write_text(
        "audio_file,text,speaker_name,lang,offset,duration\n"
        "clips/one.wav,eins,Ann,de,0.1,0.5\n"
        "C:\\x\\two.wav,zwei,Bob,,,\n"
        "/etc/passwd,drei,,,,\n"
        "../../etc/passwd,drei,,,,\n"
        "lost.wav,vier,,,,\n"
        "one.wav,too,many,cells,1,2,3\n"
        "ärger.wav,fünf,,,,\n"
    )
    manifest = here.save_upload(
        [*files, str(source / "3.wav"), str(table)],
        ["one.wav", "two.wav", "a\u0308rger.wav", "four.wav", "My table.csv"],
    )
    assert manifest == here.runs / "uploads/1/manifest.jsonl"
    one, two, five = rows_of(manifest)
    assert [*one.values()] == ["upload-0001.wav", "eins", "Ann", "de", "0.1", "0.5"]
    assert here.own_name(manifest.with_name("upload-0003.wav")) == "ärger.wav"
    assert here.own_name(manifest) == "manifest.jsonl"
    assert two["audio_file"] == "upload-0002.wav" and five["audio_file"] == "upload-0003.wav"
    names = sorted(path.name for path in manifest.parent.glob("upload-*"))
    assert names == ["upload-0001.wav", "upload-0002.wav", "upload-0003.wav", "upload-0004.flac"]
    notes = here.not_used(manifest)
    assert "3  file was not uploaded" in notes and "My table.csv:4: passwd" in notes
    assert "My table.csv:7" in notes and "more cells" in notes and str(source) not in notes
    assert "no line for this file" in notes and "four.wav" in notes
    assert here.manifests() == ["uploads/1/manifest.jsonl"]
    assert len(here.clips()) == 4


def test_upload_of_json_keeps_segments(here, tmp_path, wav, json_lines):
    segments = [{"start": 0, "end": 0.5, "text": "one"}, {"start": 0.5, "end": 1, "text": "two"}]
    good = {"audio_filepath": "/x/a.wav", "segments": segments, "speaker": "Ann", "label": 3}
    other = {"audio": "/etc/passwd", "file": "../../x"}  # an upload names no paths
    table = json_lines(tmp_path / "t.jsonl", [{**good, **other}, b"{broken", {"text": "no"}, [1]])
    manifest = here.save_upload([wav(tmp_path / "up.wav"), table], ["a.wav", "t.jsonl"])
    (row,) = rows_of(manifest)
    assert row == {**good, "audio_filepath": "upload-0001.wav"}
    assert "2  no audio path" in here.not_used(manifest)
    assert "t.jsonl:2" in here.not_used(manifest)


LABELS = b"0.1\t0.9\tone\n"
EAF = (
    b'<ANNOTATION_DOCUMENT><HEADER><MEDIA_DESCRIPTOR MEDIA_URL="file:///C:/x/tape%207.wav"/></HEADER>'
    b'<TIME_ORDER><TIME_SLOT TIME_SLOT_ID="a" TIME_VALUE="100"/>'
    b'<TIME_SLOT TIME_SLOT_ID="b" TIME_VALUE="900"/></TIME_ORDER><TIER TIER_ID="Anna"><ANNOTATION>'
    b'<ALIGNABLE_ANNOTATION ANNOTATION_ID="c" TIME_SLOT_REF1="a" TIME_SLOT_REF2="b">'
    b"<ANNOTATION_VALUE>one</ANNOTATION_VALUE></ALIGNABLE_ANNOTATION></ANNOTATION></TIER>"
    b"</ANNOTATION_DOCUMENT>"
)


def test_annotations_below_the_folder_can_be_chosen(here, tmp_path, wav):
    """A file, or a pattern for several in one folder; nothing that leads out."""
    for name in "ab":
        wav(here.data / f"talks/{name}.wav")
        written(here.data / f"talks/{name}.eaf", EAF)
    written(here.data / "talks/a.txt", LABELS)
    written(here.data / "talks/readme.txt", b"Talks of 1999.")
    found = ["talks/*.eaf", "talks/a.eaf", "talks/a.txt", "talks/b.eaf"]
    assert here.manifests() == here.manifests("talks") == found
    assert here.table("talks/*.eaf") == here.data / "talks/*.eaf"
    assert here.table("talks/a.txt") == here.data / "talks/a.txt"
    os.symlink(written(tmp_path / "secret.eaf", EAF), here.data / "talks/link.eaf")
    for name in ("talks/*.eaf", "talks/*.srt", "../*.eaf", "talks/gone.eaf", "talks"):
        with pytest.raises(UsageError):
            here.table(name)


def test_upload_of_annotations(here, tmp_path, wav):
    """They are copied beside their audio, which they name, or whose name they have."""
    clips = [wav(tmp_path / f"{i}.wav") for i in range(4)]
    names = ["other.wav", "talk.wav", "tape 7.wav", "alone.wav"]
    files = [written(tmp_path / "l.txt", LABELS), written(tmp_path / "m.txt", LABELS)]
    files.append(written(tmp_path / "readme.txt", b"Talks of 1999."))
    upload = here.save_upload([*clips, *files], [*names, "talk.txt", "lost.txt", "readme.txt"])
    assert upload == here.runs / "uploads/1/upload-0002.0.txt"
    notes = here.not_used(upload)
    assert "there are no annotations of this file" in notes and "other.wav" in notes
    assert "lost.txt: its audio was not uploaded" in notes and "readme.txt" in notes
    assert here.manifests() == ["uploads/1/upload-0002.0.txt"]

    assert here.own_name(upload) == "talk.txt"

    eaf = written(tmp_path / "x.eaf", EAF)
    other = written(
        tmp_path / "y.eaf", EAF.replace(b'"100"', b'"910"').replace(b'"900"', b'"1000"')
    )
    upload = here.save_upload([*clips, eaf, other], [*names, "talk.eaf", "second.eaf"])
    assert upload == here.runs / "uploads/2/*.eaf"
    assert [row["text"] for row in rows_of(upload)] == ["one", "one"]
    assert {row["audio_filepath"] for row in rows_of(upload)} == {
        f"{upload.parent}/upload-0003.wav"
    }
    assert here.table(here.name(upload)) == upload
    assert here.manifests() == ["uploads/1/upload-0002.0.txt", "uploads/2/*.eaf"]  # one table
    here.remove_upload(upload)
    with pytest.raises(UsageError, match=r"several formats: talk\.eaf, talk\.txt; give one"):
        here.save_upload([clips[0], eaf, files[0]], ["talk.wav", "talk.eaf", "talk.txt"])
    bad = written(tmp_path / "bad.eaf", b"<html>")
    with pytest.raises(UsageError, match=r"bad\.eaf: bad\.eaf:1: it is not") as error:
        here.save_upload([clips[0], bad], ["bad.wav", "bad.eaf"])
    assert str(tmp_path) not in str(error.value)


def test_upload_without_a_table(here, tmp_path, wav):
    first = here.save_upload([wav(tmp_path / "a.wav")], ["<img onerror=x>.exe"])
    assert first == here.runs / "uploads/1" and (first / "upload-0001.wav").is_file()
    second = here.save_upload([wav(tmp_path / "a.wav")], ["a.wav"])
    assert second.name == "2"
    here.remove_upload(first)
    assert not any(first.iterdir()) and any(second.iterdir())
    here.remove_upload(second / "upload-0001.wav")
    assert not any(second.iterdir()) and not here.uploads()
    # A draft of the second one must not play another recording.
    assert here.save_upload([wav(tmp_path / "a.wav")], ["a.wav"]).name == "3"


def test_only_uploads_are_removed(here, wav):
    clip = wav(here.data / "clips/a.wav")
    (here.runs / "uploads/mine").mkdir(parents=True)
    for path in (here.data, here.runs, here.runs / "uploads", here.runs / "uploads/mine", clip):
        with pytest.raises(UsageError):
            here.remove_upload(path)
        assert here.not_used(path) == ""
    assert os.path.exists(clip)


def written(path, content: bytes):
    path.write_bytes(content)
    return str(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"#EXTM3U\n#EXTINF:1,\n/etc/passwd\n",
    ],
)
def test_only_audio_is_taken(here, tmp_path, wav, content):
    bad = written(tmp_path / "bad.wav", content)
    with pytest.raises(UsageError, match=r"not audio .*bad\.wav"):
        here.save_upload([bad], ["bad.wav"])
    assert not list((here.runs / "uploads").glob("*"))
    folder = here.save_upload([bad, wav(tmp_path / "a.wav")], ["bad.wav", "a.wav"])
    assert "bad.wav" in here.not_used(folder)
    assert sorted(path.name for path in folder.glob("upload-*")) == ["upload-0002.wav"]


TABLE = b"audio_file,text\na.wav,one\n"


@pytest.mark.parametrize(
    ("names", "table", "message"),
    [
        (["a.wav", "t.csv", "u.csv"], TABLE, "several tables: t.csv, u.csv"),
        (["b.wav", "t.csv"], TABLE, "file was not uploaded (t.csv:2: a.wav)"),
        ([], TABLE, "nothing of this"),
        (["a.wav", "t.csv"], b"day,price\n1,2\n", "t.csv"),
        (["a.wav", "t.csv"], b"PK\3\4", "t.csv"),
        (["a.wav", "t.csv"], "käse".encode("utf-16"), "t.csv"),
    ],
)
def test_uploads_that_are_refused(here, tmp_path, wav, names, table, message):
    files = []
    for name in names:
        path = tmp_path / name
        files.append(wav(path) if name.endswith(".wav") else written(path, table))
    with pytest.raises(UsageError) as error:
        here.save_upload(files, names)
    assert message in str(error.value) and str(tmp_path) not in str(error.value)
    assert not list((here.runs / "uploads").glob("*"))


def test_a_corrected_file_beside_the_one_that_it_replaces(here, tmp_path, wav):
    first, second = (wav(tmp_path / f"{seconds}.wav", seconds) for seconds in (1, 2))
    old = written(tmp_path / "old.csv", b"audio_file,text\na.wav,wrong\n")
    new = written(tmp_path / "new.csv", b"audio_file,text\na.wav,right\n")
    names = ["a.wav", "t.csv", "t.csv", "a.wav"]
    manifest = here.save_upload([first, old, new, second], names)
    (row,) = rows_of(manifest)
    assert row["text"] == "right"
    (copy,) = manifest.parent.glob("*.wav")
    assert copy.read_bytes() == (tmp_path / "2.wav").read_bytes()
    notes = here.not_used(manifest)
    assert "2  a later file of this name is used" in notes
    assert "t.csv" in notes and "a.wav" in notes
