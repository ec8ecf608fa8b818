"""Random Morse texts: callsigns, contest exchanges, everyday contacts."""

import re

import numpy as np

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
DIGITS = "0123456789"
CONTESTS = {  # name: (what follows CQ, fields of the exchange)
    "CQWW": ("TEST WW", ("rst", "cq_zone")),
    "CQWPX": ("TEST WPX", ("rst", "serial")),
    "ARRLDX": ("TEST DX", ("rst", "state_or_power")),
    "FIELD_DAY": ("FD", ("class", "section")),
    "NAQP": ("NA", ("name", "state")),
    "SWEEPSTAKES": ("SS", ("serial", "precedence", "own_call", "check", "section")),
    "SPRINT": ("NA", ("other_call", "own_call", "serial", "name", "state")),
    "IARU": ("TEST IARU", ("rst", "itu_zone")),
}
# Contests whose participants are nearly all from the USA or Canada.
AMERICAN = ("FIELD_DAY", "NAQP", "SWEEPSTAKES", "SPRINT")
QUERIES = {  # field: how to ask for it
    "rst": "RST?",
    "cq_zone": "ZONE?",
    "serial": "NR?",
    "state_or_power": "NR?",
    "class": "CLASS?",
    "section": "SEC?",
    "name": "NAME?",
    "state": "ST?",
    "precedence": "PREC?",
    "own_call": "CALL?",
    "check": "CK?",
    "other_call": "CALL?",
    "itu_zone": "ZONE?",
}
# Sample types: what is sent by station {own} to station {other}.
FORMS = {
    "full_qso": (
        "CQ {cq} {own} {own} {other} {other} {sent} R {received} TU {own} | "
        "CQ {test} {own} {own} {test} {other} {other} {sent} TU {received} R TU {own} {test} | "
        "{own} {test} {other} {other} {sent} = {received} TU {own} | "
        "{test} {own} {other} {sent} CFM {received} 73 {own} | "
        "QRZ {own} {other} {sent} QSL {received} EE"
    ).split(" | "),
    "call": (
        "CQ {cq} {own} {own} | CQ {test} DE {own} {own} K | {test} {own} {test} | "
        "CQ {own} {own} {cq} | {own} | {own} {own} | {other} DE {own} | DE {own} {own} ( | "
        "TU {own} | QRZ {own}"
    ).split(" | "),
    "exchange": (
        "{other} {sent} | {other} {sent} | TU {sent} | R {sent} | {sent} | {sent} {sent} | "
        "{other} {sent} {other} | {other} {sent} BK"
    ).split(" | "),
    "repeat_request": (
        "{query} | {query} {query} | AGN? | AGN AGN? | ? | PSE AGN {query} | {other} AGN? | "
        "{other}? | {part}? | CL? {own} {own} | {query} {answer} {answer} | AGN? {sent} | "
        "{query} QRM | NIL"
    ).split(" | "),
}
CONTEST_SAMPLES = ("full_qso", "call", "exchange", "partial", "repeat_request")
SAMPLE_TYPES = (*CONTEST_SAMPLES, "words")
NO_CONTEST = "NONE"
STATES = (
    "AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM"
    " NY NC ND OH OK OR PA RI SC SD TN TX UT VT VA WA WV WI WY DC AB BC MB NB NL NS ON PE QC SK NT"
    " NU YT"
).split()
SECTIONS = (
    "CT EMA ME NH RI VT WMA ENY NLI NNJ NNY SNJ WNY DE EPA MDC WPA AL GA KY NC NFL SC SFL WCF TN VA"
    " PR VI AR LA MS NM NTX OK STX WTX EB LAX ORG SB SCV SDG SF SJV SV PAC AZ EWA ID MT NV OR UT"
    " WWA WY AK MI OH WV IL IN WI CO IA KS MN MO NE ND SD AB BC GH MB NB NL NS ONE ONN ONS PE QC"
    " SK TER"
).split()
PREFIXES = (
    "DL DJ DK DF G M GM GW GI F TM I IK IZ EA EC PA PE ON OT OK OL OM SP SQ SN HA YO LZ YU YT S5 9A"
    " E7 Z3 UA RA R UR US LY YL ES OH OG SM SE LA OZ TF EI HB CT CR SV TA 4X 5B JA JH JR BY BG HL"
    " DS VU HS YB 9M 9V DU VK ZL KH PY PP LU LW CE XQ CX HK YV XE TI HI CO KP V3 8P 9Y ZS 5H 5Z ST"
    " CN EL UN EX 4L EK OD A6 A7 9K HZ VP FK FO"
).split()
ABROAD = ("W1/", "W4/", "KH6/", "VE3/", "EA8/", "F/", "DL/", "OH0/", "VP5/", "PJ2/")
# Digits that some operators send as shorter letters.
CUT_NUMBERS = ({}, {"0": "T"}, {"0": "T", "9": "N"}, {"0": "T", "9": "N", "1": "A"})
POWERS = ("KW", "K", "1TT", "100", "ATT", "5TT", "400", "5", "200")
SOCIETIES = (
    "ARRL RAC DARC RSGB REF ARI JARL URE SRR PZK CRC OEVSV USKA VERON MRASZ HRS LRMD CRSA AC R1"
    " R2 R3".split()
)
NAMES = (
    "BOB JIM JOHN BILL TOM DAN DAVE MIKE STEVE RICK ED JOE KEN AL DON RON PETE PAUL MARK JEFF GARY"
    " FRED JACK SAM HANS UWE KARL JAN PIET LARS OLE ANNA MARIA EVA IVAN YURI IGOR VLAD ZORAN LUIS"
    " JOSÉ JUAN PABLO TARO HIRO GIOVANNI"
).split()
PHRASES = (  # of everyday contacts, with {slots}
    "{a} DE {b} + | {a} DE {b} {b} ( | CQ CQ DE {b} {b} K | QRZ? | GM OM | GA DR {name} | "
    "GE ES TNX FER CALL = | UR RST {rst} {rst} = | MY NAME IS {name} {name} = | "
    "QTH {city}, {city} = | LOC {grid} {grid} | HW CPY? | BK | WX {weather} ES TEMP {n} C | "
    "RIG IS {rig} PWR {n} W | ANT {antenna} | AGE {n} | R R FB {name} | QRM HR | QSB | "
    "PSE QSL VIA BURO | TNX FER FB QSO = | 73 ES GL DR {name} + | {a} DE {b} <SK> | "
    "73 <SK> E E | <AS> | QRX 5 <AS> | {city} <HH> {city} | QRL? | SRI QRN | PSE RPT UR NAME? | "
    "NR {n}/{n} | (EX {b}) | QSY {n}.{n} | {n}:{n} UTC | MAIL: {name}@{city}.COM | "
    'THE "{city}" CLUB | '
    "IT'S {weather}, ISN'T IT? | CAFÉ {city} | {n}-{n} - OK"
).split(" | ")
SLOTS = {
    "name": NAMES,
    "city": (
        "BOSTON BERLIN PARIS TOKYO OSAKA LONDON LEEDS DALLAS MIAMI OSLO ROMA PRAHA WIEN SPLIT"
        " KIEV LIMA QUITO"
    ).split(),
    "weather": "SUNNY CLOUDY RAIN SNOW WINDY FOG COLD WARM HOT FINE".split(),
    "rig": "K3 K4 KX2 KX3 IC7300 IC705 FT8 FTDX10 TS590 TS850 QCX HOMEBREW".split(),
    "antenna": "DIPOLE VERTICAL YAGI LOOP G5RV EFHW LW GP QUAD BEAM".split(),
}


