"""What a recogniser's texts are used for: the table and examples at the end, and the transcripts of files."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common import metrics
from common.audio import cut_at_silences
from common.batches import audio_files, read_audio
from common.errors import DataError, UsageError

EXAMPLES = 5


def print_results(rows: list[dict], title: str, path: Path, seed: int = 0) -> None:
    """Prints WER, CER and five of `rows` ({"file", "reference", "hypothesis"}); all of them go to `path`."""
    print(f"\n{title}")
    print(metrics.error_table([row["reference"] for row in rows], [row["hypothesis"] for row in rows]))
    for index in np.random.default_rng(seed).permutation(len(rows))[:EXAMPLES]:
        print(f"  reference:  {rows[index]['reference']}\n  transcript: {rows[index]['hypothesis']}\n")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def transcribe_files(
    args, decode: Callable[[list[torch.Tensor], str], list[str]], sample_rate: int, longest: float
) -> None:
    """`args.transcribe` (files and folders) to stdout, with the name and a tab before the text where there are several
    files, or as JSON Lines to `args.output`. Long files are cut at silences into pieces of at most `longest` seconds.
    `decode(waveforms, name)` turns pieces into texts. A file that cannot be read is named on stderr and the others are
    transcribed; then `DataError` is raised."""
    files = audio_files(args.transcribe)
    try:
        output = open(args.output, "w", encoding="utf-8") if args.output else None  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"--output {args.output}: {error.strerror}") from None
    failed = 0
    for file in files:
        try:
            waveform = read_audio(str(file), sample_rate)
        except DataError as error:
            print(f"error: {error}", file=sys.stderr)
            failed += 1
            continue
        pieces = cut_at_silences(waveform, sample_rate, longest)
        texts = []
        for first in range(0, len(pieces), args.eval_batch_size):
            texts += decode([waveform[a:b] for a, b in pieces[first : first + args.eval_batch_size]], str(file))
        whole = " ".join(filter(None, texts))
        if output:
            times = [
                {"start": a / sample_rate, "end": b / sample_rate, "text": text}
                for (a, b), text in zip(pieces, texts, strict=True)
            ]
            row = {"file": str(file), "text": whole, "seconds": len(waveform) / sample_rate, "pieces": times}
            output.write(json.dumps(row, ensure_ascii=False) + "\n")
            output.flush()
        else:
            print(f"{file}\t{whole}" if len(files) > 1 else whole, flush=True)
    if output:
        output.close()
    if failed:
        raise DataError(f"{failed} of {len(files)} files could not be transcribed")
