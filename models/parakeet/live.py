"""--stream: a recording or standard input is recognised while it comes, and what is printed is
final."""

import functools
import json
import os
import re
import select
import struct
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from common.device import Setup
from common.errors import (
    DataError,
    Failure,
    Stopped,
    UsageError,
    signals_afterwards,
    writing,
)
from common.layers import finite_layers
from models.parakeet import decoding
from models.parakeet.model import Parakeet
from models.parakeet.streaming import Stream
from models.parakeet.tokenizer import ParakeetTokenizer
from speech.decoding import recogniser, timed, transcripts
from speech.decoding.timed import Token
from speech.signal import audio
from speech.signal.audio import SAMPLE_RATE
from speech.writing import subtitles
from speech.writing.text import SENTENCE_ENDS

STANDARD_INPUT = "-"
BYTES = 1 << 16  # of standard input at a time
LARGEST_HEADER = 1 << 16  # bytes of a wav file before its samples
BEGINNING = 12  # bytes by which most files are known
# How files begin that hold encoded samples, or a header that is not read here.
CODED = re.compile(
    rb"RI(FF....(?!WAVE)|FX)|RF64|FORM|fLaC|OggS|ID3|caff|riff|\.snd|wvpk|#!AMR|....ftyp"
    rb"|\x1aE\xdf\xa3|\xff[\xe2\xe3\xf2\xf3\xfa\xfb]",  # the last: a frame of an MP3
    re.DOTALL,
)
CONVERT = "convert it: ffmpeg -i - -f s16le -ar 16000 -ac 1 - | ..."
ENDLESS = 0x7FF00000  # bytes of samples: programs that write into a pipe do not know how many come
PCM = (1, 0xFFFE)  # wav formats: plain samples; what the rest of the header says
# Seconds without a token: then a word is printed although the next one has not begun; then the next
# word begins a line.
WORD_PAUSE = 0.3
LINE_PAUSE = 1.0
LONGEST_LINE = 30.0  # seconds
SLOW_AFTER = 20.0  # seconds of audio, when it is known whether the machine is fast enough


def check_source(paths: list[str], milliseconds: int | None) -> None:
    """Raises `UsageError` if --transcribe names what cannot be read with, or without, --stream."""
    if milliseconds is None:
        if STANDARD_INPUT in paths:
            raise UsageError(
                "--transcribe -: standard input is read with --stream MS; without it, name files"
            )
        return
    from speech.decoding import annotated  # much to load

    if len(paths) != 1 or os.path.isdir(paths[0]):
        raise UsageError(
            f"--stream {milliseconds}: it reads one recording, or - for standard input; name one"
        )
    if paths[0] != STANDARD_INPUT:
        if annotated.is_asked(paths):
            raise UsageError(
                f"--stream {milliseconds}: it reads a recording, and {paths[0]} has annotations"
            )
        audio.audio_files(paths)
    elif os.isatty(0):
        raise UsageError(
            "--transcribe -: nothing is piped in; it reads 16 kHz mono 16-bit samples:"
            " arecord -q -t raw -f S16_LE -r 16000 -c 1 | python recipes/parakeet_tdt.py ..."
        )


def lookahead_of(config: dict, milliseconds: int) -> int:
    """The look-ahead whose chunks last so long: one that the model was trained with, or a shorter
    one whose chunks divide what it sees before them. Raises `UsageError`."""
    flag = f"--stream {milliseconds}"
    if "streaming" not in config:
        raise UsageError(
            f"{flag}: this model hears a recording as a whole; leave it out, or use a model that"
            " streams: NVIDIA's Nemotron ASR Streaming (English) and Nemotron 3.5 ASR"
        )
    has = config["streaming"]
    known = {*has["lookaheads"]}
    known |= {frames for frames in range(max(known)) if has["left"] % (frames + 1) == 0}
    frame = 1000 * decoding.frame_samples(config) // SAMPLE_RATE
    chunks = {frame * (frames + 1): frames for frames in sorted(known)}
    if milliseconds not in chunks:
        raise UsageError(f"{flag}: this model has {', '.join(map(str, chunks))}")
    return chunks[milliseconds]


# --- words ----------------------------------------------------------------------------------------