def pick(random: np.random.Generator, options):
    return options[random.integers(len(options))]


def letters(random: np.random.Generator, count: int, alphabet: str = LETTERS) -> str:
    return "".join(alphabet[i] for i in random.integers(len(alphabet), size=count))


def callsign(random: np.random.Generator, american: bool) -> str:
    """A plausible callsign: if `american`, of the USA (1x2 to 2x3) or Canada, sometimes of a
    special event, else of any other country; sometimes portable or elsewhere."""
    kind = random.random()
    if not american:
        if kind < 0.04:
            digits = pick(random, (2, 3))
            suffix = 3
        else:
            digits = 1
            suffix = pick(random, (1, 2, 2, 3, 3, 3))
        call = pick(random, PREFIXES) + letters(random, digits, DIGITS) + letters(random, suffix)
    elif kind < 0.12:
        call = pick(random, ("VE", "VA", "VO", "VY")) + pick(random, DIGITS[1:])
        call += letters(random, pick(random, (2, 3)))
    elif kind < 0.16:  # of a special event, 1x1
        call = pick(random, "KNW") + pick(random, DIGITS)
        call += letters(random, 1, LETTERS.replace("X", ""))
    else:
        first, suffix = pick(random, ((1, 2), (1, 3), (1, 3), (2, 1), (2, 2), (2, 3)))
        prefix = pick(random, "KW" if (first, suffix) == (2, 3) else "KNW")
        prefix += letters(random, first - 1)
        if first == 2 and suffix < 3 and random.random() < 0.25:
            prefix = "A" + pick(random, "ABCDEFGIJK")
        call = prefix + pick(random, DIGITS) + letters(random, suffix)
    if random.random() < 0.06:
        call += pick(random, ("/P", "/M", "/QRP", "/MM", "/" + pick(random, DIGITS)))
    elif random.random() < 0.03:
        call = pick(random, ABROAD) + call
    return call


