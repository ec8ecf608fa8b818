"""Amharic text for synthesis: numbers, abbreviations and symbols in words, then letters to
phonemes.

    python -m speech.amharic < texts.txt > phonemes.txt     # one line for each line
    python -m speech.amharic --lexicon words.tsv --no_epenthesis < texts.txt

Phonemes are written with characters that XTTS-v2's vocabulary has: ə for the first vowel order, ı
for the sixth, ' after ejectives, č š ž ñ. The script writes neither gemination nor the absence of
the sixth vowel. A lexicon gives gemination; syllable structure decides where ı is heard. Glottal
stops are silent.

Sources: the Unicode names of the Ethiopic syllables; CLDR's number words for Amharic (am.xml: መቶ
without አንድ, ordinals in -ኛ), with tens, thousands, negatives and abbreviations in their usual
spelling. The rule for ı is a heuristic.
"""

import argparse
import re
import sys
import unicodedata
from collections.abc import Mapping

from common.errors import UsageError, exit_with_one_line
from common.files import read_text

BLOCKS = ((0x1200, 0x139F), (0x2D80, 0x2DDF), (0xAB00, 0xAB2F), (0x1E7E0, 0x1E7FF))
# The names in the last block, which is newer than Python 3.10's Unicode data. A hyphen is an
# unassigned character.
EXTENDED_B = (
    "HHYA HHYU HHYI HHYAA HHYEE HHYE HHYO - GURAGE_HHWA HHWI HHWEE HHWE - MWI MWEE - QWI QWEE QWE"
    " BWI BWEE KWI KWEE KWE GWI GWEE GWE FWI FWEE PWI PWEE"
).split()
# The consonant part of a name. Consonants that Amharic lacks become its nearest ones.
CONSONANTS = dict(
    pair.split(":")
    for pair in (
        "H:h HH:h X:h KX:h L:l M:m SZ:s S:s R:r SH:š Q:k' QH:k' B:b V:v T:t C:č N:n NY:ñ K:k W:w"
        " Z:z ZH:ž Y:y D:d DD:d J:j G:g GG:ng TH:t' CH:č' PH:p' TS:s' TZ:s' F:f P:p SS:š CC:č ZZ:ž"
        " CCH:č' QY:k'y KY:ky XY:hy GY:gy HHY:hy RY:ry MY:my FY:fy TTH:t' DDH:d DZ:dz CCHH:č' BB:b"
        " GLOTTAL: PHARYNGEAL:"
    ).split()
)
ORDERS = {"A": "ə", "U": "u", "I": "i", "AA": "a", "EE": "e", "E": "ı", "O": "o", "OA": "wa"}
FIRST_IS_A = ("H", "HH", "X", "GLOTTAL", "PHARYNGEAL", "RY", "MY", "FY")  # ሀ, not hə

ONES = "ዜሮ አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ".split()
TENS = "- አስር ሃያ ሰላሳ አርባ ሃምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split()
TEEN = "አስራ"
HUNDRED = "መቶ"
SCALES = ((10**9, "ቢሊዮን"), (10**6, "ሚሊዮን"), (10**3, "ሺህ"))
LARGEST = 10**9  # without commas; longer digit strings are phone and account numbers
POINT = "ነጥብ"
RANGE = "እስከ"
NEGATIVE = "ነጌቲቭ"
MINUS = "ሲቀነስ"
PERCENT = "በመቶ"
IRREGULAR_ORDINALS = {"ዘጠኝ": "ዘጠነ", "ሺህ": "ሺ"}  # the others: the last letter in its first order
PREFIXES = ("በ", "ከ", "ለ", "የ", "ስለ", "እንደ", "እየ")  # they stay attached to a number
SUFFIX = "(?:ዎች|ዎቹ)?[ውዋ]?[ንምናስ]{0,2}"  # these also

