"""Vietnamese speech recognition: Whisper fine-tuned on 8 GB, or trained from scratch.

    python recipes/whisper_vietnamese.py                      # no data needed: makes a demo corpus of synthetic speech
    python recipes/whisper_vietnamese.py --model_dir whisper-base --train_manifest train.json --val_manifest val.json --resume auto
    python recipes/whisper_vietnamese.py --transcribe recording.wav folder/ --resume checkpoints/best.safetensors

Data: JSON Lines {"audio_filepath": "a.wav", "text": "hôm nay trời đẹp"}, CSV/TSV with a header, or LJSpeech's metadata.csv;
any sample rate; utterances of up to 30 s, longer ones with --use_chunking where the manifest has segment times. The text
is trained on as it is written, in NFC: case, tones, punctuation and numbers stay. Any other language: --language.

--model_dir takes a Hugging Face folder, --model_file OpenAI's .pt with its tokenizer beside it; --from_scratch
--model_size base trains one with a vocabulary of its own. --export DIR writes what transformers' WhisperForConditionalGeneration
and pipeline load. --verify_gpu checks the machine before training.

Memory: benchmarks/RESULTS.md has what each size is predicted to need; base trains in 8 GB at 22 clips of 30 s. Expect a
character error rate of about 6 % on the demo's held-out sentences after its 1,800 updates (two CPU cores: seven minutes).

Sources: Whisper (Radford et al. 2022); variable length as in icefall's Whisper recipes; learning rates and SpecAugment as
in the references of common/whisper_task.py.
"""

import functools
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import batches, checkpoint, device, optim, options, report
from common.errors import UsageError, exit_with_one_line
from common.loop import train
from speech import audio, demo, metrics
from speech import recogniser as results
from speech import text as written
from speech.columns import Corpus
from speech.corpus import load_splits
from speech.whisper import formats as files
from speech.whisper import task
from speech.whisper import tokenizer as text
from speech.whisper.model import SAMPLE_RATE, Whisper

RECIPE = "whisper_vietnamese"
DEMO_SIZES = {"train": 6000, "val": 100, "test": 200}  # utterances
DEMO_STEPS = 1800
HELD_OUT, MOST_HELD_OUT = 0.05, 200  # of the training data, where no --val_manifest is given
SIZES = {"demo": files.shape(144, (4, 2), 4), **files.SIZES}


def add_arguments(parser) -> None:
    options.add_shared_arguments(parser, learning_rate=(None, "by the model's width, and whether it is fine-tuned"))
    task.add_arguments(parser, SIZES, language="vi")
    # fmt: off
    own = parser.add_argument_group("Vietnamese")
    own.add_argument("--test_manifest", type=options.path, metavar="FILE", help="for the figures at the end (the evaluation set)")
    own.add_argument("--vocab_size", type=options.POSITIVE, metavar="N", help="tokens of a model from scratch: 256 bytes, 9 special tokens and pieces (500; 320 for the demo)")
    own.add_argument("--compare_to", type=options.path, metavar="PATH", help="a baseline for the figures at the end: a Hugging Face folder, OpenAI's .pt, or weights of this recipe")
    # fmt: on


def for_scoring(transcript: str) -> str:
    """As PhoWhisper's figures are made: NFC, lower case, without punctuation; tones and numbers stay."""
    return written.for_scoring(transcript).lower()


# --- data ------------------------------------------------------------------------------------------------------------


def read_corpora(args) -> dict[str, Corpus]:
    """The checked corpora "train", "val" and, where there is one, "test"; the demo's where no manifest is given. For
    --evaluate the test set alone does."""
    paths = {"train": args.train_manifest, "val": args.val_manifest, "test": args.test_manifest}
    if args.evaluate and args.test_manifest:
        paths = {"test": args.test_manifest}
    elif not args.train_manifest:
        print("no --train_manifest: using the demo corpus (synthetic speech)")
        folder = Path(args.output_dir) / "data" / "vietnamese_demo"
        paths = demo.speech_corpus(folder, demo.VIETNAMESE_WORDS, demo.VIETNAMESE_VOICES, DEMO_SIZES)
    return load_splits(args, paths, written.normalise, HELD_OUT, MOST_HELD_OUT)


