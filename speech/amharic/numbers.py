"""Numbers in words, as Amharic text writes them: clock times, fractions, dates, scores, telephone
numbers, amounts and signs.

Number words: CLDR's rules for Amharic (rbnf/am.xml) have መቶ without አንድ, ነጥብ and ordinals in -ኛ.
Tens, አስራ, ሺህ and ዜሮ are those of speech, where CLDR has ሁለት አስር, አስር, ሺ and ባዶ. Scores are
written in words in sports news ("ሁለት ለዜሮ", "4 ለ 1"). Service numbers (8282) are said digit by digit
only beside a word of telephones or services. What no source was found for is in the list of
recipes/xtts_amharic.md. No speaker of Amharic has checked this yet.
"""

import re
from functools import lru_cache

from speech.amharic.letters import LETTER, SYLLABLES

ONES = "ዜሮ አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ".split()
TENS = "- አስር ሃያ ሰላሳ አርባ ሃምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
TEEN = "አስራ"
HUNDRED = "መቶ"
SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (10**3, "ሺህ"))
LARGEST = 10**9  # without commas; longer digit strings are phone and account numbers
POINT = "ነጥብ"
RANGE = "እስከ"
TO = "ለ"  # 3-1
FROM = "ከ"  # before minutes, and before the fraction of 2 1/3
NEGATIVE = "ነጌቲቭ"
PLUS = "ፕላስ"  # before a number
MINUS = "ሲቀነስ"
DIVIDED = "ሲካፈል"
NUMBER = "ቁጥር"  # 5 of #5
HOUR, MINUTE, SECOND = "ሰዓት", "ደቂቃ", "ሰከንድ"
HALF, QUARTER, AND_A_HALF = "ግማሽ", "ሩብ", "ተኩል"  # 1/2, 1/4, and the half of 2 1/2 and of 8:30
IRREGULAR_ORDINALS = {"ዘጠኝ": "ዘጠነ", "ሺህ": "ሺ"}  # the others: the last letter in its first order
PREFIXES = ("በ", "ከ", "ለ", "የ", "ስለ", "እንደ", "እየ")  # they stay attached to a number
SUFFIX = "(?:ነት)?(?:ዎች|ዎቹ)?[ውዋ]?[ንምናስ]{0,2}"  # these also

CODES = {"etb": "ብር", "usd": "ዶላር", "eur": "ዩሮ", "gbp": "ፓውንድ"}  # before or after an amount
CURRENCIES = {"$": "ዶላር", "€": "ዩሮ", "£": "ፓውንድ", "¥": "የን"}
PERCENT = {"%": "በመቶ", "‰": "በሺህ"}
# Between numbers.
OPERATORS = {
    "+": "ሲደመር", "−": MINUS, "×": "ሲባዛ", "*": "ሲባዛ", "x": "ሲባዛ", "÷": DIVIDED, "=": "እኩል ይሆናል",
}  # fmt: skip
UNITS = {
    "ሜ": "ሜትር", "ሊ": "ሊትር", "°c": "ዲግሪ ሴንቲግሬድ", "°": "ዲግሪ", "km/h": "ኪሎ ሜትር በሰዓት",
    "km": "ኪሎ ሜትር", "cm": "ሴንቲ ሜትር", "mm": "ሚሊ ሜትር", "kg": "ኪሎ ግራም", "mg": "ሚሊ ግራም",
}  # fmt: skip
# Words near 1-3 by which it is a score, not a range.
SCORES = re.compile(
    f"(?<!{LETTER})[በከለየ]?(?:ጎል|ግብ|ውጤት|አቻ)(?:ዎች|ች)?[ንምና]{{0,2}}(?!{LETTER})|[አተ]ሸ[ነንና][ፈፋፍፎፏፊ]"
)
# Words before 3:16 and 1/2 by which they are a verse and the number of an article.
BOOKS = re.compile(
    f"(?<!{LETTER})[በከለየ]?(?:ዘፍ|ዘፍጥረት|ዘጸ|ዘጸአት|ዘሌ|ዘኁ|ዘዳ|ኢያ|መሳ|ሩት|ሳሙ|ነገ|መዝ|መዝሙር|ምሳ|ምሳሌ|መክ|ኢሳ|ኢሳይያስ|ኤር"
    "|ሕዝ|ዳን|ዳንኤል|ሆሴ|ማቴ|ማቴዎስ|ማር|ማርቆስ|ሉቃ|ሉቃስ|ዮሐ|ዮሐንስ|ሐዋ|ሮሜ|ቆሮ|ቆሮንቶስ|ገላ|ኤፌ|ፊል|ቆላ|ተሰ|ጢሞ|ቲቶ|ዕብ|ያዕ"
    "|ጴጥ|ራእ|ራእይ|ራዕ|ራዕይ|ሱራ|ምዕራፍ|ምዕ|አንቀጽ|አንቀፅ|ቁጥር|ቁ)[.]? ?$"
)

