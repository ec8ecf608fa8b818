"""The Train tab: a form with the options of a recipe, whether the run fits, and its start."""

import functools
import re
import shlex
from contextlib import suppress
from dataclasses import dataclass

import gradio as gr

from common.errors import Failure, UsageError
from dry_run.cards import CARDS
from webui import commands, outputs, plans, runs, views
from webui.catalogue import LABELS, Option, Recipe
from webui.commands import AUTO
from webui.context import Context
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared

# The options that have a place of their own: what a model starts from, and what it learns from.
STARTS = ("model_dir", "model_file")
MANIFESTS = ("train_manifest", "val_manifest", "test_manifest")
WEIGHTS = ("init_from", "resume")  # whose values may be weights of other runs
LISTED = (*STARTS, *MANIFESTS, *WEIGHTS)  # options with a list of paths
# What the options of `LABELS` are, in plain words. They are open, all else is folded.
OPEN = {
    "train_manifest": "a table of files and their texts, as on the Data tab; none: a small demo, if"
    " the recipe has one",
    "val_manifest": "none: a part of the others is kept for it",
    "model_dir": "its folder; with little speech, this counts most",
    "model_file": "its file; with little speech, this counts most",
    "language": "",
}
DATA = "data"  # the group of options that stay when another recipe is chosen
PICKED = re.compile(r"tier: (\S+) \(auto\)")  # what a preset script says
CPU = "cpu"  # the tier without a GPU
HERE = "the GPU of this computer"
NO_GPU = (
    "This computer has no NVIDIA GPU: what is started here is trained on the CPU. The demo takes"
    " minutes, a small model of your data hours, and a released model days."
)
WIDTH = 260  # of a control at least, pixels
PLAN_SECONDS = 900.0
# By itself gradio does not see that controls are used by events that are made later.
LIVE = {"interactive": True, "min_width": WIDTH}


@dataclass(frozen=True)
class Form:
    """The recipe of a form, its controls (recipe, tier, size, then those of `options`)."""

    recipe: Recipe
    controls: list
    options: list[Option]

    def read(self, values: tuple) -> dict:
        """Settings of the values of the controls. Raises `UsageError` if another recipe was chosen
        a moment ago, whose form is not there yet."""
        recipe, tier, size, *others = values
        if recipe != self.recipe.name:
            raise UsageError(f"the options of {recipe} are not shown yet: try again in a second")
        given = {}
        for option, value in zip(self.options, others, strict=True):
            text = shlex.join(value) if isinstance(value, list) else str(value or "").strip()
            if text:
                given[option.name] = text
        return {"recipe": recipe, "tier": tier or AUTO, "size": size or "", "values": given}


@dataclass(frozen=True)
class Parts:
    """The controls above the form, and the settings in it when it was left."""

    typed: gr.State
    card: gr.Dropdown
    plan: gr.Button
    planned: gr.Markdown
    advice: gr.State  # {option name: value} that make the run fit, and maybe "tier"
    use: gr.Button
    details: gr.Markdown
    name: gr.Textbox
    show: gr.Button
    command: gr.Textbox
    start: gr.Button


def build(context: Context, shared: Shared) -> None:
    if not context.recipes:
        gr.Markdown("There are no recipes in the folder recipes/.")
        return
    parts = _parts()
    wanted = gr.Markdown(_mark("wanted", 0), **HTML)
    place = gr.Column(elem_classes="drawn-form")
    drawn = gr.State(({}, 0))  # the settings that the form was made of, and how often it was made

    def draw(settings: dict, typed: dict, before: tuple) -> tuple:
        if settings == typed:  # the form has them, and its events must stay
            return (gr.skip(),) * 3
        return (settings, before[1] + 1), settings, _mark("wanted", before[1] + 1)

    inputs = [shared.settings, parts.typed, drawn]
    outputs = [drawn, parts.typed, wanted]
    on(shared.settings.change, draw, inputs, outputs, show_progress="hidden")
    with place:

        @gr.render(inputs=[drawn])
        def render(state: tuple) -> None:
            gr.Markdown(_mark("drawn", state[1]), **HTML)
            form = _form(context, state[0])
            _follow(context, shared, form, parts)
            _connect(context, form, parts, shared, state, drawn)
            _forget(form, parts)


def _mark(kind: str, number: int) -> str:
    """How often the form was `wanted` or `drawn` anew. The style sheet hides the form while these
    differ: what is typed into the old one would be lost."""
    return f'<i class="{kind}-{number % 2}"></i>'


