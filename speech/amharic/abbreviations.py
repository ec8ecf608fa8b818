"""Abbreviations with slashes or points: what they stand for.

ኮ/ል, ጠ/ሚ/ሩ and ዓ.ም. stand in `WHOLE`. In ኃ/ማርያም, ት/ቤቱ and ም/ሊቀመንበር the last word is written out,
and `HEADS` says what the letters before it stand for; they combine, as in ጠ/ፍ/ቤት and ም/ጠ/ሚ. Slash
and point are the same, and so are letters that sound alike. An unknown ኢ.ሕ.አ.ዴ.ግ is read as the
word ኢሕአዴግ, as in newscasts. In an unknown one with slashes, each part is a word.
"""

import re
from functools import lru_cache

from speech.amharic.letters import HOMOPHONES, LETTER, SYLLABLES

# By source. CLDR: am.xml (eras). Press: AmharicAbbreviations.txt of the project
# Amharic-Text-Processor (MIT), which quotes newspapers. spaCy: lang/am/tokenizer_exceptions.py.
# Where they spell words in different ways, the spelling is the one with ሥ, ሕ and ጽ.
WHOLE_BY_SOURCE = {
    "CLDR": {"ዓ.ም": "ዓመተ ምሕረት", "አ.ም": "ዓመተ ምሕረት", "ዓ.ዓ": "ዓመተ ዓለም"},
    "Press": {
        "ኮ/ል": "ኮሎኔል",
        "ኮ/ሌ": "ኮሎኔል",
        "ሌ/ኮ": "ሌተናል ኮሎኔል",
        "ሌ/ኮ/ል": "ሌተናል ኮሎኔል",
        "ሌ/ጄ": "ሌተናል ጄኔራል",
        "ሌ/ጄ/ል": "ሌተናል ጄኔራል",
        "ብ/ጄ": "ብርጋዴር ጄኔራል",
        "ብ/ጄ/ል": "ብርጋዴር ጄኔራል",
        "ሜ/ጄ": "ሜጀር ጄኔራል",
        "ሜ/ጄ/ል": "ሜጀር ጄኔራል",
        "መ/አ": "መቶ አለቃ",
        "ኢ/ር": "ኢንጂነር",
        "ፕ/ት": "ፕሬዚዳንት",
        "ወ/ሮ": "ወይዘሮ",
        "ወ/ት": "ወይዘሪት",
        "ሚ/ር": "ሚኒስትር",
        "ጠ/ሚ": "ጠቅላይ ሚኒስትር",
        "ጠ/ሚ/ር": "ጠቅላይ ሚኒስትር",
        "ጠ/ሚር": "ጠቅላይ ሚኒስትር",
        "ህ/ተ/ም/ቤት": "ሕዝብ ተወካዮች ምክር ቤት",
        "ሊ/መ": "ሊቀ መንበር",
        "ማ/ኮ": "ማዕከላዊ ኮሚቴ",
        "አ/አ": "አዲስ አበባ",
        "አ/አ/ድ": "የአፍሪካ አንድነት ድርጅት",
        "ተ/መ/ድ": "የተባበሩት መንግሥታት ድርጅት",
        "እ.ኤ.አ": "እንደ ኤውሮፓውያን አቆጣጠር",
        "ህ/ሰብ": "ኅብረተሰብ",
        "ኃ/የተ/የግ/ማ": "ኃላፊነቱ የተወሰነ የግል ማኅበር",
        "ኃ/የተ/የግ/ማኅበር": "ኃላፊነቱ የተወሰነ የግል ማኅበር",
    },
    "spaCy": {
        "ዶ/ር": "ዶክተር",
        "ፕ/ሮ": "ፕሮፌሰር",
        "ሆ/ል": "ሆስፒታል",
        "ቤ/ክ": "ቤተ ክርስቲያን",
        "ቤ/መ": "ቤተ መንግሥት",
    },
    "no source found": {
        "ፕ/ር": "ፕሮፌሰር",
        "ወ/ሪት": "ወይዘሪት",
        "ጄ/ል": "ጄኔራል",
        "ሻ/ል": "ሻምበል",
        "ሻ/ቃ": "ሻለቃ",
        "ሻ/ባሻ": "ሻምበል ባሻ",
        "ሜ/ጀ": "ሜጀር ጄኔራል",
        "ሌ/ጀ": "ሌተናል ጄኔራል",
        "ብ/ጀ": "ብርጋዴር ጄኔራል",
        "ሄ/ር": "ሄክታር",
        "ክ.ል.በ": "ክርስቶስ ልደት በፊት",
        "ኮ/ር": "ኮማንደር",
        "መ/ር": "መምህር",
        "መ/ርት": "መምህርት",
        "ተ/ቁ": "ተራ ቁጥር",
        "ተ.ቁ": "ተራ ቁጥር",
        "ቤ/ያን": "ቤተ ክርስቲያን",
        "ሲ/ር": "ሲስተር",
        "ዲ/ን": "ዲያቆን",
        "አ/ቶ": "አቶ",
        "ት/ት": "ትምህርት",
        "ት/ርት": "ትምህርት",
        "ብ/ክ/መ": "ብሔራዊ ክልላዊ መንግሥት",
        "ቀ/ኃ/ሥ": "ቀዳማዊ ኃይለ ሥላሴ",
        "አ.አ.ዩ": "አዲስ አበባ ዩኒቨርሲቲ",
        "እ.አ.አ": "እንደ ኤውሮፓውያን አቆጣጠር",
        "ወ.ዘ.ተ": "ወዘተ",
        "ኪ.ሜ": "ኪሎ ሜትር",
        "ኪ.ሜ/ሰ": "ኪሎ ሜትር በሰዓት",
        "ኪ.ሜ/ሰዓት": "ኪሎ ሜትር በሰዓት",
        "ሜ/ሰ": "ሜትር በሰከንድ",
        "ካ.ሜ": "ካሬ ሜትር",
        "ኪ.ግ": "ኪሎ ግራም",
        "ሴ.ሜ": "ሴንቲ ሜትር",
        "ሚ.ሜ": "ሚሊ ሜትር",
        "ሚ.ሊ": "ሚሊ ሊትር",
        "ሚ.ግ": "ሚሊ ግራም",
        "ስ.ቁ": "ስልክ ቁጥር",
        "ፖ.ሳ.ቁ": "ፖስታ ሳጥን ቁጥር",
    },
}  # fmt: skip
# A letter, how the word after it begins, and what the letter stands for.
# The last letter of a word is left out where a suffix changes it. A hyphen: any other word.
HEADS_BY_SOURCE = {
    "Press": """
        ኃ - ኃይለ
        ት ቤ,ክፍ ትምህርት
        ም ቤ ምክር
        ም - ምክትል
        መ ቤ መሥሪያ
        መ አለቃ መቶ
        መ ሚኒስት መከላከያ
        ጠ - ጠቅላይ
        ፍ ቤ ፍርድ
        ፌ - ፌዴራል
        ማ ቤ ማረፊያ
        ማ ኮሚቴ ማዕከላዊ
        ን ም ንግድ
        ሊ መንበ ሊቀ
        ሥ አስኪያ,አስፈጻሚ ሥራ
        አ አበባ አዲስ
        ሌ - ሌተናል
        ብ ጄ,ጀ ብርጋዴር
        ሜ ጄ,ጀ ሜጀር
        ተ ዋና,ም,ፕሬዚዳን,ፕሬዝዳን ተጠባባቂ
        ተ - ተክለ
        ወ - ወልደ
        ኤ ማዦ,ማዡ ኤታ
        """,
    "spaCy": "ጽ ቤ ጽሕፈት",
    "no source found": """
        ገ - ገብረ
        ክ ከተማ,ሀገ,አገ,ዘመ,ጦ,ጊዜ ክፍለ
        ቤ ክርስቲያ,ክርስትያ,መንግሥ,ክህነ,መጻሕፍ ቤተ
        ደ ዘይ,ታቦ,ብርሃ,ማርቆ,ሊባኖ,ጽጌ ደብረ
        ሃ አለቃ ሃምሳ
        ር መምህ ርእሰ
        ቅ - ቅዱስ
        """,
}
PREFIXES = ("", "በ", "ከ", "ለ", "የ", "እነ", "የእነ", "በየ", "ለየ", "ከየ", "ስለ", "እንደ", "ወደ", "እስከ")
# After the last letter of an abbreviation: of it (ዓ.ም.ን), or of its word (ጠ/ሚ/ርነት).
SUFFIX = re.compile("(?:ነት)?(?:ዎች|ዎቹ|ኦች|ኦቹ)?[ውዋ]?[ንምናስ]{0,2}")