def load_item(corpus: Corpus, tokenizer, args, longest: float, training: bool, index: int, epoch: int) -> dict:
    """One utterance, see `task.make_item`."""
    waveform = audio.read_utterance(corpus, index, SAMPLE_RATE, args.cache_audio)
    place = (epoch, index, len(corpus))
    return task.make_item(args, tokenizer, waveform, corpus.texts[index], corpus.where(index), place, training, longest)


# --- loss and evaluation ---------------------------------------------------------------------------------------------


def compute_loss(model: Whisper, batch: dict) -> dict[str, torch.Tensor]:
    """Sums over the batch of each loss term, to be divided by the window's counts."""
    return task.losses(model, batch, *model.encode(batch))


def evaluate(
    recogniser: task.Recogniser, names: list[str], model: Whisper, eval_batches
) -> dict[str, tuple[float, float]]:
    """Losses, CER and WER of one greedy pass, as (numerator, denominator)."""
    rows, values = task.decode_set(model, eval_batches, names, recogniser.greedy_texts)
    return {**values, **metrics.score(rows, for_scoring)}


@torch.no_grad()
def final_figures(args, recogniser: task.Recogniser, eval_batches, name: str, used: str, setup) -> None:
    """The table and examples at the end; with --compare_to beside a baseline's."""
    with setup.autocast():
        rows, _ = task.decode_set(recogniser.model, eval_batches, [], recogniser.texts)
    title = f"{name} set, {len(rows)} utterances, decoding: {args.decoding}, {used}"
    results.print_results(rows, title, args.log_dir / "transcripts.jsonl", args.seed, for_scoring)
    if args.compare_to:
        print_improvement(args, rows, eval_batches, setup)


def read_baseline(args) -> tuple[dict, dict]:
    """Weights and metadata of --compare_to. Raises `UsageError`."""
    path = Path(args.compare_to)
    if not path.exists():
        raise UsageError(f"--compare_to {path}: no such file or folder")
    if path.is_file() and (path.suffix == ".safetensors" or path.name.startswith("checkpoint_step_")):
        return checkpoint.read_weights(path, RECIPE)
    return task.read_pretrained(args.compare_to, args.tokenizer_file if args.pretrained else None, args.language)


def print_improvement(args, rows: list[dict], eval_batches, setup) -> None:
    """WER and CER of --compare_to on the same utterances, and by how much this model's are lower."""
    weights, metadata = read_baseline(args)
    model = task.make_model(metadata)
    checkpoint.load_weights(model, weights)
    baseline = task.Recogniser(model.to(setup.device).eval(), metadata, args)
    with setup.autocast():
        others, _ = task.decode_set(model, eval_batches, [], baseline.texts)
    print(
        f"compared to {args.compare_to} on the same {len(rows)} utterances:\n{metrics.improvement_table(others, rows, for_scoring)}"
    )


# --- main ------------------------------------------------------------------------------------------------------------


def start(args, corpora: dict, resumed: dict | None) -> tuple[dict, dict | None]:
    """Metadata of the model to be trained, and the weights it starts with (None: random ones)."""
    if resumed:
        task.check_resumed(args, SIZES, resumed["metadata"])
        weights, metadata = resumed["model"], resumed["metadata"]
    elif args.pretrained:
        weights, metadata = task.read_pretrained(args.pretrained, args.tokenizer_file, args.language)
    else:
        tokenizer = text.train_bpe(corpora["train"].texts, args.vocab_size, args.language)
        config = task.shape_from_scratch(args, SIZES[args.model_size], tokenizer.size)
        weights, metadata = None, task.metadata_from_scratch(args, config, tokenizer)
    return {**metadata, "recipe": RECIPE, "pad_to_30s": args.pad_to_30s}, weights


