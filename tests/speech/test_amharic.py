"""Amharic text: numbers and abbreviations in words, letters to phonemes, the lexicon and the
command."""

import random
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import UsageError
from speech.amharic import BLOCKS, PHONEMES, SYLLABLES, phonemes, read_lexicon, spoken
from speech.amharic.abbreviations import HEADS, WHOLE
from speech.amharic.reading import SPOKEN

ROOT = Path(__file__).resolve().parents[2]
ETHIOPIC = [chr(c) for first, last in BLOCKS for c in range(first, last + 1)]
DIGITS = "0123456789٣५５²①፩፪፱፲፳፺፻፼"
SIGNS = ".,:;/-–−+=×÷%$€£°&()'\"።፣፤፥፦፧፨፡፠½．ኛ \t\n"
PIECES = [
    *"ዓ.ም. ኪ.ሜ ት/ቤ ዶ/ር አ.አ. በ ቱ ሩ ሜ. ሚሊዮን 1,000 ፡፡ :: a İ a.com http:// @ # \" « » ' 😀 👍🏽".split(),
    *"½ 8፡30 ኮ/ል አ.አ.ዩ. ም \u135f é 日 ж".split(),
    *("1/2 ", " ሰዓት", "ስልክ ", "ዓ. "),
]
mixed = st.lists(
    st.sampled_from([*ETHIOPIC, *DIGITS * 8, *SIGNS * 8, *PIECES * 8]), max_size=30
).map("".join)
any_text = st.text(max_size=40) | st.text(st.characters(), max_size=20)  # surrogates too


