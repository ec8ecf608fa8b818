"""The flags that every recipe shares, the parser that records which flags were given, and which
flags contradict."""

import argparse
import dataclasses
import functools
import itertools
import math
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from common.errors import UsageError

LEVELS = ("states", "gradients", "weights")  # of --use_cpu_offload, from the least to the most

# In a row of a table, in place of the other flag: every command that takes no training flags.
COMMAND = "any command"
# Marks of a flag: `--help` shows it; it has no effect without training; it does something else than
# training, and flags of a training contradict it, or can stand beside it.
USUAL, TRAINS, ALONE, BESIDE = "usual", "trains", "alone", "beside"
LEAVE_OUT = object()  # in `add_record`

# Rows (flag, other flag, reason), for flags that were given. "flag value" stands for that value of
# the flag.
EXCLUDES = (
    ("use_cpu_offload", "optimizer adamw_8bit",
     "offloading leaves no optimizer states on the GPU; give the first alone for the least GPU"
     " memory, the second alone for faster updates"),
    ("sharded", "use_cpu_offload",
     "the first divides the states between the GPUs, the second moves them to the host; give one"),
    ("sharded", "optimizer adamw_8bit",
     "8-bit states have blocks that cannot be divided between GPUs; leave one out"),
)  # fmt: skip


class OnOff(argparse.Action):
    """`--x` / `--no_x` (argparse's own BooleanOptionalAction spells the second with a hyphen)."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(
            [*option_strings, "--no_" + option_strings[0].removeprefix("--")],
            dest,
            nargs=0,
            **kwargs,
        )

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, not option_string.startswith("--no_"))


class Level(OnOff):
    """`--x`, `--x LEVEL` or `--no_x`: the first of `choices` without a word, None if it is off."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, **kwargs)
        self.nargs = "?"

    def __call__(self, parser, namespace, values, option_string=None):
        level = values or self.choices[0]
        if option_string.startswith("--no_"):
            if values:
                parser.error(f"{option_string} takes no word")
            level = None
        setattr(namespace, self.dest, level)


class Repeated(argparse.Action):
    """A flag with `nargs` "+" that can be given several times: all its values as a list.
    (argparse's "extend" adds to the default, which `Parser.parse_args` does not give it.)"""

    def __call__(self, parser, namespace, values, option_string=None):
        earlier = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(earlier if isinstance(earlier, list) else []), *values])


class JoinedWords(argparse.Action):
    """The words that follow a flag as one text: `--dry_run 8 GB`."""

    def __call__(self, parser, namespace, values, option_string=None):
        setattr(namespace, self.dest, " ".join(values))


class Help(argparse._HelpAction):
    """`--help` shows the flags that were marked by `Parser.usual`, `--help all` shows all."""

    def __init__(self, option_strings, dest, **kwargs):
        super().__init__(option_strings, dest, **kwargs)
        self.nargs = "?"
        self.choices = ("all",)
        self.metavar = "all"

    def __call__(self, parser, namespace, values, option_string=None):
        text = parser.format_help() if values else parser.format_usual()
        parser._print_message(text, sys.stdout)
        parser.exit()


