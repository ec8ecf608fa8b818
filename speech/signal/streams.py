"""Sound that libsndfile does not read, or not to its end, by the libraries of FFmpeg (PyAV): MP3,
which often states no length or a wrong one, phones' and videos' formats, chained Ogg."""

import io
import re
from collections.abc import Iterator

import numpy as np

from speech.signal.marks import CONTINUES, FLAC, BadStream, has_behind

# Playlists (m3u8, ffconcat, sdp) would read other files. What libsndfile knows is not here: where
# it refuses a file, several were joined, and FFmpeg would read the first alone.
FORMATS = (
    "mov,matroska,asf,aac,amr,mp3,ogg,flac,caf,avi,flv,mpeg,mpegts,ac3,eac3,ape,wv,tta,dts,rm,loas,"
    "gsm,sln,g722,tak,mpc,mpc8,dsf,spx,oma"
)
RESTARTING = ("ogg", "flac")  # read here if chained or of unstated length: times may be wrong
GENERIC_INDEX = 0x100  # a flag of formats that hold no times: FFmpeg estimates their length
PREROLL = 2.0  # seconds that are decoded before a part: frames build on earlier ones
TOLERANCE = 0.1  # seconds by which a stated length may be wrong
PADDING = 2304  # samples that an encoder of MP3 adds, and decoders leave out
# The first frame of an MP3 that states the number of frames: Xing's and LAME's, or Fraunhofer's.
STATED_FRAMES = re.compile(
    rb"\xff[\xe2-\xfb].{2,4}?\0{9,32}(?:(?:Xing|Info)...[\1\3\5\7\x09\x0b\x0d\x0f]|VBRI.{10})(.{4})",
    re.DOTALL,
)
LENGTH_FRAME = 250  # bytes: its mark ends before
# What a joined MP3 has in its middle: packets that are not sound and have a time.
JOINED = (b"ID3\3\0", b"ID3\4\0", b"ID3\2\0", b"APETAGEX", b"Xing\0\0\0", b"Info\0\0\0")
# How what is not sound begins where MP3s were joined.
TAGS = (b"TAG", b"ID3", b"APETAGEX", b"LYRICSBEGIN")


