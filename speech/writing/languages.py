"""Languages by their codes and English names; and the language of a command's texts."""

import itertools
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from common import options
from common.checkpoint import list_checkpoints
from common.errors import UsageError
from speech.data.columns import Rejections
from speech.data.fields import LANGUAGE_KEYS
from speech.data.manifest import parse

# The code, other codes (ISO 639-2 and 639-3, older ones, other forms of it), English names.
TABLE = """
af afr Afrikaans; am amh Amharic; ar ara arb Arabic; as asm Assamese; az aze azj Azerbaijani;
ba bak Bashkir; be bel Belarusian; bg bul Bulgarian; bn ben Bengali; bo bod tib Tibetan;
br bre Breton; bs bos Bosnian; ca cat Catalan, Valencian; cs ces cze Czech; cy cym wel Welsh;
da dan Danish; de deu ger German; el ell gre Greek; en eng English; es spa Spanish, Castilian;
et est ekk Estonian; eu eus baq Basque; fa fas per pes Persian, Farsi; fi fin Finnish;
fo fao Faroese; fr fra fre French; gl glg Galician; gu guj Gujarati; ha hau Hausa;
haw Hawaiian; he heb iw Hebrew; hi hin Hindi; hr hrv Croatian; ht hat Haitian Creole, Haitian;
hu hun Hungarian; hy hye arm Armenian; id ind in Indonesian; is isl ice Icelandic;
it ita Italian; ja jpn Japanese; jv jav jw Javanese; ka kat geo Georgian; kk kaz Kazakh;
km khm Khmer; kn kan Kannada; ko kor Korean; la lat Latin; lb ltz Luxembourgish; ln lin Lingala;
lo lao Lao; lt lit Lithuanian; lv lav lvs Latvian; mg mlg plt Malagasy; mi mri mao Maori;
mk mkd mac Macedonian; ml mal Malayalam; mn mon khk Mongolian; mr mar Marathi; ms msa may zsm Malay;
mt mlt Maltese; my mya bur Burmese, Myanmar; ne nep npi Nepali; nl nld dut Dutch, Flemish;
nn nno Nynorsk; no nor nb nob Norwegian, Bokmål; oc oci Occitan; pa pan Punjabi, Panjabi;
pl pol Polish; ps pus pbt Pashto, Pushto; pt por Portuguese; ro ron rum mo Romanian, Moldovan;
ru rus Russian; sa san Sanskrit; sd snd Sindhi; si sin Sinhala, Sinhalese; sk slk slo Slovak;
sl slv Slovenian, Slovene; sn sna Shona; so som Somali; sq sqi alb als Albanian;
sr srp Serbian; su sun Sundanese; sv swe Swedish; sw swa swh Swahili, Kiswahili; ta tam Tamil;
te tel Telugu; tg tgk Tajik; th tha Thai; tk tuk Turkmen; tl tgl fil Tagalog, Filipino;
tr tur Turkish; tt tat Tatar; uk ukr Ukrainian; ur urd Urdu; uz uzb uzn Uzbek;
vi vie Vietnamese; yi yid ydd ji Yiddish; yo yor Yoruba; yue zh-hk zh-yue Cantonese;
zh zho chi cmn Chinese, Mandarin
"""  # fmt: skip
PLANS = {"dry_run", "verify_gpu"}  # commands that read texts as a training does
ASK = (
    "the language of the texts is not given: add --language with a code or a name, such as sw or"
    " Swahili, or to every row of the table in a column named language"
)


def _read_table() -> tuple[dict[str, str], dict[str, str]]:
    """Codes and names in lower case to codes; codes to the first of their names."""
    codes = {}
    names = {}
    for entry in TABLE.split(";"):
        written, called = re.fullmatch(r"([a-z -]+) ([A-Z].*)", " ".join(entry.split())).groups()
        code = written.split()[0]
        called = called.split(", ")
        codes |= dict.fromkeys([*written.split(), *map(str.lower, called)], code)
        names[code] = called[0]
    return codes, names


_CODES, _NAMES = _read_table()


def _plain(name: str) -> str:
    return " ".join(name.lower().replace("_", "-").split())


def forms(name: str) -> list[str]:
    """What a language that is written in any case and perhaps with a region may be called, the
    best first: nb-NO is nb-no, nb or no."""
    whole = _plain(name)
    names = []
    for spelling in (whole, whole.partition("-")[0]):
        names += [spelling, _CODES.get(spelling, spelling)]
    return list(dict.fromkeys(names))


def exact(name: str) -> str:
    """The code of a language by any of its codes or its English name, in any case; what has a
    region, such as zh-TW, or is not in the table, in lower case."""
    whole = _plain(name)
    return whole if "-" in whole else _CODES.get(whole, whole)


def code_of(name: str) -> str:
    """The code of a language by any of its codes or its English name, with or without a region, in
    any case (en-US, eng, English); what is not in the table, without its region."""
    known = [_CODES[form] for form in forms(name) if form in _CODES]
    return known[0] if known else forms(name)[-1]


def described(code: str) -> str:
    """A code with the language's name, if it is known: "ln (Lingala)"."""
    name = _NAMES.get(code_of(code))
    return f"{code} ({name})" if name else code


def resolve(args, demo: str | None, may_tell: bool = False) -> str | None:
    """The language of a command's texts: that of --language, of the `demo` if it trains on nothing
    else, or the one that most rows name, if all name one: those of the training data, or those that
    a released model is evaluated on. None if weights have a language or no text is read, and if
    only the released model can tell (`may_tell`). Else raises `UsageError`."""
    if args.language is not None:
        return args.language
    used = {name for name in args.rules.commands if options.is_on(vars(args), name)} - PLANS
    if not args.train_manifest:
        evaluated = args.test_manifest or [*filter(None, [getattr(args, "long", None)])]
        if args.evaluate and evaluated and not args.resume:
            return of_rows(evaluated, args.tier or (), args.audio_root)
        return None if used else demo
    is_saved = args.resume and (args.resume != "auto" or list_checkpoints(args.checkpoint_dir))
    if used - {"check_data"} or args.init_from or is_saved:
        return None
    named = of_rows(args.train_manifest, args.tier or (), args.audio_root)
    if named is None and not may_tell:
        raise UsageError(ASK)
    return named


def of_rows(paths: Sequence[str], tiers: Sequence[str], audio_root: str | None) -> str | None:
    """The language that most rows name, if all do. Raises `UsageError` and `DataError`."""
    counts: Counter[str] = Counter()
    parsed = (parse(Path(path), Rejections(), tiers, audio_root) for path in paths)
    for _, row in itertools.chain.from_iterable(parsed):
        if not isinstance(row, dict):  # it will be rejected
            continue
        named = [row[key] for key in LANGUAGE_KEYS if row.get(key)]
        if not named:
            return None
        counts[str(named[0])] += 1
    return exact(max(counts, key=counts.get)) if counts else None
