"""Texts as they are read aloud."""

import functools

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
    assert reading.texts_of([str(tmp_path / "a.txt")]) == ["ሰላም ለሁሉም", "no"]
    assert reading.texts_of(["a", "b "]) == ["a", "b"]
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


def test_letters_that_are_left_out_are_counted():
    text = "Nzúngu yé obvέ, nω ə˩kʰɯ ISTANBUL İ"

    def left_out(text: str, language: str) -> dict:
        return reading.left_out([text], functools.partial(reading.read, language=language))

    lost = {"ú": 1, "é": 1, "έ": 1, "ω": 1, "ə": 1, "˩": 1, "ɯ": 1}
    assert left_out(text, "am") == lost and not left_out("ሰላም እናት፟ በ10", "am")
    for language in ("mdw", "tr", "vi"):  # tone letters are kept, too
        assert not left_out(text, language)
    assert reading.plain("Ma˥꞉ 😀^", "mdw") == "ma˥꞉"
