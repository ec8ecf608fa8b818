"""Texts as they are read aloud: numbers in words, without what is not heard; and the texts that
flags name."""

import contextlib
import functools
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable

from common import files
from common.errors import UsageError, require
from speech import amharic
from speech.data.fields import check_encoding
from speech.writing import languages
from speech.writing.text import is_letter, normalise
from speech.writing.unknown import named

AMHARIC = "am"
# Quotes, and marks that stand for others.
MARKS = str.maketrans({**dict.fromkeys('"“”„‟«»‹›〝〞＂'), **dict.fromkeys("’‘", "'"), "…": "..."})
WITH_DOTLESS = ("az", "crh", "kaa", "tr", "tt")  # languages whose I becomes ı
# Not heard, above all emoji, and what shapes or combines glyphs.
UNHEARD = ("So", "Sk", "Me", "Cc", "Cf", "Cn", "Co", "Cs")
VARIANTS = range(0xFE00, 0xFE10)  # select the glyph of the character before
SIGNS = "&@%#$£°"
RARE_SIGNS = "№℃℉"
FRACTIONS = "¼½¾\u2150-\u215f"
NUMBERED = "²³\u2460-\u249b"  # powers, and numbers in circles
# They are spoken as words.
NOT_IN_WORDS = re.compile(f"[0-9{SIGNS}{RARE_SIGNS}€¥₦₩₪₫₹₺₽+=×÷±−‰§{FRACTIONS}{NUMBERED}]")
FILE = re.compile(r"\S+\.(txt|csv|tsv|json)")  # an argument that must be the name of a file
# "5km" gets a space, "0912 345 678" is not grouped, and "12.5.2016" has no decimals.
BESIDE_LETTERS = re.compile(r"(?<=[^\W\d_])(?=[0-9])|(?<=[0-9])(?=[^\W\d_])")
GROUPS = re.compile(
    r"(?<![0-9.,])(?<![0-9][\u00a0 ])[1-9][0-9]{0,2}([.,\u00a0 ])[0-9]{3}(?:\1[0-9]{3})*(?![0-9])"
)
PLAIN_DECIMAL = re.compile(r"(?<![0-9])(?<![0-9][.,])[0-9]+[.,][0-9]+(?![.,]?[0-9])")
WITH_ZERO = re.compile("(?<![0-9])0[0-9]+")
BETWEEN = re.compile("(?<=[0-9])[.,:/](?=[0-9])")  # numbers of a date or a time
# How a decimal point is read where num2words reads 0.05 as 0.5, or rounds to two places.
POINTS = {"bn": "দশমিক", "fa": "ممیز", "vi": "phẩy"}
UNREAD = re.compile("[0-9]")  # in a text whose numbers cannot be read
DIGITS = re.compile("[0-9]+")
ETHIOPIC = re.compile(amharic.ETHIOPIC)


def code_of(name: str) -> str:
    """The code of a language that is written in any way (en-US, eng, Amharic), as Coqui writes it."""
    code = languages.code_of(name)
    return "zh-cn" if code == "zh" else code


def texts_of(wanted: list[str], flag: str = "--synthesize") -> list[str]:
    """The texts of a flag: the name of a file stands for its lines. Raises `UsageError`."""
    lines = wanted
    if len(wanted) == 1 and os.path.isfile(wanted[0]):
        lines = files.read_text(wanted[0]).split("\n")  # other separators may be within a text
    elif len(wanted) == 1 and FILE.fullmatch(wanted[0]):
        raise UsageError(f"{flag} {wanted[0]}: no such file")
    for line in lines:
        try:
            check_encoding(line)
        except ValueError:
            raise UsageError(
                f"{flag} {line[:40]!r}: it is not UTF-8, or the locale is not: set LC_ALL=C.UTF-8"
            ) from None
    texts = [normalise(line) for line in lines]
    texts = [text for text in texts if text]
    if not texts:
        raise UsageError(f"{flag}: there is no text")
    return texts


def plain(text: str, language: str) -> str:
    """A text in lower case, numbers in words if num2words
    knows the language, without quotes, emoji and what is not heard."""
    text = text.replace("İ", "i")  # its small letter would have two dots
    if language in WITH_DOTLESS:
        text = text.replace("I", "ı")
    text = text.lower().translate(_HEARD)
    return " ".join(plain_numbers(text, language).split())


def read(text: str, language: str) -> str:
    """The text as it is read aloud: Amharic by its own reader, other languages by `plain`."""
    return amharic.spoken(text) if language == AMHARIC else plain(text, language)


