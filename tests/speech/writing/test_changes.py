"""What is said of texts that are changed before they are used."""

import pytest

from speech.writing import text
from speech.writing.changes import Changes


@pytest.mark.parametrize("same", ["one two", " one  two\n", "e\u0301", "a\u00a0b"])
def test_spaces_and_composed_letters_are_no_changes(same):
    changes = Changes(text.normalise)
    assert changes(same) == text.normalise(same)
    assert changes.report() == ""


def test_characters_that_go_are_named_with_their_counts_and_an_example():
    changes = Changes(
        lambda value: text.normalise(value).lower().replace("˩", "").replace("ʰ", "h")
    )
    texts = ["Ab", "ə˩kʰɯ˩", "one", "a\u200bb"]
    assert [changes(each) for each in texts] == ["ab", "əkhɯ", "one", "ab"]
    assert changes.report() == (
        "texts: 3 of 4 are changed before they are used; left out or replaced: ˩ x 2, ʰ x 1,"
        " U+200B ZERO WIDTH SPACE x 1; letters in the other case x 1; `ə˩kʰɯ˩` becomes `əkhɯ`"
    )


def test_the_example_shows_the_place_of_the_change():
    changes = Changes(lambda value: value.replace("˩", ""))
    changes("x" * 500 + "˩" + "y" * 500)
    assert f"`{'x' * 20}˩{'y' * 39}` becomes `{'x' * 20}{'y' * 40}`" in changes.report()
