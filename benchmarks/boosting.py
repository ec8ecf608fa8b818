"""What --boost does to Parakeet's demo: its rarest test words are boosted, in clean clips and in
noise. Prints the share of these words that is found, how often one is written that nobody said,
and the word error rate without them.

    ./run_parakeet_tdt.sh cpu --output_dir demo
    python benchmarks/boosting.py --run demo"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

import numpy as np
import torch

from benchmarks.joined_clips import spoken_clips
from common import checkpoint
from common.batches import pad
from common.errors import exit_with_one_line
from recipes.parakeet_tdt import RECIPE, make_model
from speech import metrics
from speech.boosting import Phrase
from speech.parakeet import decoding, start
from speech.splits import RunInfo
from speech.text import for_scoring

RARE = 8  # words
NOISE = (0.0, 0.02, 0.05)  # deviation; the clips' own is about 0.1
WEIGHTS = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
CLIPS = 200


def read(model, tokenizer, waveforms: list[torch.Tensor], trie) -> list[str]:
    texts = []
    for first in range(0, len(waveforms), 8):
        audio, lengths = pad(waveforms[first : first + 8])
        batch = {"audio": audio, "audio_lengths": lengths, "audio_lengths_host": lengths}
        records = decoding.transcripts(model, tokenizer, batch, trie)
        texts += [record["text"] for record in records]
    return texts


def compare(run: Path) -> None:
    saved = checkpoint.read_weights(run / "checkpoints" / "best.safetensors", RECIPE)
    info, _ = checkpoint.read_infos(saved, start.ModelInfo, RunInfo)
    model = make_model(info, saved.model).eval()
    tokenizer = start.tokenizer_of(info)
    clips = spoken_clips(run, CLIPS)
    references = [for_scoring(text).split() for _, text in clips]
    counts = Counter(word for words in references for word in words)
    rare = [word for word, _ in sorted(counts.items(), key=lambda item: item[1])[:RARE]]
    said = sum(counts[word] for word in rare)
    print(f"{len(clips)} clips; boosted: {' '.join(rare)}, said {said} times")
    print("| noise | weight | found | not said | WER of the other words |")
    for noise in NOISE:
        random = np.random.default_rng(0)
        waveforms = []
        for samples, _ in clips:
            added = noise * random.standard_normal(len(samples)).astype(np.float32)
            waveforms.append(torch.from_numpy(samples / np.float32(2**15) + added))
        for weight in WEIGHTS:
            phrases = [Phrase(word, weight, "") for word in rare] if weight else []
            trie = decoding.phrase_trie(phrases, tokenizer)
            with torch.no_grad():
                found = [
                    for_scoring(each).split() for each in read(model, tokenizer, waveforms, trie)
                ]
            hits = extra = 0
            for reference, words in zip(references, found, strict=True):
                for word in rare:
                    both = min(reference.count(word), words.count(word))
                    hits += both
                    extra += words.count(word) - both
            others = [
                [" ".join(each for each in words if each not in rare) for words in texts]
                for texts in (references, found)
            ]
            rate = 100 * metrics.count_errors(*others, "words", for_scoring).rate
            print(
                f"| {noise:g} | {weight:g} | {100 * hits / said:.1f} % | {extra} | {rate:.2f} % |",
                flush=True,
            )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=Path, required=True, help="the --output_dir of a trained demo"
    )
    args = parser.parse_args()
    exit_with_one_line(lambda: compare(args.run))
