"""NeMo's small Conformer-CTC, trained from scratch for so many minutes of processor time: its CER
beside that of a recipe, whose --max_steps is chosen so that its process takes as long.

    python benchmarks/real_speech.py mboshi CHECKOUT --manifests manifests
    python benchmarks/nemo_ctc.py manifests --minutes 30

It needs `pip install 'nemo_toolkit[asr]>=3,<4'`. The network, its masks and its dropout are those
of NeMo's conformer_ctc_char.yaml (small). Its schedule is made for weeks on many GPUs, so that of
the recipes is taken: AdamW with a peak of 1e-3, a warm-up of a tenth, cosine.
"""

import json
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()

import torch
from nemo.collections.asr.models import EncDecCTCModel
from omegaconf import OmegaConf

from common import optim
from speech.writing import metrics

PEAK = 1e-3
WARMUP = 0.1
CLIPS = 8  # of an update
WIDTH = 176


def network(letters: list[str]) -> EncDecCTCModel:
    """The model of conformer_ctc_char.yaml with its sizes for "small"."""
    config = {
        "sample_rate": 16000,
        "labels": letters,
        "preprocessor": {
            "_target_": "nemo.collections.asr.modules.AudioToMelSpectrogramPreprocessor",
            "sample_rate": 16000,
            "normalize": "per_feature",
            "window_size": 0.025,
            "window_stride": 0.01,
            "features": 80,
            "n_fft": 512,
        },
        "spec_augment": {
            "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
            "freq_masks": 2,
            "time_masks": 5,
            "freq_width": 27,
            "time_width": 0.05,
        },
        "encoder": {
            "_target_": "nemo.collections.asr.modules.ConformerEncoder",
            "feat_in": 80,
            "feat_out": -1,
            "n_layers": 16,
            "d_model": WIDTH,
            "subsampling": "striding",
            "subsampling_factor": 4,
            "subsampling_conv_channels": -1,
            "ff_expansion_factor": 4,
            "self_attention_model": "rel_pos",
            "n_heads": 4,
            "xscaling": True,
            "untie_biases": True,
            "conv_kernel_size": 31,
            "dropout": 0.1,
            "dropout_emb": 0.0,
            "dropout_att": 0.1,
        },
        "decoder": {
            "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
            "feat_in": WIDTH,
            "num_classes": len(letters),
            "vocabulary": letters,
        },
        "optim": None,
    }
    return EncDecCTCModel(cfg=OmegaConf.create(config))


def loader(model: EncDecCTCModel, manifest: Path, letters: list[str], shuffle: bool):
    """NeMo's batches of a manifest."""
    config = {
        "manifest_filepath": str(manifest),
        "sample_rate": 16000,
        "labels": letters,
        "batch_size": CLIPS,
        "shuffle": shuffle,
        "num_workers": 0,
    }
    return model._setup_dataloader_from_config(OmegaConf.create(config))


@torch.no_grad()
def error_rate(model: EncDecCTCModel, batches, texts: list[str]) -> float:
    """CER of greedy decoding, as the recipes count it."""
    model.eval()
    written = []
    for audio, lengths, _, _ in batches:
        log_probs, frames, _ = model.forward(input_signal=audio, input_signal_length=lengths)
        for row, count in zip(log_probs.argmax(-1), frames.tolist(), strict=True):
            path = row[:count].unique_consecutive().tolist()
            written.append("".join(model.cfg.labels[i] for i in path if i < len(model.cfg.labels)))
    model.train()
    errors = metrics.count_errors(texts, written, "characters")
    return errors.total / errors.length


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("manifests", type=Path)
    parser.add_argument("--minutes", type=float, default=30, help="of processor time")
    args = parser.parse_args()
    texts = {}
    for name in ("train", "val"):
        lines = (args.manifests / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts[name] = [json.loads(line)["text"] for line in lines]
    letters = sorted(set("".join(texts["train"])))
    torch.manual_seed(1)
    model = network(letters)
    train = loader(model, args.manifests / "train.jsonl", letters, shuffle=True)
    val = loader(model, args.manifests / "val.jsonl", letters, shuffle=False)
    optimizer = torch.optim.AdamW(model.parameters(), PEAK, betas=(0.9, 0.98), weight_decay=1e-3)
    optim.note_rates(optimizer)
    limit = 60 * args.minutes
    schedule = optim.Schedule(optimizer, "cosine", limit, WARMUP * limit)  # by seconds
    model.train()
    spent = updates = 0
    while spent < limit:
        for audio, lengths, tokens, counts in train:
            started = time.process_time()
            schedule.set(spent)
            log_probs, frames, _ = model.forward(input_signal=audio, input_signal_length=lengths)
            loss = model.loss(
                log_probs=log_probs, targets=tokens, input_lengths=frames, target_lengths=counts
            )
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            spent += time.process_time() - started
            updates += 1
            if updates % 200 == 0 or spent >= limit:
                rate = error_rate(model, val, texts["val"])
                line = f"{spent / 60:.1f} minutes, {updates} updates, loss {loss.item():.3f}"
                print(f"{line}, CER {100 * rate:.1f} %", flush=True)
            if spent >= limit:
                break


if __name__ == "__main__":
    main()