@dataclasses.dataclass
class Rules:
    """What flags contradict. `commands`: those that do something else than training, {name: whether
    flags of a training can stand beside it}; `trains`: flags that have no effect without training;
    rows (flag, other flag, reason) that exclude each other, and rows (flag, flags of which it needs
    one, reason)."""

    commands: dict[str, bool] = dataclasses.field(default_factory=dict)
    trains: set[str] = dataclasses.field(default_factory=set)
    excludes: list[tuple] = dataclasses.field(default_factory=lambda: [*EXCLUDES])
    needs: list[tuple] = dataclasses.field(default_factory=list)


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and with a short help. An error is one line that offers the
    nearest flag. The parsed namespace has `given`, the set of names that were on the command line,
    and the parser's `rules`."""

    def __init__(self, description: str):
        layout = functools.partial(
            argparse.RawDescriptionHelpFormatter, max_help_position=34, width=118
        )
        super().__init__(
            description=description, allow_abbrev=False, formatter_class=layout, add_help=False
        )
        self.add_argument(
            "-h", "--help", action=Help, help="show the usual flags, or all of them, and exit"
        )
        self.in_short_help: set[argparse.Action] = set()
        self.rules = Rules()
        self.hints: dict[str, str] = {}  # a recipe's sentences for flags that it does not have

    def add_flag(self, group, name: str, marks: Iterable[str], settings: dict) -> None:
        """Adds a flag, with argparse's `settings`. At most one command can be given, a flag that is
        marked ALONE or BESIDE: it does something else than training. Flags that are marked TRAINS
        contradict the first. --check_data, which checks a training's data, is marked BESIDE: it
        can be added to a training's command line."""
        action = group.add_argument(f"--{name}", **settings)
        if USUAL in marks:
            self.usual(name)
        if TRAINS in marks:
            self.rules.trains.add(name)
        if ALONE in marks or BESIDE in marks:
            self.rules.commands[action.dest] = BESIDE in marks

    def refuse(self, excludes: Iterable[tuple], needs: Iterable[tuple] = ()) -> None:
        """Adds rows for `resolve`: (flag, other flag, reason) for flags that exclude each other,
        and (flag, flags of which one must be given, reason)."""
        self.rules.excludes += excludes
        self.rules.needs += needs

    def usual(self, *names: str) -> None:
        """Marks flags, which have been added, for the short help: those that most people need in
        their first week. Raises `KeyError` for another name."""
        self.in_short_help |= {self._option_string_actions[f"--{name}"] for name in names}

    def format_usual(self) -> str:
        """The short help; that of all flags if none is marked."""
        if not self.in_short_help:
            return self.format_help()
        formatter = self._get_formatter()
        formatter.add_usage("%(prog)s [FLAG ...]", [], [])
        formatter.add_text(self.description)
        for group in self._action_groups:
            formatter.start_section(group.title)
            formatter.add_arguments(a for a in group._group_actions if a in self.in_short_help)
            formatter.end_section()
        count = len(self._actions) - 1  # without --help
        formatter.add_text(f"--help all shows all {count} flags.")
        return formatter.format_help()

    def parse_args(self, words=None, namespace=None) -> argparse.Namespace:
        # Of several flags for one name, the first has the default. argparse keeps values that are
        # set already.
        actions = [
            action for action in reversed(self._actions) if action.default is not argparse.SUPPRESS
        ]
        defaults = {action.dest: action.default for action in actions}
        unset = object()
        parsed = vars(
            super().parse_args(words, argparse.Namespace(**dict.fromkeys(defaults, unset)))
        )
        given = {name: value for name, value in parsed.items() if value is not unset}
        return argparse.Namespace(**{**defaults, **given}, given=frozenset(given), rules=self.rules)

    def explained(self, message: str) -> str:
        """A message of argparse in one line that offers the nearest flag."""
        from common import wrong_flags

        return message + wrong_flags.hint(message, self._option_string_actions, self.hints)

    def error(self, message: str):
        print(f"error: {self.explained(message)} (--help all lists every flag)", file=sys.stderr)
        sys.exit(2)


def number(kind: type, low: float, high: float = math.inf, *, open_low: bool = False):
    """An argparse type: a finite number within [low, high], or (low, high] with `open_low`."""

    def parse(text: str):
        try:
            value = kind(text)
            if value != value or value in (math.inf, -math.inf):
                raise ValueError
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"{text!r} is not {'a whole' if kind is int else 'a'} number"
            ) from None
        if value > high:
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be at most {high}")
        if value < low or (open_low and value == low):
            bound = f"more than {low:g}" if open_low else f"at least {low:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range: it must be {bound}")
        return value

    return parse