# ዓ.ዓ is not አ.አ.
_SAME = {code: first for code, first in HOMOPHONES.items() if chr(first) not in "አኡኢኤእኦ"}


def _key(text: str) -> str:
    return text.replace(".", "/").translate(_SAME)


def _heads() -> dict[str, list[tuple[tuple[str, ...], str]]]:
    """{letter: [(beginnings of the next word, what the letter stands for)]}."""
    heads = {}
    rows = "\n".join(HEADS_BY_SOURCE.values()).split("\n")
    for letter, beginnings, words in filter(None, map(str.split, rows)):
        beginnings = _key(beginnings.replace("-", "")).split(",")
        heads.setdefault(_key(letter), []).append((tuple(beginnings), words))
    return {letter: sorted(rows, key=lambda row: "" in row[0]) for letter, rows in heads.items()}


def _spellings(letter: str) -> str:
    return "".join(c for c in SYLLABLES if _key(c) == _key(letter))


_TABLE = {short: words for table in WHOLE_BY_SOURCE.values() for short, words in table.items()}
WHOLE = {tuple(_key(short).split("/")): words for short, words in _TABLE.items()}
HEADS = _heads()
LONGEST = max(map(len, WHOLE))
_ANY = re.compile(f"(?<!{LETTER}){LETTER}+(?:[./]{LETTER}+)+[./]?")
# With spaces after the points (ዓ. ም.) only those of the table.
_SPACED = re.compile(
    f"(?<!{LETTER})([በከለየ]?)("
    + "|".join(
        r"\. ?".join(f"[{_spellings(c)}]" for c in short.split("."))
        for short in sorted(_TABLE, key=len, reverse=True)
        if "." in short and "/" not in short
    )
    + rf")(?!{LETTER}|\. ?{LETTER}(?!{LETTER}))\.?"
)