class Lines:
    """The text of a stream. `show(text)` gets it as it grows, without a word that may still grow;
    `write(row)` gets every line, when it is complete, with the times of its words.

    A line is a sentence; it also ends at a pause, and after LONGEST_LINE. It is complete when the
    next one begins. Kept are the tokens of the line that is not."""

    def __init__(
        self,
        tokenizer: ParakeetTokenizer,
        frame_seconds: float,
        show: Callable[[str], None],
        write: Callable[[dict], None],
    ):
        self.tokenizer = tokenizer
        self.frame_seconds = frame_seconds
        self.show = show
        self.write = write
        self.tokens: list[Token] = []
        self.word = 0  # where the last word begins
        self.shown = ""  # what is printed of this line

    def add(self, tokens: list[Token], frames: int) -> None:
        """The next tokens. `frames`: how many the encoder has made."""
        for token in tokens:
            self._add(token, frames)
        is_whole = self._is_tag(len(self.tokens) - 1)
        is_whole |= self._pause(len(self.tokens), frames) >= WORD_PAUSE
        self._show(len(self.tokens) if is_whole else self.word)

    def finish(self, frames: int) -> None:
        """The recording has ended."""
        self._end(len(self.tokens), frames)

    def _add(self, token: Token, frames: int) -> None:
        """A line ends before a word, and not before a mark, which belongs to the word before it."""
        piece = token.piece
        is_tag = self.tokenizer.is_tag(piece)
        if self.tokens and not is_tag and timed.begins_word(piece, self.tokenizer):
            self.word = len(self.tokens)
        self.tokens.append(token)
        word = self._text(self.tokens[self.word :])
        if self.word and word and not timed.is_mark(word) and self._is_over():
            self._end(self.word, frames)

    def _is_over(self) -> bool:
        """Whether the line ends before its last word, of which nothing is shown yet."""
        first = self.tokens[self.word].frame
        text = self._text(self.tokens[: self.word])
        return len(self.shown) <= len(text) and (
            self._is_tag(self.word - 1)
            or text.endswith(SENTENCE_ENDS)
            or self._pause(self.word, first) > LINE_PAUSE
            or (first - self.tokens[0].frame) * self.frame_seconds > LONGEST_LINE
        )

    def _is_tag(self, number: int) -> bool:
        """Whether this token names a language, which follows a sentence."""
        return bool(self.tokens) and self.tokenizer.is_tag(self.tokens[number].piece)

    def _pause(self, count: int, frame: int) -> float:
        """Seconds from the end of the first `count` tokens to a frame."""
        if not count:
            return 0.0
        last = self.tokens[count - 1]
        return (frame - last.frame - last.duration) * self.frame_seconds

    def _text(self, tokens: list[Token]) -> str:
        return timed.text_of(tokens, self.tokenizer)

    def _show(self, count: int) -> None:
        text = self._text(self.tokens[:count]).rstrip("\ufffd")  # a part of a character
        if len(text) > len(self.shown):
            self.show(text[len(self.shown) :])
            self.shown = text

    def _end(self, count: int, frames: int) -> None:
        """Ends the line after so many tokens."""
        line, self.tokens = self.tokens[:count], self.tokens[count:]
        row = timed.transcript(line, self.tokenizer, self.frame_seconds, frames)
        if row["text"]:
            self.show(row["text"][len(self.shown) :] + "\n")
        if words := row["words"]:
            times = {"start": words[0]["start"], "end": words[-1]["end"]}
            self.write({**times, "text": row["text"], "words": words})
        self.word = 0
        self.shown = ""


# --- audio ----------------------------------------------------------------------------------------


def standard_input() -> Iterator[torch.Tensor]:
    """The samples (T,) of standard input as they come: 16-bit, little-endian, mono, 16 kHz, after
    the header of a wav file or without one. Raises `DataError` for other files."""

    def read() -> bytes:
        try:
            return os.read(0, BYTES)
        except OSError as error:
            raise DataError(f"standard input: {error.strerror}") from None

    data = read()
    while len(data) < BEGINNING and (more := read()):
        data += more
    if CODED.match(data):
        raise DataError(f"standard input: it is a file of another form than wav; {CONVERT}")
    left = sys.maxsize
    if data[:4] == b"RIFF":
        data, left = _without_header(data, read)
    while data := data[:left]:
        whole = len(data) // 2 * 2
        samples = np.frombuffer(data[:whole], "<i2").astype(np.float32) / 32768
        yield torch.from_numpy(samples)
        left -= whole
        more = read() if left > 1 else b""
        data = data[whole:] + more if more else b""


