"""Amharic text as it is read aloud: letters and sentence marks only. Brackets, slashes and word
spaces (፡) make no pause; no speaker has checked that yet."""

import re
import unicodedata

from speech.amharic.abbreviations import expand
from speech.amharic.letters import GEMINATION, LENGTH, LETTER, LETTERS, SYLLABLES
from speech.amharic.numbers import SUFFIX, ascii_numerals, say_numbers

MARKS = "?!.;:,"  # of several in a row, the first of these stays
# What `spoken` may return, as a character class. An apostrophe stands between Latin letters only.
SPOKEN = f"{LETTERS}{GEMINATION}{LENGTH}a-z '{MARKS}"
PUNCTUATION = {
    "።": ".", "፣": ",", "፤": ";", "፥": ":", "፦": ":", "፧": "?", "፨": ".", "፡": " ", "፠": " ",
}  # fmt: skip
SIGNS = "€£¥°×÷−‰⁄"  # not in ASCII, and read aloud
OTHER = {
    "؟": "?", "،": ",", "؛": ";", "。": ".", "、": ",", "№": "#", "™": " ", "ı": "i", "ł": "l",
    "ø": "o", "đ": "d", "ð": "d", "þ": "th", "æ": "ae", "œ": "oe", "ß": "ss",
}  # fmt: skip
APOSTROPHES = "‘’‛ʼʹ`´′"
AND = "እና"  # of &
DOT, AT, SLASH = "ዶት", "አት", "ስላሽ"  # in addresses, from English


class _Folded(dict):
    """For str.translate: every character as the one that the rules below know. Digits of all
    scripts, letters in any case and with accents, quotes and dashes have one form. What is neither
    read nor a mark becomes a space; what is invisible or a mark on a letter goes."""

    def __missing__(self, code: int) -> str:
        self[code] = folded = _fold(chr(code))
        return folded


def _fold(c: str) -> str:
    if c in SYLLABLES or "፠" <= c <= "፼" or c in GEMINATION + LENGTH or c in SIGNS:
        return c
    if c.isascii():
        return c.lower() if c.isprintable() and c != "`" else " "
    if c.lower() in OTHER:
        return OTHER[c.lower()]
    category = unicodedata.category(c)
    if category in ("Mn", "Me", "Cf"):
        return ""
    if c in APOSTROPHES:
        return "'"
    if category in ("Pi", "Pf") or c in "„‚":
        return '"'
    if category == "Pd":
        return "-"
    if category == "Nd":
        return str(unicodedata.decimal(c))
    parts = [p for p in unicodedata.normalize("NFKD", c) if unicodedata.category(p) != "Mn"]
    if not parts or not all(p.isascii() or p in SIGNS for p in parts):
        return " "
    folded = "".join(parts).lower()
    return f" {folded} " if re.search(r"\d", folded) else folded  # ½, ², ①


_FOLDED = _Folded()
# A square unit; the number of a footnote, which is not read.
_SQUARE = re.compile("(?<![A-Za-z])(km|m)²", re.IGNORECASE)
_SQUARES = {"km": "ካሬ ኪሎ ሜትር", "m": "ካሬ ሜትር"}
_FOOTNOTE = re.compile(f"(?<=[{LETTERS}a-z])[¹²³⁴-⁹]+")
_PLAIN = re.compile(f"[{LETTERS} ,;?!፡።፣፤፧]*[.]?")
_AMPERSAND = re.compile("(?<![^ ])&(?![^ ])")
_DASH = re.compile("(?<= )-+(?= )|--+")
_NOT_SPOKEN = re.compile(f"[^{SPOKEN}]+")
_STRAY = re.compile(
    f"(?<![a-z])'|'(?![a-z])|(?<![{LETTERS}{GEMINATION}{LENGTH}])[{GEMINATION}{LENGTH}]+"
)
_RUN_OF_MARKS = re.compile(f" ?([{MARKS}])(?:[{MARKS} ]*[{MARKS}])?(?: ?(?=([^ ]))|$)")


