"""Chinese, Korean and Japanese texts in Latin letters, as Coqui's XTTS reads them."""

import functools
import itertools
import re
import string
from collections.abc import Callable

from common.errors import RunError, require

# --- Chinese --------------------------------------------------------------------------------------

DIGITS = "零一二三四五六七八九"
TWO = "两"  # 2 before a unit
POINT = "点"
# Powers of ten with a name, and their names.
UNITS = dict(zip([1, 2, 3, 4, *range(8, 48, 4)], "十百千万亿兆京垓秭穰沟涧正载", strict=True))
# Counting words that follow a number, of one character.
COUNTED = (
    "丈世丘丝两个丸代令件伏位冬出刀分刻勺匹升单卮厘双叠口只合名周啖回场块坡堂堆墙壳壶夏夜天头季客"
    "家寸对寻尺尾层山岁岭常幢年座张忽户手扎打担挑捆撮支斗斛斤日旬时春曲更月本条杯板枝根桶棵毫江泡"
    "溪炮煲片瓶盆盏盒盘石砣碗碟秋秒程窠笼管箩箱篮簋粒纪线罐网罗群脚腔袋袭课贯贴跳身辆辈道里针钟钧"
    "钱钵铢铺锅锱阙队阵面页顶颗首"
)
# Marks that become a comma, with those of ASCII.
MARKS = (
    "·–—‘’‛“”„‟…‧、。〃〈〉《》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿﹏！＂＃＄％"
    "＆＇（）＊＋，－／：；＜＝＞？＠［＼］＾＿｀｛｜｝～｟｠｡｢｣､"
)
_COMMAS = str.maketrans(dict.fromkeys(MARKS + string.punctuation, ","))
_NUMBER = r"\d+(?:\.\d+)?"
_DAY = r"\d{1,2}月(?:\d{1,2}[日号])?"
_AMOUNT = "(?:亿|千万|百万|[万千百元块角毛分])"


def pinyin(text: str) -> str:
    """Chinese characters as syllables with the number of their tone; others as they are."""
    library = require("pypinyin", "Chinese text")
    syllables = library.pinyin(
        text, style=library.Style.TONE3, heteronym=False, neutral_tone_with_five=True
    )
    return "".join(choices[0] for choices in syllables)


def chinese_numbers(text: str) -> str:
    """A Chinese text with its numbers in words, and with commas for all other marks.

    Each kind of number is searched in the whole text, and then the first occurrence of each number
    found is replaced, wherever that is: so does Coqui's code."""
    text = f"^{text}$"
    for pattern, read in _STEPS:
        if pattern == "％":
            text = text.replace("％", "%")
        for written in re.findall(pattern, text):
            text = text.replace(written, read(written), 1)
    return text.lstrip("^").rstrip("$").translate(_COMMAS)


def cardinal(written: str) -> str:
    """A number with or without decimals in words: 102.5 is 一百零二点五."""
    whole, _, decimals = written.partition(".")
    symbols = _places(whole) if len(whole) > 1 else [DIGITS[int(whole)]]
    if decimals:
        symbols += [POINT, *spelled(decimals)]
    units = set(UNITS.values()) - {UNITS[1]}
    for i, symbol in enumerate(symbols):
        follows_unit = i == 0 or symbols[i - 1] in units
        if symbol == DIGITS[2] and symbols[i + 1 : i + 2] and symbols[i + 1] in units:
            symbols[i] = TWO if follows_unit else symbol
    words = "".join(symbols)
    if words.startswith(POINT):
        return DIGITS[0] + words
    return words.removeprefix(DIGITS[1]) if words.startswith(DIGITS[1] + UNITS[1]) else words


def _places(written: str) -> list[str]:
    """The digits and units of a whole number; nothing of 0."""
    digits = written.lstrip("0")
    if not digits:
        return []
    if len(digits) == 1:
        zero = [DIGITS[0]] if len(written) > 1 else []
        return [*zero, DIGITS[int(digits)]]
    power = max(power for power in UNITS if power < len(digits))
    return [*_places(written[:-power]), UNITS[power], *_places(digits[-power:])]


