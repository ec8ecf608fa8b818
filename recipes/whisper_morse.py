"""Morse decoding: Whisper trained on synthetic contest and everyday Morse, made without end while it trains.

    python recipes/whisper_morse.py                           # no data needed: a small model, on easy conditions
    python recipes/whisper_morse.py --model_dir whisper-small --conditions contest_good contest_moderate wide --max_steps 20000
    python recipes/whisper_morse.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: made in the worker processes from (seed, number), see `synthesise`; or a folder of recordings, --data_dir DIR, with
metadata.csv (id, audio_file, text, contest_type, ...), which --write_dataset DIR N writes; or manifests, as in the other
recipes. At the end the errors by
condition, contest, speed and SNR are printed and kept in evaluation.json. Every SNR is stated in 2,500 Hz.

--model_dir takes a Hugging Face folder, --model_file OpenAI's .pt with its tokenizer beside it; --from_scratch
--model_size base trains one whose tokens are Morse's symbols. --export DIR writes what transformers' WhisperForConditionalGeneration
and pipeline load.

Memory: benchmarks/RESULTS.md has what each size is predicted to need. Expect a character error rate of about 2 % on the
demo's held-out clips (15-28 WPM, 450-900 Hz, 0-20 dB) after its 1,100 updates (two CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); ITU-R M.1677 (codes and timing); the contests' own rules (exchanges).
"""

import argparse
import csv
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import sys
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import batches, checkpoint, device, manifest, optim, options, report, transcripts
from common import whisper_files as files
from common import whisper_task as task
from common import whisper_text as text
from common.errors import DataError, UsageError, cannot_write, exit_with_one_line
from common.loop import train
from common.morse import (
    METADATA,
    MORE_METADATA,
    MORSE,
    SYMBOLS,
    Recordings,
    evaluation_tables,
    for_scoring,
    from_corpus,
    normalise,
    print_tables,
    read_dataset,
    symbols,
    write_evaluation,
)  # fmt: skip
from common.whisper import FRAME, SAMPLE_RATE, Whisper

RECIPE = "whisper_morse"
DEMO_STEPS = 1100
HELD_OUT, MOST_HELD_OUT = 0.05, 200  # of a manifest, where no --val_manifest is given
EPOCH_CLIPS = 4000
DEMO_CLIPS = 200  # for evaluation, and as many for the figures at the end
SIZES = {"demo": files.shape(128, (4, 2), 4), **files.SIZES}
BLOCK = 64  # samples: frequency, fading and gain are set every 4 ms
EDGE = 80  # samples of a raised-cosine edge: 5 ms
SNR_BANDWIDTH = 2_500  # Hz
CLIP_UNIT = 25 * BLOCK  # samples: clips are whole tenths of a second
CHIRP_SECONDS = 0.02  # in which a chirping transmitter's frequency settles, to 1/e
OF_SYNTHESIS = ("conditions", "wpm", "tone", "snr_db", "clip_seconds", "clips_per_epoch", "eval_clips")  # flags
DRAWN = ("conditions", "wpm", "tone", "snr_db", "clip_seconds")  # flags: kept with the weights, for --evaluate
OF_RECORDINGS = ("max_samples", "cache_audio", "audio_root")
DATASET_MIX = ("clean", "contest_good", "contest_moderate", "contest_poor", "dx_expedition", "wide")


def add_arguments(parser) -> None:
    options.add_shared_arguments(parser, learning_rate=(None, "by the model's width, and whether it is fine-tuned"))
    task.add_arguments(parser, SIZES, language="en")
    # fmt: off
    own = parser.add_argument_group("Morse")
    own.add_argument("--conditions", nargs="+", choices=list(CONDITIONS), metavar="NAME", help=f"what clips are drawn from, each equally likely: {', '.join(CONDITIONS)} (demo; with a model of its own or --from_scratch all but demo)")
    for name, what in (("wpm", "speed, words a minute"), ("tone", "tone, Hz"), ("snr_db", "SNR in 2,500 Hz, dB")):
        own.add_argument(f"--{name}", type=options.number(float, -40), nargs=2, metavar=("LOW", "HIGH"), help=f"{what}, in place of the conditions' own")
    own.add_argument("--clip_seconds", type=options.number(float, 1.0, 29.0), metavar="S", help="longest clip (29; 3 in the demo)")
    own.add_argument("--clips_per_epoch", type=options.POSITIVE, metavar="N", help="synthetic clips in an epoch; every epoch has new ones (4000)")
    own.add_argument("--eval_clips", type=options.POSITIVE, metavar="N", help=f"synthetic clips in the evaluation set, and in the test set ({DEMO_CLIPS})")
    own.add_argument("--alignment_weight", type=options.SHARE, metavar="X", help="share of an auxiliary loss on the encoder, what is being sent in every frame, for synthetic clips from scratch (0.3 there)")
    own.add_argument("--test_manifest", type=options.path, metavar="FILE", help="with --train_manifest, for the figures at the end (the evaluation set)")
    own.add_argument("--data_dir", type=options.path, metavar="DIR", help="train from and evaluate on a folder of recordings with metadata.csv or splits/")
    own.add_argument("--write_dataset", nargs=2, metavar=("DIR", "N"), help="write such a folder with N synthetic clips of --conditions, and end")
    # fmt: on


# --- Morse text ------------------------------------------------------------------------------------------------------

LETTERS, DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "0123456789"

CONTESTS = {  # name: what follows CQ, the exchange's fields
    "CQWW": ("TEST WW", ("rst", "cq_zone")),
    "CQWPX": ("TEST WPX", ("rst", "serial")),
    "ARRLDX": ("TEST DX", ("rst", "state_or_power")),
    "FIELD_DAY": ("FD", ("class", "section")),
    "NAQP": ("NA", ("name", "state")),
    "SWEEPSTAKES": ("SS", ("serial", "precedence", "own_call", "check", "section")),
    "SPRINT": ("NA", ("other_call", "own_call", "serial", "name", "state")),
    "IARU": ("TEST IARU", ("rst", "itu_zone")),
}
AMERICAN = ("FIELD_DAY", "NAQP", "SWEEPSTAKES", "SPRINT")  # nearly everybody there is from the USA or Canada
QUERIES = {  # how a field is asked for
    "rst": "RST?", "cq_zone": "ZONE?", "serial": "NR?", "state_or_power": "NR?", "class": "CLASS?", "section": "SEC?",
    "name": "NAME?", "state": "ST?", "precedence": "PREC?", "own_call": "CALL?", "check": "CK?", "other_call": "CALL?",
    "itu_zone": "ZONE?",
}  # fmt: skip
FORMS = {  # of what is sent: {own} is the sender, {other} the station in contact with it
    "full_qso": (
        "CQ {cq} {own} {own} {other} {other} {sent} R {received} TU {own}",
        "CQ {test} {own} {own} {test} {other} {other} {sent} TU {received} R TU {own} {test}",
        "{own} {test} {other} {other} {sent} = {received} TU {own}",
        "{test} {own} {other} {sent} CFM {received} 73 {own}",
        "QRZ {own} {other} {sent} QSL {received} EE",
    ),
    "call": (
        "CQ {cq} {own} {own}", "CQ {test} DE {own} {own} K", "{test} {own} {test}", "CQ {own} {own} {cq}", "{own}",
        "{own} {own}", "{other} DE {own}", "DE {own} {own} (", "TU {own}", "QRZ {own}",
    ),
    "exchange": (
        "{other} {sent}", "{other} {sent}", "TU {sent}", "R {sent}", "{sent}", "{sent} {sent}", "{other} {sent} {other}",
        "{other} {sent} BK",
    ),
    "repeat_request": (
        "{query}", "{query} {query}", "AGN?", "AGN AGN?", "?", "PSE AGN {query}", "{other} AGN?", "{other}?", "{part}?",
        "CL? {own} {own}", "{query} {answer} {answer}", "AGN? {sent}", "{query} QRM", "NIL",
    ),
}  # fmt: skip
CONTEST_SAMPLES = ("full_qso", "call", "exchange", "partial", "repeat_request")
SAMPLE_TYPES = (*CONTEST_SAMPLES, "words", "characters")
NO_CONTEST = "NONE"