COUNT = number(int, 0, 2**31 - 1)
POSITIVE = number(int, 1, 2**31 - 1)
RATE = number(float, 0.0, open_low=True)
SHARE = number(float, 0.0, 1.0)


def workers(text: str):
    return text if text == "auto" else number(int, 0, 256)(text)


def path(text: str) -> str:
    """An argparse type. With an unset shell variable, `--resume ""` must not start a new run."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty")
    return text


def optional_path(text: str) -> str | None:
    """An argparse type: a path; None for an empty one, as in the calls of other projects."""
    return path(text) if text else None


def file(text: str) -> str:
    """An argparse type: a path whose last part is a name, not `folder/`."""
    if path(text).endswith(("/", "/.", "/..")):
        raise argparse.ArgumentTypeError(f"{text} is the name of a folder; name a file")
    return text


@dataclasses.dataclass(frozen=True)
class Flag:
    """One flag of the command line. `kind`: argparse's type, its choices as a list or tuple, an
    action, or None for a text. `unit`: what stands for the value in the help. `marks`: of USUAL,
    TRAINS, ALONE and BESIDE. `settings`: argparse's others."""

    kind: Any
    default: Any
    unit: str | None
    help: str
    marks: tuple[str, ...]
    settings: dict


def flag(kind, default, unit, help, *marks, **settings) -> dataclasses.Field:
    """A field of a frozen record, whose name is the flag's (see `Flag`). `add_record` adds the
    flags of a record to a parser, and `read_record` makes the record of what was parsed."""
    declared = Flag(kind, default, unit, help, marks, settings)
    return dataclasses.field(default=default, kw_only=True, metadata={"flag": declared})


def flags_of(record: type) -> dict[str, Flag]:
    """The flags that a record declares, by name."""
    fields = dataclasses.fields(record)
    return {each.name: each.metadata["flag"] for each in fields if "flag" in each.metadata}


def add_record(parser: Parser, group, record: type, **changes):
    """Adds the flags of a record to a group of the parser, or to a new group with this title, which
    it returns. `changes`: the default of a flag in this recipe, which stands in the parentheses at
    the end of its help, or (default, text in these parentheses), or argparse's settings as a
    dictionary; LEAVE_OUT leaves the flag out. Raises `KeyError` for a change of another flag."""
    if isinstance(group, str):
        group = parser.add_argument_group(group)
    flags = flags_of(record)
    if unknown := changes.keys() - flags.keys():
        raise KeyError(f"{record.__name__} has no flags {', '.join(sorted(unknown))}")
    for name, declared in flags.items():
        change = changes.get(name, {})
        if change is LEAVE_OUT:
            continue
        settings = {"default": declared.default, "help": declared.help}
        if declared.unit is not None:
            settings["metavar"] = declared.unit
        if isinstance(declared.kind, list | tuple):
            settings["choices"] = declared.kind
        elif isinstance(declared.kind, type) and issubclass(declared.kind, argparse.Action):
            settings["action"] = declared.kind
        elif declared.kind:
            settings["type"] = declared.kind
        settings |= declared.settings
        settings |= change if isinstance(change, dict) else changed(declared.help, change)
        parser.add_flag(group, name, declared.marks, settings)
    return group


def changed(help: str, change) -> dict:
    """argparse's settings of a flag with another default; see `add_record`."""
    default, text = change if isinstance(change, tuple) else (change, change)
    if isinstance(text, bool):
        text = "on" if text else "off"
    return {"default": default, "help": re.sub(r"\([^()]*\)$", f"({text})", help)}


def read_record(record: type, args: argparse.Namespace, **others):
    """A record with the values of its flags, as far as the recipe has them, and with `others`: its
    fields that are no flags, or values in place of a flag's."""
    values = {name: getattr(args, name) for name in flags_of(record) if name in vars(args)}
    return record(**{**values, **others})


