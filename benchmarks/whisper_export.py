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
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import device, options
from common.batches import EvalBatches
from common.errors import exit_with_one_line
from recipes import whisper_morse, whisper_vietnamese
from speech import metrics, text
from speech.morse import scores
from speech.recogniser import decode_set
from speech.whisper import decoding
from speech.whisper.model import SAMPLE_RATE

RECIPES = {
    "vietnamese": (whisper_vietnamese, text.for_scoring),
    "morse": (whisper_morse, scores.for_scoring),
}
MOST = 200  # new tokens
THEIRS, EXAMPLES = "transformers, 30 s", 5


class Exported:
    """The folder as transformers loads it."""

    def __init__(self, folder: str, device_of_model: torch.device):
        from transformers import WhisperForConditionalGeneration, WhisperProcessor

        self.model = (
            WhisperForConditionalGeneration.from_pretrained(folder).to(device_of_model).eval()
        )
        self.processor = WhisperProcessor.from_pretrained(folder)

    def texts(self, batch: dict) -> list[str]:
        lengths = batch["audio_lengths"].tolist()
        arrays = [
            waveform[:length].numpy()
            for waveform, length in zip(batch["audio"], lengths, strict=True)
        ]
        features = self.processor(
            arrays, sampling_rate=SAMPLE_RATE, return_tensors="pt"
        ).input_features
        tokens = self.model.generate(
            features.to(self.model.device),
            do_sample=False,
            num_beams=1,
            max_new_tokens=MOST,
            return_timestamps=False,
            force_unique_generate_call=True,
        )
        return [
            one.strip() for one in self.processor.batch_decode(tokens, skip_special_tokens=True)
        ]


def decode_by_all(
    model, search: decoding.Search, tokenizer, batches: list[dict], exported: Exported
) -> dict:
    """{way of decoding: (rows, seconds)}: ours as the recipe decodes, by one greedy pass, by one at
    30 s; theirs."""
    padded, device_of_model, results = model.pad_to_longest, next(model.parameters()).device, {}
    for way, texts_of, at_30s in (
        (f"ours, {search.method}, as the recipe decodes", decoding.texts, padded),
        ("ours, one greedy pass", decoding.greedy_texts, padded),
        ("ours, one greedy pass, 30 s", decoding.greedy_texts, True),
    ):
        model.pad_to_longest, started = at_30s, time.perf_counter()

        def decode(batch: dict, texts_of=texts_of) -> tuple[list[str], dict]:
            return texts_of(model, tokenizer, *model.encode(batch), search), {}

        rows, _ = decode_set(decode, batches, device_of_model)
        results[way] = rows, time.perf_counter() - started
    model.pad_to_longest, started = padded, time.perf_counter()
    texts = [text for batch in batches for text in exported.texts(batch)]
    rows = [{**row, "hypothesis": text} for row, text in zip(rows, texts, strict=True)]
    results[THEIRS] = rows, time.perf_counter() - started
    return results


@torch.no_grad()
def main(both) -> None:
    args, rest = both
    recipe, normalise = RECIPES[args.recipe]
    parser = options.Parser("the recipe's flags")
    recipe.add_arguments(parser)
    with tempfile.TemporaryDirectory() as logs:
        own = parser.parse_args(
            ["--evaluate", "--output_dir", args.against, "--log_dir", logs, *rest]
        )
        start = recipe.resolve(own)
        setup = device.setup(own)
        model, metadata = recipe.trained(own, start, setup)
        batches = list(
            EvalBatches(own, recipe.test_set(own, start, metadata)[1], recipe.collate, setup)
        )
    tokenizer, search = recipe.make_search(own, metadata)
    results = decode_by_all(
        model, search, tokenizer, batches, Exported(args.exported, setup.device)
    )
    found = {way: rows for way, (rows, _) in results.items()}
    seconds = {way: spent for way, (_, spent) in results.items()}
    theirs = found[THEIRS]
    print(f"\n{len(theirs)} clips of the {args.recipe} test set, {args.exported}\n")
    print("| | CER, % | WER, % | the same as transformers', % | s |\n|---|---|---|---|---|")
    for way, rows in found.items():
        scores = metrics.score(rows, normalise)
        same = [
            row["hypothesis"] == other["hypothesis"]
            for row, other in zip(rows, theirs, strict=True)
        ]
        print(
            f"| {way} | {100 * metrics.rate(scores['cer']):.2f} |"
            f" {100 * metrics.rate(scores['wer']):.2f} | {100 * sum(same) / len(same):.1f} |"
            f" {seconds[way]:.1f} |"
        )
    pairs = [
        pair
        for pair in zip(next(iter(found.values())), theirs, strict=True)
        if len({one["hypothesis"] for one in pair}) > 1
    ]
    for ours, other in pairs[:EXAMPLES]:
        print(
            f"\nreference     {ours['reference']}\nours          {ours['hypothesis']}\ntransformers"
            f"  {other['hypothesis']}"
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("exported", help="what --export wrote")
    parser.add_argument("--against", default=".", metavar="RUN", help="the run's --output_dir (.)")
    exit_with_one_line(main, parser.parse_known_args())
