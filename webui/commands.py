"""The recipes as the page knows them: their options, their preset scripts, and the commands that both
make of a form's values. All of it is read from the recipes and scripts themselves."""

import argparse
import functools
import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from common import options
from common.errors import RunError, UsageError, first_line
from dry_run.cards import CARDS
from speech.columns import printable
from webui.places import Places

ROOT = Path(__file__).resolve().parents[1]  # of the project; commands are run in it
LEFT_OUT = "template"  # to be copied, not to be used
AUTO = "auto"  # the tier that a script picks by the GPU
LONGEST = 10_000  # characters of a value
# The options that matter, the most important first: a form shows the first ten that a recipe has.
FIRST = (
    "language use_amharic_g2p extend_vocab train_tokenizer conditions num_epochs max_steps"
    " learning_rate batch_size gradient_accumulation_steps gradient_checkpointing optimizer"
    " use_cpu_offload max_duration spec_augment export"
).split()
FIRST_COUNT = 10
# What the page decides itself, and how.
OWN = {
    "output_dir": "the page gives every run a folder of its own",
    "checkpoint_dir": "the page keeps the checkpoints in the folder of the run",
    "log_dir": "the page keeps the logs in the folder of the run",
    "dry_run": "the button “Will it fit?” gives it",
}
OUTPUTS = ("export", "output", "write_dataset", "cache_audio")  # what a run writes to these paths
PATHS = re.compile(r"\b(?:\w*DIR|\w*FILE|\w*PATH)\b")  # in a metavar
NUMBER = re.compile(r"-(\d+|\d*\.\d+)")  # what argparse takes as a negative number
SWITCHES = (options.OnOff, argparse.BooleanOptionalAction)


@dataclass(frozen=True)
class Option:
    """An option of a recipe: all flags with one meaning. `flag` takes a value; `switches` are the
    values, such as "on", that are a flag without one. `default` is a text for people. `is_path`: some
    of its words are paths. `several`: its value has several words, quoted as in a shell. `own`: why
    only the page sets it, or ""."""

    name: str
    flag: str
    flags: tuple[str, ...]  # with the ones for other values, and other names
    group: str
    help: str
    default: str
    choices: tuple[str, ...]  # "" stands for an option that is not given
    switches: dict[str, str]
    metavar: tuple[str, ...]  # of each word; the last one is that of all further words, too
    is_path: bool
    several: bool
    own: str

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

    def option(self, name: str) -> Option:
        """Raises `UsageError` for a name that the recipe does not have."""
        for option in self.options:
            if option.name == name:
                return option
        raise UsageError(f"{self.name} has no option --{printable(name[:40])}")


@dataclass(frozen=True)
class Command:
    """The words of a recipe's command, and what its preset script says about it, such as
    "tier: cpu (auto)"."""

    words: list[str]
    notes: list[str]


@dataclass(frozen=True)
class Verdict:
    """What --dry_run has printed: "fits", "tight" or "does not fit"; the memory by kind; the other
    lines, and those of its advice. `flags` are values of options with which it fits, or none, and `after` is the verdict with
    them, or ""."""

    word: str
    memory: list[tuple[str, str]]
    lines: list[str]
    advice: list[str]
    flags: dict[str, str]
    after: str


class Parser(options.Parser):
    """A recipe's parser whose errors are raised."""

    def error(self, message: str):
        raise UsageError(self.explained(message))


# --- recipes --------------------------------------------------------------------------------------


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
        commands=tuple(parser.commands),
        page=page if page.is_file() else None,
        parser=parser,
        resolve=getattr(module, "resolve", None),
    )


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.strip().split("\n\n")[0].split())
    return re.split(r"(?<=\.) ", paragraph)[0].removesuffix(".")