@dataclasses.dataclass(frozen=True)
class TrainingFlags:
    """Flags of what is learned, and for how long."""

    # fmt: off
    batch_size: int = flag(POSITIVE, 2, "N", "utterances in a micro-batch (2)", USUAL, TRAINS)
    gradient_accumulation_steps: int = flag(
        POSITIVE, 4, "N", "micro-batches in an update (4)", USUAL, TRAINS)
    num_epochs: int | None = flag(
        POSITIVE, None, "N",
        "passes over the training data (100; fine-tuning by the hours of speech; any number with"
        " --max_steps)", USUAL, TRAINS)
    max_steps: int | None = flag(
        POSITIVE, None, "N", "stop after so many updates, whatever the epoch", USUAL, TRAINS)
    learning_rate: float = flag(RATE, 1e-3, "X", "peak learning rate (1e-3)", USUAL, TRAINS)
    weight_decay: float = flag(
        number(float, 0.0), 0.01, "X",
        "decoupled weight decay; not applied to norms and biases (0.01)", TRAINS)
    warmup_steps: int | None = flag(
        COUNT, None, "N", "updates with a rising learning rate (a tenth of all, at most 2000)",
        TRAINS)
    lr_schedule: str = flag(
        ["inverse_sqrt", "cosine", "constant"], "cosine", None,
        "schedule after the warm-up (cosine)", TRAINS)
    max_grad_norm: float = flag(
        number(float, 0.0), 1.0, "X",
        "clip the gradient norm to this; 0 = do not clip (1.0)", TRAINS)
    early_stopping_patience: int | None = flag(
        COUNT, None, "N",
        "stop after N evaluations without a better result or a lower loss; 0 = never (0;"
        " fine-tuning: a third of them, at least 5)", TRAINS)
    seed: int = flag(COUNT, 1, "N", "seed of initialisation, order, augmentation and dropout (1)")


@dataclasses.dataclass(frozen=True)
class MemoryFlags:
    """Flags of device, memory and speed."""

    # fmt: off
    device: str = flag(None, "auto", "D", "auto, cpu, cuda or cuda:N (auto)", USUAL)
    mixed_precision: str = flag(
        ["auto", "fp16", "bf16"], "auto", None,
        "16-bit activations; auto: bf16 from compute capability 8.0, fp16 below, fp32 on a CPU"
        " (auto)", USUAL, nargs="?", const="auto")
    no_mixed_precision: str = flag(
        None, None, None, "fp32 throughout",
        dest="mixed_precision", action="store_const", const="no")
    bf16: str = flag(
        None, None, None, "same as --mixed_precision bf16",
        dest="mixed_precision", action="store_const", const="bf16")
    gradient_checkpointing: bool = flag(
        OnOff, False, None,
        "recompute activations in backward: less memory, about a third more time (off)",
        USUAL, TRAINS)
    torch_compile: bool = flag(
        OnOff, False, None,
        "compile the layers: faster updates after a slow start; needs a C compiler, on a GPU also"
        " triton (off)", TRAINS)
    optimizer: str = flag(
        ["adamw", "adamw_8bit"], "adamw", None,
        "adamw_8bit keeps optimizer states in 8 bits, a quarter of the memory; needs bitsandbytes"
        " (adamw)", USUAL, TRAINS)
    use_cpu_offload: str | None = flag(
        Level, None, "LEVEL",
        "update on the host, slower: `states` keeps AdamW's states in host memory, `gradients`"
        " also the gradients, `weights` also the fp32 weights, with 16-bit copies on the GPU (off;"
        " without a word states)", USUAL, TRAINS, choices=LEVELS)
    sharded: bool = flag(
        OnOff, False, None,
        "divide weights, gradients and states between the GPUs (FSDP2), for a model that is too"
        " large for one (off)", TRAINS)
    max_batch_seconds: float | None = flag(
        RATE, None, "S", "limit of a micro-batch's padded audio, seconds (no limit)", TRAINS)
    empty_cache_every: int = flag(
        COUNT, 50, "N", "micro-batches between calls of torch.cuda.empty_cache(); 0 = never (50)")
    allocator_conf: str = flag(
        None, "expandable_segments:True", "CONF",
        "PYTORCH_CUDA_ALLOC_CONF, unless the environment sets it (expandable_segments:True)")
    tf32: bool = flag(OnOff, True, None, "use TF32 for fp32 operations on CUDA (on)")
    cudnn_benchmark: bool = flag(
        OnOff, False, None,
        "let cuDNN time its kernels for every new shape; slower with varying lengths (off)")
    dataloader_num_workers: str | int = flag(
        workers, "auto", "N", "data worker processes; 0 = load in the main process (auto)")
    persistent_workers: bool = flag(
        OnOff, True, None, "keep the evaluation's workers between evaluations (on)")
    skip_bad_audio: bool = flag(
        OnOff, False, None,
        "skip, count and list samples that cannot be read, instead of stopping (off)")
    dry_run: str | None = flag(
        JoinedWords, None, "CARD",
        "predict this run's peak of GPU memory, without a GPU, and say whether it fits on CARD"
        " (8GB, t4, 2x16gb for two; default: the one that is there), and exit: status 3 if it does"
        " not fit", USUAL, BESIDE, nargs="*")
    verify_gpu: bool = flag(
        OnOff, False, None,
        "check GPU, driver, memory, precision, attention, compiler and disk for this run,"
        " and exit", BESIDE)