# --- Numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0", "ዜሮ"),
        ("፼፼", "መቶ ሚሊዮን"),
        ("፭፪", "አምስት ሁለት"),
        ("፻፻", "መቶ መቶ"),
        ("፩0", "አንድ ዜሮ"),
        ("1$0", "አንድ ዶላር ዜሮ"),
        ("120,000,000,000", "መቶ ሃያ ቢሊዮን"),
        ("1000000001", "አንድ ዜሮ ዜሮ ዜሮ ዜሮ ዜሮ ዜሮ ዜሮ ዜሮ አንድ"),
        ("007", "ዜሮ ዜሮ ሰባት"),
        ("1.2.3", "አንድ ነጥብ ሁለት ነጥብ ሦስት"),
        ("2.5 %", "ሁለት ነጥብ አምስት በመቶ"),
        ("1000ኛ", "አንድ ሺኛ"),
        ("1ኛደረጃ", "አንደኛ ደረጃ"),
        ("-5", "ነጌቲቭ አምስት"),
        ("5−3", "አምስት ሲቀነስ ሦስት"),
        ("5+3=8", "አምስት ሲደመር ሦስት እኩል ይሆናል ስምንት"),
        ("ከ5–10", "ከአምስት እስከ አስር"),
        ("12/01/2016", "አስራ ሁለት አንድ ሁለት ሺህ አስራ ስድስት"),
        ("2016-01-12", "ሁለት ሺህ አስራ ስድስት አንድ አስራ ሁለት"),
        ("በ$5 ሚሊዮን ነው", "በአምስት ሚሊዮን ዶላር ነው"),
        ("30°C", "ሰላሳ ዲግሪ ሴንቲግሬድ"),
        ("½", "ግማሽ"),
        ("5ቱ", "አምስቱ"),
        ("9ኙም", "ዘጠኙም"),
        ("5ተማሪዎች", "አምስት ተማሪዎች"),
        ("५", "አምስት"),
        ("２．５", "ሁለት ነጥብ አምስት"),
        ("m²", "ካሬ ሜትር"),
        ("covid19", "covid አስራ ዘጠኝ"),
        ("12:30", "አስራ ሁለት ሰዓት ተኩል"),
        ("2:05", "ሁለት ሰዓት ከአምስት ደቂቃ"),
        ("8፡45 ሰአት ላይ", "ስምንት ሰዓት ከአርባ አምስት ደቂቃ ላይ"),
        ("2፡30 ሰዓትና 3፡00 ሰዓት", "ሁለት ሰዓት ተኩልና ሦስት ሰዓት"),
        ("2:05:12", "ሁለት ሰዓት ከአምስት ደቂቃ ከአስራ ሁለት ሰከንድ"),
        ("ከ10፡00 - 11፡30 ሰዓት", "ከአስር ሰዓት እስከ አስራ አንድ ሰዓት ተኩል"),
        ("ከ8-10 ሰዓት", "ከስምንት እስከ አስር ሰዓት"),
        ("ዮሐ. 3፡16", "ዮሐ. ሦስት አስራ ስድስት"),
        ("3:1", "ሦስት ለአንድ"),
        ("1/2 ኪ.ግ", "ግማሽ ኪሎ ግራም"),
        ("⅓", "አንድ ሦስተኛ"),
        ("2/3ኛ ድምፅ", "ሁለት ሦስተኛ ድምፅ"),
        ("2½", "ሁለት ተኩል"),
        ("2 1/3 ሊትር", "ሁለት ከአንድ ሦስተኛ ሊትር"),
        ("አንቀጽ 1/2", "አንቀጽ አንድ ሁለት"),
        ("አዋጅ ቁጥር 34/85", "አዋጅ ቁጥር ሰላሳ አራት ሰማንያ አምስት"),
        ("12.01.2016", "አስራ ሁለት አንድ ሁለት ሺህ አስራ ስድስት"),
        ("10/2=5", "አስር ሲካፈል ሁለት እኩል ይሆናል አምስት"),
        ("+251 911 234 567", "ፕላስ ሁለት አምስት አንድ ዘጠኝ አንድ አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት"),
        ("0911 23 45 67", "ዜሮ ዘጠኝ አንድ አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት"),
        ("(011) 551-7700", "ዜሮ አንድ አንድ አምስት አምስት አንድ ሰባት ሰባት ዜሮ ዜሮ"),
        ("በስልክ ቁጥር 911234567", "በስልክ ቁጥር ዘጠኝ አንድ አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት"),
        ("የ-5", "የነጌቲቭ አምስት"),
        ("+5", "ፕላስ አምስት"),
        ("5 - 3 = 2", "አምስት ሲቀነስ ሦስት እኩል ይሆናል ሁለት"),
        ("3-1", "ሦስት ለአንድ"),
        ("1-3", "አንድ እስከ ሦስት"),
        ("ቡናን 1-3 ተሸነፈ", "ቡናን አንድ ለሦስት ተሸነፈ"),
        ("4 ለ 1", "አራት ለአንድ"),
        ("5%-10%", "አምስት በመቶ እስከ አስር በመቶ"),
        ("$5-$10", "አምስት ዶላር እስከ አስር ዶላር"),
        ("10ኛ-12ኛ ክፍል", "አስረኛ እስከ አስራ ሁለተኛ ክፍል"),
        ("120 km/h", "መቶ ሃያ ኪሎ ሜትር በሰዓት"),
        ("#5", "ቁጥር አምስት"),
        ("ማቴ. 5፥3-4", "ማቴ. አምስት ሦስት እስከ አራት"),
        ("ዘፍ 1፥1-2፥3", "ዘፍ አንድ አንድ እስከ ሁለት ሦስት"),
        ("በ1ኛነት", "በአንደኛነት"),
        ("3ተኛ", "ሦስተኛ"),
    ],
)
def test_numbers_times_fractions_and_signs(text, words):
    assert spoken(text) == words


SMALL = {word: i for i, word in enumerate("አንድ ሁለት ሦስት አራት አምስት ስድስት ሰባት ስምንት ዘጠኝ".split(), 1)}
SMALL |= {word: 10 * i for i, word in enumerate("አስር ሃያ ሰላሳ አርባ ሃምሳ ስልሳ ሰባ ሰማንያ ዘጠና".split(), 1)}
LARGE = {"ሺህ": 10**3, "ሚሊዮን": 10**6, "ቢሊዮን": 10**9}