CURRENCIES = {"$": "ዶላር", "€": "ዩሮ", "£": "ፓውንድ"}
OPERATORS = {"+": "ሲደመር", "−": MINUS, "×": "ሲባዛ", "÷": "ሲካፈል", "=": "እኩል ይሆናል"}  # between numbers
SYMBOLS = {"½": "ግማሽ", "¼": "ሩብ", "¾": "ሦስት አራተኛ"}
UNITS = {"ሜ": "ሜትር", "ሊ": "ሊትር", "°C": "ዲግሪ ሴንቲግሬድ", "°": "ዲግሪ"}  # after numbers
# Dotted forms are also written with slashes and without the last dot. ት/ቤ stands for ት/ቤት, ት/ቤቶች
# ...
ABBREVIATIONS = {
    "ዓ.ም": "ዓመተ ምሕረት",
    "ዓ.ዓ": "ዓመተ ዓለም",
    "እ.ኤ.አ": "እንደ ኤውሮፓውያን አቆጣጠር",
    "እ.አ.አ": "እንደ ኤውሮፓውያን አቆጣጠር",
    "ወ.ዘ.ተ": "ወዘተ",
    "አ.አ": "አዲስ አበባ",
    "ኪ.ሜ": "ኪሎ ሜትር",
    "ኪ.ግ": "ኪሎ ግራም",
    "ሴ.ሜ": "ሴንቲ ሜትር",
    "ሚ.ሜ": "ሚሊ ሜትር",
    "ሚ.ሊ": "ሚሊ ሊትር",
    "ዶ/ር": "ዶክተር",
    "ፕ/ር": "ፕሮፌሰር",
    "ወ/ሮ": "ወይዘሮ",
    "ወ/ሪት": "ወይዘሪት",
    "ኢ/ር": "ኢንጂነር",
    "ጠ/ሚ/ር": "ጠቅላይ ሚኒስትር",
    "ጠ/ሚኒስትር": "ጠቅላይ ሚኒስትር",
    "ጠ/ሚ": "ጠቅላይ ሚኒስትር",
    "ም/ሊቀመንበር": "ምክትል ሊቀመንበር",
    "ሆ/ል": "ሆስፒታል",
    "ቤ/ክ": "ቤተ ክርስቲያን",
    "ት/ቤ": "ትምህርት ቤ",
    "ም/ቤ": "ምክር ቤ",
    "መ/ቤ": "መሥሪያ ቤ",
    "ፍ/ቤ": "ፍርድ ቤ",
    "ጽ/ቤ": "ጽሕፈት ቤ",
    "ክ/ሀገር": "ክፍለ ሀገር",
    "ክ/ሃገር": "ክፍለ ሀገር",
    "ክ/ከተማ": "ክፍለ ከተማ",
    "ክ/ዘመን": "ክፍለ ዘመን",
    "ክ/ጦር": "ክፍለ ጦር",
}
PUNCTUATION = {
    "።": ".",
    "፣": ",",
    "፤": ";",
    "፥": ":",
    "፦": ":",
    "፧": "?",
    "፨": ".",
    "፡": " ",
    "፠": " ",
}


def _syllables() -> dict[str, tuple[str, str]]:
    """(consonant, vowel) of every Ethiopic syllable. A glottal consonant is an empty string, and w
    belongs to a vowel."""
    names = {chr(BLOCKS[-1][0] + i): name for i, name in enumerate(EXTENDED_B) if name != "-"}
    for first, last in BLOCKS[:-1]:
        for c in map(chr, range(first, last + 1)):
            name = unicodedata.name(c, "")
            if name.startswith("ETHIOPIC SYLLABLE "):
                names[c] = name.removeprefix("ETHIOPIC SYLLABLE ").replace(" ", "_")
    pattern = re.compile(f"(SEBATBEIT_|GURAGE_)?({'|'.join(CONSONANTS)})_?(W?)({'|'.join(ORDERS)})")
    rows, syllables = set(names.values()), {}
    for c, name in names.items():
        labial, consonant, w, order = pattern.fullmatch(name).groups()
        vowel = w.lower() + ORDERS[order]
        if order == "A" and consonant in FIRST_IS_A:
            vowel = "a"
        elif (
            name.endswith("WA") and w and not labial and f"{consonant}WAA" not in rows
        ):  # ሏ; the row of ቋ has both
            vowel = "wa"
        syllables[c] = CONSONANTS[consonant], "ə" if name == "GLOTTAL_WA" else vowel
    return syllables


