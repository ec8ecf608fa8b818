"""Does an exported folder transcribe in transformers as the run that it is of does here? Both on
the demo's test set.

    python benchmarks/whisper_export.py vietnamese EXPORTED --against RUN [flags of the recipe]
    python benchmarks/whisper_export.py morse EXPORTED --against RUN --eval_clips 100

EXPORTED: what --export wrote. RUN: that run's --output_dir, with checkpoints/ and, Vietnamese,
data/vietnamese_demo/. The recipe's flags choose other weights (--resume FILE) or other data, as
with its --evaluate, which is what runs here.

transformers: WhisperForConditionalGeneration.from_pretrained and WhisperProcessor, clips filled up
to 30 s, greedy. Ours: the recipe's own decoding of clips as long as they are; then one greedy pass
without its fallback to higher temperatures; then the same at 30 s. `generate` is held to one call
and 200 tokens a clip: a model that has not learned to end would, with tokens that it takes for
timestamps, be asked again for ever."""

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from common import device, options
from common.batches import EvalBatches
from common.errors import exit_with_one_line
from recipes import whisper_morse, whisper_vietnamese
from speech import metrics, text
from speech.morse import clips, scores
from speech.recogniser import decode_texts
from speech.whisper import decoding, start
from speech.whisper.model import SAMPLE_RATE

MOST = 200  # new tokens
EXAMPLES = 5  # transcripts that differ


class Exported:
    """The folder as transformers loads it."""

    def __init__(self, folder: str, device: torch.device):
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self.model = WhisperForConditionalGeneration.from_pretrained(folder).to(device).eval()
        self.processor = WhisperProcessor.from_pretrained(folder)

    def texts(self, batch: dict) -> list[str]:
        arrays = []
        for waveform, length in zip(batch["audio"], batch["audio_lengths"].tolist(), strict=True):
            arrays.append(waveform[:length].cpu().numpy())
        inputs = self.processor(arrays, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        tokens = self.model.generate(
            inputs.input_features.to(self.model.device),
            do_sample=False,
            num_beams=1,
            max_new_tokens=MOST,
            return_timestamps=False,
            force_unique_generate_call=True,
        )
        texts = self.processor.batch_decode(tokens, skip_special_tokens=True)
        return [text.strip() for text in texts]


def vietnamese(args, setup: device.Setup) -> tuple:
    """The model, its record, what the flags ask for, and the test set."""
    recipe = whisper_vietnamese
    asked = recipe.resolve(args)
    model, info, before = recipe.trained(asked, setup)
    return model, info, asked, recipe.read_data(args, before)["test"]


def morse(args, setup: device.Setup) -> tuple:
    """The same of the Morse recipe."""
    recipe = whisper_morse
    asked, source = recipe.resolve(args)
    model, info, before = recipe.trained(asked, setup)
    source = clips.as_trained(source, before.synthesis if before else None)
    return model, info, asked, recipe.read_data(args, source, before)["test"]


RECIPES = {
    "vietnamese": (whisper_vietnamese, vietnamese, text.for_scoring),
    "morse": (whisper_morse, morse, scores.for_scoring),
}


def decode_by_all(
    model, tokenizer, search: decoding.Search, batches: list[dict], exported: Exported
) -> dict[str, tuple[list[dict], float]]:
    """The rows and the seconds of each way of decoding: ours as the recipe decodes, by one greedy
    pass, and by one at 30 s; transformers'."""

    def ours(texts_of: Callable) -> Callable:
        return lambda batch: texts_of(model, tokenizer, *model.encode(batch), search)

    padded = model.pad_to_longest
    ways = {
        f"ours, {search.method}, as the recipe decodes": (ours(decoding.texts), padded),
        "ours, one greedy pass": (ours(decoding.greedy_texts), padded),
        "ours, one greedy pass, 30 s": (ours(decoding.greedy_texts), True),
        "transformers, 30 s": (exported.texts, padded),
    }
    results = {}
    for way, (texts_of, at_30s) in ways.items():
        model.pad_to_longest = at_30s
        started = time.perf_counter()
        rows = decode_texts(model, texts_of, batches)
        results[way] = rows, time.perf_counter() - started
    model.pad_to_longest = padded
    return results


@torch.no_grad()
def main(parsed: tuple) -> None:
    args, flags = parsed
    recipe, read, normalise = RECIPES[args.recipe]
    parser = options.Parser("the recipe's flags")
    recipe.add_arguments(parser)
    with tempfile.TemporaryDirectory() as logs:
        flags = ["--evaluate", "--output_dir", args.against, "--log_dir", logs, *flags]
        own = parser.parse_args(flags)
        setup = device.setup(own)
        model, info, asked, test_set = read(own, setup)
        tokenizer, search = start.make_search(asked, info)
        data = recipe.Utterances(own, test_set, tokenizer, info, training=False)
        batches = list(EvalBatches(own, data, recipe.collate, setup))
    exported = Exported(args.exported, setup.device)
    results = decode_by_all(model, tokenizer, search, batches, exported)
    *_, (theirs, _) = results.values()
    print(
        f"\n{len(theirs)} clips of the {args.recipe} test set, {args.exported}, {common.spinning()}\n"
    )
    print("| | CER, % | WER, % | the same as transformers', % | s |\n|---|---|---|---|---|")
    for way, (rows, seconds) in results.items():
        found = metrics.score(rows, normalise)
        cer = 100 * metrics.rate(found["cer"])
        wer = 100 * metrics.rate(found["wer"])
        same = 100 * sum(map(is_same, rows, theirs)) / len(rows)
        print(f"| {way} | {cer:.2f} | {wer:.2f} | {same:.1f} | {seconds:.1f} |")
    ours = next(iter(results.values()))[0]
    differ = [pair for pair in zip(ours, theirs, strict=True) if not is_same(*pair)]
    for row, other in differ[:EXAMPLES]:
        print(f"\nreference     {row['reference']}")
        print(f"ours          {row['hypothesis']}")
        print(f"transformers  {other['hypothesis']}")


def is_same(row: dict, other: dict) -> bool:
    return row["hypothesis"] == other["hypothesis"]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("exported", help="what --export wrote")
    parser.add_argument("--against", default=".", metavar="RUN", help="the run's --output_dir (.)")
    exit_with_one_line(main, parser.parse_known_args())