def _parts() -> Parts:
    here = plans.this_card()
    cards = [(f"{HERE} ({here})", "")] if here else []
    with gr.Row():
        name = gr.Textbox(
            label="Name of the run",
            info="letters, digits, hyphens and underscores",
            placeholder="the recipe's name and a number",
            **LIVE,
        )
        card = gr.Dropdown(
            [*cards, *((each.name, each.name) for each in CARDS)],
            value="" if here else "8gb",
            label="GPU to predict for",
            info="a name, or gigabytes such as 10GB; choose a tier, too, if it is none itself",
            allow_custom_value=True,
            **LIVE,
        )
    with gr.Row(elem_classes="drawn-form"):
        start = gr.Button("Start", variant="primary", min_width=140)
        plan = gr.Button("Will it fit?", min_width=140)
        show = gr.Button("Show the command", min_width=140)
    planned = gr.Markdown(**HTML)
    use = gr.Button("Use these flags", visible=False)
    details = gr.Markdown(**HTML)
    command = gr.Textbox(label="Command", lines=3, interactive=False, visible=False)
    return Parts(
        gr.State({}), card, plan, planned, gr.State({}), use, details, name, show, command, start
    )


# --- the form -------------------------------------------------------------------------------------


def _form(context: Context, settings: dict) -> Form:
    """Makes the controls of the recipe that `settings` have."""
    wanted = settings.get("recipe")
    every = context.recipes.values()
    recipe = context.recipes.get(wanted) or min(every, key=lambda each: bool(each.fault))
    if wanted and wanted != recipe.name:
        gr.Markdown(f"<p>There is no recipe {views.text(wanted)} now: choose another.</p>", **HTML)
    choices = [(f"{each.name}: {each.title or 'cannot be used'}", each.name) for each in every]
    chosen = gr.Dropdown(choices, value=recipe.name, label="Recipe", info="what is learned", **LIVE)
    if recipe.fault:
        gr.Markdown(f"<p>{views.text(recipe.fault)}</p>", **HTML)
    preset, notes = _preset(context, recipe, settings)
    values = settings.get("values", {})
    by_name = {option.name: option for option in recipe.options}
    form = Form(recipe, [chosen], [])

    def add(options: list[Option], look: str = "options") -> None:
        with gr.Row(elem_classes=look):
            for option in options:
                control = _control(context, option, values.get(option.name, ""), preset)
                if not option.own:
                    form.options.append(option)
                    form.controls.append(control)

    add([by_name[name] for name in OPEN if name in by_name], "options few")
    often = [by_name[name] for name in (*STARTS, *MANIFESTS, *recipe.first) if name in by_name]
    groups: dict[str, list[Option]] = {"More: tier, size and what is changed often": []}
    (first,) = groups
    for option in (*often, *(each for each in recipe.options if each not in often)):
        title = first if option in often else option.group
        if option.name not in OPEN:
            groups.setdefault(title, []).append(option)
    for title, options in groups.items():
        given = sum(option.name in values for option in options)
        shown = title[:1].upper() + title[1:]
        with gr.Accordion(f"{shown} ({given} set)" if given else shown, open=False):
            if title == first:
                form.controls[1:1] = _tier_and_size(recipe, settings, notes)
            add(options)
    return form


def _preset(context: Context, recipe: Recipe, settings: dict) -> tuple[dict[str, str], list[str]]:
    with suppress(Failure):  # which the buttons report
        return commands.preset(context.places, recipe, settings)
    return {}, []


def _tier_and_size(recipe: Recipe, settings: dict, notes: list[str]) -> tuple:
    with gr.Row():
        tier = gr.Dropdown(
            [AUTO, *recipe.tiers],
            value=settings.get("tier") or AUTO,
            label="Tier",
            info=_about_tier(notes),
            visible=bool(recipe.tiers),
            **LIVE,
        )
        size = gr.Dropdown(
            [("default", ""), *((size, size) for size in recipe.sizes)],
            value=settings.get("size") or "",
            label="Size",
            info="of a new model; a given one keeps its size",
            visible=bool(recipe.sizes),
            **LIVE,
        )
    return tier, size


def _about_tier(notes: list[str]) -> str:
    """`notes`: what the preset script says."""
    about = "the preset for the memory of a GPU"
    if _picked(notes):
        card = plans.this_card()
        reason = f"this computer has {card}" if card else "no NVIDIA GPU was found here"
        about += f"; auto is {_picked(notes)}: {reason}"
    others = [note for note in notes if not PICKED.fullmatch(note)]
    return "; ".join([about, *others])


def _picked(notes: list[str]) -> str:
    """The tier that a script has picked, or ""."""
    found = [PICKED.fullmatch(note) for note in notes]
    return next((match[1] for match in found if match), "")