NUMERALS = {chr(0x1369 + i): i + 1 for i in range(9)} | {
    chr(0x1372 + i): 10 * i + 10 for i in range(9)
}
NUMERALS |= {"፻": 100, "፼": 10_000}
GROUP = re.compile("(?:(?P<hundreds>[፲-፺]?[፩-፱]?)(?P<hundred>፻))?(?P<tens>[፲-፺]?)(?P<ones>[፩-፱]?)")


# --- Words of one number --------------------------------------------------------------------------


def _cardinal(value: int) -> str:
    """The words of an integer from 0 to 10^12 - 1."""
    if value == 0:
        return ONES[0]
    words = []
    for size, name in SCALES:
        if value >= size:
            words += [_cardinal(value // size), name]
            value %= size
    if value >= 100:
        if value >= 200:
            words.append(ONES[value // 100])
        words.append(HUNDRED)
        value %= 100
    if 10 < value < 20:
        words += [TEEN, ONES[value - 10]]
        value = 0
    if value >= 10:
        words.append(TENS[value // 10])
    if value % 10:
        words.append(ONES[value % 10])
    return " ".join(words)


def _cardinals(texts) -> str:
    return " ".join(_cardinal(int(text)) for text in texts)


def _digits(text: str) -> str:
    return " ".join(ONES[int(c)] for c in text if c.isdecimal())


@lru_cache(maxsize=2**14)
def _integer(text: str) -> str:
    """The words of "2016" and "1,000,000". Digit by digit with a leading zero or beyond the
    limit."""
    plain = text.replace(",", "")
    limit = LARGEST * 1000 if "," in text else LARGEST + 1
    if len(plain) > 12 or (plain[0] == "0" and plain != "0") or int(plain) >= limit:
        return _digits(plain)
    return _cardinal(int(plain))


def _decimal(text: str) -> str:
    """The words of "3.5" (digits after the point one by one), of "1.2.3", and of "1.000.000", whose
    points group thousands. The cents of an amount, 50,000.00, are not said if there are none."""
    if re.fullmatch(r"[1-9]\d{0,2}(?:[.]\d{3}){2,}", text):
        return _integer(text.replace(".", ","))
    if "," in text:
        text = re.sub(r"[.]00$", "", text)
    whole, *rest = text.split(".")
    rest = [_digits(rest[0])] if len(rest) == 1 else [_integer(part) for part in rest]
    return f" {POINT} ".join([_integer(whole), *rest])


def _ordinal(words: str) -> str:
    """ሁለት -> ሁለተኛ, ሃያ -> ሃያኛ."""
    *before, last = words.split()
    if last in IRREGULAR_ORDINALS:
        last = IRREGULAR_ORDINALS[last]
    elif SYLLABLES[last[-1]][1] == "ı":
        last = last[:-1] + chr(ord(last[-1]) - 5)  # from the sixth letter of its row to the first
    return " ".join([*before, last + "ኛ"])


def _fraction(above: str, below: str, short: bool = True) -> str:
    """The words of 2/3: ሁለት ሦስተኛ. `short`: ግማሽ and ሩብ."""
    if short and (int(above), int(below)) in ((1, 2), (1, 4)):
        return HALF if int(below) == 2 else QUARTER
    return f"{_integer(above)} {_ordinal(_integer(below))}"


def _time(hour: str, minute: str, second: str | None) -> str:
    words = f"{_cardinal(int(hour))} {HOUR}"
    if second is None and int(minute) in (15, 30):
        return f"{words} {AND_A_HALF}" if int(minute) == 30 else f"{words} {FROM}{QUARTER}"
    if int(minute) or second is not None:
        words += f" {FROM}{_cardinal(int(minute))} {MINUTE}"
    if second is not None:
        words += f" {FROM}{_cardinal(int(second))} {SECOND}"
    return words


# --- Chains of numbers ----------------------------------------------------------------------------

_TIME = re.compile(r"(\d|[01]\d|2[0-4])[:.]([0-5]\d)(?:[:.]([0-5]\d))?")
_FRACTION = re.compile(r"(\d{1,4})[/⁄](\d{1,4})")
_DATE = re.compile(
    r"\d{1,4}/\d\d?/\d{1,4}|\d\d?[.]\d\d?[.]\d{4}|\d{4}-\d\d?-\d\d?|\d\d?-\d\d?-\d{4}"
)
_YEARS = re.compile(r"(\d{4})[/-](\d\d|\d{4})")


class _Chain:
    """Integers that are joined by points, colons, slashes and hyphens, between what stands before
    and after them. `is_time`: whether the last of them is a clock time."""

    def __init__(self, before: str, after: str, has_hour: bool):
        self.before = before
        self.after = after
        self.has_hour = has_hour  # the word ሰዓት follows
        self.is_time = False

    @property
    def is_verse(self) -> bool:
        return bool(BOOKS.search(self.before))

    @property
    def is_sum(self) -> bool:
        signs = tuple(OPERATORS.values())
        return self.before.rstrip().endswith(signs) or self.after.lstrip().startswith(signs)

    def words(self, text: str) -> str:
        if text.isdecimal():
            return _integer(text)
        if ("፥" in text and "-" not in text) or _DATE.fullmatch(text):
            return _cardinals(re.findall(r"\d+", text))
        sides = text.split("-")
        if len(sides) > 1 and self.is_sum:
            return f" {MINUS} ".join(map(self._one, sides))
        if len(sides) > 2:
            return " ".join(map(_digits, sides))
        if len(sides) == 2:
            return self._pair(*sides)
        return self._one(text)

    def _pair(self, first: str, last: str) -> str:
        """The words of "5-10", a range or a score, of years or of a telephone number."""
        if not (first.replace(",", "").isdecimal() and last.replace(",", "").isdecimal()):
            return f"{self._one(first)} {RANGE} {self._one(last)}"  # of times or decimals
        a, b = first.replace(",", ""), last.replace(",", "")
        is_number = a == "0" or a[0] != "0"
        is_small = max(len(a), len(b)) <= 3 and is_number and (b == "0" or b[0] != "0")
        starts = self.before.endswith(FROM)
        if is_small and not starts and ((len(a), a) >= (len(b), b) or self._is_score()):
            return f"{_integer(a)} {TO}{_integer(b)}"
        if is_number and ((len(a), a) < (len(b), b) or (is_small and starts)):
            return f"{_integer(first)} {RANGE} {_integer(last)}"
        if _YEARS.fullmatch(f"{a}-{b}"):
            return _cardinals((a, b))
        return f"{_digits(a)} {_digits(b)}"

    def _is_score(self) -> bool:
        return bool(SCORES.search(self.before) or SCORES.search(self.after))

    def _one(self, text: str) -> str:
        """The words of numbers without hyphens."""
        time = _TIME.fullmatch(text)
        self.is_time = bool(time and (self.has_hour if "." in text else not self.is_verse))
        if self.is_time:
            return _time(*time.groups())
        if (pair := _FRACTION.fullmatch(text)) and self._is_fraction(text, *pair.groups()):
            return _fraction(*pair.groups())
        parts = re.split("[:/⁄፥]", text)
        if ":" in text and len(parts) == 2 and not self.is_verse and "." not in text:
            return f"{_integer(parts[0])} {TO}{_integer(parts[1])}"  # a ratio
        if len(parts) > 1 and self.is_sum:
            return f" {DIVIDED} ".join(map(_decimal, parts))
        return " ".join(map(_decimal, parts))

    def _is_fraction(self, text: str, above: str, below: str) -> bool:
        """Whether 2/3 is a fraction, not the number of an article, a day and month or a sum."""
        if "⁄" in text:
            return int(below) > 0
        is_usual = 1 < int(below) <= 10 or int(below) in (100, 1000)
        is_proper = 0 < int(above) < int(below) and above[0] != "0"
        return is_usual and is_proper and not self.is_verse and not self.is_sum


_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_CHAIN = rf"{_INTEGER}(?:[.:፥/⁄\-]{_INTEGER})*"
_AMOUNT = rf"{_CHAIN}(?: ?(?:ሺህ?|ሚሊዮን|ቢሊዮን)(?!{LETTER}))?"
_NUMBER = re.compile(
    rf"(?P<chain>{_CHAIN})(?:-?ተ?(?P<ordinal>ኛ))?"
    rf"(?:(?P<suffix>[ቱሩኙዱኑ][ንምና]{{0,2}}|{SUFFIX})(?!{LETTER}))?"
    rf"(?P<hour> ?ሰ[ዓአዐ]ት(?P<end>{LETTER}{{0,3}})(?!{LETTER}))?"
)
CONTEXT = 40  # characters


def _number(match: re.Match) -> str:
    """A chain of numbers in words, joined to what stands before and after it."""
    text = match.string
    before = text[max(0, match.start() - CONTEXT) : match.start()]
    after = text[match.end() : match.end() + CONTEXT]
    chain = _Chain(before, after, bool(match["hour"]))
    ordinal, suffix = match["ordinal"] or "", match["suffix"] or ""
    words = chain.words(match["chain"])
    hour = match["hour"] or ""
    if chain.is_time:
        suffix += match["end"] or ""
        hour = ""
    if ordinal and _FRACTION.fullmatch(match["chain"]):
        words = _fraction(*re.split("[/⁄]", match["chain"]), short=False)
    elif ordinal:
        words = _ordinal(words)
    elif suffix and ord(words[-1]) - 4 == ord(suffix[0]):  # 5ቱ is አምስቱ
        words = words[:-1]
    if hour and not hour.startswith(" "):
        hour = f" {hour}"
    letters = re.search(f"{LETTER}*$", before[-4:])[0]
    if before[-1:].isalnum() and letters not in PREFIXES:
        words = f" {words}"
    return f"{words}{suffix}{hour}{' ' if after[:1].isalnum() else ''}"


# --- Numbers in text ------------------------------------------------------------------------------

_PHONE = re.compile(r"(?<![\d.,:/-])(?:(\+)|(?=00|\(?0\d))(\(?\d[\d ()-]{6,24}\d)(?![\d/:])")
_CALLED = re.compile(
    rf"((?<!{LETTER})[በከለየ]?ስልክ{LETTER}{{0,3}}[ .:]{{0,3}}(?:ቁጥር{LETTER}{{0,3}}[ .:]{{0,3}})?)"
    r"(\d[\d -]{5,24}\d)(?![\d/:])"
)
# A service number is said digit by digit: ስልክ 8282, አጭር ቁጥር 999, ነፃ መስመር 8335, 8282 ይደውሉ.
_SHORT = re.compile(
    rf"((?<!{LETTER})[በከለየ]?(?:ስልክ{LETTER}{{0,3}}(?: ቁጥር{LETTER}{{0,3}})?"
    rf"|(?:አጭር|አገልግሎት) ቁጥር{LETTER}{{0,3}}|(?:ነ[ፃጻ]|ስልክ) መስመር{LETTER}{{0,3}})"
    r"[ .:]{1,3})(\d{3,6})(?![\d/:.,-])"
)
_CALL = re.compile(rf"(?<![\d.,:/-])(\d{{3,4}})(?= (?:ላይ )?(?:ይደውሉ|ደውሉ|ደውለው|በመደወል)(?!{LETTER}))")
_MIXED = re.compile(r"(?<![\d./:,⁄-])(\d{1,3}) (\d{1,2})([/⁄])(\d{1,4})(?![\d/⁄]|[.,:-]\d)")
_SPACED_DASH = re.compile(r"(?<=\d)(?: -{1,3} |-{2,3})(?=\d)")
_RANGE = re.compile(
    f"(?:(?<=[ኛ%‰°{''.join(CURRENCIES)}])|(?<=ሺ)|(?<=ሺህ)|(?<=ሚሊዮን)|(?<=ቢሊዮን))(?: - |-)"
    f"(?=[{''.join(CURRENCIES)}]?\\d)|(?<=\\d)(?: - |-)(?=[{''.join(CURRENCIES)}]\\d)"
)
_LONE_PREFIX = re.compile(f"(?<!{LETTER})([በከለየ]) (?=\\d)")
_CURRENCY = "[" + "".join(CURRENCIES) + "]"
_CURRENCY_FIRST = re.compile(rf"(?<!\d)({_CURRENCY}) ?({_AMOUNT})")
_CURRENCY_LAST = re.compile(rf"(?<=\d) ?({_CURRENCY})")
_CODE = re.compile(
    rf"(?<![a-z])(?:({'|'.join(CODES)}) ?({_AMOUNT})|(?<=\d) ?({'|'.join(CODES)}))(?![a-z])"
)
# *999# is said sign by sign.
_SERVICE = re.compile(r"(?<![\da-z*])\*(\d[\d*]*)#")
_LARGE = re.compile(rf"(?<=\d) ?([ሚቢ])\.(?!{LETTER})")  # 10.5 ሚ.
_SECONDS = re.compile(r"(\d{1,2})[:፡](\d\d)\.(\d{1,2}) ?ደቂቃ")  # 12:45.3
_PERCENT = re.compile(f"(?<=\\d) ?([{''.join(PERCENT)}])")
_UNIT = re.compile(
    "(?<=\\d) ?("
    + "|".join(
        rf"{unit}(?!{LETTER})\.?" if unit in SYLLABLES else rf"{unit}(?![a-z\d])" for unit in UNITS
    )
    + ")"
)
_OPERATOR = re.compile(f"(?<=\\d) ?([{''.join(OPERATORS)}]) ?(?=[-−+]?\\d)")
_PREFIXED_MINUS = re.compile(f"(?<!{LETTER})([በከለየ])[-−](?=\\d{{1,3}}(?!\\d))")
_MINUS = re.compile(r"(?<![^\s(\[\"'])[-−](?=\d)|−(?=\d)")
_PLUS = re.compile(r"(?<![^\s(\[\"'])\+(?=\d)")
_DIGIT = re.compile(r"\d")
_SIGN = re.compile(f"[-#{''.join([*CURRENCIES, *PERCENT, *OPERATORS])}]")
_COUNT = re.compile(r"#(?=\d)")


def say_numbers(text: str) -> str:
    """`text` with its ASCII digits in words, numbers that are not understood digit by digit."""
    if not _DIGIT.search(text):
        return text
    text = _SERVICE.sub(lambda m: f"ኮከብ {_digits(m[1])} መሰላል", text)
    text = _LARGE.sub(lambda m: " ሚሊዮን" if m[1] == "ሚ" else " ቢሊዮን", text)
    text = _CODE.sub(lambda m: f"{m[2]} {CODES[m[1]]} " if m[1] else f" {CODES[m[3]]} ", text)
    text = _SECONDS.sub(rf"\1 {MINUTE} {FROM}\2.\3 {SECOND}", text)
    if "0" in text or "+" in text:
        text = _PHONE.sub(_phone, text)
    if "ስልክ" in text:
        text = _CALLED.sub(lambda m: f"{m[1]} {_digits(m[2])}" if _is_phone(m[2]) else m[0], text)
    text = _SHORT.sub(lambda m: f"{m[1]}{_digits(m[2])}", text)
    text = _CALL.sub(lambda m: _digits(m[1]), text)
    if " " in text:
        text = _MIXED.sub(_mixed, _LONE_PREFIX.sub(r"\1", text))
    if _SIGN.search(text):
        text = _symbols(_RANGE.sub(f" {RANGE} ", _SPACED_DASH.sub("-", text)))
    text = _UNIT.sub(lambda m: f" {UNITS[m[1].rstrip('.')]} ", text)
    return _NUMBER.sub(_number, text)


def _is_phone(text: str) -> bool:
    """Whether there are as many digits as in a telephone number, in at most six groups."""
    return 7 <= sum(map(str.isdecimal, text)) <= 15 and len(re.findall(r"\d+", text)) <= 6


def _phone(match: re.Match) -> str:
    plus, digits = match.groups()
    count = sum(map(str.isdecimal, digits))
    if not _is_phone(digits) or (not plus and not digits.startswith("00") and not 9 <= count <= 10):
        return match[0]
    return f"{PLUS} {_digits(digits)}" if plus else _digits(digits)


def _mixed(match: re.Match) -> str:
    """2 1/2 and 2 ½ in words, before the first of them is taken for a number of its own."""
    whole, above, slash, below = match.groups()
    if not 0 < int(above) < int(below) or (slash == "/" and int(below) > 10):
        return match[0]
    words = _cardinal(int(whole))
    if (int(above), int(below)) == (1, 2):
        return f"{words} {AND_A_HALF}"
    return f"{words} {FROM}{_fraction(above, below)}"


def _symbols(text: str) -> str:
    """Symbols around numbers in words. The numbers stay digits."""
    text = _CURRENCY_FIRST.sub(lambda m: f"{m[2]} {CURRENCIES[m[1]]} ", text)
    text = _CURRENCY_LAST.sub(lambda m: f" {CURRENCIES[m[1]]} ", text)
    text = _PERCENT.sub(lambda m: f" {PERCENT[m[1]]} ", text)
    text = _OPERATOR.sub(lambda m: f" {OPERATORS[m[1]]} ", text)
    text = _PREFIXED_MINUS.sub(rf"\1{NEGATIVE} ", text)
    text = _PLUS.sub(f"{PLUS} ", _MINUS.sub(f"{NEGATIVE} ", text))
    return _COUNT.sub(f"{NUMBER} ", text)


# --- Ethiopic numerals ----------------------------------------------------------------------------


def ascii_numerals(text: str) -> str:
    """Ethiopic numerals as ASCII digits."""
    return re.sub("[፩-፼]+", _numeral, text)


def _numeral(match: re.Match) -> str:
    """An Ethiopic number as digits, or its numerals in words, one by one, if their order is not a
    number's."""
    total = 0
    parts = match[0].split("፼")
    groups = [GROUP.fullmatch(part) for part in parts]
    if not all(groups) or len(parts) > 3:
        return " " + " ".join(_cardinal(NUMERALS[c]) for c in match[0]) + " "
    for i, group in enumerate(groups):
        hundreds = sum(NUMERALS[c] for c in group["hundreds"] or "") or bool(group["hundred"])
        value = 100 * hundreds + sum(NUMERALS[c] for c in group["tens"] + group["ones"])
        if not value and i == 0:
            value = 1  # ፼ alone is 10,000
        total = 10_000 * total + value
    digits = f"{total:,}" if total > LARGEST else str(total)
    before = match.string[max(0, match.start() - 1) : match.start()]
    after = match.string[match.end() : match.end() + 1]
    if before.isdecimal():
        digits = f" {digits}"
    return f"{digits} " if after.isdecimal() else digits