def value(words: str) -> int:
    """The number that words name. Each word may only make a value that its place allows."""
    total, group, last = 0, 0, 10**12
    for word in words.split():
        if word in LARGE:
            assert 0 < group < 1000 and LARGE[word] < last
            total, group, last = total + group * LARGE[word], 0, LARGE[word]
        elif word == "መቶ":
            assert group < 10 and group != 1
            group = 100 * max(1, group)
        elif word == "አስራ":
            assert group % 100 == 0
            group += 10
        else:
            assert group % 10 == 0 and (group % 100 == 0 or SMALL[word] < 10)
            group += SMALL[word]
    return total + group


def ethiopic(number: int) -> str:
    """Ethiopic numerals of a number below 10^8, in pairs of digits with ፻ and ፼ in turn, as in CSS
    Counter Styles."""
    digits = str(number)
    digits = "0" * (len(digits) % 2) + digits
    pairs = [digits[i : i + 2] for i in range(0, len(digits), 2)]
    text = ""
    for place, (tens, ones) in zip(range(len(pairs) - 1, -1, -1), pairs, strict=True):
        pair = ("" if tens == "0" else chr(0x1371 + int(tens))) + (
            "" if ones == "0" else chr(0x1368 + int(ones))
        )
        sign = "" if place == 0 else "፻" if place % 2 else "፼"
        if pair == "፩" and place and (sign == "፻" or place == len(pairs) - 1):
            pair = ""
        text += pair + ("" if sign == "፻" and pair == "" and (tens, ones) == ("0", "0") else sign)
    return text


def test_every_number_reads_back():
    generator = random.Random(0)
    numbers = [
        *range(1, 10_001),
        *range(10_001, 100_001, 37),
        *(generator.randint(1, 10**9) for _ in range(3000)),
        10**9,
    ]
    text = spoken(" ; ".join(map(str, numbers)))
    assert [value(words) for words in text.split(";")] == numbers
    text = spoken(" ; ".join(f"{number:,}" for number in numbers))
    assert [value(words) for words in text.split(";")] == numbers
    numbers = [number for number in numbers if number < 10**8]
    text = spoken(" ; ".join(map(ethiopic, numbers)))
    assert [value(words) for words in text.split(";")] == numbers


LONG = 'በ|9|1,|1-|፼|1,000|a|a.|a@|@|1/|ዓ.|ዓ. |ዓ/|ስልክ|0 |+1 |(0|$1|1:|1 - |x1|www.|http://|a-|.com|«|የ"|ሰላም"|1ኛጠ/|በ '
LONG += "|. |a'|\u135f|::|፡፡|፡|- |😀|1 1/2 |½|ሀ/ለ/|1:00 ሰዓት|5ኪ.ሜ|እ. ኤ. |<<|=1|%41"