def _without_header(data: bytes, read: Callable[[], bytes]) -> tuple[bytes, int]:
    """The bytes after the header of a wav file that begins with `data`, and how many of those that
    come are samples."""
    place = 12
    while True:
        while len(data) < place + 24:  # a chunk's name and size, and a format
            more = read()
            if not more or place > LARGEST_HEADER:
                raise DataError("standard input: it begins like a wav file and has no samples")
            data += more
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if name == b"data":
            return data[place:], size if 0 < size < ENDLESS else sys.maxsize
        if name == b"fmt ":
            form, channels, rate, _, _, bits = struct.unpack_from("<HHIIHH", data, place)
            if form not in PCM or (channels, rate, bits) != (1, SAMPLE_RATE, 16):
                raise DataError(
                    f"standard input: it has {rate} Hz, {channels} channels and {bits} bits (wav"
                    f" format {form}); {CONVERT}"
                )
        place += size + size % 2


# --- output ---------------------------------------------------------------------------------------


class Written:
    """--output, if it is given: lines of `Lines`, or subtitles. Unlike other transcripts they are
    written in place, because a stream may never end. Methods raise `RunError`."""

    def __init__(self, output: str | None, name: str):
        self.file = None
        if output is None:
            return
        self.path = Path(output)
        self.name = name
        self.form = subtitles.FORMATS.get(self.path.suffix.lower())
        self.count = 0
        with writing(self.path, "--output"):
            if not transcripts.is_stream(self.path):
                transcripts.keep_earlier(self.path)
            errors = "backslashreplace"
            self.file = open(self.path, "w", encoding="utf-8", errors=errors)  # noqa: SIM115
            self.file.write(self.form.head if self.form else "")

    def write(self, row: dict) -> None:
        if self.file is None:
            return
        with writing(self.path, "--output"):
            if self.form is None:
                self.file.write(json.dumps({"file": self.name, **row}, ensure_ascii=False) + "\n")
            else:
                for cue in subtitles.cues(row):
                    self.count += 1
                    self.file.write(self.form.cue(self.count, cue))
            self.file.flush()

    def close(self) -> None:
        if self.file:
            with writing(self.path, "--output"):
                self.file.close()


# --- the command ----------------------------------------------------------------------------------


class Pace:
    """Says once if a machine is too slow for audio that does not wait."""

    def __init__(self):
        self.busy = 0.0  # seconds
        self.heard = 0.0

    def add(self, busy: float, heard: float) -> None:
        is_known = self.heard >= SLOW_AFTER
        self.busy += busy
        self.heard += heard
        if self.heard >= SLOW_AFTER and not is_known and self.busy > self.heard:
            print(
                f"warning: this machine needs {self.busy / self.heard:.1f} s for a second of audio;"
                " a larger --stream takes less",
                file=sys.stderr,
            )


def transcribe(
    how: recogniser.DecodingOptions,
    milliseconds: int,
    model: Parakeet,
    tokenizer: ParakeetTokenizer,
    setup: Setup,
) -> None:
    """Prints the words of the recording of --transcribe, or of standard input, as they come, and
    writes them to --output. A signal ends the recording; Ctrl-C is the usual end of standard input.
    Raises `UsageError`, `DataError` and `RunError`."""
    lookahead = lookahead_of(model.config, milliseconds)
    name = how.transcribe[0]
    is_live = name == STANDARD_INPUT
    pieces = standard_input() if is_live else audio.read_in_pieces(name, SAMPLE_RATE)
    written = Written(how.output, name)
    frame_seconds = decoding.frame_samples(model.config) / SAMPLE_RATE
    show = functools.partial(print, end="", flush=True)
    lines = Lines(tokenizer, frame_seconds, show, written.write)
    pace = Pace()
    end: Failure | KeyboardInterrupt | None = None
    with setup.autocast(), finite_layers():
        stream = Stream(model, lookahead)
        if is_live:
            print("listening; Ctrl-C ends", file=sys.stderr)
        try:
            while True:
                if is_live:
                    select.select([0], [], [])  # a signal ends this wait, and no step
                with signals_afterwards():
                    piece = next(pieces, None)
                    if piece is None:
                        break
                    begin = time.monotonic()
                    lines.add(stream.push(piece), stream.encoder.frames)
                    if is_live:
                        pace.add(time.monotonic() - begin, len(piece) / SAMPLE_RATE)
        except (KeyboardInterrupt, Stopped, DataError) as error:
            end = error
        lines.add(stream.finish(), stream.encoder.frames)
        lines.finish(stream.encoder.frames)
    written.close()
    if end and not (is_live and isinstance(end, KeyboardInterrupt)):
        raise end
