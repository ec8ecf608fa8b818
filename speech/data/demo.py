"""Synthetic spoken corpora, so that every recipe runs without data. The speech is made by espeak-ng
(GPL-3, through the PyPI package espeakng-loader): it shows that training works, not what error
rates on real speech will be."""

import ctypes
import functools
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from common.errors import RunError, require, signals_afterwards
from speech.data.folders import read_made_from, write_folder
from speech.signal import augment
from speech.signal.audio import write_wav

# Everyday words, so that sentences are pronounceable; they are not grammatical.
KONKANI_WORDS = (
    "हांव तूं तो ती आमी तुमी घर उदक जेवण वाट गांव मनीस बायल भुरगो शाळा पुस्तक काम दीस रात सकाळ सांज"
    " आज फाल्यां काल नवें पोरनें व्हड ल्हान बरें वायट नुस्तें शीत दूद चा रूख फूल पावस वत वारो दर्या"
    " न्हंय दोंगर वचता येता करता पळयता उलयता आयकता खाता वाचता बरयता जाय ना आसा खंय कोण कितें बाजार"
).split()
# espeak-ng's Konkani voice spells vowel signs aloud; its Marathi voice reads Konkani's Devanagari
# well.
KONKANI_VOICES = [f"mr+{variant}" for variant in "m1 m2 m3 m4 m5 m7 f1 f2 f3 f4 f5".split()]

# Syllables of all six tones, and pairs that differ only in the tone.
VIETNAMESE_WORDS = (
    "tôi bạn anh chị em ông bà mẹ cha con nhà nước cơm bánh trà cà phê sữa cá thịt rau ngày đêm"
    " sáng chiều hôm nay mai đi đến về ăn uống nói nghe đọc viết làm học chơi ngủ mua bán yêu thích"
    " biết lớn nhỏ mới cũ đẹp tốt xấu nhanh chậm một hai ba bốn năm đường phố chợ trường sách hoa"
    " cây trời mưa nắng gió biển núi sông má mả mã mạ dưa dừa dứa"
).split()
# The northern, central and southern dialects, each with several speakers.
VIETNAMESE_VOICES = [
    f"{voice}+{variant}"
    for voice in ("vi", "vi-vn-x-central", "vi-vn-x-south")
    for variant in ("m1", "m3", "m7", "f2", "f4")
]


# Everyday Amharic.
AMHARIC_WORDS = (
    "ሰላም ቤት ውሃ ዳቦ ቡና ወተት ሥጋ መንገድ ከተማ ሰው ሴት ልጅ አባት እናት ወንድም እህት ትምህርት መጽሐፍ ሥራ ቀን ሌሊት ጠዋት ማታ ዛሬ ነገ"
    " ትናንት አዲስ አሮጌ ትልቅ ትንሽ ጥሩ መጥፎ ቀይ ነጭ ጥቁር ሰማይ ፀሐይ ዝናብ ነፋስ ተራራ ባሕር ዛፍ አበባ ወፍ ውሻ ድመት ላም በግ ፈረስ እኔ"
    " አንተ እሱ እሷ እኛ መጣ ሄደ በላ ጠጣ ተኛ አየ ሰማ ጻፈ"
).split()
AMHARIC_VOICES = ["am+m1", "am+f2"]

VERSION = 3  # of what a corpus sounds like
SILENCE = ((0.6, 1.0), (0.0, 0.6))  # seconds at an end, by a number from [0, 1)
NOISE_SNR = (30.0, 60.0)  # dB: the level of the noise below that of the speech
NO_NOISE = 0.5  # share of the recordings without noise


@dataclass(frozen=True)
class Manner:
    """How a corpus is spoken: the range of the rate in words a minute, of the pitch (0 to 99) and
    of the words in a sentence; and whether the silence at the ends is cut, as synthesis needs it,
    or silence and low noise are added, as in recordings of people."""

    rate: tuple[int, int] = (140, 220)
    pitch: tuple[int, int] = (30, 70)
    words: tuple[int, int] = (2, 5)
    trimmed: bool = False


USUAL = Manner()


class Espeak:
    """espeak-ng's library through ctypes. The library has one global state, so use `espeak()`."""

    SYNCHRONOUS = 2  # espeak_Initialize
    UTF8 = 1  # espeak_Synth
    CHARACTERS = 1  # espeak_Synth
    RATE = 1  # espeak_SetParameter
    PITCH = 3  # espeak_SetParameter

    def __init__(self):
        loader = require("espeakng_loader", "the demo corpus")
        self.library = ctypes.CDLL(loader.get_library_path())
        data = loader.get_data_path()
        self.variants = Path(data) / "voices" / "!v"
        self.sample_rate = self.library.espeak_Initialize(self.SYNCHRONOUS, 0, os.fsencode(data), 0)
        if self.sample_rate <= 0:
            raise RunError(f"espeak-ng does not start with its data in {data}")
        self.pieces: list[bytes] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self.callback = kind(self._receive)  # kept, because the library has only its address
        self.library.espeak_SetSynthCallback(self.callback)

    def _receive(self, samples, count, events) -> int:
        if samples and count > 0:
            self.pieces.append(ctypes.string_at(samples, 2 * count))
        return 0

    def say(self, text: str, voice: str, rate: int = 170, pitch: int = 50) -> np.ndarray:
        """int16 samples (T,) at `sample_rate` Hz. `rate` in words per minute, `pitch` 0 to 99.
        Raises `RunError` for an unknown voice or variant: espeak-ng would keep the last voice, or
        leave out the variant, without an error."""
        _, plus, variant = voice.partition("+")
        is_known = not plus or (self.variants / variant).is_file()
        if not is_known or self.library.espeak_SetVoiceByName(voice.encode()) != 0:
            raise RunError(f"espeak-ng has no voice {voice!r}")
        # Of the breath in some voices. The default is the time of day.
        self.library.espeak_ng_SetRandSeed(1)
        self.library.espeak_SetParameter(self.RATE, rate, 0)
        self.library.espeak_SetParameter(self.PITCH, pitch, 0)
        self.pieces.clear()
        data = text.encode() + b"\0"
        # ctypes drops what a handler raises while the library calls back: the program would run on.
        with signals_afterwards():
            failed = self.library.espeak_Synth(
                data, len(data), 0, self.CHARACTERS, 0, self.UTF8, None, None
            )
            failed = failed or self.library.espeak_Synchronize()
        if failed or not self.pieces:
            raise RunError(f"espeak-ng could not say {text!r} with voice {voice}")
        return np.frombuffer(b"".join(self.pieces), dtype=np.int16)


