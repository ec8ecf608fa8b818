"""The Data tab: recordings and their texts, chosen or uploaded; what a recipe can use of them, and
why it cannot use the rest."""

import functools
import html
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from common.errors import Failure, UsageError
from speech.data.annotations.rows import has_tiers
from webui import checked, commands, corrections, editor, views
from webui.catalogue import Recipe
from webui.context import Context
from webui.corrections import Table
from webui.places import DRAFT, Places
from webui.tabs import drafts, which
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared, with_own_names
from webui.uploads import is_table
from webui.use import error_of

CHECK_SECONDS = 3600.0  # of a check at most: it listens to all recordings, the first time
WAIT = "<p>Checking: every recording is listened to once.</p>"
MANIFESTS = ("train_manifest", "val_manifest")
USABLE = "checked: "  # begins the line that says how much can be used
CHECKS = ".check"  # folder in --runs of what is kept of the recordings between two checks
# The options that matter for the check, and what they are called here.
OPTIONS = {
    "language": "Language of the texts",
    "model_dir": "Released model",
    "model_file": "Released model, one file",
    "vocab_file": "Vocabulary",
    "use_amharic_g2p": "Amharic as phonemes",
    "extend_vocab": "More characters in the vocabulary",
    "use_chunking": "Long recordings in pieces",
    "tier": "Tiers with the texts",
    "audio_root": "Folder of the audio files",
}
MISSING = "A table of their texts is missing: add it, or let a recogniser write a draft (below)."
TEXTS_SECONDS = 5.0  # between two looks at what the editor has saved
EVALUATION = ("dev", "val", "valid", "validation", "eval")  # names of tables beside a train.*
HELP = (
    "<p>The table says what is spoken in each file. Its first line is <code>audio_file|text</code>,"
    " then there is a line for each file, such as <code>a.wav|This is what is said</code>. A"
    " <code>|speaker</code> can follow. Write it in any text editor or spreadsheet, save it as"
    " .csv (UTF-8), and drop it here together with the audio files. Files of ELAN (.eaf), Praat"
    " (.TextGrid) and Audacity (labels in .txt), and subtitles (.srt, .vtt), are taken as they are:"
    " drop them with their audio.</p>"
)


@dataclass(frozen=True)
class Controls:
    """The controls of the tab, from top to bottom."""

    table: gr.Dropdown
    evaluation: gr.Dropdown
    files: gr.File
    folder: gr.File
    said: gr.Markdown
    texts: gr.Markdown
    recipe: gr.Dropdown
    options: list[gr.Dropdown]
    check: gr.Button
    train: gr.Button
    result: gr.Markdown
    printed: gr.Textbox
    uploads: gr.Dropdown
    remove: gr.Button


def build(context: Context, shared: Shared) -> None:
    places = context.places
    able = (each for each in context.recipes.values() if "check_data" in each.commands)
    recipes = {each.name: each for each in able if "train_manifest" in each.names}
    controls = _controls(context, recipes, shared)
    _connect_tables(places, shared, controls)
    _connect_texts(places, shared, controls)
    _connect_uploads(places, controls)
    _connect_check(places, recipes, shared, controls)


