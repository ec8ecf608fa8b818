"""--align from files to files, with a recogniser to which each letter is a loudness."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from common import options
from common.device import Setup
from common.errors import DataError, Stopped, UsageError
from speech.alignment import command
from speech.alignment.letters import HOLE, of_characters, of_pieces
from speech.data.annotations import elan
from speech.data.loading import Checks, load_corpus
from speech.signal.audio import SAMPLE_RATE
from speech.writing.text import normalise

LETTERS = "abcdefghijklmnopqrstuvwxyz"
BLANK = len(LETTERS)
FRAME = 0.02
SAMPLES = round(FRAME * SAMPLE_RATE)
LINES = [
    "the old man went down to the river before the sun was up",
    "his boat was small and it was painted green",
    "nobody had seen so many birds on the water",
    "she asked him what he would do with all the fish",
    "we will eat what we can and give away the others",
    "in winter there is ice on both sides of the bridge",
]


def spoken(text: str) -> np.ndarray:
    """Two frames of a loudness for each letter, and one that is quieter behind it."""
    values = []
    for letter in text:
        if letter in LETTERS:
            level = 0.1 + 0.03 * LETTERS.index(letter)
            values += [level, level, 0.05]
        else:
            values += [0.05] * 2
    return np.repeat(np.array(values, np.float32), SAMPLES)


def tape(path: Path, lines: list[str], lead: float = 1.0) -> list[tuple[float, float]]:
    """Writes a recording of the lines; returns where each begins and ends, in seconds."""
    parts, places = [np.zeros(round(lead * SAMPLE_RATE), np.float32)], []
    for line in lines:
        start = sum(map(len, parts)) / SAMPLE_RATE
        parts.append(spoken(line))
        places.append((start, start + len(parts[-1]) / SAMPLE_RATE))
        parts.append(np.zeros(round(0.6 * SAMPLE_RATE), np.float32))
    if not lead:
        parts.pop()
    soundfile.write(path, np.concatenate(parts), SAMPLE_RATE, subtype="FLOAT")
    return places


def log_probs_of(batch: dict) -> torch.Tensor:
    waveform = batch["audio"][0]
    whole = waveform[: len(waveform) // SAMPLES * SAMPLES].reshape(-1, SAMPLES)
    letter = ((whole.mean(1) - 0.1) / 0.03).round().long()
    letter[letter < 0] = BLANK
    scores = torch.full((len(whole), BLANK + 1), -9.0)
    return scores.scatter(1, letter[:, None], 0.0).log_softmax(-1)


def recogniser() -> command.Recogniser:
    index = {letter: i for i, letter in enumerate(LETTERS)}
    vocabulary = of_characters(index, BLANK, BLANK + 1)
    return command.Recogniser(Setup(), log_probs_of, FRAME, vocabulary, 10.0)


def request(*words: str) -> command.Request | None:
    parser = options.Parser("")
    command.add_arguments(parser)
    parser.add_argument("--output")
    parser.add_argument("--output_format")
    parser.add_argument("--resume")
    return command.resolve(parser.parse_args(words))


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


TAPE = ("--align", "tape.wav", "book.txt", "--output", "aligned.json")


def align(lines: list[str], *more: str, hears=recogniser) -> list[dict]:
    """The utterances of tape.wav with a book of these lines."""
    Path("book.txt").write_text("\n".join(lines), encoding="utf-8")
    command.align_files(request(*TAPE, *more), hears)
    return rows_of(Path("aligned.json"))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_tape_and_its_book(folder, capsys):
    """Another order, a line that is not read, one that is not in the book; the manifest is read as
    any other."""
    (folder / "out").mkdir()
    read = [*LINES[3:], *LINES[:2], "this is a line that only the reader knows and nobody else"]
    places = tape(folder / "tape.wav", read)
    book = ". ".join(line.capitalize() for line in LINES) + ".\n"
    (folder / "book.txt").write_text(book, encoding="utf-8-sig")
    command.align_files(
        request("--align", "tape.wav", "book.txt", "--output", "out/aligned.json"), recogniser
    )
    utterances = rows_of(folder / "out/aligned.json")
    assert [row["text"] for row in utterances] == [f"{line.capitalize()}." for line in read[:5]]
    for row, (start, end) in zip(utterances, places, strict=False):
        assert row["audio_filepath"] == "../tape.wav"
        assert abs(row["offset"] - start) < 0.06
        assert abs(row["offset"] + row["duration"] - end) < 0.06
    texts, sounds = [], []
    for row in rows_of(folder / "out/aligned_left_out.json"):
        (sounds if "heard" in row else texts).append(row)
    assert [row["text"] for row in texts] == [f"{LINES[2].capitalize()}."]
    assert [row["heard"] for row in sounds] == [read[5].replace(" ", "")]
    printed = capsys.readouterr().out
    assert "5 utterances" in printed and "not found in the recording: 1" in printed
    assert (folder / "out/aligned.html").read_bytes().startswith(command.page.BEGINS)
    corpus, rejected = load_corpus("out/aligned.json", normalise, Checks())
    assert not rejected.counts
    assert list(corpus.texts) == [row["text"] for row in utterances]
    assert corpus.seconds.tolist() == pytest.approx([row["duration"] for row in utterances])


def test_files_for_elan_in_place_of_the_manifest(folder, capsys):
    """One for each recording of a folder; the least certain utterance is marked."""
    for place in ("tapes", "books"):
        (folder / place).mkdir()
    for name in "ab":
        tape(folder / f"tapes/{name}.wav", LINES)
        (folder / f"books/{name}.txt").write_text("\n".join(LINES), encoding="utf-8")
    words = ("--align", "tapes", "books", "--output", "new")
    command.align_files(request(*words), recogniser)
    utterances = [row for row in rows_of(folder / "new") if row["audio_filepath"] == "tapes/b.wav"]
    (folder / "new").unlink()
    command.align_files(request(*words, "--output_format", "eaf"), recogniser)
    assert sorted(path.name for path in (folder / "new").iterdir()) == ["a.eaf", "b.eaf"]
    tiers = {tier.name: tier.annotations for tier in elan.read(folder / "new" / "b.eaf").tiers}
    assert list(tiers) == ["utterances", "draft", "doubtful", "confidence"]
    found = [(each.start, each.end - each.start, each.text) for each in tiers["utterances"]]
    expected = [(row["offset"], row["duration"], row["text"]) for row in utterances]
    assert [each[2] for each in found] == [each[2] for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one[:2] == pytest.approx(other[:2], abs=0.002)
    assert [each.text for each in tiers["doubtful"]] == ["?"]
    least = min(utterances, key=lambda row: row["confidence"])
    assert tiers["doubtful"][0].start == pytest.approx(least["offset"], abs=0.002)
    assert "in new; nothing is left out" in capsys.readouterr().out


def test_a_flat_start_needs_no_recogniser(folder, capsys):
    places = tape(folder / "tape.wav", LINES * 5)
    rows = align(LINES * 5, "--flat_start", hears=None)
    assert len(rows) >= 10
    for row in rows:
        number = int(np.abs(np.array(places)[:, 0] - row["offset"]).argmin())
        assert row["text"] == LINES[number % len(LINES)]
        edges = (row["offset"], row["offset"] + row["duration"])
        assert edges == pytest.approx(places[number], abs=0.06)
    (folder / "silence").mkdir()
    soundfile.write(folder / "silence/tape.wav", np.zeros(5 * SAMPLE_RATE), SAMPLE_RATE)
    words = ("--align", "silence/tape.wav", "book.txt", "--output", "x.json", "--flat_start")
    with pytest.raises(DataError, match="too few pauses"):
        command.align_files(request(*words), None)
    (folder / "page.txt").write_text(LINES[0], encoding="utf-8")
    words = ("--align", "tape.wav", "page.txt", "--output", "x.json", "--flat_start")
    with pytest.raises(DataError, match=r"page\.txt: the text is too short"):
        command.align_files(request(*words), None)
    assert not (folder / "x.json").exists()


def test_folders_of_pairs(folder, capsys):
    for name in ("tapes/one", "books/one"):
        (folder / name).mkdir(parents=True)
    tape(folder / "tapes/one/a\u0308.wav", LINES[:3])
    tape(folder / "tapes/b.wav", LINES[3:])
    tape(folder / "tapes/alone.wav", LINES[:1])
    (folder / "tapes/broken.wav").write_bytes(b"RIFF")
    (folder / "books/one/\u00e4.txt").write_text("\n".join(LINES[:3]), encoding="utf-8")
    (folder / "books/b.txt").write_text("\n".join(LINES[3:]), encoding="utf-8")
    (folder / "books/broken.txt").write_text("a", encoding="utf-8")
    tape(folder / "tapes/old.wav", LINES[:3])
    (folder / "books/old.txt").write_text("\n".join(LINES[:3]), encoding="utf-16")
    (folder / "books/unread.txt").write_text("a", encoding="utf-8")
    asked = request("--align", "tapes", "books", "--output", "aligned.json")
    told = capsys.readouterr().err
    assert "alone.wav" in told and "unread.txt" in told
    with pytest.raises(DataError, match="2 of 4"):
        command.align_files(asked, recogniser)
    told = capsys.readouterr().err
    assert "broken.wav" in told and "old.txt: it is not UTF-8" in told
    found = [(row["audio_filepath"], row["text"]) for row in rows_of(folder / "aligned.json")]
    assert found == [
        *(("tapes/b.wav", line) for line in LINES[3:]),
        *(("tapes/one/a\u0308.wav", line) for line in LINES[:3]),
    ]


def test_a_tape_that_begins_and_ends_with_speech(folder):
    places = tape(folder / "tape.wav", LINES, lead=0.0)
    rows = align(LINES)
    assert [row["text"] for row in rows] == LINES
    assert rows[0]["offset"] < 0.06
    assert abs(rows[-1]["offset"] + rows[-1]["duration"] - places[-1][1]) < 0.06


def test_numbers_of_lines_are_a_part_of_those_that_are_read(folder):
    tape(folder / "tape.wav", [LINES[0], f"twelve {LINES[1]}", *LINES[2:]])
    rows = align([f"{number}. {line}" for number, line in enumerate(LINES)])
    assert [row["text"] for row in rows] == [LINES[0], f"1. {LINES[1]}", *LINES[2:]]
    # A year is longer than the part beside a sentence in which its pause is looked for.
    year = "nineteen ninety nine"
    tape(folder / "tape.wav", [*LINES[:2], f"{LINES[2]} {year}", *LINES[3:]])
    rows = align([*LINES[:2], f"{LINES[2]} 1999.", *LINES[3:]])
    assert LINES[2] not in "".join(row["text"] for row in rows) and len(rows) == 5
    left = rows_of(folder / "aligned_left_out.json")
    assert [row["text"] for row in left if "text" in row] == [f"{LINES[2]} 1999."]


def test_two_files_of_one_name_are_refused(folder):
    for place in ("tapes", "books"):
        (folder / place).mkdir()
    tape(folder / "tapes/a.wav", LINES)
    (folder / "tapes/._a.wav").write_bytes(b"a Mac's")
    for name in ("a.txt", "a.md"):
        (folder / "books" / name).write_text("\n".join(LINES), encoding="utf-8")
    words = ("--align", "tapes", "books", "--output", "x.json")
    with pytest.raises(UsageError, match=r"books/a\.md and books/a\.txt have the same name"):
        request(*words)
    (folder / "books/a.md").unlink()
    assert request(*words).pairs == [(Path("tapes/a.wav"), Path("books/a.txt"))]


def test_nothing_is_written_for_another_text(folder, capsys):
    tape(folder / "tape.wav", LINES)
    with pytest.raises(DataError, match="nothing was found"):
        align(["Quixotic \u0437\u0435\u0431\u0440\u044b jump."] * 40)
    warning = "the recogniser cannot write 29 % of its letters (\u0431 x 40, \u0435 x 40"
    assert warning in capsys.readouterr().err
    names = [path.name for path in sorted(folder.iterdir())]
    assert names == ["aligned_left_out.json", "book.txt", "tape.wav"]


def test_a_signal_ends_all_pairs_and_what_was_aligned_is_kept(folder):
    for name in "ab":
        tape(folder / f"{name}.wav", LINES)
        (folder / f"{name}.txt").write_text("\n".join(LINES), encoding="utf-8")
    before = sorted(folder.iterdir())
    seconds = [0.0]

    def stopped_later(batch):
        seconds[0] += batch["audio"].shape[1] / SAMPLE_RATE
        if seconds[0] > 1.5 * soundfile.info("a.wav").duration:
            raise Stopped("stopped by SIGTERM", 143)
        return log_probs_of(batch)

    asked = request("--align", ".", ".", "--output", "aligned.json")
    with pytest.raises(Stopped):
        command.align_files(
            asked, lambda: dataclasses.replace(recogniser(), log_probs=stopped_later)
        )
    partial = folder / "aligned.json.partial"
    assert sorted(folder.iterdir()) == sorted([*before, partial])
    assert {row["audio_filepath"] for row in rows_of(partial)} == {"a.wav"}


def test_texts_that_somebody_has_mended_are_kept(folder):
    tape(folder / "tape.wav", LINES)
    align(LINES)
    first = (folder / "aligned.json").read_text(encoding="utf-8")
    mended = first.replace("old man", "young man").replace('": ', '":')  # as the page saves it
    (folder / "aligned.json").write_text(mended, encoding="utf-8")
    align(LINES)
    assert (folder / "aligned.json").read_text(encoding="utf-8") == first
    assert (folder / "aligned.json.earlier-1").read_text(encoding="utf-8") == mended


def test_the_list_of_what_is_left_out_is_that_of_the_last_run(folder, capsys):
    tape(folder / "tape.wav", LINES)
    align([*LINES, "nobody reads this line"])
    align(LINES)
    assert not (folder / "aligned_left_out.json").exists()
    assert "nothing is left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, message",
    [
        ("tape.wav missing.txt --output a.json", "No such file"),
        ("missing.wav book.txt --output a.json", "missing.wav: no such file"),
        ("tape.wav . --output a.json", "two files or two folders"),
        ("tape.wav book.html --output a.json", "and a text such as book.txt"),
        ("book.txt tape.wav --output a.json", "name a recording, and a text"),
        ("*.wav *.txt --output a.json", "two files or two folders"),
        ("tape.wav book.txt --output book.txt", ".txt cannot be written"),
        ("tape.wav book.txt --output a --output_format jsonl", "name it as --output x.json"),
        ("tape.wav book.txt --output other.json", "it exists"),
        ("tape.wav book.txt --output .", "it is a folder"),
    ],
)
def test_requests_that_are_refused(folder, words, message):
    (folder / "tape.wav").write_bytes(b"")
    (folder / "book.txt").write_text("A text.", encoding="utf-8")
    (folder / "other.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        request("--align", *words.split())


@pytest.mark.parametrize("pieces", ["▁ab a b ▁ <unk>", "▁AB A B ▁ <UNK>"])
def test_pieces_write_a_text_in_the_other_case(pieces):
    pieces = pieces.split()

    def encode(text: str) -> list[int]:
        return [pieces.index(c) if c in pieces else 4 for c in text.replace(" ", "▁")]

    vocabulary = of_pieces(pieces, "▁", 5, 4, encode)
    expected = [1, 2, 3, 1, HOLE]
    assert vocabulary.encode("ab ak") == vocabulary.encode("AB AK") == expected