def trim(samples: np.ndarray) -> np.ndarray:
    """int16 samples (T,) without what is quieter than -40 dB of their peak at the ends."""
    level = np.abs(samples.astype(np.int32))
    loud = np.flatnonzero(level > level.max() // 100)
    return samples[loud[0] : loud[-1] + 1] if len(loud) else samples


def recorded(samples: np.ndarray, sample_rate: int, random: np.random.Generator) -> np.ndarray:
    """int16 samples (T,) with silence at the ends and low noise throughout, each of which may be
    missing. A model that was trained without them loses the first word after a pause."""
    before, after = np.rint(np.interp(random.random(2), *SILENCE) * sample_rate).astype(int)
    speech = samples.astype(np.float32)
    whole = np.pad(speech, (before, after))
    if random.random() >= NO_NOISE:
        noise = augment.drawn_noise(random, len(whole))
        whole += augment.at_snr(noise, augment.power(speech), random.uniform(*NOISE_SNR))
    return whole.round().clip(-32768, 32767).astype(np.int16)


@functools.cache
def espeak() -> Espeak:
    """The only `Espeak` of this process: initialising the library a second time can crash it."""
    return Espeak()


def sentences(
    words: list[str], count: int, random: np.random.Generator, shortest: int = 2, longest: int = 5
) -> list[str]:
    """`count` distinct random sentences. Raises `ValueError` if there are not so many."""
    if count > sum(len(set(words)) ** length for length in range(shortest, longest + 1)):
        raise ValueError(f"{len(set(words))} words do not make {count} distinct sentences")
    distinct: dict[str, None] = {}
    while len(distinct) < count:
        length = int(random.integers(shortest, longest + 1))
        distinct[" ".join(words[i] for i in random.integers(0, len(words), length))] = None
    return list(distinct)


def speech_corpus(
    folder: Path,
    words: list[str],
    voices: list[str],
    sizes: dict[str, int],
    seed: int = 0,
    manner: Manner = USUAL,
) -> dict[str, str]:
    """Writes a corpus of spoken sentences, unless `folder` already holds the same one. `sizes`:
    number of utterances per split; no sentence is in two splits. Returns {split: manifest path}.
    Raises `RunError` if it cannot be written."""
    manifests = {split: str(folder / f"{split}.json") for split in sizes}
    recipe = {"words": words, "voices": voices, "sizes": sizes, "seed": seed, "version": VERSION}
    if manner != USUAL:
        recipe["manner"] = json.loads(json.dumps(asdict(manner)))  # as it is read back
    if read_made_from(folder) == recipe:
        return manifests

    def fill(aside: Path) -> tuple[float, int]:
        result = _write_corpus(aside, recipe, manner)
        if read_made_from(folder) == recipe:
            raise FileExistsError("another rank was quicker")
        return result

    try:
        seconds, count = write_folder(folder, fill, recipe)
    except OSError as error:
        if read_made_from(folder) != recipe:
            raise RunError(f"cannot write the demo corpus in {folder}: {error.strerror}") from None
        return manifests
    hours = f"{seconds / 3600:.2f} h"
    print(f"demo corpus: {count} utterances, {hours}, {len(voices)} voices, in {folder}")
    return manifests


def _write_corpus(folder: Path, recipe: dict, manner: Manner) -> tuple[float, int]:
    """Speaks the sentences of every split; returns their seconds and their number."""
    (folder / "audio").mkdir()
    random = np.random.default_rng(recipe["seed"])
    voices = recipe["voices"]
    texts = sentences(recipe["words"], sum(recipe["sizes"].values()), random, *manner.words)
    if manner != USUAL:
        # There are few sentences of one word, and most of them are drawn first.
        random.shuffle(texts)
    speaker = espeak()
    seconds = 0.0
    count = 0
    for split, size in recipe["sizes"].items():
        rows = []
        for _ in range(size):
            text = texts.pop()
            voice = voices[int(random.integers(len(voices)))]
            rate = int(random.integers(manner.rate[0], manner.rate[1] + 1))
            pitch = int(random.integers(manner.pitch[0], manner.pitch[1] + 1))
            samples = speaker.say(text, voice, rate, pitch)
            if manner.trimmed:
                samples = trim(samples)
            else:
                ends = np.random.default_rng([recipe["seed"], count + len(rows)])
                samples = recorded(samples, speaker.sample_rate, ends)
            name = f"audio/{split}_{len(rows):05d}.wav"
            write_wav(folder / name, samples, speaker.sample_rate)
            duration = len(samples) / speaker.sample_rate
            seconds += duration
            row = {"audio_filepath": name, "text": text, "duration": round(duration, 3)}
            rows.append({**row, "speaker": voice})
        count += len(rows)
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in rows]
        (folder / f"{split}.json").write_text("".join(lines), encoding="utf-8")
    return seconds, count
