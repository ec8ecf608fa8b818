"""What --transcribe does: files and folders to texts, in pieces where they are long."""

import itertools
import sys
from collections.abc import Callable, Iterator

import torch

from common import batches, memory
from common.device import Setup
from common.errors import DataError
from common.layers import finite_layers
from speech.decoding import annotated, transcripts
from speech.decoding.long import BY_PAUSES, BY_SILENCES, Cutting, Piece, by_length, unless_silent
from speech.decoding.ngram import Fusion
from speech.decoding.recogniser import DecodingOptions
from speech.signal.audio import SAMPLE_RATE, audio_files, read_audio


def join_records(records: list[dict], pieces: list[Piece], cutting: Cutting) -> dict:
    """The record of a recording, with its "pieces" in seconds, from those of its pieces."""
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
    fusion: Fusion | None = None,
) -> None:
    """Transcribes the files and folders of --transcribe. Prints the text of each file, after its
    name and a tab if there are several, or writes what --output asks for. Of files of annotations,
    it writes copies (see `annotated`).

    `decode(batch on device)` returns the texts of a batch of waveforms, or records: "text" and
    lists of timed `parts`, such as "words". Recordings over `longest` seconds are cut, and their
    texts joined, by `cutting` (None: `by_length`); with --piece_seconds they are cut at silences.
    If `longest` is None, they are not cut, and `decode` gets one at a time. In pieces that do not
    overlap, the language model that `decode` uses (`fusion`) begins where the piece before ended. A
    file that cannot be read is named on stderr and the others are transcribed; then `DataError` is
    raised."""
    if how.piece_seconds:
        longest = min(longest, how.piece_seconds)
        cutting = BY_SILENCES
    elif longest and cutting is None:
        cutting = by_length(longest)
    records_of = decoder(decode, setup, parts)

    def hear(name: str, waveforms: list[torch.Tensor]) -> list[dict]:
        if longest is None:
            return [records_of([waveform], name)[0] for waveform in waveforms]
        pieces = [cutting.cut(waveform, SAMPLE_RATE, longest) for waveform in waveforms]
        if fusion:
            fusion.restart()
        if fusion and max(map(len, pieces), default=0) > 1 and cutting in (BY_SILENCES, BY_PAUSES):
            return [in_order(name, *pair) for pair in zip(waveforms, pieces, strict=True)]
        cut = [each[a:b] for each, own in zip(waveforms, pieces, strict=True) for a, b in own]
        records = []
        for first in range(0, len(cut), how.batch_size):
            records += records_of(cut[first : first + how.batch_size], name)
        rest = iter(records)
        return [join_records([*itertools.islice(rest, len(own))], own, cutting) for own in pieces]

    def in_order(name: str, waveform: torch.Tensor, pieces: list[Piece]) -> dict:
        fusion.restart()
        records = []
        for begin, end in pieces:
            records += records_of([waveform[begin:end]], name)
            fusion.follow(records[-1]["text"])
        return join_records(records, pieces, cutting)

    with finite_layers():
        if how.annotated:
            count, failed = annotated.hear(how.annotated, hear)
        else:
            count, failed = transcribe_recordings(how, hear)
    if failed:
        raise DataError(f"{failed} of {count} files could not be transcribed")


def transcribe_recordings(
    how: DecodingOptions, hear: Callable[[str, list[torch.Tensor]], list[dict]]
) -> tuple[int, int]:
    """Prints or writes transcripts. Returns how many recordings there are, and how many failed."""
    recordings = audio_files(how.transcribe)

    def rows() -> Iterator[dict]:
        for path in recordings:
            try:
                waveform = read_audio(str(path), SAMPLE_RATE)
            except DataError as error:
                print(f"error: {error}", file=sys.stderr)
                continue
            row = {"file": str(path), "text": "", "seconds": len(waveform) / SAMPLE_RATE}
            yield {**row, **hear(str(path), [waveform])[0]}

    if how.output is None:
        done = transcripts.show(rows(), len(recordings) > 1, how.timestamps)
    else:
        output = transcripts.output_of(how.output, how.output_format, how.transcribe)
        by_piece = how.piece_seconds is not None
        if output.table:
            done = transcripts.write(output.table, rows())
        else:
            done = transcripts.write_files(output.files, rows(), by_piece)
    return len(recordings), len(recordings) - done


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
