"""Texts as they are read aloud."""

import pytest

from common.errors import UsageError
from speech.writing import reading


@pytest.mark.parametrize(
    ("name", "code"),
    [("en-US", "en"), ("zh", "zh-cn"), ("ZH_tw", "zh-cn"), ("zh-cn", "zh-cn"), ("Amharic", "am"),
     ("deu", "de"), ("yue", "yue"), ("", "")],
)  # fmt: skip
def test_codes_of_languages(name, code):
    assert reading.code_of(name) == code


def test_texts_of_a_flag(tmp_path):
    (tmp_path / "a.txt").write_text("ሰላም  ለሁሉም\n\nno\n", encoding="utf-8")
    assert reading.texts_of([str(tmp_path / "a.txt")]) == ["ሰላም ለሁሉም", "no"] and reading.texts_of(
        ["a", "b "]
    ) == ["a", "b"]
    with pytest.raises(UsageError, match="--show_text: there is no text"):
        reading.texts_of([" "], "--show_text")


@pytest.mark.parametrize(
    ("language", "text", "read"),
    [
        ("vi", "Tôi có 25 con, 1.234 nhà", "tôi có hai mươi lăm con, một nghìn hai trăm ba mươi bốn"
         " nhà"),
        ("fi", "12,5", "kaksitoista pilkku viisi"),
        ("vi", "0,05 và 12.5; 3,14159", "không phẩy không năm và mười hai phẩy năm; ba phẩy một"
         " bốn một năm chín"),
        ("bn", "0.05", "শূন্য দশমিক শূন্য পাঁচ"),
        ("fa", "0.05", "صفر ممیز صفر پنج"),
        ("vi", "12.5.2016, 3:45", "mười hai năm hai nghìn lẻ mười sáu, ba bốn mươi lăm"),
        ("id", "0912 345 678", "nol sembilan satu dua tiga ratus empat puluh lima enam ratus tujuh"
         " puluh delapan"),
        ("vi", "covid19 5km.", "covid mười chín năm km."),
        ("xx", "25", "25"),
    ],
)  # fmt: skip
def test_numbers_of_other_languages(language, text, read):
    assert reading.plain_numbers(text.lower(), language) == read