@pytest.mark.parametrize("piece", LONG.split("|"))
def test_long_input(piece):
    """Linear: twice the text takes little more than twice the time, up to 80,000 characters."""
    seconds = []
    for size in (10_000, 80_000):
        text = piece * (size // len(piece))
        start = time.process_time()
        words = phonemes(text)
        seconds.append(time.process_time() - start)
        assert not any(c.isdecimal() for c in words)
    assert seconds[1] < max(4 * 8 * seconds[0], 0.3)


# --- Abbreviations and punctuation ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("በ1995 ዓ.ም.", "በአንድ ሺህ ዘጠኝ መቶ ዘጠና አምስት ዓመተ ምሕረት"),
        ("ዓ. ም.", "ዓመተ ምሕረት"),
        ("በት/ቤቱ", "በትምህርት ቤቱ"),
        ("5 ሜ.", "አምስት ሜትር"),
        ("2ኛጠ/ሚ", "ሁለተኛ ጠቅላይ ሚኒስትር"),
        ("ሰላም፡ነው፡፡", "ሰላም ነው."),
        ("ሰላም ። እንዴት ነህ፧አለ፤", "ሰላም. እንዴት ነህ? አለ;"),
        ("አንድ፣ሁለት፥ሦስት፦አራት፨", "አንድ, ሁለት: ሦስት: አራት."),
        ("ነው::ይህ", "ነው. ይህ"),
        ("C++ std::cout", "c std: cout"),
        ("日本 & እኛ", "እና እኛ"),
        ("ብር 50,000.00", "ብር ሃምሳ ሺህ"),
        ("ሄ/ር ሜ/ጀ ሻ/ባሻ ክ.ል.በ.", "ሄክታር ሜጀር ጄኔራል ሻምበል ባሻ ክርስቶስ ልደት በፊት"),
        ("10.5 ሚ. ብር", "አስር ነጥብ አምስት ሚሊዮን ብር"),
        ("ETB 500 እና 5 USD", "አምስት መቶ ብር እና አምስት ዶላር"),
        ("በ12፡45.3 ደቂቃ", "በአስራ ሁለት ደቂቃ ከአርባ አምስት ነጥብ ሦስት ሰከንድ"),
        ("*999#", "ኮከብ ዘጠኝ ዘጠኝ ዘጠኝ መሰላል"),
        ("በስልክ ቁጥር 8282", "በስልክ ቁጥር ስምንት ሁለት ስምንት ሁለት"),
        ("1.000.000 ብር", "አንድ ሚሊዮን ብር"),
        ("በ*847# ይጠቀሙ", "በኮከብ ስምንት አራት ሰባት መሰላል ይጠቀሙ"),
        ("በ8282 ይደውሉ", "በስምንት ሁለት ስምንት ሁለት ይደውሉ"),
        ("ነፃ የስልክ መስመር 8335", "ነፃ የስልክ መስመር ስምንት ሦስት ሦስት አምስት"),
        ("ወደ 8282 ሰዎች", "ወደ ስምንት ሺህ ሁለት መቶ ሰማንያ ሁለት ሰዎች"),
        ("ሰው (ልጅ) [እና]፡ቡና/ሻይ", "ሰው ልጅ እና ቡና ሻይ"),
        ("ኃ/ማርያም ሃ/ማርያም", "ኃይለ ማርያም ኃይለ ማርያም"),
        ("ተ.መ.ድ ለተ/መ/ድ", "የተባበሩት መንግሥታት ድርጅት ለተባበሩት መንግሥታት ድርጅት"),
        ("የጠ/ሚ/ሩን", "የጠቅላይ ሚኒስትሩን"),
        ("ጠ/ሚ/መለስ", "ጠቅላይ ሚኒስትር መለስ"),
        ("5 ኪ.ሜ/ሰ", "አምስት ኪሎ ሜትር በሰዓት"),
        ("በአ.አ.ዩ.", "በአዲስ አበባ ዩኒቨርሲቲ"),
        ("አ.አ.ተ", "አአተ"),
        ("ኢ.ሕ.አ.ዴ.ግ. ኤስ.ኤም.ኤስ", "ኢሕአዴግ ኤስ ኤም ኤስ"),
        ("እ/ጉ/ም/ቤት", "እ ጉ ምክር ቤት"),
        ("ነው/ናት /ኢነጋማ/ ሰላም.ነው.", "ነው ናት ኢነጋማ ሰላም. ነው."),
        ("እ. ኤ. አ. በ2003", "እንደ ኤውሮፓውያን አቆጣጠር በሁለት ሺህ ሦስት"),
        ("ሰላም 😀👍🏽 ለዓለም 🇪🇹", "ሰላም ለዓለም"),
        ('«አዲስ ዘመን»ን የ«ሰላም» "ቤት"', "አዲስ ዘመንን የሰላም ቤት"),
        ("ሰላም... እሺ?! (ሥነ-ጽሑፍ) - አዎ", "ሰላም. እሺ? ሥነ ጽሑፍ, አዎ"),
        ("https://www.ebc.et/news/?a=5.", "www ዶት ebc ዶት et ስላሽ news ስላሽ a አምስት."),
        ("info@example.com", "info አት example ዶት com"),
        ("@tikvah #ኢትዮጵያ_ሰላም", "አት tikvah ኢትዮጵያ ሰላም"),
        ("COVID-19 U.S.A. Café don't", "covid አስራ ዘጠኝ u s a cafe don't"),
        ("በተ/ቁ 5", "በተራ ቁጥር አምስት"),
        ("በወ/መ/ሕ/ቁ", "በወ መ ሕ ቁ"),
        ("የህ/ተ/ም/ቤት", "የሕዝብ ተወካዮች ምክር ቤት"),
        ("ጠ/ሚሩ", "ጠቅላይ ሚኒስትሩ"),
        ("ስለ ኤች.አይ.ቪ/ኤድስ", "ስለ ኤች አይ ቪ ኤድስ"),
        ("10 km² ሰላም¹", "አስር ካሬ ኪሎ ሜትር ሰላም"),
    ],
)
def test_abbreviations_and_punctuation(text, words):
    assert spoken(text) == words