SYLLABLES = _syllables()
_first: dict[tuple[str, str], int] = {}
# Of the letters with the same sound, the first.
HOMOPHONES = {ord(c): _first.setdefault(sound, ord(c)) for c, sound in SYLLABLES.items()}
GEMINATION, LENGTH = "\u135d\u135f", "\u135e"
LETTER = "[" + "".join(SYLLABLES) + "]"
WORD = re.compile(f"{LETTER}[{''.join(SYLLABLES)}{GEMINATION}{LENGTH}]*")
ETHIOPIC = "[" + "".join(f"{chr(first)}-{chr(last)}" for first, last in BLOCKS) + "]"

_NUMERALS = {chr(0x1369 + i): i + 1 for i in range(9)} | {
    chr(0x1372 + i): 10 * i + 10 for i in range(9)
}
_NUMERALS |= {"፻": 100, "፼": 10_000}
_GROUP = re.compile("(?:(?P<hundreds>[፲-፺]?[፩-፱]?)(?P<hundred>፻))?(?P<tens>[፲-፺]?)(?P<ones>[፩-፱]?)")
_INTEGER = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)"
_CHAIN = rf"{_INTEGER}(?:[.:/\-–]{_INTEGER})*"
_AMOUNT = rf"{_CHAIN}(?: ?(?:ሺህ?|ሚሊዮን|ቢሊዮን)(?!{LETTER}))?"
_CURRENCY = "[" + "".join(CURRENCIES) + "]"
_CHAIN_IN_TEXT = re.compile(rf"({_CHAIN})(?:-?(ኛ))?(?:([ቱሩኙዱኑ][ንምና]{{0,2}}|{SUFFIX})(?!{LETTER}))?")


def spoken(text: str) -> str:
    """Amharic text as it is read aloud, in Ethiopic script with Latin punctuation and single
    spaces. Numbers of all scripts, abbreviations and symbols become words; numbers that are not
    understood are read digit by digit. Idempotent."""
    text = unicodedata.normalize("NFC", text)
    text = _ABBREVIATION.sub(
        _abbreviation, " ".join(text.split())
    )  # before the full stop of ዓ.ም። becomes a point
    text = _symbols(_ascii_numbers(_punctuation(text)))
    text = _CHAIN_IN_TEXT.sub(_number, text)
    return " ".join(
        _ABBREVIATION.sub(_abbreviation, text).split()
    )  # those that followed 5ኛ without a space


def phonemes(text: str, lexicon: Mapping[str, str] | None = None, epenthesis: bool = True) -> str:
    """The phonemes of Amharic text, after `spoken`: lower case, without Ethiopic characters and
    digits. `lexicon`: from `read_lexicon`, {word: phonemes}. `epenthesis`: whether the vowel ı is
    written where syllables need it, or after every consonant in the sixth order that does not end
    its word. Characters of other scripts stay as they are."""

    def pronounce(match: re.Match) -> str:
        word = match[0]
        listed = (lexicon or {}).get(word) or (lexicon or {}).get(word.translate(HOMOPHONES))
        return listed or _pronounce(word, epenthesis)

    text = WORD.sub(pronounce, spoken(text))
    return " ".join(re.sub(ETHIOPIC, "", text).lower().split())