def _rows(script: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tiers and sizes in the table of a script, the smallest tier first."""
    _, table, _ = _run_script(script, "--rows")
    rows = [line.split() for line in table.splitlines()]
    rows = [row for row in rows if len(row) > 1 and not row[0].startswith("#")]
    columns = [dict.fromkeys(row[i] for row in rows if row[i] != "*") for i in range(2)]
    return tuple(columns[0]), tuple(columns[1])


def _options(parser: options.Parser) -> Iterator[Option]:
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
        flags=tuple(flag for action in actions for flag in action.option_strings),
        group=group,
        help="; ".join(text for text in helps if text),
        default="" if main.dest in parser.commands else _default(helps[0], main.default),
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
    """The help as --help prints it, in one line."""
    return " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""


def _default(text: str, default) -> str:
    """The default that a help text names at its end, in parentheses, or the parser's."""
    if named := re.search(r"\(([^()]*)\)$", text):
        return named[1]
    if default in (None, False, argparse.SUPPRESS):
        return ""
    return "on" if default is True else str(default)


# --- commands -------------------------------------------------------------------------------------


def command(
    places: Places, recipe: Recipe, settings: dict, folder: Path, card: str | None = None
) -> Command:
    """The command that `settings` ask for, {"tier", "size", "values": {option name: text}}, with its
    output in `folder`. With a `card` it is that of a plan for this card, or for the computer's own
    ("").

    Raises `UsageError` for values that the recipe does not take, and for paths outside of `places`."""
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
    """The values of options that the preset script adds to `settings`, and what it says. Raises
    `UsageError` as `command` does."""
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
    if len(text) > LONGEST:
        raise UsageError(f"{flag}: a value of over {LONGEST} characters is not taken")
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
    """A word that is not a path. A recipe may read the file that it names, so this must be inside."""
    for base in (ROOT, places.data, places.runs):
        named = os.path.join(base, word)
        if os.path.isfile(named) or ("/" in word and os.path.exists(named)):
            return str(places.inside(word))
    return word


def _preset(recipe: Recipe, settings: dict, flags: list[str]) -> tuple[list[str], list[str]]:
    """The flags that the preset script adds before `flags`, and what it says. Raises `UsageError`."""
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
    status, printed, said = _run_script(recipe.script, *words, *flags, "--print")
    notes = said.splitlines()
    if status:
        raise UsageError((notes or ["no message"])[-1].removeprefix("error: "))
    # The first of `flags` is the only --output_dir with an equals sign. What is before it is plain.
    before = printed.partition(" --output_dir=")[0]
    words = before.rpartition(f"{recipe.name}.py")[2].split()
    return _without(words, "--output_dir"), notes


def _run_script(script: Path, *words: str) -> tuple[int, str, str]:
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


def resumed(words: list[str]) -> list[str]:
    """The command that continues the run of a command, or starts it again if it has saved nothing."""
    folder = next(w.partition("=")[2] for w in words if w.startswith("--output_dir="))
    if not any(Path(folder, "checkpoints").glob("checkpoint_step_*.pt")):
        return list(words)
    return [*_without(words, "--resume", "--init_from"), "--resume=auto"]


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


def ask(words: list[str], seconds: float = 600.0) -> tuple[int, str]:
    """Runs a short command to its end. Returns its status and what it has printed. Raises `RunError`
    if it takes longer than `seconds`; it is killed then, and what it has started."""
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


# --- plans ----------------------------------------------------------------------------------------


def cards() -> list[str]:
    """The GPUs whose names --dry_run knows."""
    return [card.name for card in CARDS]


@functools.cache
def this_card() -> str | None:
    """The name of this computer's first NVIDIA GPU, as the driver calls it."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    words = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    if first and not first.startswith("MIG-"):  # a slice is not found by its name
        words += ["-i", first]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = done.stdout.splitlines()
    return names[0].strip() if first and names and done.returncode == 0 else None


SIZE = r"-?[\d.]+ [GM]iB"
OF_MEMORY = re.compile(rf"  (\S.*?)\s+({SIZE})")
OF_FLAGS = re.compile(rf"  (--\S.*): {SIZE} less")
OF_VERDICT = re.compile(r"Verdict: (.+?) \(.*")
OF_ADVICE = re.compile(rf"Peak with these flags: {SIZE} of {SIZE} \(.+\): (.+)")


def verdict(recipe: Recipe, text: str) -> Verdict:
    """Reads what --dry_run has printed. Raises `UsageError` with its last line if this is not a plan,
    but an error."""
    words = []
    memory = []
    lines = []
    advice = []
    word = after = ""
    for line in text.splitlines():
        if found := OF_FLAGS.fullmatch(line):
            words += found[1].split()
            advice.append(line.strip())
        elif not word and (found := OF_MEMORY.fullmatch(line)):
            memory.append((found[1], found[2]))
        elif line.startswith("  ") and lines:  # the rest of a long line
            lines[-1] += f" {line.strip()}"
        elif advice or line.startswith("Peak with "):
            advice.append(line)
        else:
            lines.append(line)
        if found := OF_VERDICT.fullmatch(line):
            word = found[1]
        elif found := OF_ADVICE.fullmatch(line):
            after = found[1]
    if not word:
        last = [line for line in lines if line.strip()][-1:] or ["it printed nothing"]
        raise UsageError(last[0].removeprefix("error: "))
    flags = values_of(recipe, words) if after in ("fits", "tight") else {}
    return Verdict(word, memory, lines, advice, flags, after)


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