def test_every_abbreviation_is_read():
    for parts, words in WHOLE.items():
        for sign in "./":
            assert spoken(sign.join(parts)) == words
    for letter, rows in HEADS.items():
        for beginnings, words in rows:
            word = f"{beginnings[0]}ሎሎ"
            assert spoken(f"{letter}/{word}").split()[: len(words.split())] == words.split()


# --- Phonemes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "sounds", "in_full"),
    [
        ("ትምህርት", "tımhırt", "tımıhırıt"),
        ("መጽሐፍ", "məs'haf", "məs'ıhaf"),
        ("ትክክል", "tıkıkıl", "tıkıkıl"),
        ("ንግድ", "nıgd", "nıgıd"),
        ("አእምሮ", "aımro", "aımıro"),
        ("ስእል", "sıl", "sıl"),
        ("ኢትዮጵያ", "ityop'ya", "itıyop'ıya"),
        ("ጭቃ", "č'ık'a", "č'ık'a"),
        ("ዣንጥላ", "žant'ıla", "žanıt'ıla"),
        ("ኧረ", "ərə", "ərə"),
        ("እ", "ı", "ı"),
        ("ቋንቋ", "k'wank'wa", "k'wanık'wa"),
        ("ቊ", "k'wi", "k'wi"),
        ("ቈ", "k'wə", "k'wə"),
        ("ፊልም፧", "film?", "filım?"),
        ("አለ\u135f", "allə", "allə"),
        ("Abebe ABEBE 日本", "abebe abebe", "abebe abebe"),
        ("\u1390ሰ\u135d\u1249", "ssə", "ssə"),
    ],
)
def test_phonemes(word, sounds, in_full):
    assert phonemes(word) == sounds
    assert phonemes(word, epenthesis=False) == in_full


@pytest.mark.parametrize(
    ("a", "b"), ["ሠሰ", "ፀጸ", "ሐኀ", "ሐሀ", "ዐአ", "ሀሃ", "አኣ", "ኁሑ", "ኹሁ", "ቀቐ", "ሢሲ"]
)
def test_homophones(a, b):
    assert phonemes(a) == phonemes(b)
    assert phonemes(f"መ{a}ብ") == phonemes(f"መ{b}ብ")


def test_every_syllable():
    """All syllables of Unicode 14, and every vowel order differs from the others of its row."""
    assert len(SYLLABLES) == 481
    assigned = [c for c in ETHIOPIC if unicodedata.name(c, "").startswith("ETHIOPIC SYLLABLE")]
    assert set(assigned) <= set(SYLLABLES)
    for c in SYLLABLES:
        sound = phonemes(c)
        assert re.fullmatch("[a-zəčšžñı']+", sound) and re.search("[a-zəčšžñı]", sound), c
    row = {phonemes(c + "ና", epenthesis=False).removesuffix("na") for c in "ለሉሊላሌልሎሏ"}
    assert row == {"lə", "lu", "li", "la", "le", "lı", "lo", "lwa"}


WEAK = [
    c
    for c, (consonant, vowel) in SYLLABLES.items()
    if vowel == "ı" and len(consonant.strip("'")) == 1
]


