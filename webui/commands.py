"""The command of a recipe that a form's values ask for: its preset script's flags, then theirs."""

import os
import re
import shlex
import signal
import subprocess
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path

from common.checkpoint import list_checkpoints
from common.errors import RunError, UsageError, first_line
from speech.data.columns import printable
from webui.catalogue import ROOT, Option, Recipe, run_script
from webui.outputs import CHECKPOINTS
from webui.places import Places

AUTO = "auto"  # the tier that a script picks by the GPU
OUTPUTS = ("export", "output", "cache_audio")  # what a run writes to these paths
NUMBER = re.compile(r"-(\d+|\d*\.\d+)")  # what argparse takes as a negative number


@dataclass(frozen=True)
class Command:
    """The words of a recipe's command, and what its script says, such as "tier: cpu (auto)"."""

    words: list[str]
    notes: list[str]


def command(
    places: Places, recipe: Recipe, settings: dict, folder: Path, card: str | None = None
) -> Command:
    """The command that `settings` ask for, {"tier", "size", "values": {option name: text}}, with
    its output in `folder`. With a `card` it is that of a plan for this card, or for the computer's
    own ("").

    Raises `UsageError` for values that the recipe does not take, and for paths outside of
    `places`."""
    flags = _flags(places, recipe, settings, folder)
    if card is not None:
        flags.append(f"--dry_run={_checked('--dry_run', card)}" if card else "--dry_run")
    preset, notes = _preset(recipe, settings, flags)
    words = [sys.executable, str(recipe.file), *preset, *flags]
    args = recipe.parser.parse_args(words[2:])
    if recipe.resolve:
        recipe.resolve(args)  # what contradicts
    return Command(words, notes)


def preset(places: Places, recipe: Recipe, settings: dict) -> tuple[dict[str, str], list[str]]:
    """The values that the preset script adds, and what it says. Raises as `command` does."""
    words, notes = _preset(recipe, settings, _flags(places, recipe, settings, places.runs / "new"))
    return values_of(recipe, words), notes


def _flags(places: Places, recipe: Recipe, settings: dict, folder: Path) -> list[str]:
    """The flags for the values of a form, after the one for the output."""
    if recipe.fault:
        raise UsageError(recipe.fault)
    flags = [f"--output_dir={folder}"]
    for name, value in settings.get("values", {}).items():
        if str(value).strip():
            flags += words_of(places, recipe.option(name), str(value).strip(), folder)
    return flags


def words_of(places: Places, option: Option, text: str, folder: Path) -> list[str]:
    """The words of the command line for the value `text` of an option. Raises `UsageError`."""
    _checked(option.flag, text)
    if option.own:
        raise UsageError(f"{option.flag} cannot be changed: {option.own}")
    if text in option.switches:
        return [option.switches[text]]
    words = [text]
    if option.several:
        try:
            words = shlex.split(text)
        except ValueError:
            raise UsageError(f"{option.flag}: a quotation mark is missing in {text!r}") from None
    for index, word in enumerate(words):
        if option.is_word_path(index, word):
            words[index] = _path(places, option, word, folder)
        elif not option.choices:
            words[index] = _text(places, word)
    for word in words:
        is_flag = word.startswith("-") and not NUMBER.fullmatch(word)
        if word == "--" or (option.several and is_flag):
            raise UsageError(f"{option.flag}: {word!r} must not begin with a hyphen")
    return [option.flag, *words] if option.several else [f"{option.flag}={words[0]}"]


def _checked(flag: str, text: str) -> str:
    """Raises `UsageError` for a text that cannot be a word of a command."""
    if any(unicodedata.category(character) in ("Cc", "Cs") for character in text):
        raise UsageError(f"{flag}: {printable(text[:40])} has a character that is not text")
    return text


def _path(places: Places, option: Option, word: str, folder: Path) -> str:
    if option.name not in OUTPUTS:
        return str(places.inside(word))
    try:
        path = (folder / word).resolve()
    except (OSError, RuntimeError) as error:
        raise UsageError(f"{option.flag} {word}: {first_line(error)}") from None
    if folder.resolve() not in path.parents:
        raise UsageError(
            f"{option.flag} {word}: it is written in the folder of the run; give only a name"
        )
    return str(path)


def _text(places: Places, word: str) -> str:
    """A word that is not a path. A recipe may read the file of this name, which must be inside."""
    for base in (ROOT, places.data, places.runs):
        named = os.path.join(base, word)
        if os.path.isfile(named) or ("/" in word and os.path.exists(named)):
            return str(places.inside(word))
    return word


def _preset(recipe: Recipe, settings: dict, flags: list[str]) -> tuple[list[str], list[str]]:
    """The flags that the preset script adds, and what it says. Raises `UsageError`."""
    tier = settings.get("tier") or AUTO
    size = settings.get("size") or ""
    if tier not in (AUTO, *recipe.tiers):
        raise UsageError(
            f"{recipe.name} has no tier {tier!r}: it is one of {', '.join((AUTO, *recipe.tiers))}"
        )
    if size not in ("", *recipe.sizes):
        raise UsageError(f"{recipe.name} has no size {size!r}: leave it empty, or take another")
    if not recipe.script:
        return [], []
    words = [tier, size] if size else [tier]
    status, printed, said = run_script(recipe.script, *words, *flags, "--print")
    notes = said.splitlines()
    if status:
        raise UsageError((notes or ["no message"])[-1].removeprefix("error: "))
    # The first of `flags` is the only --output_dir with an equals sign. What is before it is plain.
    before = printed.partition(" --output_dir=")[0]
    words = before.rpartition(f"{recipe.name}.py")[2].split()
    return _without(words, "--output_dir"), notes


def resumed(words: list[str]) -> list[str]:
    """The command that continues the run of a command. If it has saved no checkpoint yet, it starts
    again from the one that the command names."""
    folder = next(word.partition("=")[2] for word in words if word.startswith("--output_dir="))
    names_checkpoint = any(word.startswith("--resume=") for word in words)
    if names_checkpoint and not list_checkpoints(Path(folder, CHECKPOINTS)):
        return list(words)
    return [*_without(words, "--resume"), "--resume=auto"]


def _without(words: list[str], *flags: str) -> list[str]:
    """The words without these flags and the word that each of them takes."""
    kept = []
    is_value = False
    for word in words:
        is_flag = word.partition("=")[0] in flags
        if not (is_flag or (is_value and not word.startswith("-"))):
            kept.append(word)
        is_value = word in flags
    return kept


def values_of(recipe: Recipe, words: list[str]) -> dict[str, str]:
    """The values of a form for flags of a recipe, by its parser. Raises `UsageError`."""
    args = recipe.parser.parse_args(words)
    values = {}
    for name in args.given:
        value = getattr(args, name)
        if value is None or isinstance(value, bool):
            values[name] = "on" if value else "off"
        elif isinstance(value, list):
            values[name] = shlex.join(map(str, value))
        else:
            values[name] = str(value)
    return values


def ask(words: list[str], seconds: float = 600.0) -> tuple[int, str]:
    """Runs a short command to its end. Returns its status and what it has printed. Raises
    `RunError` if it takes longer than `seconds`; it is killed then, and what it has started."""
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        cwd=ROOT,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=seconds)
            return process.returncode, text
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise RunError(f"it took more than {seconds:g} s and was ended") from None
            raise
