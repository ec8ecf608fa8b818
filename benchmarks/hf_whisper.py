"""transformers' Whisper, fine-tuned for so many minutes of processor time: its folder, which
`--evaluate` of our recipe reads, so that both are decoded and counted by the same program.

    python benchmarks/real_speech.py mboshi CHECKOUT --manifests manifests
    python benchmarks/hf_whisper.py whisper-base manifests/train.jsonl trained --language sw
    python recipes/whisper_vietnamese.py --evaluate --model_dir trained --language sw \\
        --test_manifest manifests/val.jsonl

The settings are those of Hugging Face's guide to fine-tuning Whisper: 16 clips an update, AdamW, a
peak of 1e-5 and a linear decay; the warm-up is a tenth of the time. Every clip is padded to 30 s,
as its processor does.
"""

import json
import random
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()

import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor

from speech.signal.audio import SAMPLE_RATE, read_audio

PEAK = 1e-5
WARMUP = 0.1
CLIPS = 16  # of an update
IGNORED = -100  # as a label


def batch_of(processor: WhisperProcessor, rows: list[dict]) -> dict[str, torch.Tensor]:
    """The inputs of transformers' model: log-mel features of 30 s, and labels."""
    samples = [read_audio(row["audio_filepath"], SAMPLE_RATE).numpy() for row in rows]
    features = processor(samples, sampling_rate=SAMPLE_RATE, return_tensors="pt")
    texts = processor.tokenizer([row["text"] for row in rows], padding=True, return_tensors="pt")
    labels = texts.input_ids.masked_fill(texts.attention_mask == 0, IGNORED)
    # The model puts the first token in front of the labels by itself.
    return {"input_features": features.input_features, "labels": labels[:, 1:]}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("output_dir", type=Path)
    parser.add_argument("--language", required=True)
    parser.add_argument("--minutes", type=float, default=30, help="of processor time")
    args = parser.parse_args()
    lines = args.manifest.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    torch.manual_seed(1)
    random.seed(1)
    about = {"language": args.language, "task": "transcribe"}
    processor = WhisperProcessor.from_pretrained(args.model_dir, **about)
    model = WhisperForConditionalGeneration.from_pretrained(args.model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK, weight_decay=0.0)
    limit = 60 * args.minutes
    warmup = WARMUP * limit
    model.train()
    spent = updates = 0
    while spent < limit:
        random.shuffle(rows)
        for start in range(0, len(rows) - CLIPS + 1, CLIPS):
            started = time.process_time()
            rate = PEAK * min((spent + 1) / warmup, (limit - spent) / (limit - warmup))
            optimizer.param_groups[0]["lr"] = rate
            loss = model(**batch_of(processor, rows[start : start + CLIPS])).loss
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            spent += time.process_time() - started
            updates += 1
            line = f"{spent / 60:.1f} minutes, {updates} updates, loss {loss.item():.3f}"
            print(line, flush=True)
            if spent >= limit:
                break
    model.generation_config.language = args.language
    model.generation_config.task = "transcribe"
    model.save_pretrained(args.output_dir)
    processor.save_pretrained(args.output_dir)


if __name__ == "__main__":
    main()