@given(st.lists(st.sampled_from([*WEAK * 3, "ላ", "ቱ", "ኦ"]), min_size=1, max_size=9).map("".join))
def test_no_impossible_cluster(word):
    consonants = phonemes(word).replace("'", "")
    runs = re.split("[aeiouıə]+", consonants)
    assert len(runs[0]) <= 1 or not re.search("[aeiouıə]", consonants)
    assert all(len(run) <= 2 for run in runs)
    assert not re.search(".*[^lrmnñwy][lrmnñwy]$", runs[-1])


# --- Any input ------------------------------------------------------------------------------------


NOT_SPOKEN = re.compile(f"[^{SPOKEN}]")
NOT_PHONEMES = re.compile(f"[^{PHONEMES} .,:;?!]")


@given(any_text | mixed)
def test_any_input(text):
    words = spoken(text)
    assert not NOT_SPOKEN.search(words)
    assert spoken(words) == words
    assert words == " ".join(words.split())
    for epenthesis in (True, False):
        assert not NOT_PHONEMES.search(phonemes(text, epenthesis=epenthesis))


@given(
    st.lists(
        st.sampled_from([*DIGITS, *SIGNS[:20].replace(",", "").replace("/", "")]), max_size=12
    ).map("".join)
)
def test_no_digit_is_dropped(text):
    """Every string of digits or numerals is heard: there are at least as many words as strings."""
    strings = re.findall(r"[0-9٣५５]+|[²①]|[፩-፼]+", text)
    assert len(re.findall("[ሀ-ፗ]+", spoken(text))) >= len(strings)


# --- Lexicon --------------------------------------------------------------------------------------


def test_lexicon(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_text(
        "# geminates\n\nአለ\tallə\nዓለም\taləm:\nሠሪ\tsərri\nሰሪ\tsəri\nአለ\tAllə\n", encoding="utf-8-sig"
    )
    lexicon = read_lexicon(str(path))
    assert phonemes("አለ፣ ዐለ አለው 1", lexicon) == "allə, allə aləw and"
    assert phonemes("አለም ዓለም", lexicon) == "aləm: aləm:"
    assert phonemes("ሠሪ ሰሪ", lexicon) == "sərri səri"
    assert phonemes("አለ") == "alə"


DAMAGED = "አለ allə|alə\tallə|አለ ነው\tallə|አለ\tአለ|አለ\tal2|አለ\tal፩|አለ\t|አለ\t'|\tallə|ሰማ\tsəma|አለ\ta\tb"


@pytest.mark.parametrize("line", DAMAGED.split("|"))
def test_damaged_lexicon(tmp_path, line):
    path = tmp_path / "words.tsv"
    path.write_text(f"# words\nሰማ\tsəmma\n{line}\n", encoding="utf-8")
    with pytest.raises(UsageError, match=f"^--lexicon {re.escape(str(path))}, line 3: [^\n]*$"):
        read_lexicon(str(path))


# --- Command --------------------------------------------------------------------------------------


def command(*flags: str, stdin: bytes = b"", **options) -> subprocess.CompletedProcess:
    line = [sys.executable, "-m", "speech.amharic", *flags]
    return subprocess.run(line, cwd=ROOT, input=stdin, capture_output=True, timeout=60, **options)


def test_command(tmp_path):
    path = tmp_path / "words.tsv"
    path.write_text("አለ\tallə\n", encoding="utf-8")
    text = "\ufeffትምህርት፡አለ።\n\n".encode() + b"\xff\xfe 5\r\n\x0c\x1c\n" + "\u2028ቤት".encode()
    result = command("--lexicon", str(path), stdin=text, env={"LC_ALL": "C", "PYTHONUTF8": "0"})
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode().split("\n") == ["tımhırt allə.", "", "amıst", "", "bet", ""]
    assert command("--no_epenthesis", stdin="ትምህርት".encode()).stdout.decode() == "tımıhırıt\n"


def test_command_errors(tmp_path):
    result = command("--lexicon", str(tmp_path / "missing.tsv"))
    assert result.returncode == 2 and result.stdout == b""
    assert re.fullmatch(rf"error: --lexicon {tmp_path}/missing[^\n]*\n", result.stderr.decode())