def spelled(written: str) -> str:
    """The digits of a text, one by one; what is not a digit is left out."""
    return "".join(DIGITS[int(character)] for character in written if character.isdecimal())


def _date(written: str) -> str:
    """2016年5月3日: the year digit by digit, month and day as numbers."""
    year, mark, rest = written.rpartition("年")
    return spelled(year) + mark + re.sub(r"\d+", lambda match: cardinal(match[0]), rest)


def _money(written: str) -> str:
    return re.sub(_NUMBER, lambda match: cardinal(match[0]), written)


def _fraction(written: str) -> str:
    numerator, denominator = written.split("/")
    return f"{cardinal(denominator)}分之{cardinal(numerator)}"


# What is searched, in this order, and how it is read. Each pattern has at most one group, the part
# that is replaced.
_STEPS: tuple[tuple[str, Callable[[str], str]], ...] = (
    (rf"\D((?:[089]\d|(?:19|20)\d{{2}})年(?:{_DAY})?|{_DAY})", _date),
    (rf"\D({_NUMBER}[多余几]?{_AMOUNT}(?:\d{_AMOUNT}?)?)", _money),
    # mobile telephones, then others
    (r"\D((?:\+?86 ?)?1(?:[38]\d|5[0-35-9]|7[678]|9[89])\d{8})\D", spelled),
    (r"\D((?:0(?:10|2[1-3]|[3-9]\d{2})-?)?[1-9]\d{6,7})\D", spelled),
    (r"\d+/\d+", _fraction),
    ("％", str),
    (rf"{_NUMBER}%", lambda written: "百分之" + cardinal(written.removesuffix("%"))),
    (rf"({_NUMBER})[多余几]?(?:[{COUNTED}]|[千微][克米])", cardinal),
    (r"\d{4,32}", spelled),
    (_NUMBER, cardinal),
    ("[a-zA-Z]+二[a-zA-Z]+", lambda written: written.replace(DIGITS[2], "2")),  # B2B
)

# --- Korean ---------------------------------------------------------------------------------------

FIRST, LAST = 0xAC00, 0xD7A3  # syllables in Unicode
# The letters of the academic romanisation, in Unicode's order; - stands for none.
INITIALS = "g kk n d tt l m b pp s ss - j jj ch k t p h".replace("-", "").split(" ")
VOWELS = "a ae ya yae eo e yeo ye o wa wae oe yo u wo we wi yu eu ui i".split(" ")
FINALS = (
    "- g kk gs n nj nh d l lg lm lb ls lt lp lh m b bs s ss ng j ch k t p h".replace("-", "")
).split(" ")


def romanise(text: str) -> str:
    """Korean syllables in Latin letters, others as they are. A hyphen stands before a syllable that
    begins with a vowel, or whose first consonant could be read with the syllable before."""
    letters = []
    last_consonant = None  # the last consonant of the syllable before, if there is one
    for character in text:
        number = ord(character) - FIRST
        if not 0 <= number <= LAST - FIRST:
            letters.append(character)
            last_consonant = None
            continue
        initial = INITIALS[number // 588]
        final = FINALS[number % 28]
        if last_consonant is not None and (not initial or last_consonant + initial in _ambiguous()):
            letters.append("-")
        letters.append(initial + VOWELS[number // 28 % 21] + final)
        last_consonant = final
    return "".join(letters)


@functools.cache
def _ambiguous() -> set[str]:
    """Consonants between vowels that can be divided into a final and an initial in several ways,
    one of which may be none. The division after the last letter does not count."""
    return {
        final + initial
        for final, initial in itertools.product(FINALS, INITIALS)
        if sum(
            (final + initial)[:i] in FINALS and (final + initial)[i:] in INITIALS
            for i in range(len(final + initial))
        )
        > 1
    }


# --- Japanese -------------------------------------------------------------------------------------


def romaji(text: str) -> str:
    """Japanese in Latin letters."""
    return _cutlet().romaji(text)


@functools.cache
def _cutlet():
    library = require("cutlet", "Japanese text")
    try:
        return library.Cutlet()
    except RuntimeError:  # of MeCab, over many lines
        raise RunError("Japanese text needs a dictionary: pip install unidic-lite") from None