STATES = (
    "AL AK AZ AR CA CO CT DE FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH OK OR PA "
    "RI SC SD TN TX UT VT VA WA WV WI WY DC AB BC MB NB NL NS ON PE QC SK NT NU YT"
).split()
SECTIONS = (
    "CT EMA ME NH RI VT WMA ENY NLI NNJ NNY SNJ WNY DE EPA MDC WPA AL GA KY NC NFL SC SFL WCF TN VA PR VI AR LA MS NM "
    "NTX OK STX WTX EB LAX ORG SB SCV SDG SF SJV SV PAC AZ EWA ID MT NV OR UT WWA WY AK MI OH WV IL IN WI CO IA KS MN "
    "MO NE ND SD AB BC GH MB NB NL NS ONE ONN ONS PE QC SK TER"
).split()
PREFIXES = (
    "DL DJ DK DF G M GM GW GI F TM I IK IZ EA EC PA PE ON OT OK OL OM SP SQ SN HA YO LZ YU YT S5 9A E7 Z3 UA RA R UR US "
    "LY YL ES OH OG SM SE LA OZ TF EI HB CT CR SV TA 4X 5B JA JH JR BY BG HL DS VU HS YB 9M 9V DU VK ZL KH PY PP LU LW "
    "CE XQ CX HK YV XE TI HI CO KP V3 8P 9Y ZS 5H 5Z ST CN EL UN EX 4L EK OD A6 A7 9K HZ VP FK FO"
).split()
SOCIETIES = "ARRL RAC DARC RSGB REF ARI JARL URE SRR PZK CRC OEVSV USKA VERON MRASZ HRS LRMD CRSA AC R1 R2 R3".split()
NAMES = (
    "BOB JIM JOHN BILL TOM DAN DAVE MIKE STEVE RICK ED JOE KEN AL DON RON PETE PAUL MARK JEFF GARY FRED JACK SAM HANS "
    "UWE KARL JAN PIET LARS OLE ANNA MARIA EVA IVAN YURI IGOR VLAD ZORAN LUIS JOSÉ JUAN PABLO TARO HIRO GIOVANNI"
).split()
PHRASES = [  # of everyday contacts; {slots} are filled in
    "{a} DE {b} +", "{a} DE {b} {b} (", "CQ CQ DE {b} {b} K", "QRZ?", "GM OM", "GA DR {name}", "GE ES TNX FER CALL =",
    "UR RST {rst} {rst} =", "MY NAME IS {name} {name} =", "QTH {city}, {city} =", "LOC {grid} {grid}", "HW CPY?", "BK",
    "WX {weather} ES TEMP {n} C", "RIG IS {rig} PWR {n} W", "ANT {antenna}", "AGE {n}", "R R FB {name}", "QRM HR", "QSB",
    "PSE QSL VIA BURO", "TNX FER FB QSO =", "73 ES GL DR {name} +", "{a} DE {b} <SK>", "73 <SK> E E", "<AS>", "QRX 5 <AS>",
    "{city} <HH> {city}", "QRL?", "SRI QRN", "PSE RPT UR NAME?", "NR {n}/{n}", "(EX {b})", "QSY {n}.{n}", "{n}:{n} UTC",
    "MAIL: {name}@{city}.COM", "THE \"{city}\" CLUB", "IT'S {weather}, ISN'T IT?", "CAFÉ {city}", "{n}-{n} - OK",
]  # fmt: skip
SLOTS = {
    "name": NAMES,
    "city": "BOSTON BERLIN PARIS TOKYO OSAKA LONDON LEEDS DALLAS MIAMI OSLO ROMA PRAHA WIEN SPLIT KIEV LIMA QUITO".split(),
    "weather": "SUNNY CLOUDY RAIN SNOW WINDY FOG COLD WARM HOT FINE".split(),
    "rig": "K3 K4 KX2 KX3 IC7300 IC705 FT8 FTDX10 TS590 TS850 QCX HOMEBREW".split(),
    "antenna": "DIPOLE VERTICAL YAGI LOOP G5RV EFHW LW GP QUAD BEAM".split(),
}


def pick(random: np.random.Generator, options):
    return options[random.integers(len(options))]


def letters(random: np.random.Generator, count: int, alphabet: str = LETTERS) -> str:
    return "".join(alphabet[i] for i in random.integers(len(alphabet), size=count))


def callsign(random: np.random.Generator, american: bool) -> str:
    """A callsign as it could be issued: of the USA (its 1x2 to 2x3 forms), Canada or, unless `american`, elsewhere; now
    and then a special event's, portable or in another district or country."""
    kind = random.random()
    if not american:
        digits, suffix = (pick(random, (2, 3)), 3) if kind < 0.04 else (1, pick(random, (1, 2, 2, 3, 3, 3)))
        call = pick(random, PREFIXES) + letters(random, digits, DIGITS) + letters(random, suffix)
    elif kind < 0.12:
        call = pick(random, ("VE", "VA", "VO", "VY")) + pick(random, DIGITS[1:]) + letters(random, pick(random, (2, 3)))
    elif kind < 0.16:  # a special event's, 1x1
        call = pick(random, "KNW") + pick(random, DIGITS) + letters(random, 1, LETTERS.replace("X", ""))
    else:
        first, suffix = pick(random, ((1, 2), (1, 3), (1, 3), (2, 1), (2, 2), (2, 3)))
        prefix = pick(random, "KW" if (first, suffix) == (2, 3) else "KNW") + letters(random, first - 1)
        if first == 2 and suffix < 3 and random.random() < 0.25:
            prefix = "A" + pick(random, "ABCDEFGIJK")
        call = prefix + pick(random, DIGITS) + letters(random, suffix)
    if random.random() < 0.06:
        call += pick(random, ("/P", "/M", "/QRP", "/MM", "/" + pick(random, DIGITS)))
    elif random.random() < 0.03:
        call = pick(random, ("W1/", "W4/", "KH6/", "VE3/", "EA8/", "F/", "DL/", "OH0/", "VP5/", "PJ2/")) + call
    return call