def read_lexicon(path: str) -> dict[str, str]:
    """The pronunciations in a UTF-8 file with lines `word<TAB>phonemes`; blank lines and lines that
    begin with # are ignored. Homophone letters are merged, so that ዓለም in the file also pronounces
    አለም. Raises `UsageError`."""
    lexicon: dict[str, str] = {}
    for number, line in enumerate(read_text(path, "--lexicon").split("\n"), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        word, tab, pronunciation = unicodedata.normalize("NFC", line).partition("\t")
        word = word.strip()
        pronunciation = pronunciation.lower().strip()
        place = f"--lexicon {path}, line {number}"
        if not tab or "\t" in pronunciation:
            raise UsageError(f"{place}: a line is an Amharic word, one tab and its phonemes")
        if not WORD.fullmatch(word):
            raise UsageError(f"{place}: {word!r} is not a word in Ethiopic letters")
        has_letters = any(character.isalpha() for character in pronunciation)
        is_spoken = has_letters and spoken(pronunciation) == pronunciation
        if not is_spoken or re.search(ETHIOPIC, pronunciation):
            raise UsageError(
                f"{place}: {pronunciation!r} are not phonemes; write them in Latin letters, without"
                " digits"
            )
        if lexicon.setdefault(word, pronunciation) != pronunciation:
            raise UsageError(
                f"{place}: {word} already has the phonemes {lexicon[word]!r}; keep one of the lines"
            )
    merged = {}
    for word, pronunciation in lexicon.items():
        merged.setdefault(word.translate(HOMOPHONES), pronunciation)
    return merged | lexicon


# --- Numbers --------------------------------------------------------------------------------------


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


def _digits(text: str) -> str:
    return " ".join(ONES[int(c)] for c in text if c.isdecimal())


def _integer(text: str) -> str:
    """The words of "2016" and "1,000,000". Digit by digit with a leading zero or beyond the
    limit."""
    plain = text.replace(",", "")
    limit = LARGEST * 1000 if "," in text else LARGEST + 1
    if len(plain) > 12 or (plain[0] == "0" and plain != "0") or int(plain) >= limit:
        return _digits(plain)
    return _cardinal(int(plain))


def _chain(text: str) -> str:
    """The words of integers that are joined by points, colons, slashes and hyphens."""
    sides = re.split("[-–]", text)
    if len(sides) == 2 and _is_range(*sides):
        return f"{_chain(sides[0])} {RANGE} {_chain(sides[1])}"
    if len(sides) > 1:
        is_date = re.fullmatch(r"\d{4}-\d\d-\d\d|\d\d?-\d\d?-\d{4}", text)
        return " ".join(_cardinal(int(side)) if is_date else _digits(side) for side in sides)
    if re.fullmatch(r"\d{1,4}/\d\d?/\d{1,4}", text):  # a date
        return " ".join(_cardinal(int(part)) for part in text.split("/"))
    return " ".join(_decimal(part) for part in re.split("[:/]", text))


def _is_range(first: str, last: str) -> bool:
    """Whether "5-10" is a range, not a phone number or a score."""
    first = first.replace(",", "")
    last = last.replace(",", "")
    if not (first.isdecimal() and last.isdecimal()):
        return True  # of times or decimals
    return first == "0" or (first[0] != "0" and (len(first), first) < (len(last), last))


def _decimal(text: str) -> str:
    """The words of "3.5" (digits after the point one by one) and of "1.2.3"."""
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


def _number(match: re.Match) -> str:
    """A chain of numbers in words, joined to what stands before and after it."""
    chain, ordinal, suffix = match.groups(default="")
    words = _chain(chain)
    if ordinal:
        words = _ordinal(words)
    elif suffix and ord(words[-1]) - 4 == ord(suffix[0]):  # 5ቱ is አምስቱ
        words = words[:-1]
    before = match.string[max(0, match.start() - 4) : match.start()]
    letters = re.search(f"{LETTER}*$", before)[0]
    if before[-1:].isalnum() and letters not in PREFIXES:
        words = f" {words}"
    following = match.string[match.end() : match.end() + 1]
    return f"{words}{suffix}{' ' if following.isalnum() else ''}"


def _numeral(match: re.Match) -> str:
    """Ethiopic numerals as ASCII digits, or in words, one by one, if their order is not a
    number's."""
    total = 0
    parts = match[0].split("፼")
    groups = [_GROUP.fullmatch(part) for part in parts]
    if not all(groups) or len(parts) > 3:
        return " " + " ".join(_cardinal(_NUMERALS[c]) for c in match[0]) + " "
    for i, group in enumerate(groups):
        hundreds = sum(_NUMERALS[c] for c in group["hundreds"] or "") or bool(group["hundred"])
        value = 100 * hundreds + sum(_NUMERALS[c] for c in group["tens"] + group["ones"])
        if not value and i == 0:
            value = 1  # ፼ alone is 10,000
        total = 10_000 * total + value
    digits = f"{total:,}" if total > LARGEST else str(total)
    before = match.string[max(0, match.start() - 1) : match.start()]
    after = match.string[match.end() : match.end() + 1]
    if before.isdecimal():
        digits = f" {digits}"
    return f"{digits} " if after.isdecimal() else digits


def _ascii_numbers(text: str) -> str:
    """Ethiopic numerals and the digits of all scripts as ASCII digits. Superscripts and the like
    stand apart."""
    text = re.sub("[፩-፼]+", _numeral, text)
    text = re.sub(r"(?<=\d)．(?=\d)", ".", text)
    characters = []
    for c in text:
        decimal = unicodedata.decimal(c, None)
        digit = unicodedata.digit(c, None)
        if decimal is not None:
            c = str(decimal)
        elif digit is not None:
            c = f" {digit} "
        characters.append(c)
    return "".join(characters)


# --- Symbols, abbreviations and punctuation -------------------------------------------------------


def _symbols(text: str) -> str:
    """Symbols around numbers in words. The numbers stay digits."""
    text = re.sub(
        rf"(?<!\d)({_CURRENCY}) ?({_AMOUNT})", lambda m: f"{m[2]} {CURRENCIES[m[1]]} ", text
    )
    text = re.sub(rf"(?<=\d) ?({_CURRENCY})", lambda m: f" {CURRENCIES[m[1]]} ", text)
    text = re.sub(r"(?<=\d) ?[%٪％]", f" {PERCENT} ", text)
    units = "|".join(rf"{unit}(?!{LETTER})\.?" if unit in SYLLABLES else unit for unit in UNITS)
    text = re.sub(rf"(?<=\d) ?({units})", lambda m: f" {UNITS[m[1].rstrip('.')]} ", text)
    operators = "".join(OPERATORS)
    text = re.sub(rf"(?<=\d) ?([{operators}]) ?(?=[-−]?\d)", lambda m: f" {OPERATORS[m[1]]} ", text)
    text = re.sub(r"(?<![^\s(\[«“\"'])[-−](?=\d)|−(?=\d)", f"{NEGATIVE} ", text)
    return re.sub(f"[{''.join(SYMBOLS)}]", lambda m: f" {SYMBOLS[m[0]]} ", text).replace(
        " & ", " እና "
    )


def _abbreviation(match: re.Match) -> str:
    prefix, short = match.groups()
    words = ABBREVIATIONS.get(re.sub(r"[./]\s?", ".", short).strip(".")) or ABBREVIATIONS[short]
    following = match.string[match.end() : match.end() + 1]
    if short.endswith("ቤ"):
        return prefix + words
    words = prefix + words
    if match.string[max(0, match.start() - 1) : match.start()].isalnum():
        words = f" {words}"
    return f"{words} " if following.isalnum() else words


def _abbreviation_pattern() -> re.Pattern:
    """Matches a prefix and an abbreviation."""
    patterns = []
    for short in ABBREVIATIONS:
        pattern = short.replace(".", "[./] ?")
        if "." in short:
            pattern += r"\.?"
        patterns.append(pattern if short.endswith("ቤ") else f"{pattern}(?!{LETTER})")
    return re.compile(f"(?<!{LETTER})([በከለየ]?)({'|'.join(patterns)})")


_ABBREVIATION = _abbreviation_pattern()


def _punctuation(text: str) -> str:
    """Latin punctuation. Two word spaces (፡፡) are a common spelling of the full stop, and one
    between digits is a colon."""
    text = text.replace("፡፡", "።").replace("፡-", "፦")
    text = re.sub(r"(?<=[\d፩-፼]) ?[፡፥] ?(?=[\d፩-፼])", ":", text)
    text = re.sub(" *([።፣፤፥፦፧፨])", r"\1", text)  # a space in front of it is common
    text = re.sub(r"([።፣፤፥፦፧፨])(?=\w)", r"\1 ", text)
    text = re.sub("[፠-፨]", lambda m: PUNCTUATION[m[0]], text)
    return re.sub(
        r"::(?![A-Za-z])(\w?)", lambda m: f". {m[1]}" if m[1] else ".", text
    )  # ፡፡ on a Latin keyboard


# --- Phonemes -------------------------------------------------------------------------------------


def _pronounce(word: str, epenthesis: bool) -> str:
    """The phonemes of one word in Ethiopic letters."""
    consonants = []
    vowels = []
    is_long = []
    for c in word:
        if c in SYLLABLES:
            consonant, vowel = SYLLABLES[c]
            consonants.append(consonant)
            vowels.append(vowel)
            is_long.append(False)
        elif c in GEMINATION:
            is_long[-1] = True
    if epenthesis:
        vowels = _epenthesis(consonants, vowels, is_long)
    elif vowels[-1] == "ı":
        vowels[-1] = ""
    sounds = ""
    for consonant, vowel, long in zip(consonants, vowels, is_long, strict=True):
        sounds += (consonant[:1] if long else "") + consonant + vowel
    return sounds.replace("ıı", "ı") or "ı"


def _epenthesis(consonants: list[str], vowels: list[str], is_long: list[bool]) -> list[str]:
    """The vowels of a word, without the ı that syllables do not need. A syllable is CV or CVC, and
    CVCC at the end of a word. From left to right, a consonant in the sixth order closes an open
    syllable or begins one with ı."""
    vowels = list(vowels)
    is_open = False
    for i, vowel in enumerate(vowels):
        left = len(vowels) - i - 1  # letters after this one
        if vowel != "ı":
            is_open = True
        elif left == 0:
            vowels[i] = ""
        elif is_open and _closes(consonants[i:], vowels[i:], is_long[i:]):
            vowels[i] = ""
            is_open = False
        else:
            is_open = True
            continue
        if left == 1 and vowels[i] == "" and vowels[i + 1] == "ı":
            vowels[i + 1] = ""  # the second consonant of a final cluster
            break
    return vowels


def _closes(consonants: list[str], vowels: list[str], is_long: list[bool]) -> bool:
    """Whether the first of the remaining consonants closes the open syllable before it."""
    if is_long[0] or consonants[0] == "":
        return False
    if vowels[1] != "ı":
        return True
    if consonants[0] == consonants[1]:
        return False  # a geminate is written once, so there is a vowel between two
    if len(consonants) == 2:
        return _ends_a_word(*consonants)
    # አምስት, ስድስት: a final -t forms a cluster, so that ı precedes the cluster
    is_cluster = len(consonants) == 3 and vowels[2] == "ı" and consonants[2] == "t"
    return not (is_cluster and _ends_a_word(*consonants[1:]))


def _ends_a_word(first: str, second: str) -> bool:
    """Whether two consonants can end a word: sonority falls, or both are obstruents. The suffixes
    -h and -š follow ı."""
    if first == "" or second in ("h", "š"):
        return False
    return _sonority(first) > _sonority(second) or _sonority(first) == _sonority(second) == 0


def _sonority(consonant: str) -> int:
    for kind, value in {"wy": 3, "lr": 2, "mnñ": 1}.items():
        if consonant[-1:] in kind:
            return value
    return 0


# --- Command line ---------------------------------------------------------------------------------


def main() -> None:
    """Reads text from stdin and prints the phonemes of each line."""
    parser = argparse.ArgumentParser(
        "python -m speech.amharic",
        description="Phonemes of Amharic text, line by line.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--lexicon", metavar="FILE", help="pronunciations, for gemination: word<TAB>phonemes"
    )
    parser.add_argument(
        "--no_epenthesis",
        action="store_true",
        help="write the sixth vowel wherever a letter has it",
    )
    args = parser.parse_args()
    lexicon = read_lexicon(args.lexicon) if args.lexicon is not None else None
    sys.stdout.reconfigure(encoding="utf-8")
    for line in sys.stdin.buffer:
        print(phonemes(line.decode("utf-8-sig", "replace"), lexicon, not args.no_epenthesis))


if __name__ == "__main__":
    exit_with_one_line(main)
