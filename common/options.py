"""The flags that every recipe shares: one line each, with unit and default. A recipe adds its own."""

import argparse
import difflib
import math
import os
import re
import sys
from pathlib import Path

from common.errors import UsageError

# What other projects call a flag, where the nearest spelling here would be another one.
OTHER_NAMES = {"--lr": "--learning_rate", "--fp16": "--mixed_precision fp16", "--fp32": "--no_mixed_precision"}


class OnOff(argparse.Action):
    """`--x` / `--no_x` (argparse's own BooleanOptionalAction spells the second with a hyphen)."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__([*option_strings, "--no_" + option_strings[0].removeprefix("--")], dest, nargs=0, **kwargs)

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--no_"))


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, whose errors are one line that offers the nearest flag."""

    def __init__(self, description: str):
        super().__init__(
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=34, width=118),
        )

    def error(self, message: str):
        hint = ""
        if message.startswith("unrecognized arguments:"):
            words = message.split(": ", 1)[1].split()
            unknown = next((word for word in words if word.startswith("-")), "").split("=")[0]
            longer = [flag for flag in self._option_string_actions if unknown and flag.startswith(unknown)]
            near = longer or difflib.get_close_matches(unknown, self._option_string_actions, n=1, cutoff=0.6)
            if unknown in OTHER_NAMES:
                hint = f"; did you mean {OTHER_NAMES[unknown]}?"
            elif near:
                hint = f"; did you mean {near[0]}?"
            elif not unknown:
                hint = "; on/off flags take no value"
        print(f"error: {message}{hint} (--help lists every flag)", file=sys.stderr)
        sys.exit(2)


def number(kind: type, low: float, high: float = math.inf, *, open_low: bool = False):
    """An argparse type: an int or finite float within [low, high], or (low, high] with `open_low`."""

    def parse(text: str):
        try:
            value = kind(text)
            if value != value or value in (math.inf, -math.inf):
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {'a whole' if kind is int else 'a'} number") from None
        if not (low < value if open_low else low <= value) or value > high:
            bound = f"at most {high}" if value > high else f"more than {low:g}" if open_low else f"at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bound}")
        return value

    return parse


COUNT = number(int, 0, 2**31 - 1)
POSITIVE = number(int, 1, 2**31 - 1)
RATE = number(float, 0.0, open_low=True)
SHARE = number(float, 0.0, 1.0)


def workers(text: str):
    return text if text == "auto" else COUNT(text)


