"""Texts of the languages that Coqui's XTTS speaks, written as its tokenizer writes them before it
makes tokens: lower case, without double quotes, with numbers, abbreviations and signs in words.

The result is that of coqui-tts 0.28.0 to the letter, its oddities included (German 3.5 with a full
stop is read as a decimal, Turkish I becomes i), because the released model has learned from such
texts. Where Coqui's code fails, numbers are read in another way: `_number`. The tables are facts
about it; the code is our own. Numbers are read by num2words."""

import re

from common.errors import require
from models.xtts import latin
from speech.writing.reading import DIGITS, SIGNS, decimal_words, number_words, words_of

CHINESE, JAPANESE, KOREAN = "zh-cn", "ja", "ko"
DOUBLE_QUOTE = '"'
CAPITALS = {"tr": str.maketrans("İÖÜ", "iöü")}  # before other capitals become small letters

SIGN_WORDS = {  # in the order of `SIGNS`
    "ar": "و|على|في المئة|رقم|دولار|جنيه|درجة",
    "cs": "a|na|procento|křížek|dolar|libra|stupně",
    "de": "und|at|prozent|raute|dollar|pfund|grad",
    "en": "and|at|percent|hash|dollar|pound|degree",
    "es": "y|arroba|por ciento|numeral|dolar|libra|grados",
    "fr": "et|arobase|pour cent|dièse|dollar|livre|degrés",
    "hi": "और|ऐट दी रेट|प्रतिशत|हैश|डॉलर|पाउंड|डिग्री",
    "hu": "és|kukac|százalék|kettőskereszt|dollár|font|fok",
    "it": "e|chiocciola|per cento|cancelletto|dollaro|sterlina|gradi",
    "ko": "그리고|에|퍼센트|번호|달러|파운드|도",
    "nl": "en|bij|procent|hekje|dollar|pond|graden",
    "pl": "i|małpa|procent|krzyżyk|dolar|funt|stopnie",
    "pt": "e|arroba|por cento|cardinal|dólar|libra|graus",
    "ru": "и|собака|процентов|номер|доллар|фунт|градус",
    "tr": "ve|at|yüzde|diyez|dolar|sterlin|derece",
    CHINESE: "和|在|百分之|号|美元|英镑|度",
}
LANGUAGES = (*SIGN_WORDS, JAPANESE)  # that Coqui's tokenizer reads

# Words before a full stop, in the order in which they are replaced.
ABBREVIATIONS = {
    "cs": {"dr": "doktor", "ing": "inženýr", "p": "pan"},
    "de": {"fr": "frau", "dr": "doktor", "st": "sankt", "co": "firma", "jr": "junior"},
    "en": {
        "mrs": "misess", "mr": "mister", "dr": "doctor", "st": "saint", "co": "company",
        "jr": "junior", "maj": "major", "gen": "general", "drs": "doctors", "rev": "reverend",
        "lt": "lieutenant", "hon": "honorable", "sgt": "sergeant", "capt": "captain",
        "esq": "esquire", "ltd": "limited", "col": "colonel", "ft": "fort",
    },
    "es": {
        "sra": "señora", "sr": "señor", "dr": "doctor", "dra": "doctora", "st": "santo",
        "co": "compañía", "jr": "junior", "ltd": "limitada",
    },
    "fr": {
        "mme": "madame", "mr": "monsieur", "dr": "docteur", "st": "saint", "co": "compagnie",
        "jr": "junior", "ltd": "limitée",
    },
    "hu": {"dr": "doktor", "b": "bácsi", "nőv": "nővér"},
    "it": {
        "sig": "signore", "dr": "dottore", "st": "santo", "co": "compagnia", "jr": "junior",
        "ltd": "limitata",
    },
    "nl": {"dhr": "de heer", "mevr": "mevrouw", "dr": "dokter", "jhr": "jonkheer"},
    "pl": {"p": "pani", "m": "pan", "dr": "doktor", "sw": "święty", "jr": "junior"},
    "pt": {
        "sra": "senhora", "sr": "senhor", "dr": "doutor", "dra": "doutora", "st": "santo",
        "co": "companhia", "jr": "júnior", "ltd": "limitada",
    },
    "ru": {"г-жа": "госпожа", "г-н": "господин", "д-р": "доктор"},
    "tr": {"b": "bay", "byk": "büyük", "dr": "doktor"},
}  # fmt: skip
END = {"ru": r"\b"}  # what ends an abbreviation, if that is not a full stop

