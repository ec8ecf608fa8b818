"""The Try tab: what a trained or released model hears or says."""

from dataclasses import dataclass

import gradio as gr

from common.checkpoint import CHECKPOINT
from common.errors import Failure, UsageError
from speech.text import for_scoring
from webui import outputs, plans, runs, trials, views
from webui.catalogue import Recipe
from webui.context import Context
from webui.runs import Run
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared
from webui.trials import CPU, GPU, Model, Utterance

OF_RUN, RELEASED = "A run", "A released model"
NOTHING = "nothing was recognised"
NO_EVALUATION = "<p>This run has no results of an evaluation set yet.</p>"
SHOWN = 10  # utterances of a table
SAID = 50  # rows of a history
MOST_WORDS = 1_000  # of a table of times
WEIGHTS = {"best.safetensors": "best evaluation"}
SOUND = {"type": "filepath", "sources": ["upload", "microphone"], "buttons": ["download"]}
WORST = "The worst utterances of the last evaluation"
MARKS = (
    "Struck out: words of the reference that were not heard. Underlined: words that were heard in"
    " their place, or in addition. Texts are compared without punctuation."
)


@dataclass(frozen=True)
class Choice:
    """The controls that say which model is tried, and where. Their values are the first inputs of
    every event."""

    kind: gr.Radio
    run: gr.Dropdown
    weights: gr.Dropdown
    recipe: gr.Dropdown
    path: gr.Dropdown
    language: gr.Textbox
    device: gr.Radio
    allowed: gr.Checkbox

    def all(self) -> list:
        return list(vars(self).values())


@dataclass(frozen=True)
class Chosen:
    """What these controls say."""

    kind: str
    run: str | None
    weights: str | None
    recipe: str | None
    path: str | None
    language: str
    device: str
    allowed: bool


def build(context: Context, shared: Shared) -> None:
    choice = _choose(context)
    state = gr.Markdown(**HTML)
    with gr.Column(visible=False) as hearing:
        heard = _hearing(context, choice)
    with gr.Column(visible=False) as speaking:
        said = _speaking(context, choice)
    clip = said[0]

    def choices(name: str | None, run: str | None, path: str | None) -> tuple:
        """The runs and the released models that there are now. `name` is the run that the other
        tabs look at."""
        names = [each.name for each in usable(context)]
        run = next((each for each in (name, run) if each in names), next(iter(names), None))
        models = context.places.models()
        path = path if path in models else next(iter(models), None)
        return gr.Dropdown(choices=names, value=run), gr.Dropdown(choices=models, value=path)

    def weights(run: str | None, before: str | None) -> gr.Dropdown:
        return weights_of(context, run, before)

    def switch(kind: str) -> list:
        is_run = kind == OF_RUN
        of_run = [gr.Dropdown(visible=is_run)] * 2
        return [*of_run, *[gr.Dropdown(visible=not is_run)] * 2, gr.Textbox(visible=not is_run)]

    def look(voice: str | None, *values) -> list:
        return _look(context, voice, Chosen(*values))

    paths = [choice.run, choice.path]
    chosen = [
        on(shared.tab.select, choices, [shared.chosen, *paths], paths),
        on(choice.run.input, lambda name: name, choice.run, shared.chosen),
    ]
    looks = [
        on(each.then, weights, [choice.run, choice.weights], choice.weights) for each in chosen
    ]
    looks.append(on(choice.kind.input, switch, choice.kind, choice.all()[1:6]))
    triggers = [each.then for each in looks]
    for control in (choice.weights, choice.recipe, choice.path, choice.device):
        triggers.append(control.input)
    for trigger in triggers:
        on(trigger, look, [clip, *choice.all()], [state, hearing, speaking, *heard, *said])


# --- controls -------------------------------------------------------------------------------------


def _choose(context: Context) -> Choice:
    card = plans.this_card()
    devices = [GPU, CPU] if card else [CPU]
    known = [recipe.name for recipe in context.recipes.values() if _uses(recipe)]
    kind = gr.Radio([OF_RUN, RELEASED], value=OF_RUN, label="Try")
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
    with gr.Row():
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