def path(text: str) -> str:
    """An argparse type. An empty path is a shell variable that was never set, and `--resume ""` must not start anew."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def add_shared_arguments(parser: argparse.ArgumentParser, **defaults) -> None:
    """Adds the shared flags in four groups. A recipe's own `defaults` replace the ones here, in the help too:
    add_shared_arguments(parser, learning_rate=1e-4), or with what the help is to say: learning_rate=(None, "by size")."""
    # fmt: off
    data = parser.add_argument_group("data")
    data.add_argument("--train_manifest", type=path, metavar="FILE", help="JSON Lines, CSV/TSV or LJSpeech metadata.csv; without it a demo corpus is made")
    data.add_argument("--val_manifest", type=path, metavar="FILE", help="the same, for evaluation; without it a part of the training data is held out")
    data.add_argument("--audio_root", type=path, metavar="DIR", help="where relative paths start, and where absolute paths of another machine are looked up")
    data.add_argument("--max_samples", type=POSITIVE, metavar="N", help="use only the first N training utterances")
    data.add_argument("--min_duration", type=number(float, 0.0), default=0.1, metavar="S", help="reject shorter utterances, seconds (0.1)")
    data.add_argument("--max_duration", type=RATE, default=30.0, metavar="S", help="reject longer utterances, seconds (30)")
    data.add_argument("--strict_data", action=OnOff, default=False, help="make any rejected utterance an error (off)")
    data.add_argument("--skip_bad_audio", action=OnOff, default=False, help="pass over, count and list samples that cannot be read, instead of stopping (off)")
    data.add_argument("--cache_audio", type=path, metavar="DIR", help="for slow storage: keep decoded audio here, 230 MB an hour at 16 kHz (no cache)")
    data.add_argument("--dataloader_num_workers", type=workers, default="auto", metavar="N", help="processes that read audio; 0 = in the main one (auto)")
    data.add_argument("--persistent_workers", action=OnOff, default=True, help="keep evaluation's workers between evaluations (on)")

    training = parser.add_argument_group("training")
    training.add_argument("--batch_size", type=POSITIVE, default=2, metavar="N", help="utterances in a micro-batch (2)")
    training.add_argument("--gradient_accumulation_steps", type=POSITIVE, default=4, metavar="N", help="micro-batches in an update (4)")
    training.add_argument("--num_epochs", type=POSITIVE, metavar="N", help="passes over the training data (100 where --max_steps is not given)")
    training.add_argument("--max_steps", type=POSITIVE, metavar="N", help="updates after which to stop, whatever the epoch")
    training.add_argument("--learning_rate", type=RATE, default=1e-3, metavar="X", help="peak learning rate (1e-3)")
    training.add_argument("--weight_decay", type=number(float, 0.0), default=0.01, metavar="X", help="decoupled weight decay; not on norms and biases (0.01)")
    training.add_argument("--warmup_steps", type=COUNT, metavar="N", help="updates with a rising learning rate (a tenth of all, at most 2000)")
    training.add_argument("--lr_schedule", choices=["inverse_sqrt", "cosine", "plateau", "constant"], default="cosine", help="what follows the warm-up (cosine)")
    training.add_argument("--max_grad_norm", type=number(float, 0.0), default=1.0, metavar="X", help="clip the gradient's norm to this; 0 = do not clip (1.0)")
    training.add_argument("--max_bad_windows", type=POSITIVE, default=10, metavar="N", help="stop after so many non-finite losses in a row (10)")
    training.add_argument("--early_stopping_patience", type=COUNT, default=0, metavar="N", help="stop after N evaluations without a better result; 0 = never (0)")
    training.add_argument("--seed", type=COUNT, default=1, metavar="N", help="of initialisation, order, augmentation and dropout (1)")
    training.add_argument("--deterministic", action=OnOff, default=False, help="deterministic kernels where they exist; slower on CUDA (off)")

    memory = parser.add_argument_group("memory and speed")
    memory.add_argument("--device", default="auto", metavar="D", help="auto, cpu, cuda or cuda:N (auto)")
    memory.add_argument("--mixed_precision", nargs="?", const="auto", default="auto", choices=["auto", "fp16", "bf16"], help="16-bit activations; auto: bf16 from compute capability 8.0, fp16 below, fp32 on a CPU (auto)")
    memory.add_argument("--no_mixed_precision", dest="mixed_precision", action="store_const", const="no", help="fp32 throughout")
    memory.add_argument("--bf16", dest="mixed_precision", action="store_const", const="bf16", help="the same as --mixed_precision bf16")
    memory.add_argument("--gradient_checkpointing", action=OnOff, default=False, help="recompute activations in backward: less memory, about a third more time (off)")
    memory.add_argument("--torch_compile", action=OnOff, default=False, help="compile the layers: faster updates after a slow start; needs a compiler, on a GPU triton too (off)")
    memory.add_argument("--optimizer", choices=["adamw", "adamw_8bit"], default="adamw", help="adamw_8bit: states in 8 bits, embeddings' in 32: a quarter of the memory; needs bitsandbytes (adamw)")
    memory.add_argument("--use_cpu_offload", action=OnOff, default=False, help="AdamW's states in host memory, updates on the host: none of the GPU's memory, slower updates (off)")
    memory.add_argument("--max_batch_seconds", type=RATE, metavar="S", help="cap on a micro-batch's padded audio, seconds (no cap)")
    memory.add_argument("--empty_cache_every", type=COUNT, default=50, metavar="N", help="micro-batches between calls of torch.cuda.empty_cache(); 0 = never (50)")
    memory.add_argument("--allocator_conf", default="expandable_segments:True", metavar="CONF", help="PYTORCH_CUDA_ALLOC_CONF, unless the environment sets it (expandable_segments:True)")
    memory.add_argument("--tf32", action=OnOff, default=True, help="TF32 for what stays in fp32 on CUDA (on)")
    memory.add_argument("--cudnn_benchmark", action=OnOff, default=False, help="let cuDNN time its kernels for every new shape: slower with varying lengths (off)")

    output = parser.add_argument_group("evaluation and output")
    output.add_argument("--eval_every", type=COUNT, metavar="N", help="updates between evaluations; 0 = at the end of each epoch (0)")
    output.add_argument("--eval_batch_size", type=POSITIVE, default=8, metavar="N", help="utterances in an evaluation batch (8)")
    output.add_argument("--save_every", type=COUNT, default=500, metavar="N", help="updates between checkpoints; 0 = only at the end and on signals (500)")
    output.add_argument("--keep_last", type=POSITIVE, default=5, metavar="N", help="checkpoints to keep (5)")
    output.add_argument("--log_every", type=POSITIVE, default=10, metavar="N", help="updates between lines of metrics.jsonl (10)")
    output.add_argument("--output_dir", type=path, default=".", metavar="DIR", help="parent of the next two where they are not given (.)")
    output.add_argument("--checkpoint_dir", type=path, metavar="DIR", help="checkpoints and the best weights (OUTPUT_DIR/checkpoints)")
    output.add_argument("--log_dir", type=path, metavar="DIR", help="metrics.jsonl, TensorBoard events, training.png (OUTPUT_DIR/logs)")
    output.add_argument("--tensorboard", action=OnOff, default=True, help="write TensorBoard events (on)")
    output.add_argument("--resume", type=path, metavar="PATH|auto", help="continue from a checkpoint; auto: from the newest sound one, or anew where there is none")
    output.add_argument("--init_from", type=path, metavar="PATH", help="start anew from the weights in a checkpoint or .safetensors, as far as their shapes fit")
    # fmt: on
    shared = {action.dest: action for action in reversed(parser._actions)}
    for name, value in defaults.items():
        value, shown = value if isinstance(value, tuple) else (value, None)
        shared[name].default = value
        if shown is None:
            shown = ("on" if value else "off") if isinstance(value, bool) else value
        shared[name].help = re.sub(r"\([^()]*\)$", f"({shown})", shared[name].help)


def resolve(
    args: argparse.Namespace, demo_steps: int, is_demo: bool | None = None, usual: tuple[str, int] = ("num_epochs", 100),
    usual_eval_every: int = 0,
) -> None:  # fmt: skip
    """Fills in what depends on other flags and refuses what contradicts. The demo, which a run without a manifest is
    unless `is_demo` says otherwise, lasts `demo_steps` updates; another run as the flag and number in `usual` say."""
    if args.resume and args.init_from:
        raise UsageError("--resume continues a run and --init_from starts a new one: give one of them")
    if args.deterministic and args.cudnn_benchmark:
        raise UsageError("--cudnn_benchmark chooses kernels by their speed in this run, which --deterministic forbids")
    if args.optimizer == "adamw_8bit" and args.use_cpu_offload:
        raise UsageError(
            "--use_cpu_offload leaves no optimizer states on the GPU that --optimizer adamw_8bit could make smaller: "
            "give the first alone for the least GPU memory, the second alone for faster updates"
        )
    if args.val_manifest and not args.train_manifest:
        raise UsageError("--val_manifest was given without --train_manifest")
    if args.min_duration >= args.max_duration:
        raise UsageError(f"--min_duration {args.min_duration:g} is not below --max_duration {args.max_duration:g}")
    args.checkpoint_dir = Path(args.checkpoint_dir or Path(args.output_dir) / "checkpoints")
    args.log_dir = Path(args.log_dir or Path(args.output_dir) / "logs")
    is_demo = not args.train_manifest if is_demo is None else is_demo
    args.length_given = bool(args.num_epochs or args.max_steps)
    if not args.length_given:
        setattr(args, *(("max_steps", demo_steps) if is_demo else usual))
    if args.eval_every is None:
        args.eval_every = demo_steps // 6 if is_demo else usual_eval_every


def auto_workers(on_cpu: bool) -> tuple[int, int]:
    """The number of data workers that `auto` means, and of the cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (1 if on_cpu else max(1, min(4, cores))), cores


def resolve_workers(args: argparse.Namespace, on_cpu: bool) -> None:
    """`--dataloader_num_workers auto`: one process beside the training where that runs on the CPU, else up to four."""
    if args.dataloader_num_workers == "auto":
        args.dataloader_num_workers, cores = auto_workers(on_cpu)
        print(
            f"data workers: {args.dataloader_num_workers} (auto: {cores} cores, training on {'the CPU' if on_cpu else 'the GPU'})"
        )


def resolve_shape(args: argparse.Namespace, defaults: dict, saved: dict | None) -> None:
    """Fills the shape flags named in `defaults`: from a checkpoint's configuration, which a flag must not contradict,
    or from the defaults."""
    for name, default in defaults.items():
        given = getattr(args, name)
        if saved and given is not None and given != saved[name]:
            raise UsageError(
                f"--{name} {given} conflicts with the checkpoint, which has {saved[name]}: leave the flag out to continue it, "
                "or start a new run with another --output_dir, or from the weights that fit with --init_from in place of --resume"
            )
        if given is None or saved:
            setattr(args, name, saved[name] if saved else default)