def _control(context: Context, option: Option, value: str, preset: dict[str, str]):
    """The control of an option."""
    label = LABELS.get(option.name, option.flag)
    settings = {"label": label, "info": OPEN.get(option.name) or option.help}
    if option.own:
        return gr.Textbox(placeholder=option.own, interactive=False, min_width=WIDTH, **settings)
    settings |= LIVE
    if option.choices and option.several:
        chosen = [word for word in _words(value) if word in option.choices]
        return gr.Dropdown(list(option.choices), value=chosen, multiselect=True, **settings)
    if option.choices:
        value = value if value in option.choices else ""
        return gr.Dropdown(_choices(option, preset), value=value, **settings)
    found = _found(context, option)
    if found is None:
        return gr.Textbox(value, placeholder=_empty(option, preset), **settings)
    return gr.Dropdown(_paths(found, option), value=value, allow_custom_value=True, **settings)


def _empty(option: Option, preset: dict[str, str]) -> str:
    """The value of an option that is not given."""
    if option.name in preset:
        return f"{preset[option.name]} (preset)"
    if option.several and not option.default:
        return 'several: first "and another"'
    return option.default


def _choices(option: Option, preset: dict[str, str]) -> list[tuple[str, str]]:
    default = _empty(option, preset) or "not given"
    return [(choice or f"default: {default}", choice) for choice in option.choices]


def _paths(found: list[str], option: Option) -> list[tuple[str, str]]:
    words = [shlex.quote(path) if option.several else path for path in found]
    return [(option.default or "none", ""), *zip(found, words, strict=True)]


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return []


def _found(context: Context, option: Option) -> list[str] | None:
    """Paths to choose from for an option, None if there is no list."""
    places = context.places
    if option.name in MANIFESTS:
        return places.manifests()
    if option.name in STARTS:
        return places.models()
    if option.name in WEIGHTS:
        of_runs = [outputs.weights(run.folder) for run in runs.list_runs(places.runs)]
        return [places.name(path) for paths in of_runs for path in paths]
    return None


# --- events ---------------------------------------------------------------------------------------


def _follow(context: Context, shared: Shared, form: Form, parts: Parts) -> None:
    """The form after a choice: another recipe's, or what the preset says now. What is typed goes
    into the settings when another tab is opened."""
    recipe = form.recipe
    chosen, tier, size, *others = form.controls
    by_name = dict(zip((option.name for option in form.options), others, strict=True))
    listed = [option for option in form.options if option.name in LISTED]
    changing = [option for option in form.options if option.name not in LISTED]
    changing = [option for option in changing if not (option.choices and option.several)]

    def other_recipe(name: str, *values) -> tuple:
        if name == recipe.name:  # it was only looked at
            return (gr.skip(),) * 4
        stay = {option.name for option in recipe.options if option.group == DATA}
        values = form.read((recipe.name, *values))["values"]
        kept = {key: text for key, text in values.items() if key in stay}
        settings = {"recipe": name, "tier": AUTO, "size": "", "values": kept}
        return settings, "", gr.Button(visible=False), ""

    def follow(*values) -> list:
        preset, notes = _preset(context, recipe, form.read(values))
        updates = []
        for option in changing:
            if option.choices:
                updates.append(gr.Dropdown(choices=_choices(option, preset)))
            else:
                updates.append(gr.Textbox(placeholder=_empty(option, preset)))
        return [gr.Dropdown(info=_about_tier(notes)), *updates]

    def leave(event: gr.SelectData, *values) -> tuple:
        if event.value == shared.tab.label or values[0] != recipe.name:
            return gr.skip(), gr.skip()
        settings = form.read(values)
        return settings, settings

    def find() -> list:
        return [gr.Dropdown(choices=_paths(_found(context, each), each)) for each in listed]

    shown = [shared.settings, parts.planned, parts.use, parts.details]
    on(chosen.input, other_recipe, form.controls, shown)
    ways = [by_name[name] for name in (*STARTS, *MANIFESTS[:1]) if name in by_name]
    shown = [tier, *(by_name[option.name] for option in changing)]
    for control in (tier, size, *ways):
        on(control.input, follow, form.controls, shown, show_progress="hidden")
    left = [shared.settings, parts.typed]
    on(shared.tabs.select, leave, form.controls, left, show_progress="hidden")
    shown = [by_name[option.name] for option in listed]
    on(shared.tab.select, find, None, shown, show_progress="hidden")


def _with_advice(form: Form, advice: dict) -> list:
    """The controls with a plan's advice in them, what is said of it, and no more advice."""
    updates = [gr.skip()] * len(form.controls)
    if "tier" in advice:
        updates[1] = gr.Dropdown(value=advice["tier"])
    for place, option in enumerate(form.options, 3):
        if option.name in advice:
            kind = gr.Dropdown if option.choices else gr.Textbox
            updates[place] = kind(value=advice[option.name])
    said = ", ".join(f"--{name} {value}" for name, value in advice.items())
    said = f"<p>In the form now: {views.text(said)}</p>"
    return [*updates, said, gr.Button(visible=False), ""]