# What follows the digits of an ordinal number.
ORDINALS = {
    "ar": "ون|ين|ث|ر|ى",
    "cs": r"\.(?=\s|$)",
    "de": r"st|nd|rd|th|º|ª|\.(?=\s|$)",
    "en": "st|nd|rd|th",
    "es": "º|ª|er|o|a",
    "fr": "º|ª|er|re|e|ème",
    "hi": "st|nd|rd|th",
    "hu": r"\.|adik|edik|odik|ödik|ik",
    "it": "º|°|ª|o|a|i|e",
    "ko": "번째|번|차|째",
    "nl": "de|ste|e",
    "pl": "º|ª|st|nd|rd|th",
    "pt": "º|ª|o|a",
    "ru": "-(?:й|я|е|ое|ье|го)",
    "tr": r"\.|inci|nci|uncu|üncü",
}
# In these languages a comma groups digits, in the others a full stop.
COMMA_GROUPS = ("en", "ru")
WITH_COMMAS = re.compile(r"\b\d{1,3}(?:,\d{3})*(?:\.\d+)?\b")
WITH_STOPS = re.compile(r"\b\d{1,3}(?:.\d{3})*(?:,\d+)?\b")  # any character may group digits
# The look-behinds change no match. Without them, long numbers take quadratic time.
CURRENCIES = {
    code: re.compile(rf"{sign}[0-9.,]*[0-9]|(?<![0-9.,])[0-9.,]*[0-9]{sign}")
    for code, sign in {"GBP": "£", "USD": r"\$", "EUR": "€"}.items()
}
# What comes before the cents; num2words says no cents as 0 cents.
BEFORE_CENTS = {"es": " con ", "fr": " et ", "de": " und ", "pt": " e ", "it": " e "}
DECIMAL = re.compile(r"(?<![0-9])[0-9]+[.,][0-9]+")
NO_DECIMALS = ("tr",)

_SIGN_TABLES = {
    language: str.maketrans(
        {sign: f" {word} " for sign, word in zip(SIGNS, words.split("|"), strict=True)}
    )
    for language, words in SIGN_WORDS.items()
}
_ORDINALS = {
    language: re.compile(f"(?<![0-9])([0-9]+)(?:{suffixes})")
    for language, suffixes in ORDINALS.items()
}
_ABBREVIATIONS = {
    language: [
        (re.compile(rf"\b{short}{END.get(language, '[.]')}", re.IGNORECASE), word)
        for short, word in words.items()
    ]
    for language, words in ABBREVIATIONS.items()
}
_ENGLISH = re.compile(rf"\b({'|'.join(ABBREVIATIONS['en'])})\.", re.IGNORECASE)


def clean(text: str, language: str) -> str:
    """A text of one of `LANGUAGES` as Coqui's tokenizer writes it. Digits stay where num2words
    lacks the language. Raises `RunError` if a library is missing."""
    if language == JAPANESE:
        return latin.romaji(text).lower()
    text = text.replace(DOUBLE_QUOTE, "").translate(CAPITALS.get(language, {})).lower()
    if language == CHINESE:
        text = latin.chinese_numbers(text)
    elif re.search(r"\d", text):
        text = expand_numbers(text, language)
    for short, word in _ABBREVIATIONS.get(language, ()):
        text = short.sub(word, text)
    text = " ".join(text.translate(_SIGN_TABLES[language]).split())
    latin_letters = {CHINESE: latin.pinyin, KOREAN: latin.romanise}.get(language)
    return latin_letters(text) if latin_letters else text


def shield(text: str) -> str:
    """A text without digits, signs, capitals and quotes that Coqui's tokenizer leaves as it is when
    it takes it for English: the full stop after a word like English hon is set apart."""
    return _ENGLISH.sub(r"\1 .", text)


# --- numbers --------------------------------------------------------------------------------------


def expand_numbers(text: str, language: str) -> str:
    """A text in lower case with its numbers in words: digits in groups, amounts of money, decimals,
    ordinals, cardinals, in this order. Raises `RunError` if num2words is missing."""
    library = require("num2words", "a text with numbers")
    grouped, mark = (WITH_COMMAS, ",") if language in COMMA_GROUPS else (WITH_STOPS, ".")
    text = grouped.sub(lambda match: match[0].replace(mark, ""), text)
    if language not in library.CONVERTER_CLASSES:
        return text
    for code, amounts in CURRENCIES.items():
        try:
            text = amounts.sub(lambda match: _money(match[0], code, language), text)  # noqa: B023
        except Exception:  # num2words lacks the currency, or it is no number
            break  # as in Coqui's code
    if language not in NO_DECIMALS:
        text = DECIMAL.sub(lambda match: decimal_words(match[0], language), text)
    if language in _ORDINALS:
        text = _ORDINALS[language].sub(
            lambda match: number_words(match[1], language, "ordinal"), text
        )
    return DIGITS.sub(lambda match: number_words(match[0], language), text)


def _money(written: str, code: str, language: str) -> str:
    amount = float(re.sub(r"[^\d.]", "", written.replace(",", ".")))
    words = words_of(amount, language, to="currency", currency=code)
    if amount.is_integer():
        end = words.rfind(BEFORE_CENTS.get(language, ", "))
        words = words[:end] if end != -1 else words
    return words