def exchange_fields(random: np.random.Generator, contest: str, own: str, other: str, american: bool) -> list[str]:
    """What the station `own` sends to `other` in a contest, by field, its numbers cut (T for 0, N for 9, A for 1) as
    some send them."""
    cut = str.maketrans(pick(random, ({}, {"0": "T"}, {"0": "T", "9": "N"}, {"0": "T", "9": "N", "1": "A"})))

    def number(form: str, low: int, high: int) -> str:
        return format(random.integers(low, high), form).translate(cut)

    fields = {
        "rst": lambda: pick(random, ("5NN",) * 8 + ("599", "ENN")),
        "cq_zone": lambda: number(pick(random, ("d", "02d")), 1, 41),
        "itu_zone": lambda: pick(random, SOCIETIES) if random.random() < 0.15 else number("02d", 1, 91),
        "serial": lambda: number(pick(random, ("d", "03d")), 1, pick(random, (100, 1000, 3000))),
        "state_or_power": lambda: pick(random, STATES) if american else pick(random, ("KW", "K", "1TT", "100", "ATT", "5TT", "400", "5", "200")),
        "class": lambda: f"{random.integers(1, 16)}{pick(random, 'AAABCDDEF')}",
        "section": lambda: pick(random, SECTIONS),
        "state": lambda: pick(random, STATES),
        "name": lambda: pick(random, NAMES),
        "precedence": lambda: pick(random, "QABUMS"),
        "check": lambda: f"{random.integers(50, 125) % 100:02d}".translate(cut),  # the year of the first licence
        "own_call": lambda: own,
        "other_call": lambda: other,
    }  # fmt: skip
    return [fields[name]() for name in CONTESTS[contest][1]]


def contest_text(random: np.random.Generator, contest: str, sample_type: str) -> tuple[str, list[str], str]:
    """(text, the callsigns of it, the exchange) of a kind of transmission: of a whole contact, its first exchange."""
    first = contest in AMERICAN or bool(random.random() < 0.4)
    second = not first if contest == "ARRLDX" else contest in AMERICAN or bool(random.random() < 0.4)
    own, other = callsign(random, first), callsign(random, second)
    cq, names = CONTESTS[contest]
    fields = exchange_fields(random, contest, own, other, first)
    number = random.integers(len(names))
    sent, received = " ".join(fields), " ".join(exchange_fields(random, contest, other, own, second))
    form = pick(random, FORMS["full_qso" if sample_type == "partial" else sample_type])
    text = form.format(
        cq=cq, test=cq.split()[0], own=own, other=other, part=other[:3], sent=sent, received=received,
        query=QUERIES[names[number]], answer=fields[number],
    )  # fmt: skip
    if sample_type == "partial":
        words = text.split()
        start = random.integers(len(words) - 1)
        text = " ".join(words[start : start + random.integers(2, 6)])
    return text, [own, other], sent


def everyday_text(random: np.random.Generator) -> tuple[str, list[str]]:
    """(text, its callsigns): one to four phrases of everyday contacts."""
    a, b = (callsign(random, random.random() < 0.3) for _ in range(2))
    text = " ".join(pick(random, PHRASES) for _ in range(random.integers(1, 5)))

    def fill(found: re.Match) -> str:
        if found[1] == "n":
            return str(random.integers(1, 100))
        if found[1] == "rst":
            return f"{random.integers(3, 6)}{random.integers(3, 10)}{pick(random, '999N8')}"
        if found[1] == "grid":
            grid = letters(random, 2, LETTERS[:18]) + letters(random, 2, DIGITS)
            return grid + letters(random, pick(random, (0, 2)), LETTERS[:24])
        return {"a": a, "b": b}.get(found[1]) or pick(random, SLOTS[found[1]])

    return re.sub(r"\{(\w+)\}", fill, text), [a, b]


def random_groups(random: np.random.Generator, count: int, alphabet: tuple[str, ...]) -> str:
    """`count` symbols of an alphabet, equally likely, in groups of one to six."""
    text, left = "", 0
    for number in random.integers(len(alphabet), size=count):
        if not left:
            text, left = f"{text} ", random.integers(1, 7)
        text, left = text + alphabet[number], left - 1
    return text.strip()


# --- keying and channel ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Conditions:
    """What a clip is drawn from, evenly within each range. The station to be read is the loudest: the levels of
    `interferers` are relative to it."""

    name: str
    wpm: tuple[float, float] = (15, 40)  # words (PARIS) a minute, by the characters' own length
    tone: tuple[float, float] = (600, 800)  # Hz
    snr_db: tuple[float, float] = (20, 30)  # in 2,500 Hz; see `synthesise`
    jitter: tuple[float, float] = (0.02, 0.08)  # standard deviation of an element's or gap's length, as a share of it
    farnsworth: tuple[float, float] = (1.0, 1.0)  # gaps between characters and words, times the standard's
    qsb_hz: tuple[float, float] = (0.1, 0.5)  # fading's frequency
    qsb_depth: tuple[float, float] = (0.0, 0.0)  # share of the amplitude that fading takes away
    interferers: tuple[int, int] = (0, 0)  # other stations
    interferer_db: tuple[float, float] = (-25, -6)
    crashes: tuple[float, float] = (0.0, 0.0)  # of static, a second
    drift: tuple[float, float] = (0.0, 0.0)  # Hz over the clip, up or down
    chirp: tuple[float, float] = (0.0, 0.0)  # Hz by which an element's start is high or low
    multipath: tuple[float, float] = (0.0, 0.0)  # seconds by which a second path is longer
    agc: float = 0.0  # share of the clips whose receiver controls its gain
    filters: tuple[int, ...] = (0,)  # Hz, widths of the receiver's filter; 0: none
    noise_only: float = 0.05  # share of the clips without a station
    longest: float = 29.0  # seconds; texts are cut to it, but for their first symbol
    silence: tuple[float, float] = (0.1, 0.6)  # seconds before, and after
    sample_types: tuple[str, ...] = (*CONTEST_SAMPLES, "words")  # equally likely; repeat one for more of it
    characters: tuple[int, int] = (1, 20)  # symbols of the sample type "characters"
    alphabet: tuple[str, ...] = tuple(MORSE)  # of the sample type "characters"