def _controls(context: Context, recipes: dict[str, Recipe], shared: Shared) -> Controls:
    places = context.places
    custom = {"allow_custom_value": True, "min_width": 240}
    with gr.Row():
        info = f"a file or a folder in {places.data}"
        table = gr.Dropdown([], label="Table of the recordings", info=info, **custom)
        info = "may be empty: a part of the recordings is kept for it"
        evaluation = gr.Dropdown([], label="Table for evaluation", info=info, **custom)
    dropped = _dropped()
    said = gr.Markdown(HELP, **HTML)
    texts = gr.Markdown(**HTML)
    drafts.build_draft(context, shared, dropped, lambda pairs: _save(places, pairs, True))
    asked = gr.Column()
    names = [(f"{name}: {each.title}", name) for name, each in recipes.items()]
    first = next(iter(recipes), None)
    recipe = gr.Dropdown(names, value=first, label="For which training")
    with gr.Accordion("More about the texts and files", open=False), gr.Row():
        options = []
        for name, label in OPTIONS.items():
            look = _look(places, recipes.get(first), name)
            options.append(gr.Dropdown(label=label, **custom, **look))

    def looks(name: str, values: dict[str, str]) -> list:
        return _looks(places, recipes.get(name), values)

    with asked:
        tier = options[list(OPTIONS).index("tier")]
        which.build(places, [table, tier], [recipe, *options], looks)
    with gr.Row():
        check = gr.Button("Check", variant="primary", min_width=140)
        train = gr.Button("Train with these data", min_width=140)
    result = gr.Markdown(**HTML)
    with gr.Accordion("All that the check has printed", open=False):
        printed = gr.Textbox(label="Printed text", lines=12, max_lines=24, interactive=False)
    with gr.Accordion("Remove uploaded files", open=False):
        info = "its corrected texts go, too; a training that uses it cannot be resumed afterwards"
        uploads = gr.Dropdown([], label="Upload", info=info)
        remove = gr.Button("Remove it for good", variant="stop")
    return Controls(
        table,
        evaluation,
        *dropped,
        said,
        texts,
        recipe,
        options,
        check,
        train,
        result,
        printed,
        uploads,
        remove,
    )


def _dropped() -> list[gr.File]:
    """Where files, and where a folder can be dropped."""
    with gr.Row():
        label = "Or drop audio and its table"
        files = gr.File(file_count="multiple", label=label, height="11rem", min_width=240)
        label = "Or choose a folder with them"
        folder = gr.File(file_count="directory", label=label, height="11rem", min_width=240)
    for each in (files, folder):
        each.preprocess = with_own_names  # this holds as long as no event changes this component
    return [files, folder]


def _connect_tables(places: Places, shared: Shared, controls: Controls) -> None:
    """Tables to choose from."""

    def refresh(chosen=None, other=None) -> tuple:
        """The choices as they are now. A choice that was made stays: it may change meanwhile."""
        tables = places.manifests()
        return (
            gr.Dropdown(choices=_with(tables, chosen)),
            gr.Dropdown(choices=_with(tables, other)),
            gr.Dropdown(choices=places.uploads()),
        )

    def pick(chosen: str | None) -> tuple:
        tables = _tables(places, chosen)
        path = tables[0] if tables else chosen
        every = places.manifests()
        return (
            gr.Dropdown(choices=_with(tables or every, path), value=path),
            gr.Dropdown(choices=every, value=_evaluation(places, path)),
        )

    tables = [controls.table, controls.evaluation]
    refreshed = [*tables, controls.uploads]
    on(functools.partial(gr.on, None), refresh, None, refreshed)  # when the page is loaded
    on(shared.tab.select, refresh, tables, refreshed)
    on(controls.table.input, pick, controls.table, tables, show_progress="hidden")


def _connect_texts(places: Places, shared: Shared, controls: Controls) -> None:
    """The way to the editor, and what was done there."""
    tier = controls.options[list(OPTIONS).index("tier")]

    def follow(name: str | None, tier: str | None, before: str):
        said = ""
        with suppress(Failure):  # of a name that is being typed, which the buttons report
            said = _texts(places, name, tier or "") if name else ""
        return gr.skip() if said == before else said

    inputs = [controls.table, tier, controls.texts]
    for trigger in (
        controls.table.change,
        tier.change,
        shared.tab.select,
        gr.Timer(TEXTS_SECONDS).tick,
    ):
        on(trigger, follow, inputs, controls.texts, show_progress="hidden")


