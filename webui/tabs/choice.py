"""Which model: weights of a run, or a released one. What the tabs share that use models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gradio as gr

from common.checkpoint import CHECKPOINT
from common.errors import UsageError
from webui import outputs, plans, runs, trials
from webui.catalogue import Recipe
from webui.context import Context
from webui.runs import Run
from webui.tabs.events import on
from webui.trials import CPU, GPU, Model

OF_RUN, RELEASED = "A run", "A released model"
BEST = "best.safetensors"


@dataclass(frozen=True)
class Choice:
    """The controls that say which model is tried, and where; or the values of these controls."""

    kind: Any  # OF_RUN or RELEASED
    run: Any
    weights: Any
    recipe: Any
    path: Any
    language: Any
    device: Any  # CPU or GPU
    allowed: Any  # whether the GPU is used also while it trains

    def all(self) -> list:
        return list(vars(self).values())


def choose(context: Context, command: str = "") -> Choice:
    """The controls for models that know `command`, or, without one, are used on this page."""
    card = plans.this_card()
    devices = [GPU, CPU] if card else [CPU]
    wanted = {command} if command else {"transcribe", "synthesize"}
    recipes = [each for each in context.recipes.values() if each.names & wanted]
    known = [each.name for each in recipes if each.names & {*trials.RELEASED}]
    kind = gr.Radio([OF_RUN, RELEASED], value=OF_RUN, label="Recogniser" if command else "Try")
    with gr.Row():
        run = gr.Dropdown([], label="Run", info="that has weights", min_width=200)
        weights = gr.Dropdown([], label="Weights", info="of which moment", min_width=200)
        recipe = gr.Dropdown(
            known, value=next(iter(known), None), label="Recipe", visible=False, min_width=200
        )
        path = gr.Dropdown(
            [],
            label="Released model",
            info="a folder or file in the data",
            visible=False,
            min_width=200,
        )
        language = gr.Textbox(
            label="Language", info="a code such as en; may stay empty", visible=False
        )
    with gr.Row(visible=not command):
        device = gr.Radio(
            devices, value=devices[0], label="Where", info=card or "there is no GPU here"
        )
        allowed = gr.Checkbox(
            False,
            label="Use the GPU also while it trains",
            info="the training may run out of memory",
            visible=bool(card),
        )
    return Choice(kind, run, weights, recipe, path, language, device, allowed)


def connect(
    context: Context, shown: Callable, chosen: gr.State, choice: Choice, command: str = ""
) -> list[Callable]:
    """Finds what there is to choose from when `shown` happens; `chosen` as in `Shared`, `command`
    as in `choose`. Returns the triggers of what shows the chosen model."""

    def choices(name: str | None, run: str | None, path: str | None) -> tuple:
        """The runs and the released models of now. `name`: the run that the other tabs look at."""
        names = [each.name for each in usable(context, command)]
        return one_of(names, name, run), one_of(context.places.models(), None, path)

    def weights(run: str | None, before: str | None) -> gr.Dropdown:
        return weights_of(context, run, before)

    def switch(kind: str) -> list:
        is_run = kind == OF_RUN
        of_run = [gr.Dropdown(visible=is_run)] * 2
        return [*of_run, *[gr.Dropdown(visible=not is_run)] * 2, gr.Textbox(visible=not is_run)]

    paths = [choice.run, choice.path]
    found = [
        on(shown, choices, [chosen, *paths], paths),
        on(choice.run.input, lambda name: name, choice.run, chosen),
    ]
    looks = [on(each.then, weights, [choice.run, choice.weights], choice.weights) for each in found]
    looks.append(on(choice.kind.input, switch, choice.kind, choice.all()[1:6]))
    triggers = [each.then for each in looks]
    for control in (choice.weights, choice.recipe, choice.path, choice.device):
        triggers.append(control.input)
    return triggers


def one_of(names: list[str], wanted: str | None, before: str | None) -> gr.Dropdown:
    """A dropdown of `names`: `wanted` is chosen, or else what was chosen `before`, or the first."""
    value = next((each for each in (wanted, before, *names) if each in names), None)
    return gr.Dropdown(choices=names, **changed(value, before))


def changed(value: str | None, before: str | None) -> dict:
    """The value of a control, if it is another than `before`. One that stays is not sent: the user
    may have chosen something else before this answer comes."""
    return {} if value == before else {"value": value}


def usable(context: Context, command: str = "") -> list[Run]:
    """The runs that have weights, of recipes that know `command` if there is one."""
    found = [run for run in runs.list_runs(context.places.runs) if outputs.weights(run.folder)]
    knows = {name for name, each in context.recipes.items() if command in each.commands}
    return [run for run in found if not command or run.recipe in knows]


def weights_of(context: Context, name: str | None, before: str | None) -> gr.Dropdown:
    """The weights of a run to choose from; those of the name `before` if the run has them."""
    found = [path.name for path in outputs.weights(context.run(name).folder)] if name else []
    steps = [int(each) for name in found for each in CHECKPOINT.findall(name)]
    labels = ["best evaluation"] * (BEST in found) + [f"step {s}" for s in steps]
    choices = list(zip(labels, found, strict=True))
    value = before if before in found else next(iter(found), None)
    return gr.Dropdown(choices=choices, **changed(value, before))


def recipe_of(context: Context, name: str | None) -> Recipe:
    recipe = context.recipes.get(name or "")
    if recipe is None or recipe.fault:
        fault = recipe.fault if recipe else f"there is no recipe {name!r}"
        raise UsageError(f"this cannot be used: {fault}")
    return recipe


def model_of(context: Context, chosen: Choice) -> tuple[Recipe, Run | None, Model]:
    if chosen.kind == OF_RUN:
        run = context.run(chosen.run)
        return (recipe_of(context, run.recipe), run, trials.model_of_run(run, chosen.weights))
    recipe = recipe_of(context, chosen.recipe)
    if not chosen.path:
        raise UsageError("there is no released model in the folder of the data: copy one there")
    model = trials.released_model(context.places, recipe, chosen.path, chosen.language)
    return recipe, None, model
