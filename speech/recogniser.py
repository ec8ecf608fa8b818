"""What a recogniser's texts are used for: the table and examples at the end, and the transcripts of files."""

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch

from common import memory
from common.batches import to_device
from common.errors import DataError, UsageError
from speech import metrics
from speech.audio import audio_files, read_audio
from speech.long import Piece, cut_at_silences, put_together
from speech.text import for_scoring

EXAMPLES = 5


def decode_set(
    one: Callable[[dict], tuple[list[str], dict[str, float]]], eval_batches: Iterable[dict], names: Iterable[str],
    device: torch.device,
) -> tuple[list[dict], dict[str, tuple[float, float]]]:  # fmt: skip
    """Decodes batches by `one(batch on device)`, which returns the texts and the sums of the loss terms `names`, in halves
    where memory is short: one {"file", "reference", "hypothesis"} an utterance, with the "index" that the batch gives, and
    {loss term: (sum, count)}."""
    rows, sums = [], {name: [0.0, 0] for name in names}
    for batch in eval_batches:
        found = memory.split_on_oom(lambda piece: one(next(to_device([piece], device))), batch, device)
        for number, hypothesis in enumerate(text for texts, _ in found for text in texts):
            row = {"file": batch["names"][number], "reference": batch["texts"][number], "hypothesis": hypothesis}
            rows.append({**row, "index": batch["indices"][number]} if "indices" in batch else row)
        for name in sums:
            sums[name][0] += sum(terms[name] for _, terms in found)
            sums[name][1] += batch["counts"][name]
    return rows, {name: tuple(pair) for name, pair in sums.items()}


def print_results(
    rows: list[dict], title: str, path: Path, seed: int = 0, normalise: Callable[[str], str] = for_scoring
) -> None:
    """Prints WER, CER and five of `rows` ({"file", "reference", "hypothesis"}); all of them go to `path`. `normalise`: of
    both texts before they are compared."""
    print(f"\n{title}")
    print(metrics.error_table([row["reference"] for row in rows], [row["hypothesis"] for row in rows], normalise))
    for index in np.random.default_rng(seed).permutation(len(rows))[:EXAMPLES]:
        print(f"  reference:  {rows[index]['reference']}\n  transcript: {rows[index]['hypothesis']}\n")
    with open(path, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def transcribe_files(
    args,
    decode: Callable[[list[torch.Tensor], str], list[str]],
    sample_rate: int,
    longest: float,
    pieces: Callable[[torch.Tensor, int, float], list[Piece]] = cut_at_silences,
    join: Callable[[list[str], list[Piece]], tuple[str, list[tuple[int, int, str]]]] = put_together,
) -> None:
    """`args.transcribe` (files and folders) to stdout, with the name and a tab before the text where there are several
    files, or as JSON Lines to `args.output`. Long files are cut by `pieces(waveform, sample_rate, longest)`, at silences
    by default, into pieces of at most `longest` seconds. `decode(waveforms, name)` turns pieces into texts, and
    `join(texts, pieces)` those into one, beside the parts to be written to `args.output`. A file that cannot be read is
    named on stderr and the others are transcribed; then `DataError` is raised."""
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
        cuts = pieces(waveform, sample_rate, longest)
        texts = []
        for first in range(0, len(cuts), args.eval_batch_size):
            texts += decode([waveform[a:b] for a, b in cuts[first : first + args.eval_batch_size]], str(file))
        whole, parts = join(texts, cuts)
        if output:
            times = [{"start": a / sample_rate, "end": b / sample_rate, "text": text} for a, b, text in parts]
            row = {"file": str(file), "text": whole, "seconds": len(waveform) / sample_rate, "pieces": times}
            output.write(json.dumps(row, ensure_ascii=False) + "\n")
            output.flush()
        else:
            print(f"{file}\t{whole}" if len(files) > 1 else whole, flush=True)
    if output:
        output.close()
    if failed:
        raise DataError(f"{failed} of {len(files)} files could not be transcribed")