def _texts(places: Places, name: str, tier: str) -> str:
    """How far the texts of a table are corrected, and a link to their editor. Raises `Failure`."""
    if places.inside(name).is_dir():
        return ""
    only = only_tier(tier)
    if only is None:
        return "<p>Texts are corrected one tier at a time: write one name into the field tier.</p>"
    table = editor.table_of(places, name, only)
    corrections.check_writable(places, table)
    link = html.escape(editor.address(places, table))
    parts = [f'<a href="{link}" target="_blank" class="to-texts">Listen and correct the texts</a>']
    if table.corrected.is_file():
        rows, _ = corrections.texts_of(table, places)
        done = sum(row.get("edited") == corrections.DONE for row in rows)
        out = sum(row.get("edited") == corrections.LEFT_OUT for row in rows)
        used = views.text(places.name(table.corrected))
        parts.append(f"{done} of {len(rows)} texts are done, {out} are left out.")
        parts.append(f"Check and training take the corrected texts: <b>{used}</b>.")
    parts.append(editor.links_home(places, table))
    return f"<p>{' '.join(parts)}</p>"


def only_tier(text: str) -> str | None:
    """The name in the field of tiers, which is divided as by a shell: "" without one, None if there
    are several. What is still being typed is one name."""
    try:
        names = shlex.split(text)
    except ValueError:
        names = [text]
    return "".join(names) if len(names) < 2 else None