def spoken(text: str) -> str:
    """Amharic text as it is read aloud, in Ethiopic script with Latin sentence marks and single
    spaces; every character is one of `SPOKEN`. Numbers of all scripts, abbreviations, signs and
    addresses become words, Latin letters lower case without accents. Emoji, brackets, quotes and
    letters of other scripts are left out. Idempotent."""
    text = _SQUARE.sub(lambda match: _SQUARES[match[1].lower()], text)
    text = " ".join(_FOOTNOTE.sub("", text).translate(_FOLDED).split())
    if _PLAIN.fullmatch(text):
        return expand(_marks(" ".join(_punctuation(text).split())))
    text = expand(_AFTER_ORDINAL.sub(" ", ascii_numerals(_addresses(_quotes(text)))))
    text = _punctuation(say_numbers(_colons(text)))
    text = _DASH.sub(",", _AMPERSAND.sub(AND, text))
    text = _STRAY.sub("", _NOT_SPOKEN.sub(" ", text))
    # Also ዓ. ም that a removed character had cut.
    return expand(_marks(" ".join(text.split())))


def _marks(text: str) -> str:
    """Of several sentence marks the strongest, without a space before and with one after it. None
    at the beginning."""
    return _RUN_OF_MARKS.sub(_mark, text.lstrip(MARKS + " "))


def _mark(match: re.Match) -> str:
    mark = min(match[0].replace(" ", ""), key=MARKS.index)
    return f"{mark} " if match[2] else mark


# --- Quotes, addresses, punctuation ---------------------------------------------------------------

_QUOTED_PREFIX = re.compile(f'(?<!{LETTER})(በ|ከ|ለ|የ|ስለ|እንደ|ወደ|እነ)"+(?={LETTER}|\\d)')
_QUOTED_SUFFIX = re.compile(f'(?<={LETTER})"+(?={SUFFIX}(?!{LETTER}))')
_DOMAINS = "com|org|net|edu|gov|info|et|co|io|tv|me|uk|us|de|int|africa"
_IN_ADDRESS = r"[a-z0-9\-._~/?#\[\]@!$&'()*+,;=%:]"
_ADDRESS = re.compile(
    rf"(?<![a-z0-9.@%+_-])(?:(?:https?://|www\.){_IN_ADDRESS}+"
    r"|[a-z0-9][a-z0-9._%+-]*@[a-z0-9-]+(?:\.[a-z0-9-]+)+"
    rf"|[a-z0-9-]+(?:\.[a-z0-9-]+)*\.(?:{_DOMAINS})(?![a-z0-9-])(?:/{_IN_ADDRESS}*)?)"
)
_LATIN_INITIALS = re.compile(r"(?<![a-z])[a-z](?:\.[a-z](?![a-z]))+\.?")
_AFTER_ORDINAL = re.compile(f"(?<=\\dኛ)(?={LETTER}+[./]{LETTER})")


def _quotes(text: str) -> str:
    """Without quotes. A prefix before them and a suffix after them stay attached."""
    text = text.replace("<<", '"').replace(">>", '"')
    if '"' in text:
        text = _QUOTED_SUFFIX.sub("", _QUOTED_PREFIX.sub(r"\1", text)).replace('"', " ")
    return text


def _addresses(text: str) -> str:
    """Web and e-mail addresses as they are spelled aloud, @name, and the initials of U.S.A."""
    if "." in text:
        text = _LATIN_INITIALS.sub(lambda m: m[0].replace(".", " "), _ADDRESS.sub(_address, text))
    return re.sub(r"@(?=\w)", f" {AT} ", text) if "@" in text else text


def _address(match: re.Match) -> str:
    text = match[0].rstrip(".,;:!?)'")
    end = match[0][len(text) :]
    text = re.sub("^https?://|%[0-9a-f]{2}", " ", text).rstrip("/")
    for sign, word in ((".", DOT), ("@", AT), ("/", SLASH)):
        text = text.replace(sign, f" {word} ")
    return f" {re.sub('[^a-z0-9ዶትአስላሽ]', ' ', text)}{end} "


def _colons(text: str) -> str:
    """A word space (፡) between digits is a colon."""
    if "፡" in text or "፥" in text:
        text = re.sub(r"(?<=\d) ?፡ ?(?=\d)", ":", text.replace("፡፡", "።"))
        text = re.sub(r"(?<=\d) ?፥ ?(?=\d)", "፥", text)
    return text


def _punctuation(text: str) -> str:
    """Latin punctuation. Two word spaces (፡፡, and :: on a Latin keyboard) are a full stop."""
    text = text.replace("፡፡", ".").replace("፡-", ":")
    for ethiopic, latin in PUNCTUATION.items():
        text = text.replace(ethiopic, latin)
    return re.sub(r"::(?![a-z])", ".", text) if "::" in text else text
