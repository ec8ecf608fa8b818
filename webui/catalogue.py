"""The recipes as the page knows them: their options, with groups, help and choices, and the tiers
and sizes of their preset scripts. All of it is read from the recipes and scripts themselves."""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import options, preset
from common.errors import RunError, UsageError, first_line
from speech.data.columns import printable

ROOT = Path(__file__).resolve().parents[1]  # of the project; commands are run in it
LEFT_OUT = "template"  # to be copied, not to be used
# The options that matter, the most important first: a form shows the first ten that a recipe has.
FIRST = (
    "language use_amharic_g2p extend_vocab conditions num_epochs max_steps learning_rate"
    " batch_size gradient_accumulation_steps gradient_checkpointing optimizer use_cpu_offload"
    " max_duration spec_augment export"
).split()
FIRST_COUNT = 10
# What the page decides itself, and how.
OWN = {
    "output_dir": "the page gives every run a folder of its own",
    "dry_run": "the button “Will it fit?” gives it",
}
# What a form calls the options that every training asks.
LABELS = {
    "train_manifest": "Recordings to learn from",
    "val_manifest": "Recordings to evaluate on",
    "model_dir": "Released model to begin from",
    "model_file": "Released model to begin from, one file",
    "language": "Language",
}
PATHS = re.compile(r"\b(?:\w*DIR|\w*FILE|\w*PATH)\b")  # in a metavar
SWITCHES = (options.OnOff, argparse.BooleanOptionalAction)


@dataclass(frozen=True)
class Option:
    """An option of a recipe: all flags with one meaning."""

    name: str
    flag: str  # that takes a value
    group: str
    help: str
    default: str  # for people
    choices: tuple[str, ...]  # "" stands for an option that is not given
    switches: dict[str, str]  # the values, such as "on", that are a flag without one
    metavar: tuple[str, ...]  # of each word; the last one is that of all further words, too
    is_path: bool  # some of its words are paths
    several: bool  # its value has several words, quoted as in a shell
    own: str  # why only the page sets it

    def is_word_path(self, index: int, word: str) -> bool:
        """Whether a word is a path, and not one that stands for itself as in PATH|auto."""
        metavar = self.metavar[min(index, len(self.metavar) - 1)]
        return self.is_path and bool(PATHS.search(metavar)) and word not in metavar.split("|")


@dataclass(frozen=True)
class Recipe:
    """A recipe. `title` is the first sentence of its docstring, `commands` are the names of the
    options that do something else than training, `fault` says why it cannot be used, or is ""."""

    name: str
    file: Path
    title: str = ""
    script: Path | None = None
    tiers: tuple[str, ...] = ()
    sizes: tuple[str, ...] = ()
    options: tuple[Option, ...] = ()
    first: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    page: Path | None = None
    fault: str = ""
    parser: "Parser | None" = field(default=None, repr=False, compare=False)
    resolve: Callable | None = field(default=None, repr=False, compare=False)

    @property
    def names(self) -> set[str]:
        """The names of its options."""
        return {option.name for option in self.options}

    @property
    def clones(self) -> bool:
        """Whether it speaks in the voice of a reference clip."""
        return "speaker_wav" in self.names

    def option(self, name: str) -> Option:
        """Raises `UsageError` for a name that the recipe does not have."""
        for option in self.options:
            if option.name == name:
                return option
        raise UsageError(f"{self.name} has no option --{printable(name[:40])}")


def labelled(message: str) -> str:
    """A message in which flags have the names of their fields, too."""

    def named(match: re.Match) -> str:
        return f"“{LABELS[match[1]]}” ({match[0]})" if match[1] in LABELS else match[0]

    return re.sub(r"--(\w+)", named, message)


class Parser(options.Parser):
    """A recipe's parser whose errors are raised."""

    def error(self, message: str):
        raise UsageError(self.explained(message))


# --- recipes and their scripts --------------------------------------------------------------------


def find_recipes(folder: Path = ROOT / "recipes") -> dict[str, Recipe]:
    """The recipes in a folder by name, and their scripts beside it. Imports them all."""
    scripts = {}
    for script in sorted(folder.parent.glob("run_*.sh")):
        last = script.read_text(encoding="utf-8", errors="replace").split("\n")
        last = [line for line in last if line.strip()][-1:]
        if last and last[0].startswith("run "):
            scripts[last[0].split()[1]] = script
    files = [file for file in sorted(folder.glob("*.py")) if file.stem != LEFT_OUT]
    return {file.stem: _read_recipe(file, scripts.get(file.stem)) for file in files}