def left_out(texts: Iterable[str], read: Callable[[str], str]) -> Counter[str]:
    """The letters of texts that `read` leaves out, or whose marks, with their counts."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(unicodedata.normalize("NFC", text).replace("İ", "i").lower())

    def is_lost(letter: str) -> bool:
        is_unheard = unicodedata.category(letter) == "Me" or ord(letter) in VARIANTS
        if is_unheard or not is_letter(letter):
            return False
        if not letter.isalpha():
            carrier = "ሀ" if ETHIOPIC.match(letter) else "a"
            return read(carrier + letter) == read(carrier)
        heard = unicodedata.normalize("NFD", read(letter))
        return not heard or not set(unicodedata.normalize("NFD", letter)[1:]) <= set(heard)

    return Counter({letter: count for letter, count in counts.items() if is_lost(letter)})


def warn_left_out(
    name: str, texts: Iterable[str], read: Callable[[str], str], language: str
) -> None:
    """Says which letters of the set `name` `read` leaves out."""
    if lost := left_out(texts, read):
        print(
            f"warning: {name} set: what is read in {language} leaves out letters, or marks on"
            f" them: {named(lost)}"
        )


def fault(text: str, language: str, unread: re.Pattern = NOT_IN_WORDS) -> tuple[str, str] | None:
    """Why what was read of a text cannot be trained on, as (reason, details): it has signs that are
    `unread`, which nothing here says in words, or no letters. None if it can."""
    if signs := list(dict.fromkeys(unread.findall(text))):
        return (
            f"numbers or signs that are not read in words in {language}: write them as words",
            f"{' '.join(signs[:20])} in {text[:40]!r}",
        )
    if not any(map(str.isalnum, text)):
        return "the text has no letters", repr(text[:40])
    return None


class _Heard(dict):
    """For str.translate: "" for what is not heard, and 0 to 9 for digits of other scripts."""

    def __missing__(self, code: int) -> str:
        character = chr(code)
        kind = unicodedata.category(character)
        is_kept = kind not in UNHEARD or character in SIGNS + RARE_SIGNS or character.isspace()
        is_kept |= is_letter(character) and kind != "Me"
        heard = character if is_kept and code not in VARIANTS else ""
        self[code] = str(unicodedata.digit(character)) if kind == "Nd" else heard
        return self[code]


_HEARD = _Heard(MARKS)


def plain_numbers(text: str, language: str) -> str:
    """A text with its numbers in words, if num2words knows the language. A comma, full stop
    or space before each three digits groups them. A number that begins with 0, such as a telephone
    number, is read digit by digit."""
    if not UNREAD.search(text):
        return text
    library = require("num2words", "a text with numbers")
    if language not in library.CONVERTER_CLASSES:
        return text
    text = BESIDE_LETTERS.sub(" ", text)
    text = GROUPS.sub(lambda match: re.sub("[^0-9]", "", match[0]), text)
    text = PLAIN_DECIMAL.sub(lambda match: decimal_words(match[0], language), text)
    text = BETWEEN.sub(" ", text)
    text = WITH_ZERO.sub(lambda match: spelled(match[0], language), text)
    return DIGITS.sub(lambda match: number_words(match[0], language), text)


@functools.lru_cache(10_000, typed=True)  # 1 and 1.0 differ
def words_of(number: int | float, language: str, **options) -> str:
    """A number in words. Raises what num2words raises, which differs between languages."""
    import num2words

    return num2words.num2words(number, lang=language, **options)


def decimal_words(written: str, language: str) -> str:
    if language in POINTS:
        whole, decimals = re.split("[.,]", written)
        words = [number_words(whole, language), POINTS[language], spelled(decimals, language)]
        return " ".join(words)
    try:
        return words_of(float(written.replace(",", ".")), language)
    except Exception:
        return " ".join(number_words(part, language) for part in re.split("[.,]", written))


def spelled(digits: str, language: str) -> str:
    return " ".join(words_of(int(digit), language) for digit in digits)


def number_words(digits: str, language: str, kind: str = "cardinal") -> str:
    """Digits in words. A number that is too large for num2words is read digit by digit; an ordinal
    that it lacks is read as a cardinal. The digits, if it lacks the language."""
    for options in ({"to": kind}, {}):
        with contextlib.suppress(Exception):  # of many kinds
            return words_of(int(digits), language, **options)
    with contextlib.suppress(Exception):
        return spelled(digits, language)
    return digits