def _connect(
    context: Context, form: Form, parts: Parts, shared: Shared, state: tuple, drawn: gr.State
) -> None:
    """The buttons of the form, which need its values. `state`: `drawn` when it was made."""
    recipe = form.recipe
    folder = context.places.runs
    now = [shared.settings, parts.typed, drawn]

    def command(values: tuple, name: str, card: str | None = None) -> tuple[dict, list[str], list]:
        wanted, typed, drawn, *values = values
        if wanted != typed or drawn[1] != state[1]:  # `draw` is on its way, and then `render`
            raise UsageError("the form does not show what was chosen yet: try again in a second")
        settings = form.read(values)
        run = folder / (name or runs.new_name(folder, recipe.name))
        made = commands.command(context.places, recipe, settings, run, card)
        return settings, made.words, made.notes

    def wait() -> tuple:
        return "<p>Predicting. This takes up to a minute.</p>", {}, gr.Button(visible=False), ""

    def plan(card: str, *values) -> tuple:
        settings, words, notes = command(values, "", card or "")
        _, text = commands.ask(words, PLAN_SECONDS)
        verdict = plans.verdict(recipe, text)
        advice = dict(verdict.flags)
        if advice and card and settings["tier"] == AUTO and _picked(notes) not in ("", CPU):
            advice["tier"] = _picked(notes)  # the one for that card, not for this computer's
        said, details = _said(verdict, card), _details(verdict, notes)
        return said, advice, gr.Button(visible=bool(advice)), details

    def use(advice: dict) -> list:
        return _with_advice(form, advice)

    def show(name: str, *values) -> gr.Textbox:
        _, words, _ = command(values, name)
        return gr.Textbox(shlex.join(words), visible=True)

    def start(name: str, *values) -> tuple:
        settings, words, _ = command(values, name)
        run = runs.create(folder, name or runs.new_name(folder, recipe.name), settings, words)
        context.release_gpu(words)
        runs.start(run)
        return settings, settings, run.name, gr.Tabs(selected="runs"), ""

    plan_shown = [parts.planned, parts.advice, parts.use, parts.details]
    waiting = on(parts.plan.click, wait, None, plan_shown, show_progress="hidden")
    planning = on(waiting.then, plan, [parts.card, *now, *form.controls], plan_shown)
    on(planning.failure, lambda: "", None, parts.planned)
    use_shown = [*form.controls, parts.planned, parts.use, parts.details]
    on(parts.use.click, use, parts.advice, use_shown, show_progress="hidden")
    on(parts.show.click, show, [parts.name, *now, *form.controls], parts.command)
    on(
        parts.start.click,
        start,
        [parts.name, *now, *form.controls],
        [shared.settings, parts.typed, shared.chosen, shared.tabs, parts.name],
    )


def _forget(form: Form, parts: Parts) -> None:
    """A verdict goes when what it is about changes."""

    def nothing() -> tuple:
        return "", {}, gr.Button(visible=False), ""

    asked = [control.input for control in (parts.card, *form.controls)]
    shown = [parts.planned, parts.advice, parts.use, parts.details]
    once = {"show_progress": "hidden", "trigger_mode": "once"}
    on(functools.partial(gr.on, asked), nothing, None, shown, **once)


def _said(verdict: plans.Verdict, card: str) -> str:
    """Whether a run fits into the memory of a `card`, "" for this computer's, as HTML."""
    word = {"fits": "It fits.", "tight": "It is tight.", "does not fit": "It does not fit."}
    after = {"fits": "With these flags it fits:", "tight": "With these flags it is tight:"}
    title = f"{word.get(verdict.word, verdict.word)} {after.get(verdict.after, '')}"
    listed = "".join(f"<li>{views.text(line)}</li>" for line in verdict.advice)
    about = f"Predicted for {card}. " if card else ""
    if not plans.this_card():
        about += NO_GPU
    title = f"<p><b>{views.text(title)}</b> {views.text(about)}</p>"
    return f"<div>{title}<ul>{listed}</ul></div>"


def _details(verdict: plans.Verdict, notes: list[str]) -> str:
    """The rest of a plan, as HTML."""
    rows = [[views.text(name), views.text(size)] for name, size in verdict.memory]
    table = views.table(["what", "memory"], rows, "Memory of the GPU at the peak")
    lines = "".join(f"<li>{views.text(line)}</li>" for line in (*notes, *verdict.lines))
    return f"<details><summary>Memory and its details</summary>{table}<ul>{lines}</ul></details>"