# A point between two words is a full stop.
_SENTENCES = re.compile(f"(?<={LETTER}{LETTER})[.](?={LETTER}{LETTER})")
_LETTER_NAMES = re.compile(f"{LETTER}{{1,2}}(?:[.]{LETTER}{{1,2}}){{2,}}")  # ኤስ.ኤም.ኤስ


def expand(text: str) -> str:
    """The abbreviations of `text` in words. No slash or point stays between Ethiopic letters,
    except the full stop between two words, which gets a space."""
    if "/" in text or "." in text:
        text = _ANY.sub(_any, text)
    return _SPACED.sub(_spaced, text) if ". " in text else text


def _spaced(match: re.Match) -> str:
    return _prefixed(match[1], WHOLE[tuple(_key(match[2].replace(" ", "")).split("/"))])


def _any(match: re.Match) -> str:
    written = match[0].rstrip("./")
    dotted = [part for part in written.split("/") if "." in part]
    is_named = dotted and all(map(_LETTER_NAMES.fullmatch, dotted))  # ኤች.አይ.ቪ/ኤድስ, too
    is_one = is_named or _entry(re.split("[./]", written), True, True)
    pieces = [written] if is_one else _SENTENCES.split(written)
    words = ". ".join(map(_words, pieces))
    is_dotted = any("." in piece for piece in pieces)
    return words if is_dotted else words + match[0][len(written) :].replace("/", "")


@lru_cache(maxsize=2**14)
def _words(short: str) -> str:
    """The words of one abbreviation, which may have a prefix and a suffix. Initials must be known
    to their end: አ.አ.ተ is not አ.አ and a letter."""
    parts = re.split("[./]", short)
    has_prefix = len(parts[0]) == 2 and parts[0][0] in PREFIXES
    is_whole = "/" not in short or all(len(part) == 1 for part in parts[has_prefix:])
    words = []
    start = 0
    while start < len(parts):
        size, word = _next(parts, start)
        part = parts[start]
        is_letter = len(part) == 1 or (start == 0 and len(part) == 2 and part[0] in PREFIXES)
        if not word and is_letter and is_whole:
            is_acronym = "/" not in short and max(map(len, parts)) < 3
            return ("" if is_acronym else " ").join(parts)
        words.append(word or part)
        start += size
    return " ".join(words)


def _next(parts: list[str], start: int) -> tuple[int, str]:
    """How many parts from `start` on stand for something, and what. (1, "") if they do not."""
    left = len(parts) - start
    for size in range(min(left, LONGEST), 1, -1):
        if word := _entry(parts[start : start + size], start == 0, size == left):
            return size, word
    if left > 1:
        following = _key(parts[start + 1])
        for prefix, letter in _prefixes(parts[start], start == 0):
            for beginnings, word in HEADS.get(letter, ()):
                if following.startswith(beginnings):
                    return 1, prefix + word
    return 1, ""


def _entry(parts: list[str], is_first: bool, is_last: bool) -> str:
    """The words of parts that are in `WHOLE`, with a prefix if they are the first of an
    abbreviation and with a suffix if they are the last. An empty string if they are not."""
    *middle, last = map(_key, parts[1:])
    for prefix, first in _prefixes(parts[0], is_first):
        if words := WHOLE.get((first, *middle, last)):
            return _prefixed(prefix, words)
        for end in range(len(last), 0, -1) if is_last else ():
            letter = last[end - 1]
            sixth = chr(ord(letter) & ~7 | 5)  # of its row: ሩ is ር and a suffix
            words = WHOLE.get((first, *middle, last[: end - 1] + sixth), "")
            suffix = parts[-1][end:]
            if words and SUFFIX.fullmatch(suffix):
                if letter != sixth:
                    words = words[:-1] + parts[-1][end - 1] if _key(words[-1]) == sixth else ""
                if words:
                    return _prefixed(prefix, words + suffix)
    return ""


def _prefixes(part: str, is_first: bool) -> list[tuple[str, str]]:
    """(prefix, key of the rest) for the prefixes that a part may have."""
    prefixes = PREFIXES if is_first else ("",)
    return [(p, _key(part[len(p) :])) for p in prefixes if part.startswith(p) and part != p]


def _prefixed(prefix: str, words: str) -> str:
    """Of two prefixes, የ of a name is not said: ለተባበሩት."""
    return prefix + (words.removeprefix("የ") if prefix else words)