def main(args) -> None:
    options.resolve(args, DEMO_STEPS)
    task.check_arguments(args, is_demo=not args.train_manifest)
    if args.test_manifest and not (args.train_manifest or args.evaluate):
        raise UsageError("--test_manifest was given without --train_manifest; alone it goes with --evaluate")
    if args.vocab_size and args.pretrained:
        raise UsageError(f"--vocab_size is for models from scratch: {args.pretrained} has its own vocabulary")
    if args.compare_to and args.transcribe:
        raise UsageError("--compare_to goes with training and --evaluate: files to transcribe have no reference")
    if args.compare_to:
        read_baseline(args)  # what is wrong with it is said now, not after hours of training
    # Few, short pieces: with whole syllables as tokens the demo's CER was 62 % where it is 26 % with these.
    args.vocab_size = args.vocab_size or (500 if args.train_manifest else 320)
    if args.verify_gpu:
        sys.exit(task.verify_gpu(args, SIZES, args.vocab_size))
    if args.transcribe:
        return task.transcribe(args, RECIPE)
    setup = device.setup(args)
    if args.evaluate or task.only_exports(args):
        return use(args, setup)
    lock = checkpoint.lock_folder(args.checkpoint_dir) if setup.ranks.first else None  # noqa: F841  held until the end
    report.check_folder(args.log_dir)
    resumed = checkpoint.resume(args.resume, args.checkpoint_dir, RECIPE)
    options.resolve_workers(args, setup.device.type == "cpu")

    corpora = read_corpora(args)
    metadata, weights = start(args, corpora, resumed)
    tokenizer, longest = text.make(metadata["tokenizer"]), task.check_limits(args, metadata["config"])
    train_set = task.drop_untrainable(corpora["train"], tokenizer, args.max_target_tokens, args.strict_data)
    metadata["longest"] = max(float(train_set.seconds.max()), metadata.get("longest", 0.0))
    task.pad_from_the_middle(args, metadata, len(train_set), setup.ranks.size)
    load = functools.partial(load_item, train_set, tokenizer, args, longest, True)
    model = task.start_model(args, metadata, weights, load, len(train_set)).to(setup.device)
    task.compile_and_checkpoint(args, model)

    seconds = functools.partial(task.trained_seconds, args, train_set.seconds, longest)
    windows = batches.Windows(args, seconds, load, task.collate, setup)
    evaluation = {}
    for name in [name for name in corpora if name != "train"]:
        load = functools.partial(load_item, corpora[name], tokenizer, args, longest, False)
        evaluation[name] = batches.EvalBatches(args, corpora[name].seconds, load, task.collate, setup)
    optimizer = optim.make_optimizer(model, args)
    schedule = optim.Schedule(optimizer, args.lr_schedule, windows.total_steps(args), args.warmup_steps)
    recogniser, weights = task.Recogniser(model, metadata, args), task.loss_weights(args, metadata)
    scored = functools.partial(evaluate, recogniser, list(weights))
    train(args, model, optimizer, schedule, windows, evaluation["val"], compute_loss, weights, scored, setup, metadata,
          resumed, train_set.fingerprint())  # fmt: skip

    if setup.ranks.first:
        with torch.no_grad(), setup.autocast():
            used = checkpoint.use_best(
                args, model, RECIPE, metadata, lambda: metrics.rate(scored(model, evaluation["val"].whole())["cer"])
            )
        name = "test" if "test" in evaluation else "val"
        final_figures(args, recogniser, evaluation[name].whole(), name, used, setup)
        print(f"weights: {args.checkpoint_dir / 'best.safetensors'}; curves and all transcripts: {args.log_dir}")
        if args.export:
            task.export(args, recogniser)


def use(args, setup) -> None:
    """--evaluate on the test set, --export, or both, without training."""
    recogniser = task.recogniser_to_use(args, RECIPE, setup)
    if args.evaluate:
        options.resolve_workers(args, setup.device.type == "cpu")
        report.check_folder(args.log_dir)
        corpora = read_corpora(args)
        name = "test" if "test" in corpora else "val"
        longest = task.check_limits(args, recogniser.metadata["config"])
        load = functools.partial(load_item, corpora[name], recogniser.tokenizer, args, longest, False)
        eval_batches = batches.EvalBatches(args, corpora[name].seconds, load, task.collate, setup)
        final_figures(args, recogniser, eval_batches, name, "the weights named", setup)
    if args.export:
        task.export(args, recogniser)


if __name__ == "__main__":
    parser = options.Parser(__doc__)
    add_arguments(parser)
    exit_with_one_line(main, parser.parse_args())
