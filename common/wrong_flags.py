"""Flags that do not exist or are written in another way: the hints in argparse's messages, with the
names that flags have in other projects."""

import argparse
import difflib
import os
import re

# Names that a flag has in other projects and in the run_*.sh scripts. A flag here, or a sentence
# where there is none.
OTHER_NAMES = {
    "--lr": "--learning_rate",
    "--fp16": "--mixed_precision fp16",
    "--fp32": "--no_mixed_precision",
    "--grad_acumm": "--gradient_accumulation_steps",
    "--enable_grad_checkpoint": "--gradient_checkpointing",
    "--enable_mixed_precision": "--mixed_precision",
    "--output_path": "--output_dir",
    "--xla_compilation": "--torch_compile",
    "--per_device_train_batch_size": "--batch_size",
    "--per_device_eval_batch_size": "--eval_batch_size",
    "--resume_from_checkpoint": "--resume",
    "--keep_last_n_checkpoints": "--keep_last",
    "--save_total_limit": "--keep_last",
    "--eval_steps": "--eval_every",
    "--save_steps": "--save_every",
    "--logging_steps": "--log_every",
    "--num_gpus": "GPUS=2 in front of a run_*.sh script trains on two GPUs",
    "--deepspeed": "here --use_cpu_offload or, on several GPUs, --sharded saves the memory",
    "--report_to": "metrics are in OUTPUT_DIR/logs/metrics.jsonl and training.png",
    "--tensorboard": "metrics are in OUTPUT_DIR/logs/metrics.jsonl and training.png",
    "--no_tensorboard": "no TensorBoard events are written",
    "--checkpoint_dir": "checkpoints are in OUTPUT_DIR/checkpoints (--output_dir)",
    "--log_dir": "logs are in OUTPUT_DIR/logs (--output_dir)",
    "--average_checkpoints": "the weights of the best evaluation are kept, and no average",
    "--config": "there are no configuration files; every setting is a flag",
    "--print": "it belongs to the run_*.sh script",
    "--model_dir": "the recipe's page says which released model it begins from, if any",
    "--model_file": "the recipe's page says which released model it begins from, if any",
    "--transcribe": "a voice writes no texts: take a recogniser",
    "--synthesize": "a recogniser does not speak: take a voice",
}
EXPLICIT = re.compile(
    r"argument (--\w+)[^:]*: (?:ignored explicit argument|invalid choice:) '(\w+)'"
)
OFF = {"false", "0", "no", "off"}  # the value of an on/off flag in other projects
ON = {"true", "1", "yes", "on"}
DASHES = "–—"  # which a word processor makes of two hyphens
NO_VALUE = "; on/off flags take no value"

Flags = dict[str, argparse.Action]  # by every name that a flag has


def hint(message: str, flags: Flags, hints: dict[str, str]) -> str:
    """What is added to a message of argparse; empty if nothing is known. `hints`: for flags that do
    not exist, a flag that does, or a sentence."""
    if message.startswith("unrecognized arguments:"):
        words = message.split(": ", 1)[1].split()
        if not words:
            return (
                "; a word is empty: a variable of the shell that is not set, or a space behind the"
                " backslash at the end of a line"
            )
        unknown = next((word for word in words if word.startswith("-")), "")
        return of_unknown(unknown, flags, hints) if unknown else of_word(words[0])
    if found := EXPLICIT.match(message):
        if name := off(found[1], found[2], flags):
            return f"; did you mean {name}?"
        return NO_VALUE if "ignored" in message else ""
    return ""


def of_unknown(word: str, flags: Flags, hints: dict[str, str]) -> str:
    """The hint for a flag that does not exist, with or without a value: `--x=value`."""
    unknown, _, value = word.partition("=")
    near = [flag for flag in flags if flag.startswith(unknown)]
    near = near or difflib.get_close_matches(unknown, flags, n=1, cutoff=0.6)
    name = hints.get(unknown) or next(iter(near), "")
    name = off(name, value, flags) or name
    if not name:
        return ""
    return f"; did you mean {name}?" if name.split()[0] in flags else f"; {name}"


def of_word(word: str) -> str:
    """The hint for a word that no flag takes."""
    if word[0] in DASHES:
        return f"; write two hyphens: --{word.lstrip(DASHES)}"
    if word.lower() in OFF | ON:
        return NO_VALUE
    if os.path.exists(word):
        return "; a pattern of files needs quotes, as in 'files/*.eaf', and one file its flag"
    return (
        "; a name with spaces needs quotes, as in 'my tapes/a.csv'; TIER and SIZE stand before all"
        " flags, after a run_*.sh script only"
    )


def off(flag: str, value: str, flags: Flags) -> str:
    """The flag that switches off what `flag` switches on, if `value` is one of `OFF`; else an empty
    string."""
    action = flags.get(flag)
    if action is None or value.lower() not in OFF:
        return ""
    names = [
        name
        for name, other in flags.items()
        if other.dest == action.dest and name.startswith("--no_")
    ]
    return min(names, key=len, default="")