class Stream:
    """The first stream of sound in an open file. Raises `BadStream` for what cannot be decoded."""

    def __init__(self, path: str):
        import av  # 0.2 s, and most data sets do not need it

        self.path = path
        self.failures = (av.FFmpegError, OSError, ValueError)
        self.file = io.FileIO(path)  # not the name: FFmpeg gives some names a meaning
        try:
            self.container = av.open(self.file, options={"format_whitelist": FORMATS})
            self.stream = self.container.streams.audio[0]
            self.format = self.container.format.name
            self.samplerate = self.stream.codec_context.sample_rate
            self.channels = self.stream.codec_context.channels
        except (*self.failures, IndexError, AttributeError):  # no sound, or of an unknown codec
            self.file.close()
            raise BadStream("audio is unreadable") from None
        if self.format == "flac" and has_behind(path, self._first_frame() + 1, FLAC):
            self.close()  # FFmpeg may lose what is near the seam
            raise BadStream(CONTINUES)
        has_times = self.format == "flac" or not self.container.format.flags & GENERIC_INDEX
        self.stated = self.stream.duration if has_times else None

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        self.container.close()
        self.file.close()

    def seconds(self) -> float:
        """The length of what can be decoded. An MP3's packets are counted, which is faster."""
        if self.format != "mp3":
            return sum(map(len, self.pieces())) / self.samplerate
        units = samples = 0
        for packet in self._packets():
            if packet.size and bytes(packet)[:1] != b"\xff":  # joined: not all of it is sound
                with Stream(self.path) as again:
                    return sum(map(len, again.pieces())) / self.samplerate
            units += packet.duration or 0
            if packet.has_sidedata("skip_samples"):  # at the start, at the end
                skipped = np.frombuffer(bytes(packet.get_sidedata("skip_samples"))[:8], "<u4")
                samples -= int(skipped.sum())
        samples += round(units * self.stream.time_base * self.samplerate)
        self._check_end(samples)
        return samples / self.samplerate

    def pieces(self, first: int = 0, channel: int | None = None) -> Iterator[np.ndarray]:
        """The samples (T,) from `first` on, of a channel or the mean, about a second at a time."""
        waiting = [np.zeros(0, np.float32)]
        for samples in self._decoded(first, channel):
            waiting.append(samples)
            if sum(map(len, waiting)) >= self.samplerate:
                yield np.concatenate(waiting)
                waiting = []
        if waiting:
            yield np.concatenate(waiting)

    def _decoded(self, first: int, channel: int | None) -> Iterator[np.ndarray]:
        start = self.stream.start_time or 0
        preroll = round(PREROLL * self.samplerate)
        position = 0
        if first > preroll and self._can_seek():
            time = (first - preroll) / self.samplerate / self.stream.time_base
            self.container.seek(round(time) + start, stream=self.stream)
            position = None
        for frame in self._frames():
            if position is None:
                seconds = (frame.pts - start) * self.stream.time_base
                position = round(seconds * self.samplerate)
            samples = _mono(frame, channel)
            if position + len(samples) > first:
                yield samples[max(0, first - position) :]
            position += len(samples)
        self._check_end(position or 0)

    def _frames(self) -> Iterator:
        junk = None  # where the bytes end that are not sound
        for packet in self._packets():
            try:
                frames = packet.decode()
            except self.failures:
                is_tag = bytes(packet).startswith(TAGS) or packet.pos == junk
                if self.format != "mp3" or not is_tag:
                    raise BadStream(f"is truncated or damaged at byte {packet.pos}") from None
                junk = packet.pos + packet.size
                continue
            for frame in frames:
                if frame.sample_rate != self.samplerate:
                    rates = f"{self.samplerate} to {frame.sample_rate} Hz"
                    raise BadStream(f"changes its sample rate from {rates} (joined?)")
                yield frame

    def _packets(self) -> Iterator:
        try:
            for packet in self.container.demux(self.stream):
                if packet.is_corrupt:
                    raise BadStream(f"is truncated or damaged at byte {packet.pos}")
                yield packet
        except self.failures as error:
            raise BadStream(f"is truncated or damaged: {error.strerror or error}") from None

    def _check_end(self, samples: int) -> None:
        """Refuses a file that states more than these samples."""
        stated = 0
        if self.stated:
            stated = round(self.stated * self.stream.time_base * self.samplerate)
        elif self.format == "mp3":
            stated = self._stated_frames() * (1152 if self.samplerate >= 32_000 else 576) - PADDING
        if samples < stated - TOLERANCE * self.samplerate:
            read, whole = samples / self.samplerate, stated / self.samplerate
            raise BadStream(f"is truncated: {read:.2f} of {whole:.2f} s could be read")

    def _stated_frames(self) -> int:
        with open(self.path, "rb") as file:
            file.seek(self._first_frame())
            found = STATED_FRAMES.match(file.read(1500))
        return int.from_bytes(found[1], "big") if found else 0

    def _first_frame(self) -> int:
        """Where an MP3 begins behind a tag."""
        with open(self.path, "rb") as file:
            head = file.read(10)
        if not head.startswith(b"ID3"):
            return 0
        high, middle, low, lowest = head[6:]
        return 10 + (high << 21 | middle << 14 | low << 7 | lowest)

    def _can_seek(self) -> bool:
        """Whether the times of the packets are those of the sound."""
        if self.format != "mp3":
            return self.format not in RESTARTING
        return not has_behind(self.path, self._first_frame() + LENGTH_FRAME, *JOINED)


def _mono(frame, channel: int | None) -> np.ndarray:
    """The samples (T,) of a channel, or the mean of all."""
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, len(frame.layout.channels)).T
    if samples.dtype.kind in "iu":
        full_scale = 2.0 ** (8 * samples.dtype.itemsize - 1)
        middle = full_scale if samples.dtype.kind == "u" else 0.0
        samples = (samples.astype(np.float32) - middle) / full_scale
    if channel is None:
        return samples.mean(axis=0, dtype=np.float32)
    if channel >= len(samples):
        raise BadStream(f"has no channel {channel} everywhere (joined?)")
    return samples[channel].astype(np.float32)