def exchange_fields(
    random: np.random.Generator, contest: str, own: str, other: str, american: bool
) -> list[str]:
    """The fields of the exchange that `own` sends to `other` in a contest. Numbers may be cut: T
    for 0, N for 9, A for 1, as some operators send them."""
    cut = str.maketrans(pick(random, CUT_NUMBERS))

    def number(form: str, low: int, high: int) -> str:
        return format(random.integers(low, high), form).translate(cut)

    fields = {
        "rst": lambda: pick(random, ("5NN",) * 8 + ("599", "ENN")),
        "cq_zone": lambda: number(pick(random, ("d", "02d")), 1, 41),
        "itu_zone": lambda: (
            pick(random, SOCIETIES) if random.random() < 0.15 else number("02d", 1, 91)
        ),
        "serial": lambda: number(pick(random, ("d", "03d")), 1, pick(random, (100, 1000, 3000))),
        "state_or_power": lambda: pick(random, STATES if american else POWERS),
        "class": lambda: f"{random.integers(1, 16)}{pick(random, 'AAABCDDEF')}",
        "section": lambda: pick(random, SECTIONS),
        "state": lambda: pick(random, STATES),
        "name": lambda: pick(random, NAMES),
        "precedence": lambda: pick(random, "QABUMS"),
        # Year of the first licence.
        "check": lambda: f"{random.integers(50, 125) % 100:02d}".translate(cut),
        "own_call": lambda: own,
        "other_call": lambda: other,
    }
    return [fields[name]() for name in CONTESTS[contest][1]]


def contest_text(
    random: np.random.Generator, contest: str, sample_type: str
) -> tuple[str, list[str], str]:
    """(text, callsigns, exchange, the first one for a full contact) of a contest transmission."""
    first = contest in AMERICAN or bool(random.random() < 0.4)
    if contest == "ARRLDX":
        second = not first
    else:
        second = contest in AMERICAN or bool(random.random() < 0.4)
    own = callsign(random, first)
    other = callsign(random, second)
    cq, names = CONTESTS[contest]
    fields = exchange_fields(random, contest, own, other, first)
    number = random.integers(len(names))
    sent = " ".join(fields)
    received = " ".join(exchange_fields(random, contest, other, own, second))
    form = pick(random, FORMS["full_qso" if sample_type == "partial" else sample_type])
    text = form.format(
        cq=cq,
        test=cq.split()[0],
        own=own,
        other=other,
        part=other[:3],
        sent=sent,
        received=received,
        query=QUERIES[names[number]],
        answer=fields[number],
    )
    if sample_type == "partial":
        words = text.split()
        start = random.integers(len(words) - 1)
        text = " ".join(words[start : start + random.integers(2, 6)])
    return text, [own, other], sent


def everyday_text(random: np.random.Generator) -> tuple[str, list[str]]:
    """(text, its callsigns) of one to four phrases of everyday contacts."""
    a = callsign(random, random.random() < 0.3)
    b = callsign(random, random.random() < 0.3)
    text = " ".join(pick(random, PHRASES) for _ in range(random.integers(1, 5)))

    def fill(slot: re.Match) -> str:
        name = slot[1]
        if name == "n":
            return str(random.integers(1, 100))
        if name == "rst":
            return f"{random.integers(3, 6)}{random.integers(3, 10)}{pick(random, '999N8')}"
        if name == "grid":
            grid = letters(random, 2, LETTERS[:18]) + letters(random, 2, DIGITS)
            return grid + letters(random, pick(random, (0, 2)), LETTERS[:24])
        return {"a": a, "b": b}.get(name) or pick(random, SLOTS[name])

    return re.sub(r"\{(\w+)\}", fill, text), [a, b]