def _hearing(context: Context, choice: Choice) -> list:
    """The controls of recognisers. Returns those that show what a run's evaluation got wrong."""
    audio = gr.Audio(label="Recording", **SOUND)
    beside = gr.Checkbox(label="Also by the released model that the run began from")
    button = gr.Button("Transcribe", variant="primary")
    text = gr.Textbox(label="Transcript", lines=2, interactive=False)
    other = gr.Textbox(
        label="Transcript of the released model", lines=2, interactive=False, visible=False
    )
    times = gr.Markdown(**HTML)
    worst = gr.Markdown(**HTML)
    best = gr.Markdown(**HTML)

    def transcribe(path: str | None, with_released: bool, *values) -> list:
        chosen = Chosen(*values)
        recipe, run, model = _model(context, chosen)
        recording = trials.checked_audio(path, "recording")
        before = trials.released_before(context.places, recipe, run) if run else None
        models = [each for each in (model, before if with_released else None) if each]
        found, texts = [], []
        for each in models:
            words = _words(context, each, chosen)
            found.append(trials.transcribe(context.models, recipe.name, recording, words))
            info = f"by {each.label}"  # another model may be chosen before this is read
            texts.append(
                gr.Textbox(found[-1]["text"], info=info, placeholder=NOTHING, visible=True)
            )
        texts += [gr.Textbox(visible=False)] * (2 - len(texts))
        return [*texts, _times(found[0])]

    on(button.click, transcribe, [audio, beside, *choice.all()], [text, other, times])
    on(audio.change, lambda: ("", gr.Textbox(visible=False), ""), None, [text, other, times])
    return [beside, worst, best]


def _speaking(context: Context, choice: Choice) -> list:
    """The controls of speech synthesis. Returns those that show what a model can use, and what it
    has said."""
    text = gr.Textbox(label="Text", lines=3, max_length=trials.LONGEST_TEXT)
    with gr.Row():
        upload = gr.Audio(label="Reference clip of the voice", **SOUND)
        clip = gr.Dropdown(
            [], label="Or a clip that is there", info="used if nothing was dropped", min_width=240
        )
    with gr.Row():
        temperature = gr.Slider(
            0.05, 1.5, value=0.75, step=0.05, label="Temperature", info="lower is more even"
        )
        seed = gr.Number(1, precision=0, minimum=0, label="Seed", info="another seed speaks anew")
    button = gr.Button("Speak", variant="primary")
    result = gr.Markdown(**HTML)
    history = gr.Markdown(**HTML)
    held_out = gr.Markdown(**HTML)

    def speak(said: str, dropped: str | None, named: str | None, heat: float, number: int, *values):
        chosen = Chosen(*values)
        _, _, model = _model(context, chosen)
        words = _words(context, model, chosen)
        if dropped:
            voice = trials.keep_voice(
                context.places, model, trials.checked_audio(dropped, "reference clip")
            )
        elif named:
            voice = trials.checked_audio(str(context.places.file(named)), "reference clip")
        else:
            raise UsageError("there is no voice: drop or record a reference clip, or choose one")
        wish = trials.Wish(said, voice, float(heat), int(number or 0))
        row = trials.speak(context.models, model, wish, words)
        return _spoken(str(model.folder / row["file"])), _history(context, model)

    inputs = [text, upload, clip, temperature, seed, *choice.all()]
    on(button.click, speak, inputs, [result, history])
    return [clip, history, held_out]


# --- what is chosen -------------------------------------------------------------------------------


def _uses(recipe: Recipe) -> bool:
    """Whether a recipe can be tried with a released model."""
    names = {option.name for option in recipe.options}
    return bool(names & {"transcribe", "synthesize"} and names & set(trials.RELEASED))


def usable(context: Context) -> list[Run]:
    """The runs that have weights."""
    return [run for run in runs.list_runs(context.places.runs) if outputs.weights(run.folder)]


def weights_of(context: Context, name: str | None, before: str | None) -> gr.Dropdown:
    """The weights of a run to choose from; those of the name `before` if the run has them."""
    found = [path.name for path in outputs.weights(context.run(name).folder)] if name else []
    steps = [int(each) for name in found for each in CHECKPOINT.findall(name)]
    labels = [WEIGHTS[name] for name in found if name in WEIGHTS] + [f"step {s}" for s in steps]
    choices = list(zip(labels, found, strict=True))
    value = before if before in found else next(iter(found), None)
    return gr.Dropdown(choices=choices, value=value)


def recipe_of(context: Context, name: str | None) -> Recipe:
    recipe = context.recipes.get(name or "")
    if recipe is None or recipe.fault:
        fault = recipe.fault if recipe else f"there is no recipe {name!r}"
        raise UsageError(f"this cannot be used: {fault}")
    return recipe


def _model(context: Context, chosen: Chosen) -> tuple[Recipe, Run | None, Model]:
    if chosen.kind == OF_RUN:
        run = context.run(chosen.run)
        return (
            recipe_of(context, run.recipe),
            run,
            trials.model_of_run(context.places, run, chosen.weights),
        )
    recipe = recipe_of(context, chosen.recipe)
    if not chosen.path:
        raise UsageError("there is no released model in the folder of the data: copy one there")
    model = trials.released_model(context.places, recipe, chosen.path, chosen.language)
    return recipe, None, model


def _words(context: Context, model: Model, chosen: Chosen) -> tuple[str, ...]:
    return trials.on_device(model, context.places, chosen.device, chosen.allowed)