@dataclasses.dataclass(frozen=True)
class OutputFlags:
    """Flags of evaluation, checkpoints and folders."""

    # fmt: off
    eval_every: int | None = flag(
        COUNT, None, "N",
        "updates between evaluations; 0 = at the end of each epoch (an epoch's, at least 100; in a"
        " fine-tuning of fewer than 1,000 updates at least 50)",
        TRAINS)
    eval_batch_size: int = flag(POSITIVE, 8, "N", "utterances in an evaluation batch (8)")
    evaluate: bool = flag(
        OnOff, False, None,
        "only evaluate the weights of --resume (OUTPUT_DIR/checkpoints/best.safetensors)"
        " on the test set", USUAL, ALONE)
    save_every: int = flag(
        COUNT, 500, "N",
        "updates between checkpoints, which are 20 minutes apart at most; 0 = only at the end and"
        " on signals (500)", TRAINS)
    keep_last: int = flag(POSITIVE, 5, "N", "checkpoints to keep (5)", TRAINS)
    log_every: int = flag(POSITIVE, 10, "N", "updates between lines of metrics.jsonl (10)", TRAINS)
    output_dir: str = flag(path, ".", "DIR", "folder for checkpoints/ and logs/ (.)", USUAL)
    resume: str | None = flag(
        path, None, "PATH|auto",
        "continue from a checkpoint; auto: from the newest sound one, or start a new run if there"
        " is none", USUAL)
    init_from: str | None = flag(
        path, None, "PATH",
        "start a new run from the weights in a checkpoint or .safetensors, as far as their shapes"
        " fit; with --resume auto, unless there is a checkpoint to continue from", USUAL, TRAINS)


def add_arguments(parser: Parser, **defaults) -> None:
    """Adds the shared flags in three groups. A recipe's own `defaults` replace the ones here and in
    the help: add_arguments(parser, learning_rate=1e-4), or with a text for the help:
    learning_rate=(None, "by model size")."""
    groups = {
        "training": TrainingFlags,
        "memory and speed": MemoryFlags,
        "evaluation and output": OutputFlags,
    }
    for title, record in groups.items():
        own = {name: defaults.pop(name) for name in flags_of(record) if name in defaults}
        add_record(parser, title, record, **own)
    if defaults:
        raise KeyError(f"no shared flags: {', '.join(defaults)}")