def _read_recipe(file: Path, script: Path | None) -> Recipe:
    """Imports a recipe from its file."""
    name = f"{__name__}.{file.stem}"
    try:
        specification = importlib.util.spec_from_file_location(name, file)
        module = importlib.util.module_from_spec(specification)
        sys.modules[name] = module  # dataclasses look their module up
        specification.loader.exec_module(module)
        parser = Parser(module.__doc__ or "")
        module.add_arguments(parser)
        found = tuple(_options(parser))
    except (Exception, SystemExit) as error:  # a recipe of the user's, which may be half written
        reason = f"{type(error).__name__}: {first_line(error)}"
        return Recipe(file.stem, file, fault=f"{file.name} cannot be used: {reason}")
    tiers, sizes = _rows(script) if script else ((), ())
    names = {option.name for option in found}
    page = file.with_suffix(".md")
    return Recipe(
        name=file.stem,
        file=file,
        title=_first_sentence(module.__doc__ or ""),
        script=script,
        tiers=tiers,
        sizes=sizes,
        options=found,
        first=tuple(name for name in FIRST if name in names)[:FIRST_COUNT],
        commands=tuple(parser.rules.commands),
        page=page if page.is_file() else None,
        parser=parser,
        resolve=getattr(module, "resolve", None),
    )


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].removesuffix(".")


def _rows(script: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tiers and sizes in the table of a script, the smallest tier first."""
    _, table, _ = run_script(script, "--rows")
    rows = [row for row in preset.read_rows(table) if len(row) > 1]
    return tuple(preset.names(rows, 0)), tuple(preset.names(rows, 1))


def run_script(script: Path, *words: str) -> tuple[int, str, str]:
    """Status, output and messages of a preset script that starts nothing."""
    environment = dict(os.environ)
    environment["GPUS"] = "1"
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    try:
        done = subprocess.run(
            ["bash", str(script), *words],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            env=environment,
            timeout=120,  # it reads the lengths of the recordings
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RunError(f"{script.name}: {first_line(error)}") from None
    return done.returncode, done.stdout, done.stderr


# --- options --------------------------------------------------------------------------------------


def _options(parser: options.Parser) -> Iterator[Option]:
    """All options of a parser but --help, in the order of its groups."""
    by_name: dict[str, list[argparse.Action]] = {}
    for action in parser._actions:
        if action.option_strings and not isinstance(action, argparse._HelpAction):
            by_name.setdefault(action.dest, []).append(action)
    for group in parser._action_groups:
        for action in group._group_actions:
            actions = by_name.get(action.dest, [])
            if action is _main(actions):
                yield _option(parser, group.title or "", action, actions)


def _main(actions: list[argparse.Action]) -> argparse.Action | None:
    """The first action of a name that is not another name of a flag."""
    for action in actions:
        if action.default is not argparse.SUPPRESS:
            return action
    return actions[0] if actions else None


def _option(
    parser: options.Parser, group: str, main: argparse.Action, actions: list[argparse.Action]
) -> Option:
    """The option of all `actions` of one name; `main` is the one whose flag takes its value."""
    several = (isinstance(main.nargs, int) and main.nargs > 1) or main.nargs in ("+", "*")
    choices = [str(choice) for choice in main.choices or ()]
    switches = {}
    helps = [_help(parser, main)]
    for action in [main, *actions]:
        for value, flag in _switches(action):
            if value not in choices:
                switches.setdefault(value, flag)
        if action is not main and action.default is not argparse.SUPPRESS:
            helps.append(f"{action.option_strings[0]}: {_help(parser, action)}")
    choices += [value for value in switches if value not in choices]
    metavar = main.metavar or ""
    metavar = (metavar,) if isinstance(metavar, str) else tuple(metavar)
    if main.type in (options.path, options.file) and not PATHS.search(" ".join(metavar)):
        metavar = ("PATH",)
    return Option(
        name=main.dest,
        flag=main.option_strings[0],
        group=group,
        help="; ".join(text for text in helps if text),
        default="" if main.dest in parser.rules.commands else _default(helps[0], main.default),
        choices=(("",) if not several else ()) + tuple(choices) if choices else (),
        switches=switches,
        metavar=metavar,
        is_path=bool(PATHS.search(" ".join(metavar))),
        several=several,
        own=OWN.get(main.dest, ""),
    )


def _switches(action: argparse.Action) -> Iterator[tuple[str, str]]:
    """Values that are flags without a word, and these flags."""
    if isinstance(action, options.Level):
        yield "off", action.option_strings[-1]
    elif isinstance(action, SWITCHES):
        yield "on", action.option_strings[0]
        yield "off", action.option_strings[-1]
    elif action.nargs == 0:
        words = {True: "on", None: "on", False: "off"}
        constant = action.const
        value = words[constant] if constant in (True, None, False) else str(constant)
        yield value, action.option_strings[0]


def _help(parser: options.Parser, action: argparse.Action) -> str:
    """The help as --help all prints it, in one line."""
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def _default(text: str, default) -> str:
    """The default that a help text names at its end, in parentheses, or the parser's."""
    if named := re.search(r"\(([^()]*)\)$", text):
        return named[1]
    if default in (None, False, argparse.SUPPRESS):
        return ""
    return "on" if default is True else str(default)