def _look(context: Context, voice: str | None, chosen: Chosen) -> list:
    """What is shown of the chosen model: a message; the two panels; whether there is a released
    model beside it, worst and best utterances; voices, history and held-out sentences."""
    try:
        recipe, run, model = _model(context, chosen)
    except Failure as failure:
        nothing = "There is no run with weights yet: the Train tab starts one."
        message = nothing if chosen.kind == OF_RUN and not chosen.run else str(failure)
        hidden = [gr.Column(visible=False)] * 2
        return [f"<p>{views.text(message)}</p>", *hidden, *[gr.skip()] * 6]
    hears = "transcribe" in recipe.commands
    speaks = "synthesize" in recipe.commands
    message = "" if hears or speaks else f"{recipe.name} has nothing to try here."
    training = runs.on_gpu(context.places.runs) if chosen.device == GPU else []
    if training:
        message = (
            f"{training[0].name} is training on the GPU. This model would be loaded beside it."
        )
    before = trials.released_before(context.places, recipe, run) if run else None
    ranked = trials.evaluated(run) if run and hears else []
    worst = _utterances(context, ranked[:SHOWN], WORST, MARKS) or NO_EVALUATION
    voices = trials.voices(context.places, run, model.folder) if speaks else []
    clips = [path for _, path in voices]
    voice = voice if voice in clips else next(iter(clips), None)
    return [
        f"<p>{views.text(message)}</p>" if message else "",
        gr.Column(visible=hears),
        gr.Column(visible=speaks),
        gr.Checkbox(visible=before is not None),
        worst if run and hears else "",
        _utterances(context, ranked[SHOWN:][: -SHOWN - 1 : -1], "The best utterances"),
        gr.Dropdown(choices=voices, value=voice),
        _history(context, model) if speaks else "",
        _held_out(context, run) if run and speaks else "",
    ]


# --- tables ---------------------------------------------------------------------------------------


def _player(context: Context, path: str, offset: float = 0.0, seconds: float | None = None) -> str:
    """A player, if the page may read the file."""
    try:
        return views.player(str(context.places.file(path)), offset, seconds)
    except Failure:
        return "not in the folders of this page"


def _times(row: dict) -> str:
    """The times of words or, without them, of the pieces that a recording was cut into."""
    parts = row.get("words") or row.get("pieces", [])
    if len(parts) < 2:
        return ""
    rows = [
        [f"{part['start']:.2f}", f"{part['end']:.2f}", views.text(part["text"])]
        for part in parts[:MOST_WORDS]
    ]
    caption = "Words" if row.get("words") else "Pieces that the recording was cut into"
    if len(parts) > MOST_WORDS:
        caption += f": the first {MOST_WORDS} of {len(parts)}"
    return views.table(["from, s", "to, s", "text"], rows, caption)


def _utterances(context: Context, found: list[Utterance], title: str, marks: str = "") -> str:
    rows = []
    for each in found:
        w = each.words
        texts = for_scoring(each.reference), for_scoring(each.hypothesis)
        counts = f"{w.total} of {w.length}"
        if w.total:
            counts += f": {w.substitutions} replaced, {w.deletions} missing, {w.insertions} added"
        rows.append(
            [
                _player(context, each.path, each.offset, each.seconds),
                views.difference(*texts),
                views.text(counts),
                f"{100 * each.characters.rate:.0f} %",
            ]
        )
    header = ["play", "difference", "wrong words", "wrong characters"]
    if not rows:
        return ""
    return f"<div>{views.table(header, rows, title)}<p>{views.text(marks)}</p></div>"


def _spoken(path: str) -> str:
    return f"<p>{views.player(path)} {views.download(path)}</p>"


def _history(context: Context, model: Model) -> str:
    rows = []
    for row in trials.history(context.places, model.folder)[:SAID]:
        when = views.moment(row.get("time"))
        how = f"temperature {row.get('temperature')}, seed {row.get('seed')}, {when}"
        voice = str(row.get("voice", "")).rsplit("/", 1)[-1]
        cells = [views.text(row.get(name, "")) for name in ("text", "model")]
        rows.append([_spoken(row["path"]), *cells, views.text(voice), views.text(how)])
    header = ["play", "text", "weights", "voice", "how"]
    return views.table(header, rows, "What was said") if rows else ""


def _held_out(context: Context, run: Run) -> str:
    rows = []
    for row in trials.held_out(context.places, run):
        sounds = [row.get(kind, "") for kind in trials.KINDS]
        texts = [views.text(row["text"]), views.text(row["speaker"])]
        rows.append([*texts, *(_player(context, path) if path else "" for path in sounds)])
    header = ["text", "speaker", "recording", "recording from its codes", "spoken by the model"]
    title = "Sentences that the run has not learned, spoken at its end"
    table = views.table(header, rows)
    return f"<details><summary>{title}</summary>{table}</details>" if rows else ""