def _connect_uploads(places: Places, controls: Controls) -> None:
    """Dropped files, and their end."""

    def refused(reason) -> tuple:
        """The message of a refused upload. It stays, because the files have to be chosen again."""
        text = f"<p><b>Not uploaded: {views.text(reason)}</b></p>"
        return gr.skip(), gr.skip(), gr.skip(), text

    def upload(pairs: list[tuple[str, str]]) -> tuple:
        if not pairs:  # the last file was taken away
            return gr.skip(), gr.skip(), gr.skip(), HELP
        try:
            path = _save(places, pairs)
        except Failure as failure:
            return refused(failure)
        if path is None or path.is_dir():
            saved = f"The audio is now in {places.name(path)}. " if path else ""
            text = f"<p><b>{saved}{MISSING}</b></p>{HELP}"
            return gr.skip(), gr.skip(), gr.Dropdown(choices=places.uploads()), text
        name = places.name(path)
        text = (
            f"<p>Uploaded. The table is now called <b>{views.text(name)}</b>. What was corrected in"
            " an earlier upload stays there.</p>"
        )
        text += _left_out(places, [path])
        table = gr.Dropdown(choices=_with(places.manifests(), name), value=name)
        return table, None, gr.Dropdown(choices=places.uploads()), text

    def upload_folder(pairs: list[tuple[str, str]]) -> tuple:
        names = [name for _, name in pairs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice:  # the browser does not say in which of its folders each file is
            return refused(
                f"several files in this folder are called {twice}: put it into the folder of the"
                " data"
            )
        return upload(pairs)

    def removed(name: str | None) -> gr.Dropdown:
        if not name:
            raise UsageError("choose an upload first")
        places.remove_upload(name)
        return gr.Dropdown(choices=places.uploads(), value=None)

    uploaded = [controls.table, controls.evaluation, controls.uploads, controls.said]
    for trigger in (controls.files.upload, controls.files.delete):
        on(trigger, upload, controls.files, uploaded, show_progress="hidden")
    folder = controls.folder
    on(folder.upload, upload_folder, folder, uploaded, show_progress="hidden")
    on(controls.remove.click, removed, controls.uploads, controls.uploads)


def _connect_check(
    places: Places, recipes: dict[str, Recipe], shared: Shared, controls: Controls
) -> None:
    """The check for a recipe, and the way to its training."""

    def adapt(name: str | None) -> list:
        return _looks(places, recipes.get(name), {})

    def settings_of(chosen, other, name, *values) -> dict:
        if name not in recipes:
            raise UsageError("choose for which training the recordings are")
        given = dict(zip(OPTIONS, values, strict=True))
        tier = only_tier(given["tier"] or "")
        tables = [_file(places, chosen, "Table of the recordings")]
        if other:
            tables.append(_file(places, other, "Table for evaluation"))
        latest = tables
        if tier is not None:  # the texts of several are not corrected together
            latest = [Table(path, tier).latest for path in tables]
        paths = (shlex.quote(places.name(path)) for path in latest)
        settings = {"recipe": name, "values": dict(zip(MANIFESTS, paths, strict=False))}
        known = recipes[name].names
        if latest[0].suffix == ".jsonl" and not any(has_tiers(str(path)) for path in latest):
            known.discard("tier")  # it was taken when the texts were corrected
        settings["values"] |= {key: value for key, value in given.items() if value and key in known}
        if (latest[0].parent / DRAFT).is_file() and "use_chunking" in known:
            settings["values"].setdefault("use_chunking", "on")  # its recordings have pieces
        return settings

    def begin(*values) -> tuple[str, str]:
        settings_of(*values)  # what is missing
        return WAIT, ""

    def run_check(*values) -> tuple[str, str]:
        settings = settings_of(*values)
        return _check(places, recipes[settings["recipe"]], settings)

    def to_training(before: dict, *values) -> tuple:
        settings = settings_of(*values)
        if before.get("recipe") == settings["recipe"]:
            ours = {*MANIFESTS, *OPTIONS}
            kept = {key: value for key, value in before["values"].items() if key not in ours}
            settings = {**before, "values": {**kept, **settings["values"]}}
        return settings, gr.Tabs(selected="train")

    chosen = [controls.table, controls.evaluation, controls.recipe, *controls.options]
    shown = [controls.result, controls.printed]
    on(controls.recipe.input, adapt, controls.recipe, controls.options)
    changes = [each.change for each in chosen]  # a check is of what was chosen
    forget = functools.partial(gr.on, changes)
    on(forget, lambda: ("", ""), None, shown, show_progress="hidden", trigger_mode="once")
    wait = on(controls.check.click, begin, chosen, shown, show_progress="hidden")
    run = on(wait.success, run_check, chosen, shown, concurrency_limit=2)
    on(run.failure, lambda: "", None, controls.result)
    to_form = [shared.settings, shared.tabs]
    on(controls.train.click, to_training, [shared.settings, *chosen], to_form)


def _save(places: Places, pairs: list[tuple[str, str]], without_texts: bool = False) -> Path | None:
    """The manifest of dropped files, or the folder of files without a table. None if nothing is
    kept, because a table of their texts is missing. Raises `Failure`."""
    if not without_texts and not any(is_table(file, name) for file, name in pairs):
        return None
    return places.save_upload([file for file, _ in pairs], [name for _, name in pairs])


# --- what is chosen -------------------------------------------------------------------------------


def _with(choices: list[str], value: str | None) -> list[str]:
    """The choices, with a value that was typed."""
    return [*choices, value] if value and value not in choices else choices


def _file(places: Places, name: str | None, label: str) -> Path:
    if not name:
        raise UsageError(f"{label}: choose one, or drop your files")
    return places.table(next(iter(_tables(places, name)), name))


def _tables(places: Places, name: str | None) -> list[str]:
    """The tables in a folder that was typed, that of the training first; [] for a file."""
    if not name or not places.inside(name).is_dir():
        return []
    tables = places.manifests(name)
    if not tables:
        raise UsageError(f"{name}: there is no table of recordings in this folder")
    return sorted(tables, key=lambda each: not Path(each).stem.startswith("train"))


def _evaluation(places: Places, name: str | None) -> str | None:
    """The table for evaluation beside a train.tsv, as Common Voice has it."""
    path = Path(name or "")
    if path.stem != "train":
        return None
    beside = [str(path.with_stem(stem)) for stem in EVALUATION]
    return next((each for each in beside if places.inside(each).is_file()), None)


def _look(places: Places, recipe: Recipe | None, name: str) -> dict:
    """How the control of one of OPTIONS looks for a recipe."""
    options = recipe.options if recipe else ()
    option = next((each for each in options if each.name == name), None)
    if option is None:
        return {"visible": False, "value": ""}
    choices = list(option.choices) or [""]
    if name in ("model_dir", "model_file"):
        choices += places.models()
    return {"visible": True, "info": option.help, "choices": choices, "value": ""}


def _looks(places: Places, recipe: Recipe | None, values: dict[str, str]) -> list:
    """The controls of all OPTIONS for a recipe, with some values."""
    controls = []
    for name in OPTIONS:
        look = _look(places, recipe, name)
        if look["visible"] and name in values:
            look["value"] = values[name]
        controls.append(gr.update(**look))
    return controls


# --- the check ------------------------------------------------------------------------------------


def _check(places: Places, recipe: Recipe, settings: dict) -> tuple[str, str]:
    """The report on the data that a recipe can use: a table in HTML, and all that was printed."""
    values = {**settings["values"], "check_data": "on"}
    folder = places.runs / CHECKS
    command = commands.command(places, recipe, {**settings, "values": values}, folder)
    status, text = commands.ask(command.words, CHECK_SECONDS)
    words = [word for key in MANIFESTS if key in values for word in shlex.split(values[key])]
    manifests = [places.table(word) for word in words]
    sections = [each for each in checked.read(text) if str(folder) not in each.title]
    problem = error_of(text) if status else ""
    examples = checked.examples_of(sections, places, manifests)
    for manifest in manifests:
        for number, section in enumerate(sections):
            title = section.title.replace(f" ({manifest})", "")
            sections[number] = checked.Section(title, section.rows)
    report = _report(places, sections, examples, problem)
    return f"<div>{report}{_left_out(places, manifests)}</div>", text


def _report(
    places: Places,
    sections: list[checked.Section],
    examples: dict[str, checked.Example],
    problem: str,
) -> str:
    """The sections as HTML: what can be used, then what cannot, and numbers."""
    if problem:
        head = f"<h3>These data cannot be used yet</h3><p>{views.text(problem)}</p>"
    else:
        usable = [each.title for each in sections if each.title.startswith(USABLE)][-1]
        head = f"<h3>{views.text(usable.removeprefix(USABLE))}</h3>"
    lines, tables, bars = [], [], []
    for section in sections:
        title = section.title.removesuffix(":")
        if section.has_reasons:
            tables.append(_reasons(places, section, examples))
        elif section.rows:
            unit = "min" if title.startswith("minutes") else ""
            rows = [(row.label, row.number) for row in section.rows]
            bars.append(views.bars(title.capitalize(), rows, unit))
        elif not title.startswith(("error: ", USABLE)):
            lines.append(f"<li>{views.text(title)}</li>")
    listed = f"<ul>{''.join(lines)}</ul>" if lines else ""
    return f'{head}{listed}{"".join(tables)}<div class="plots">{"".join(bars)}</div>'


def _reasons(places: Places, section: checked.Section, examples: dict[str, checked.Example]) -> str:
    """A table of reasons, with examples to play."""
    rows = []
    for row in section.rows:
        shown = []
        for example in (examples.get(text, checked.Example(text)) for text in row.examples):
            shown.append(f"<div>{views.text(example.text)}</div>")
            if example.path:
                name = places.name(example.path)
                shown.append(views.player(name, example.offset, example.seconds))
        advice = f" ({views.text(row.advice)})" if row.advice else ""
        reason = f"<div><b>{views.text(row.label)}</b>{advice}</div>"
        rows.append([f"{row.number:g}", reason + "".join(shown)])
    return views.table(["rows", "reason, with examples"], rows, section.title.removesuffix(":"))


def _left_out(places: Places, paths: list[Path]) -> str:
    """The files that were left out of uploads, as HTML."""
    parts = []
    for path in paths:
        table = places.not_used(path)
        for section in checked.read(f"Left out of the upload:\n{table}") if table else []:
            parts.append(_reasons(places, section, {}))
    return "".join(parts)