def resolve(
    args: argparse.Namespace,
    is_demo: bool,
    demo_steps: int,
    usual_steps: int | None = None,
    usual_eval_every: int | None = None,
) -> None:
    """Refuses flags that contradict, by the rows of `Parser.refuse`, and fills in what depends on
    other flags. The demo lasts `demo_steps` updates, another run `usual_steps`; if they are None,
    its length is chosen by `run_length` when it begins, and so are its evaluations."""
    refuse_conflicts(args, all_excludes(args), args.rules.needs)
    if args.init_from and args.resume not in (None, "auto"):
        raise UsageError(
            "--resume and --init_from: the first continues a run, the second starts a new one; give"
            " one of them, or --resume auto"
        )
    args.checkpoint_dir = Path(args.output_dir) / "checkpoints"
    args.log_dir = Path(args.output_dir) / "logs"
    if not (args.num_epochs or args.max_steps):
        args.max_steps = demo_steps if is_demo else usual_steps
    if args.eval_every is None:
        args.eval_every = demo_steps // 6 if is_demo else usual_eval_every


def all_excludes(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """The rows of `Parser.refuse`, with the parser's commands in place of `COMMAND`, a row for
    every two commands, and for every flag that only trains and every command that does not."""
    rows = [(a, b, "give one of them") for a, b in itertools.combinations(args.rules.commands, 2)]
    training = [
        (flag, COMMAND, "the first is for training; leave it out") for flag in args.rules.trains
    ]
    for flag, other, reason in (*args.rules.excludes, *sorted(training)):
        others = [other]
        if other == COMMAND:
            others = [name for name, takes_flags in args.rules.commands.items() if not takes_flags]
        rows += [(flag, other, reason) for other in others]
    return rows


def refuse_conflicts(args: argparse.Namespace, excludes, needs) -> None:
    """Raises `UsageError` for flags that exclude each other, or that need one of the recipe's."""
    given = {name: getattr(args, name) for name in args.given}
    for flag, other, reason in excludes:
        if is_on(given, flag) and is_on(given, other):
            raise UsageError(f"{shown(flag)} and {shown(other)}: {reason}")
    for flag, others, reason in needs:
        others = [other for other in others if other.split()[0] in vars(args)]
        if is_on(given, flag) and not any(is_on(vars(args), other) for other in others):
            raise UsageError(
                f"{shown(flag)} goes with"
                f" {' or '.join(map(shown, others))}{reason and ': '}{reason}"
            )


def is_on(values: dict, flag: str) -> bool:
    """Whether a flag has the value that follows it in `flag` or, if none does, is given and on."""
    name, _, value = flag.partition(" ")
    current = values.get(name)
    return str(current) == value if value else current not in (None, False)


def shown(flag: str) -> str:
    return f"--no_{flag.split()[0]}" if flag.endswith(" False") else f"--{flag}"


def paths_in(args: argparse.Namespace, *outputs: str) -> list[str]:
    """The values of the flags on the command line that name a file or a folder that exists, but
    for the flags `outputs`: what a command may read, and must not replace."""
    values = []
    for name in sorted(args.given - {*outputs}):
        value = getattr(args, name)
        values += value if isinstance(value, list) else [value]
    return [str(v) for v in values if isinstance(v, str | Path) and os.path.exists(v)]


class ReadOnly(argparse.Namespace):
    """A namespace whose values are final."""

    def __setattr__(self, name, value):
        raise AttributeError(f"args.{name}: the flags are read-only once a run has begun")


def plans(args: argparse.Namespace) -> bool:
    """Whether the run is only planned: nothing is trained or written."""
    return args.dry_run is not None or args.verify_gpu


def freeze(args: argparse.Namespace) -> None:
    """Makes `args` read-only: what a run derives from its flags is kept elsewhere."""
    args.__class__ = ReadOnly


def for_stage(args: argparse.Namespace, name: str, **changes) -> argparse.Namespace:
    """The flags of a further run in a process, with other folders."""
    folders = {key: getattr(args, key) / name for key in ("checkpoint_dir", "log_dir")}
    return argparse.Namespace(**{**vars(args), **folders, **changes})
