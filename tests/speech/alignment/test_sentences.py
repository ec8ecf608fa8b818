"""A book in pieces: sentences in several scripts, parts of long ones, verses and wrapped lines."""

import textwrap

import pytest

from common.errors import DataError, UsageError
from speech.alignment.sentences import LONGEST, join, read_book


@pytest.fixture
def read(tmp_path):
    def of(text: str | bytes) -> list[str]:
        path = tmp_path / "book.txt"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return [piece.text for piece in read_book(str(path))]

    return of


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("One. Two! Three? Four… Five", ["One.", "Two!", "Three?", "Four…", "Five"]),
        ("It is 3.5 m. “Go.” He went.", ["It is 3.5 m.", "“Go.”", "He went."]),
        ("1. One. 2. Two (3). 4", ["1. One.", "2. Two (3).", "4"]),
        ("हांव घर वचता। तूं खंय?", ["हांव घर वचता।", "तूं खंय?"]),
        ("ሰላም ነው። ውሃ ጠጣ።", ["ሰላም ነው።", "ውሃ ጠጣ።"]),
        ("هل أنت؟ نعم.", ["هل أنت؟", "نعم."]),
        ("你好。我走了！「来。」他说", ["你好。", "我走了！", "「来。」", "他说"]),
    ],
)
def test_sentences_of_several_scripts(read, text, pieces):
    assert read(text) == pieces


def test_a_byte_order_mark_and_blank_lines_are_no_text(read):
    assert read(b"\xef\xbb\xbfTitle\r\n\r\n \t\r\nA text.\r\n* * *\r\n") == ["Title", "A text."]


def test_words_that_an_editor_has_cut_are_whole(read):
    book = (
        "The pre- and post-war houses of the old town were painted in yellow and wh-\n"
        "ite, and nobody had ever thought that they would at some time be more beauti\u00ad\n"
        "ful than they had been when the old king came to the town to see all of them\n"
        "once more."
    )
    text = " ".join(read(book))
    assert "pre- and post-war" in text and "and wh-ite, and" in text and "beautiful than" in text


@pytest.mark.parametrize("width", [62, 72, 80, 100])
def test_wrapped_lines_are_joined(read, width):
    sentences = [
        "The rain had fallen on the hills for more than a week without a break.",
        "Nobody went out to the fields.",
        "Then the old woman who lives beside the mill came to the door and sang.",
    ]
    book = f"A title\n\n{textwrap.fill(' '.join(sentences), width)}\n\nThe end"
    assert read(book) == ["A title", *sentences, "The end"]


def test_verses_are_not_joined(read):
    verses = ["The rain is here", "and it is falling on the hill", "it sings", "and sings"]
    assert read("\n".join(verses)) == verses


def test_long_sentences_are_divided_at_commas(read, tmp_path):
    long = (
        "When the rain had fallen for a week, and the river was high, they left; nobody came back."
    )
    assert read(long) == [
        "When the rain had fallen for a week,",
        "and the river was high, they left;",
        "nobody came back.",
    ]
    pieces = read_book(str(tmp_path / "book.txt"))
    assert [piece.is_end for piece in pieces] == [False, False, True]
    assert join([piece.text for piece in pieces]) == long


def test_a_text_without_any_mark_is_divided_between_words(read):
    text = " ".join(["word"] * 200)
    pieces = read(text)
    assert join(pieces) == text and max(map(len, pieces)) <= LONGEST


def test_texts_are_joined_as_the_script_is_written():
    assert join(["Yes,", "we do."]) == "Yes, we do."
    assert join(["你好，", "再见。"]) == "你好，再见。"


def test_what_cannot_be_read_is_named(tmp_path):
    path = tmp_path / "book.txt"
    with pytest.raises(UsageError, match="No such file"):
        read_book(str(path))
    path.write_text(" \n\n", encoding="utf-8")
    with pytest.raises(DataError, match="no text"):
        read_book(str(path))
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="UTF-8"):
        read_book(str(path))
