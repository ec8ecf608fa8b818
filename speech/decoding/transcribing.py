"""What --transcribe does: files and folders to texts, in pieces where they are long."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from common import batches, memory
from common.device import Setup
from common.errors import DataError, UsageError
from common.layers import finite_layers
from speech.decoding import transcripts
from speech.decoding.long import BY_SILENCES, Cutting, Piece, by_length, unless_silent
from speech.decoding.recogniser import DecodingOptions
from speech.signal.audio import SAMPLE_RATE, audio_files, read_audio


def join_records(records: list[dict], pieces: list[Piece], cutting: Cutting) -> dict:
    """The "text" of a recording, the texts of its "pieces" with their times in seconds, and timed
    parts, from the records of its pieces."""
    joined = cutting.join(records, pieces)
    timed = []
    for start, end, part in joined.pieces:
        timed.append({"start": start / SAMPLE_RATE, "end": end / SAMPLE_RATE, "text": part})
    return {"text": joined.text, "pieces": timed, **joined.parts}


@torch.no_grad()
def transcribe_files(
    how: DecodingOptions,
    decode: Callable[[dict], list[str | dict]],
    setup: Setup,
    longest: float | None,
    cutting: Cutting | None = None,
    parts: tuple[str, ...] = (),
) -> None:
    """Transcribes the files and folders of --transcribe. Prints the text of each file, after its
    name and a tab if there are several, or writes JSON Lines to --output, or subtitles.

    `decode(batch on device)` returns the texts of a batch of waveforms, or records: "text" and
    lists of timed `parts`, such as "words". Recordings over `longest` seconds are cut, and their
    texts joined, by `cutting` (None: `by_length`); with --piece_seconds they are cut at silences.
    If `longest` is None, they are not cut, and `decode` gets one at a time. A file that cannot be
    read is named on stderr and the others are transcribed; then `DataError` is raised. Raises
    `UsageError` for subtitles of several recordings."""
    recordings = audio_files(how.transcribe)
    if how.output and transcripts.is_subtitles(how.output) and len(recordings) > 1:
        raise UsageError(
            f"--output {how.output}: subtitles are of one recording, and --transcribe names"
            f" {len(recordings)}; name one, or a .jsonl file"
        )
    if how.piece_seconds:
        longest = min(longest, how.piece_seconds)
        cutting = BY_SILENCES
    elif longest and cutting is None:
        cutting = by_length(longest)
    records_of = decoder(decode, setup, parts)

    def transcript(path: Path, waveform: torch.Tensor) -> dict:
        row = {"file": str(path), "text": "", "seconds": len(waveform) / SAMPLE_RATE}
        if longest is None:
            return {**row, **records_of([waveform], str(path))[0]}
        pieces = cutting.cut(waveform, SAMPLE_RATE, longest)
        records = []
        for first in range(0, len(pieces), how.batch_size):
            several = pieces[first : first + how.batch_size]
            records += records_of([waveform[a:b] for a, b in several], str(path))
        return {**row, **join_records(records, pieces, cutting)}

    def rows() -> Iterator[dict]:
        for path in recordings:
            try:
                waveform = read_audio(str(path), SAMPLE_RATE)
            except DataError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            yield transcript(path, waveform)

    with finite_layers():
        if how.output:
            done = transcripts.write(Path(how.output), rows())
        else:
            done = transcripts.show(rows(), len(recordings) > 1, how.timestamps)
    if done < len(recordings):
        raise DataError(
            f"{len(recordings) - done} of {len(recordings)} files could not be transcribed"
        )


def decoder(
    decode: Callable[[dict], list[str | dict]], setup: Setup, parts: tuple[str, ...]
) -> Callable[[list[torch.Tensor], str], list[dict]]:
    """The function that decodes waveforms of the file with a name to records, by `decode` (see
    `transcribe_files`). Digital silence has neither text nor `parts`."""

    def decode_on_device(batch: dict) -> list[str | dict]:
        return decode(next(batches.to_device([batch], setup.device)))

    def records_of(waveforms: list[torch.Tensor], name: str) -> list[dict]:
        padded, lengths = batches.pad(waveforms)
        batch = {"audio": padded, "audio_lengths": lengths, "names": [name] * len(waveforms)}
        with setup.autocast():
            results = memory.split_on_oom(decode_on_device, batch, setup.device)
        decoded = [result for results_of_part in results for result in results_of_part]
        return [each if isinstance(each, dict) else {"text": each} for each in decoded]

    return unless_silent(records_of, {"text": "", **{part: [] for part in parts}})