_FADING = {"qsb_depth": (0.1, 0.7), "multipath": (0.0, 0.005), "drift": (0.0, 30.0), "chirp": (0.0, 15.0)}
CONDITIONS = {
    conditions.name: conditions
    for conditions in (
        Conditions("clean", snr_db=(30, 40), jitter=(0.0, 0.02)),
        Conditions("contest_good", snr_db=(18, 22), qsb_depth=(0.0, 0.3), interferers=(0, 1), agc=0.5, filters=(0, 500)),
        Conditions("contest_moderate", snr_db=(13, 17), interferers=(0, 3), crashes=(0.0, 0.2), agc=0.5, filters=(0, 250, 500), **_FADING),
        Conditions("contest_poor", snr_db=(8, 12), interferers=(2, 5), interferer_db=(-20, -3), crashes=(0.1, 0.5), agc=0.7, filters=(0, 250, 500), **_FADING),
        Conditions("dx_expedition", snr_db=(8, 18), interferers=(3, 5), interferer_db=(-15, -2), crashes=(0.0, 0.2), agc=0.7, filters=(250, 500), **_FADING),
        Conditions("wide", wpm=(10, 45), tone=(300, 1200), snr_db=(-12, 20), farnsworth=(1.0, 1.5), interferers=(0, 3), crashes=(0.0, 0.5),
                   agc=0.5, filters=(0, 0, 250, 500), **{**_FADING, "drift": (0.0, 100.0)}),
        Conditions("demo", wpm=(15, 28), tone=(450, 900), snr_db=(0, 20)),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """A clip: `audio` (T,) float32 at 16 kHz within -1 and 1; `text` as it is sent, with the callsigns and the exchange
    among its words; `spans` (N, 2) seconds of its symbols, spaces apart; `snr_db` is NaN where there is no station."""

    audio: np.ndarray
    text: str
    spans: np.ndarray
    callsigns: tuple[str, ...]
    exchange: str
    contest_type: str
    sample_type: str
    condition: str
    wpm: float
    tone: float
    snr_db: float
    is_noise_only: bool

    @property
    def seconds(self) -> float:
        return len(self.audio) / SAMPLE_RATE


_ELEMENTS = {label: [units for mark in code for units in ("..-".index(mark) + 1, 1)] for label, code in MORSE.items()}
_RISE = (0.5 - 0.5 * np.cos(np.pi * (np.arange(EDGE) + 0.5) / EDGE)).astype(np.float32)
_EDGES = np.stack([_RISE, _RISE[::-1]])  # key down, key up
_STEPS = np.arange(BLOCK, dtype=np.float32)
_FFT_SIZES = np.array(sorted(2**a * 3**b * 5**c for a in range(5, 20) for b in range(6) for c in range(6)))  # fast ones


def keying(text: str, farnsworth: float = 1.0) -> np.ndarray:
    """Lengths in units (a dit's) of key down, key up, key down ... for a text; begins and ends with the key down."""
    units: list[float] = []
    for word in text.split():
        for label in symbols(word):
            units += _ELEMENTS[label]
            units[-1] = 3 * farnsworth
        units[-1] = 7 * farnsworth
    return np.array(units[:-1])


def fit(random: np.random.Generator, text: str, room: float, farnsworth: float) -> str:
    """The text, or where it takes more than `room` units, some words in the middle of it that do not; of a single word
    that is too long, its beginning."""
    words = text.split()
    ends = np.cumsum([keying(word, farnsworth).sum() + 7 * farnsworth for word in words])  # each with the gap after it
    if not words or ends[-1] - 7 * farnsworth <= room:
        return text
    begins = ends - np.diff(ends, prepend=0)
    first = int(random.integers(1 + np.count_nonzero(ends[-1] - begins > room)) % len(words))
    count = np.count_nonzero(ends[first:] - begins[first] - 7 * farnsworth <= room)
    if count:
        return " ".join(words[first : first + count])
    labels = symbols(words[first])
    while len(labels) > 1 and keying("".join(labels), farnsworth).sum() > room:
        labels.pop()
    return "".join(labels)


def envelope(runs: np.ndarray, start: float, samples: int) -> np.ndarray:
    """(samples,) float32 amplitude of keying: `runs` in seconds as `keying` has them, the first key-down at `start`.
    Edges are raised cosines of 5 ms about the moment of keying, so that lengths are exact at half the amplitude."""
    edges = np.rint((start + np.concatenate([[0], np.cumsum(runs)])) * SAMPLE_RATE).astype(np.int64)
    state = np.arange(len(edges) + 1, dtype=np.float32) % 2
    amplitude = np.repeat(state, np.diff(edges, prepend=0, append=max(samples, edges[-1] + EDGE)))
    around = edges.reshape(-1, 2, 1) + np.arange(-EDGE // 2, EDGE // 2)
    amplitude[around] = _EDGES
    return amplitude[:samples]


def interpolate(levels: np.ndarray) -> np.ndarray:
    """(B + 1,) values at the bounds of blocks to (B * 64,) float32 samples between them, linearly."""
    levels = levels.astype(np.float32)
    return (levels[:-1, None] + np.diff(levels)[:, None] * (_STEPS / BLOCK)).ravel()


def oscillator(frequencies: np.ndarray, phase: float) -> np.ndarray:
    """A sine of amplitude 1, (B * 64,) float32, from (B,) frequencies in Hz, one a block; `phase` in turns. The phase
    is carried in float64 from block to block: float32 would lose it within seconds."""
    turns = phase + np.cumsum(frequencies * (BLOCK / SAMPLE_RATE))
    starts = (np.concatenate([[phase], turns[:-1]]) % 1 * 2 * np.pi).astype(np.float32)
    steps = (frequencies * (2 * np.pi / SAMPLE_RATE)).astype(np.float32)
    return np.sin(starts[:, None] + steps[:, None] * _STEPS).ravel()


def transmit(random: np.random.Generator, amplitude: np.ndarray, tone: float, drift: float, chirp: float) -> np.ndarray:
    """A keyed tone (T,) of `amplitude` (T,), whose frequency drifts evenly by `drift` Hz over the clip about `tone`, and
    starts every element `chirp` Hz off."""
    frequencies = tone + drift * np.linspace(-0.5, 0.5, len(amplitude) // BLOCK)
    if chirp:
        down = amplitude[::BLOCK] > 0.5
        blocks = np.arange(len(down))
        last_up = np.maximum.accumulate(np.where(down, 0, blocks))
        frequencies += chirp * np.exp(-(blocks - last_up - 1) * (BLOCK / SAMPLE_RATE / CHIRP_SECONDS)) * down
    return amplitude * oscillator(frequencies, random.random())


def interferer(random: np.random.Generator, samples: int, tone: float) -> np.ndarray:
    """(samples,) of another station, which calls again and again near `tone`, but not on it. Amplitude 1."""
    text = contest_text(random, pick(random, tuple(CONTESTS)), pick(random, ("call", "exchange")))[0]
    runs = np.append(keying(text), random.uniform(7, 40)) * (1.2 / random.uniform(15, 40))
    runs = np.tile(runs, int(samples / SAMPLE_RATE / runs.sum()) + 2)[:-1]
    offset = random.integers(EDGE, samples)  # of the clip's beginning in the station's transmission
    offset = min(offset, int(runs.sum() * SAMPLE_RATE) - samples)
    amplitude = envelope(runs, EDGE / SAMPLE_RATE, offset + samples)[offset:]
    away = random.uniform(60, 400) * pick(random, (-1, 1))
    tone = tone + away if tone + away > 100 else tone - away
    return transmit(random, amplitude, tone, 0.0, 0.0)


def add_noise(random: np.random.Generator, signal: np.ndarray, crashes: float) -> None:
    """Adds white noise of power 1 at 16 kHz, that is SNR_BANDWIDTH / 8000 in 2,500 Hz, louder by 10 to 30 dB for some
    tens of milliseconds in each of `crashes` static crashes a second."""
    noise = random.standard_normal(len(signal), dtype=np.float32)
    for _ in range(random.poisson(crashes * len(signal) / SAMPLE_RATE)):
        first, decay = random.integers(len(signal)), random.uniform(0.01, 0.1) * SAMPLE_RATE
        part = noise[first : first + int(5 * decay)]
        part *= 1 + 10 ** random.uniform(0.5, 1.5) * np.exp(-np.arange(len(part), dtype=np.float32) / np.float32(decay))
    signal += noise


def receiver_filter(audio: np.ndarray, centre: float, width: float) -> np.ndarray:
    """Band-pass of `width` Hz at half the amplitude; skirts are cosines as wide as a third of that."""
    size = int(_FFT_SIZES[np.searchsorted(_FFT_SIZES, len(audio))])
    spectrum = np.fft.rfft(audio, size)
    away = np.abs(np.arange(len(spectrum), dtype=np.float32) * (SAMPLE_RATE / size) - centre)
    spectrum *= 0.5 - 0.5 * np.sin(np.pi * np.clip((away - width / 2) / (width / 3), -0.5, 0.5))
    return np.fft.irfft(spectrum, size)[: len(audio)].astype(np.float32)


def control_gain(audio: np.ndarray, decay: float, strength: float) -> np.ndarray:
    """Automatic gain control: the level follows the loudest at once and falls by `decay` nepers a second; the gain is
    its power of -`strength`."""
    peaks = np.abs(audio.reshape(-1, BLOCK)).max(axis=1)
    fall = np.arange(len(peaks)) * (decay * BLOCK / SAMPLE_RATE)
    level = np.maximum.accumulate(np.log(np.maximum(peaks, 1e-6)) + fall) - fall
    return audio * interpolate(np.exp(-strength * np.append(level[0], level)))


def plan(random: np.random.Generator, conditions: Conditions) -> dict:
    """What a clip will hold, before any sound is made: text, speed, keying and length."""
    sample_type, contest, exchange = pick(random, conditions.sample_types), NO_CONTEST, ""
    if sample_type == "characters":
        low, high = conditions.characters
        text, callsigns = random_groups(random, random.integers(low, high + 1), conditions.alphabet), []
    elif sample_type == "words":
        text, callsigns = everyday_text(random)
    else:
        contest = pick(random, tuple(CONTESTS))
        text, callsigns, exchange = contest_text(random, contest, sample_type)
    wpm, tone, snr_db = (random.uniform(*limits) for limits in (conditions.wpm, conditions.tone, conditions.snr_db))
    jitter, farnsworth = random.uniform(*conditions.jitter), random.uniform(*conditions.farnsworth)
    before, after = random.uniform(*conditions.silence, size=2)
    unit = 1.2 / wpm
    text = fit(random, text, (conditions.longest - before - after) / unit, farnsworth)
    runs = keying(text, farnsworth)
    varied = runs * (1 + jitter * random.standard_normal(len(runs)).clip(-3, 3))
    runs = varied * (unit * runs.sum() / varied.sum())  # together they last what they would without jitter
    samples = int((before + runs.sum() + after) * SAMPLE_RATE / CLIP_UNIT) * CLIP_UNIT
    samples = max(samples, int(np.ceil(((before + runs.sum()) * SAMPLE_RATE + EDGE) / CLIP_UNIT)) * CLIP_UNIT)
    return {
        "text": text, "callsigns": callsigns, "exchange": exchange, "contest": contest, "sample_type": sample_type, "wpm": wpm,
        "tone": tone, "snr_db": snr_db, "before": before, "runs": runs, "samples": samples,
    }  # fmt: skip


def symbol_spans(text: str, before: float, runs: np.ndarray) -> np.ndarray:
    """(N, 2) seconds in which each symbol of `text`, spaces apart, is sent."""
    edges = before + np.concatenate([[0], np.cumsum(runs)])
    marks = np.array([len(_ELEMENTS[label]) // 2 for label in symbols(text) if label != " "])
    first = 2 * (np.cumsum(marks) - marks)
    return np.stack([edges[first], edges[first + 2 * marks - 1]], axis=1)


def clip_seconds(seed: int, index: int, conditions: Conditions) -> float:
    """How long the clip of a number is; a hundred times faster than making it."""
    return plan(np.random.default_rng([seed, index]), conditions)["samples"] / SAMPLE_RATE


def synthesise(seed: int, index: int, conditions: Conditions) -> Sample:
    """The clip of a number: it depends on the arguments alone, not on what was made before it or where.

    SNR: the station's mean power while its key is down, as it arrives (after fading and second path), over the power
    of the white noise in 2,500 Hz; before the receiver's filter and gain control, without interferers and crashes."""
    random = np.random.default_rng([seed, index])
    planned = plan(random, conditions)
    text, tone, snr_db, samples = (planned[name] for name in ("text", "tone", "snr_db", "samples"))
    spans = symbol_spans(text, planned["before"], planned["runs"])

    is_noise_only = bool(random.random() < conditions.noise_only)
    if is_noise_only:
        text, snr_db, audio, spans = "", np.nan, np.zeros(samples, dtype=np.float32), spans[:0]
    else:
        sign = pick(random, (-1, 1))
        drift, chirp = sign * random.uniform(*conditions.drift), sign * random.uniform(*conditions.chirp)
        amplitude = envelope(planned["runs"], planned["before"], samples)
        audio = transmit(random, amplitude, tone, drift, chirp)
        if (depth := random.uniform(*conditions.qsb_depth)) > 0:
            times = np.arange(samples // BLOCK + 1) * (BLOCK / SAMPLE_RATE)
            turns = random.uniform(*conditions.qsb_hz) * times + random.random()
            audio *= interpolate(1 - depth * (0.5 + 0.5 * np.cos(2 * np.pi * turns)))
        if (delay := int(random.uniform(*conditions.multipath) * SAMPLE_RATE)) > 0:
            audio[delay:] += np.float32(random.uniform(0.1, 0.6)) * audio[:-delay]
        power = np.vdot(audio, audio) / np.vdot(amplitude, amplitude)
        wanted = 10 ** (snr_db / 10) * SNR_BANDWIDTH / (SAMPLE_RATE / 2)
        audio *= np.float32(np.sqrt(wanted / power))
        low, high = conditions.interferers
        for _ in range(random.integers(low, high + 1)):
            level = np.sqrt(2 * wanted) * 10 ** (random.uniform(*conditions.interferer_db) / 20)
            audio += np.float32(level) * interferer(random, samples, tone)
    add_noise(random, audio, random.uniform(*conditions.crashes))
    if width := pick(random, conditions.filters):
        audio = receiver_filter(audio, tone + random.uniform(-0.1, 0.1) * width, width)
    if random.random() < conditions.agc:
        audio = control_gain(audio, random.uniform(1, 10), random.uniform(0.3, 1.0))
    audio *= np.float32(random.uniform(0.1, 0.95) / max(audio.max(), -audio.min()))

    heard = f" {text} "
    return Sample(
        audio, text, spans, tuple(dict.fromkeys(call for call in planned["callsigns"] if f" {call} " in heard)),
        planned["exchange"] if planned["exchange"] and f" {planned['exchange']} " in heard else "", planned["contest"],
        planned["sample_type"], conditions.name, float(planned["wpm"]), float(tone), float(snr_db), is_noise_only,
    )  # fmt: skip


# --- data set on disk ------------------------------------------------------------------------------------------------


def write_dataset(folder: str | Path, count: int, seed: int, mix: Sequence[Conditions], workers: int = 1) -> None:
    """Writes `count` clips of conditions drawn from `mix`: audio/*.wav (16 bits), metadata.csv, and splits/ with eight
    of ten clips for training, one for validation, one for the test. What is written depends on `count`, `seed` and `mix`
    alone, and is left as it is where it is already there; another data set that was written by this is replaced. Raises
    `UsageError` where the folder holds something else, `RunError` where it cannot be written."""
    folder = Path(folder).absolute()
    made_from = {"made_by": "whisper_morse", "version": 1, "count": count, "seed": seed}
    made_from = json.dumps({**made_from, "mix": [dataclasses.asdict(conditions) for conditions in mix]})
    aside = folder.with_name(f"{folder.name}.{os.getpid()}")
    try:
        before = _made_from(folder)
        if before == made_from:
            print(f"data set: {count} clips are already in {folder}")
            return
        if "whisper_morse" not in before and folder.exists() and any(folder.iterdir()):
            raise UsageError(f"--write_dataset {folder}: the folder holds something else; choose an empty or a new one")
        (aside / "audio").mkdir(parents=True)
        (aside / "splits").mkdir()
        todo = ((aside, seed, index, mix) for index in range(count))
        if workers > 1:
            with multiprocessing.get_context("fork").Pool(workers) as pool:
                rows = list(pool.imap(_write_clip, todo, chunksize=16))
        else:
            rows = [_write_clip(clip) for clip in todo]
        _write_table(aside / "metadata.csv", rows)
        _write_table(aside / "splits" / "train.csv", [row for i, row in enumerate(rows) if i % 10 < 8])
        _write_table(aside / "splits" / "validation.csv", rows[8::10])
        _write_table(aside / "splits" / "test.csv", rows[9::10])
        (aside / "made_from.json").write_text(made_from, encoding="utf-8")
        if before:
            shutil.rmtree(folder)
        os.replace(aside, folder)  # what a kill cut short is not taken for a data set
    except OSError as error:
        raise cannot_write(folder, error, "--write_dataset") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    hours = sum(row["duration"] for row in rows) / 3600
    print(f"data set: {count} clips, {hours:.2f} h, in {folder}")


def _made_from(folder: Path) -> str:
    try:
        return (folder / "made_from.json").read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return ""


def _write_clip(clip: tuple[Path, int, int, Sequence[Conditions]]) -> dict:
    """Writes the wav of (folder, seed, index, mix); returns its row."""
    folder, seed, index, mix = clip
    sample = synthesise(seed, index, pick(np.random.default_rng([seed, index, 1]), mix))
    name = f"audio/{index:06d}.wav"
    with wave.open(str(folder / name), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(SAMPLE_RATE)
        file.writeframes(np.rint(sample.audio * 32768).astype("<i2").tobytes())
    return {
        "id": f"{index:06d}", "audio_file": name, "text": sample.text, "contest_type": sample.contest_type,
        "sample_type": sample.sample_type, "wpm": round(sample.wpm, 2), "condition": sample.condition,
        "duration": round(sample.seconds, 3), "is_noise_only": sample.is_noise_only,
        "snr_db": "" if sample.is_noise_only else round(sample.snr_db, 2), "callsigns": " ".join(sample.callsigns),
        "exchange": sample.exchange,
    }  # fmt: skip


def _write_table(path: Path, rows: list[dict]) -> None:
    with open(path, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, METADATA + MORE_METADATA)
        writer.writeheader()
        writer.writerows(rows)


# --- clips to batches --------------------------------------------------------------------------------------------------


def conditions_of(args) -> list[Conditions]:
    """The conditions that --conditions names, changed by the flags for single ranges. Raises `UsageError`."""
    changes = {}
    for name in ("wpm", "tone", "snr_db"):
        if limits := getattr(args, name):
            if limits[0] > limits[1]:
                raise UsageError(f"--{name} {limits[0]:g} {limits[1]:g}: the first is to be the lower one")
            changes[name] = tuple(limits)
    if args.wpm and args.wpm[0] < 5:
        raise UsageError(f"--wpm {args.wpm[0]:g}: below 5 words a minute a single character fills a clip")
    if args.tone and not 100 <= args.tone[0] <= args.tone[1] <= 4000:
        raise UsageError("--tone: tones of 100 to 4,000 Hz can be made")
    if args.clip_seconds:
        changes["longest"] = args.clip_seconds
    return [dataclasses.replace(CONDITIONS[name], **changes) for name in args.conditions]


class SyntheticClips:
    """Clips made when they are asked for: number `index` of epoch `epoch`, of one of the conditions. `stream` keeps
    training, evaluation and test apart."""

    TRAIN, EVALUATION, TEST = range(3)

    def __init__(self, args, stream: int, count: int):
        self.mix, self.count, self.seed = conditions_of(args), count, 3 * args.seed + stream

    def __len__(self) -> int:
        return self.count

    def drawn(self, index: int, epoch: int) -> tuple[int, int, Conditions]:
        number = epoch * self.count + index
        return self.seed, number, self.mix[np.random.default_rng([self.seed, number, 1]).integers(len(self.mix))]

    def fingerprint(self) -> str:
        """Tells whether a position in the data means the same as before."""
        return f"{self.seed} {self.count} {self.mix}"

    @functools.lru_cache(maxsize=2)  # noqa: B019  one or two of them live as long as the run
    def seconds(self, epoch: int) -> np.ndarray:
        return np.array([clip_seconds(*self.drawn(index, epoch)) for index in range(self.count)])

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, np.ndarray | None]:
        """Waveform, text, name, and the spans of its symbols in seconds."""
        sample = synthesise(*self.drawn(index, epoch))
        return torch.from_numpy(sample.audio), sample.text, f"synthetic clip {self.seed}/{epoch * self.count + index}", sample.spans  # fmt: skip

    def row(self, index: int, hypothesis: str) -> dict:
        """What `evaluation_tables` wants to know of a clip of epoch 0."""
        sample = synthesise(*self.drawn(index, 0))
        return {
            "file": f"synthetic clip {self.seed}/{index}", "reference": sample.text, "hypothesis": hypothesis,
            "condition": sample.condition, "contest_type": sample.contest_type, "sample_type": sample.sample_type,
            "wpm": sample.wpm, "snr_db": sample.snr_db, "is_noise_only": sample.is_noise_only,
            "callsigns": list(sample.callsigns), "exchange": sample.exchange,
        }  # fmt: skip


class RecordedClips:
    """The same of clips on disk."""

    def __init__(self, args, recordings: Recordings):
        self.recordings, self.row, self.cache = recordings, recordings.row, args.cache_audio

    def __len__(self) -> int:
        return len(self.recordings)

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for row in zip(self.recordings.paths, self.recordings.texts, self.recordings.offsets.tolist(), strict=True):
            digest.update(repr(row).encode("utf-8", "surrogateescape"))
        return digest.hexdigest()

    def seconds(self, epoch: int) -> np.ndarray:
        return self.recordings.seconds

    def load(self, index: int, epoch: int) -> tuple[torch.Tensor, str, str, np.ndarray | None]:
        found, duration = self.recordings, float(self.recordings.durations[index])
        duration = None if np.isnan(duration) else duration
        waveform = batches.read_cached(
            self.cache, found.paths[index], SAMPLE_RATE, float(found.offsets[index]), duration
        )
        return waveform, found.texts[index], found.paths[index], None


def read_clips(args) -> dict[str, SyntheticClips | RecordedClips]:
    """The clips to train on, to evaluate on and to test on."""
    if args.train_manifest or args.test_manifest:
        paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
        if args.evaluate and args.test_manifest:
            paths = {"test": args.test_manifest}
        corpora = manifest.load_splits(args, paths, normalise, HELD_OUT, MOST_HELD_OUT)
        return {
            name: RecordedClips(args, from_corpus(corpora[name], f"{name} set", args.strict_data)) for name in corpora
        }
    if not args.data_dir:
        counts = (args.clips_per_epoch, args.eval_clips, args.eval_clips)
        return {name: SyntheticClips(args, stream, count) for stream, (name, count) in enumerate(zip(("train", "val", "test"), counts, strict=True))}  # fmt: skip
    found = read_dataset(args.data_dir, args.log_dir / "cache", args.strict_data)
    for split, recordings in found.items():
        kept = np.flatnonzero((recordings.seconds >= args.min_duration) & (recordings.seconds <= args.max_duration))
        if len(kept) < len(recordings):
            print(f"{split} set: {len(recordings) - len(kept)} clips are shorter than --min_duration or longer than --max_duration {args.max_duration:g} s and left out (a manifest with segment times could be cut: --train_manifest with --use_chunking)")  # fmt: skip
        found[split] = recordings.select(kept)
    if args.max_samples and "train" in found:
        found["train"] = found["train"].select(np.arange(min(args.max_samples, len(found["train"]))))
    named = {"train": "train", "validation": "val", "test": "test"}
    clips = {named[split]: RecordedClips(args, recordings) for split, recordings in found.items() if len(recordings)}
    if "val" not in clips and "test" in clips:
        clips["val"] = clips["test"]
    missing = [name for name in ("train", "val") if name not in clips and not (args.evaluate and name == "train")]
    if missing:
        raise DataError(f"--data_dir {args.data_dir}: no usable clips in {' and '.join(missing)}")
    return clips


def load_item(clips, tokenizer, args, longest: float, blank: int, training: bool, index: int, epoch: int) -> dict:
    """One clip, see `task.make_item`; with `blank` also what its encoder frames say, where the synthesis knows."""
    waveform, sent, name, spans = clips.load(index, epoch)
    item = task.make_item(args, tokenizer, waveform, sent, name, (epoch, index, len(clips)), training, longest)
    if spans is not None and blank:
        tokens = [token for token in item["ctc_tokens"].tolist() if token != tokenizer.encode(" ")[0]]
        item["alignment"] = torch.full((-(-len(waveform) // FRAME),), blank)
        # (Of an evaluation set's text --max_target_tokens may have cut the end.)
        for token, (start, end) in zip(tokens, np.rint(spans * SAMPLE_RATE / FRAME).astype(int), strict=training):
            item["alignment"][start : max(end, start + 1)] = token
    return item


# --- loss and evaluation -----------------------------------------------------------------------------------------------


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of each loss term, to be divided by the window's counts."""
    return task.losses(model, batch, *model.encode(batch))


def evaluate(
    recogniser: task.Recogniser, names: list[str], model: Whisper, eval_batches
) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of one greedy pass, as (numerator, denominator)."""
    rows, values = task.decode_set(model, eval_batches, names, recogniser.greedy_texts)
    return {**values, **task.score(rows, for_scoring)}


@torch.no_grad()
def final_figures(args, recogniser: task.Recogniser, clips, eval_batches, title: str, setup) -> None:
    """The tables and examples at the end, and evaluation.json."""
    with setup.autocast():
        rows, _ = task.decode_set(recogniser.model, eval_batches, [], recogniser.texts)
    rows = [clips.row(row["index"], row["hypothesis"]) for row in rows]
    transcripts.print_results(rows, title, args.log_dir / "transcripts.jsonl", args.seed, for_scoring)
    tables = evaluation_tables(rows)
    print_tables(tables)
    write_evaluation(tables, args.log_dir / "evaluation.json")


# --- main ----------------------------------------------------------------------------------------------------------------


def start(args, resumed: dict | None) -> tuple[dict, dict | None]:
    """Metadata of the model to be trained, and the weights it starts with (None: random ones)."""
    if resumed:
        task.check_resumed(args, SIZES, resumed["metadata"])
        weights, metadata = resumed["model"], resumed["metadata"]
    elif args.pretrained:
        weights, metadata = task.read_pretrained(args.pretrained, args.tokenizer_file, args.language, args.suppress)
    else:
        tokenizer = text.train_symbols(SYMBOLS, args.language)
        config = task.shape_from_scratch(args, SIZES[args.model_size], tokenizer.size)
        weights, metadata = None, task.metadata_from_scratch(args, config, tokenizer)
    return {**metadata, "recipe": RECIPE, "pad_to_30s": args.pad_to_30s}, weights


def resolve(args) -> None:
    """Fills in what depends on other flags, and refuses what contradicts."""
    if args.train_manifest and args.data_dir:
        raise UsageError("--train_manifest and --data_dir both name recordings: give one of them")
    if args.test_manifest and not (args.train_manifest or args.evaluate):
        raise UsageError("--test_manifest was given without --train_manifest; alone it goes with --evaluate")
    if args.test_manifest and args.data_dir:
        raise UsageError("--test_manifest and --data_dir both name recordings to test on: give one of them")
    if args.use_chunking and not args.train_manifest:
        raise UsageError("--use_chunking cuts recordings by a manifest's segment times: it goes with --train_manifest")
    recorded = args.data_dir or args.train_manifest or args.test_manifest
    is_demo = not (recorded or args.from_scratch or args.model_dir or args.model_file or args.conditions)
    given = (args.num_epochs, args.max_steps, args.eval_every)
    options.resolve(args, DEMO_STEPS)
    if not is_demo:
        args.num_epochs, args.max_steps, args.eval_every = given
        if args.num_epochs is None and args.max_steps is None:
            args.max_steps, args.num_epochs = (None, 3) if recorded else (20_000, None)
        args.eval_every = (0 if recorded else 1000) if args.eval_every is None else args.eval_every
    if recorded and args.alignment_weight:
        raise UsageError(
            "--alignment_weight: recordings do not say when each symbol is sent; --ctc_weight needs no times"
        )
    if args.alignment_weight and (args.model_dir or args.model_file):
        raise UsageError("--alignment_weight is for models from scratch: a released encoder is aligned already")
    if args.alignment_weight and args.ctc_weight:
        raise UsageError(
            "--alignment_weight and --ctc_weight train the same output layer of the encoder: give one of them"
        )
    if recorded and any(getattr(args, name) is not None for name in OF_SYNTHESIS):
        raise UsageError(f"{', '.join(f'--{name}' for name in OF_SYNTHESIS)} are for synthetic clips, not for recordings")  # fmt: skip
    if not recorded and any(getattr(args, name) for name in OF_RECORDINGS):
        raise UsageError(f"{', '.join(f'--{name}' for name in OF_RECORDINGS)} are for recordings: --data_dir or --train_manifest")  # fmt: skip
    if args.audio_root and args.data_dir:
        raise UsageError("--audio_root is for --train_manifest: the paths in metadata.csv start at --data_dir")
    aligned = not (recorded or args.model_dir or args.model_file or args.ctc_weight)
    if args.alignment_weight is None:
        args.alignment_weight = 0.3 if aligned else 0.0
    if aligned and args.alignment_weight:
        args.ctc_weight = 0.0
        if args.speed_perturbation:
            raise UsageError("--speed_perturbation would move what --alignment_weight trains on; synthetic clips have speeds of their own: --wpm LOW HIGH")  # fmt: skip
    # Off unless asked for: a masked span takes symbols away, and another speed is drawn anyway.
    for flag in ("spec_augment", "speed_perturbation"):
        setattr(args, flag, bool(getattr(args, flag)))
    args.suppress = False  # released models forbid / = + - : in Morse these are sent
    task.check_arguments(args, is_demo)
    args.conditions_given = args.conditions
    args.synthesis_given = any(getattr(args, name) for name in DRAWN)
    args.clips_per_epoch, args.eval_clips = args.clips_per_epoch or EPOCH_CLIPS, args.eval_clips or DEMO_CLIPS
    args.conditions = args.conditions or (["demo"] if is_demo else [name for name in CONDITIONS if name != "demo"])
    args.clip_seconds = args.clip_seconds or (3.0 if is_demo else None)


def main(args) -> None:
    if args.write_dataset:
        return write_clips(args)
    resolve(args)
    if args.verify_gpu:
        sys.exit(task.verify_gpu(args, SIZES, text.train_symbols(SYMBOLS, args.language).size))
    if args.transcribe:
        return task.transcribe(args, RECIPE)
    setup = device.setup(args)
    if args.evaluate or task.only_exports(args):
        return use(args, setup)
    lock = checkpoint.lock_folder(args.checkpoint_dir) if setup.ranks.first else None  # noqa: F841  held until the end
    report.check_folder(args.log_dir)
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, RECIPE)
    options.resolve_workers(args, setup.device.type == "cpu")

    clips = read_clips(args)
    metadata, weights = start(args, resumed)
    tokenizer, longest = text.make(metadata["tokenizer"]), task.check_limits(args, metadata["config"])
    metadata["longest"] = max(float(clips["train"].seconds(0).max()), metadata.get("longest", 0.0))
    if not (args.data_dir or args.train_manifest):
        metadata["synthesis"] = {name: getattr(args, name) for name in DRAWN}
    blank = tokenizer.end if args.alignment_weight and metadata["ctc_tokens"] else 0
    task.pad_from_the_middle(args, metadata, len(clips["train"]), setup.ranks.size)
    load = functools.partial(load_item, clips["train"], tokenizer, args, longest, blank, True)
    model = task.start_model(args, metadata, weights, load, len(clips["train"])).to(setup.device)
    task.compile_and_checkpoint(args, model)

    def seconds(epoch: int) -> np.ndarray:
        return task.trained_seconds(args, clips["train"].seconds(epoch), longest, epoch)

    windows = batches.Windows(args, seconds, load, task.collate, setup)
    evaluation = {
        name: eval_batches(args, clips[name], tokenizer, longest, blank, setup) for name in clips if name != "train"
    }
    optimizer = optim.make_optimizer(model, args)
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    recogniser, weights = task.Recogniser(model, metadata, args), task.loss_weights(args, metadata)
    scored = functools.partial(evaluate, recogniser, list(weights))
    train(args, model, optimizer, schedule, windows, evaluation["val"], compute_loss, weights, scored, setup, metadata,
          resumed, clips["train"].fingerprint())  # fmt: skip

    if setup.ranks.first:
        with torch.no_grad(), setup.autocast():
            used = checkpoint.use_best(
                args, model, RECIPE, metadata, lambda: task.rate(scored(model, evaluation["val"].whole())["cer"])
            )
        name = "test" if "test" in clips else "val"
        final_figures(args, recogniser, clips[name], evaluation[name].whole(), f"{name} set, {len(clips[name])} clips, decoding: {args.decoding}, {used}", setup)  # fmt: skip
        print(
            f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves, tables and all transcripts: {args.log_dir}"
        )
        if args.export:
            task.export(args, recogniser)


def eval_batches(args, clips, tokenizer, longest: float, blank: int, setup) -> batches.EvalBatches:
    load = functools.partial(load_item, clips, tokenizer, args, longest, blank, False)
    return batches.EvalBatches(args, clips.seconds(0), load, task.collate, setup)


def use(args, setup) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    recogniser = task.recogniser_to_use(args, RECIPE, setup)
    if args.evaluate:
        options.resolve_workers(args, setup.device.type == "cpu")
        report.check_folder(args.log_dir)
        if not (args.synthesis_given or args.data_dir or args.test_manifest or args.train_manifest):
            if "synthesis" not in recogniser.metadata:
                raise UsageError("--evaluate on what? These weights were not trained on synthetic clips: --data_dir, --test_manifest or --conditions")  # fmt: skip
            for name, value in recogniser.metadata["synthesis"].items():  # what it was trained on
                setattr(args, name, value)
        clips = read_clips(args)
        name = "test" if "test" in clips else "val"
        longest = task.check_limits(args, recogniser.metadata["config"])
        found = eval_batches(args, clips[name], recogniser.tokenizer, longest, 0, setup)
        title = f"{name} set, {len(clips[name])} clips, decoding: {args.decoding}"
        final_figures(args, recogniser, clips[name], found, title, setup)
    if args.export:
        task.export(args, recogniser)


def write_clips(args) -> None:
    """--write_dataset DIR N."""
    folder, count = args.write_dataset
    try:
        number = options.POSITIVE(count)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--write_dataset {folder} {count}: {error}") from None
    args.conditions = args.conditions or list(DATASET_MIX)
    workers = args.dataloader_num_workers if args.dataloader_num_workers != "auto" else len(os.sched_getaffinity(0))
    write_dataset(folder, number, args.seed, conditions_of(args), max(1, workers))


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(main, parser.parse_args())
