"""The Try tab: what a trained or released model hears or says."""

from pathlib import Path

import gradio as gr

from common.errors import Failure, UsageError
from speech.writing.text import for_scoring
from webui import runs, trials, views
from webui.context import Context
from webui.tabs.choice import OF_RUN, Choice, changed, choose, connect, model_of
from webui.tabs.events import on
from webui.tabs.shared import HTML, Shared, with_own_names
from webui.trials import GPU, Model, Utterance

LONGEST_TEXT = 5_000  # characters that are spoken at once
NOTHING = "nothing was recognised"
NO_EVALUATION = "<p>This run has no results of an evaluation set yet.</p>"
SHOWN = 10  # utterances of a table
SAID = 50  # rows of a history
MOST_WORDS = 1_000  # of a table of times
SOUND = {"type": "filepath", "sources": ["upload", "microphone"], "buttons": ["download"]}
WORST = "The worst utterances of the last evaluation"
MARKS = (
    "Struck out: words of the reference that were not heard. Underlined: words that were heard in"
    " their place, or in addition. Texts are compared without punctuation."
)


def build(context: Context, shared: Shared) -> None:
    choice = choose(context)
    state = gr.Markdown(**HTML)
    with gr.Column(visible=False) as hearing:
        heard = _hearing(context, choice)
    with gr.Column(visible=False) as speaking:
        said = _speaking(context, choice)
    clip, *_, typed = said

    def look(voice: str | None, text: str, *values) -> list:
        return _look(context, voice, text, Choice(*values))

    triggers = connect(context, shared.tab.select, shared.chosen, choice)
    for trigger in triggers:
        on(trigger, look, [clip, typed, *choice.all()], [state, hearing, speaking, *heard, *said])


# --- controls -------------------------------------------------------------------------------------


def _hearing(context: Context, choice: Choice) -> list:
    """The controls of recognisers. Returns those that show what a run's evaluation got wrong."""
    with gr.Row():
        audio = gr.Audio(label="Recording", min_width=240, **SOUND)
        several = gr.File(
            label="Or several recordings", file_count="multiple", height="11rem", min_width=240
        )
        several.preprocess = with_own_names
    beside = gr.Checkbox(label="Also by the released model that the run began from")
    subtitles = gr.Checkbox(label="Subtitles (.srt) to download")
    button = gr.Button("Transcribe", variant="primary")
    text = gr.Textbox(label="Transcript", lines=2, interactive=False)
    other = gr.Textbox(
        label="Transcript of the released model", lines=2, interactive=False, visible=False
    )
    files = gr.File(label="Subtitles", file_count="multiple", interactive=False, visible=False)
    times = gr.Markdown(**HTML)
    worst = gr.Markdown(**HTML)
    best = gr.Markdown(**HTML)
    results = [text, other, files, times]

    def transcribe(path: str | None, pairs: list, released: bool, wants: bool, *values) -> list:
        recordings = pairs or [(path, Path(path or "").name)]
        return _transcribe(context, recordings, released, wants, Choice(*values))

    def forget() -> list:
        return [gr.Textbox("", visible=True), *[gr.Textbox(visible=False)] * 2, ""]

    # One after the other: another recording empties the results of the one before, also if it came
    # while that was transcribed, and never those that follow.
    order = {"concurrency_id": "heard"}
    asked = [audio, several, beside, subtitles, *choice.all()]
    on(button.click, transcribe, asked, results, **order)
    for trigger in (audio.change, several.upload, several.delete, several.clear):
        on(trigger, forget, None, results, show_progress="hidden", **order)
    return [beside, worst, best]


def _transcribe(
    context: Context, recordings: list[tuple], released: bool, wants: bool, chosen: Choice
) -> list:
    """The transcript of one of the recordings (file, its user's name), and of the released model;
    the subtitles, if the user wants them; the times of a recording, or a table of several, in which
    each has its own error."""
    recipe, run, model = model_of(context, chosen)
    before = trials.released_before(context.places, recipe, run) if run else None
    models = [each for each in (model, before if released else None) if each]
    is_one = len(recordings) == 1
    rows, cells = [], []
    for path, name in recordings:
        cells.append([views.text(name)])
        for each in models:
            words = _words(context, each, chosen)
            try:
                audio = trials.checked_audio(path, "recording")
                extra = trials.times_of(recipe, each, before) if wants else []
                row = trials.transcribe(context.models, recipe.name, audio, words, extra)
            except Failure as failure:
                if is_one:
                    raise
                row = {"text": f"({failure})", "failed": True}
            rows.append({**row, "name": name, "is_chosen": each is model})
            cells[-1].append(views.text(row["text"]))
    written = [row for row in rows if row["is_chosen"] and "failed" not in row]
    made = trials.write_subtitles(written) if wants else []
    files = gr.File(value=made, visible=bool(made))
    if not is_one:
        header = ["recording", *(each.label for each in models)]
        hidden = [gr.Textbox(visible=False)] * 2
        return [*hidden, files, views.table(header, cells, "Transcripts")]
    texts = [
        gr.Textbox(row["text"], info=f"by {each.label}", placeholder=NOTHING, visible=True)
        for row, each in zip(rows, models, strict=True)  # another may be chosen before it is read
    ]
    texts += [gr.Textbox(visible=False)] * (2 - len(texts))
    return [*texts, files, _times(rows[0])]


def _speaking(context: Context, choice: Choice) -> list:
    """The controls of speech synthesis. Returns those of what a model can use and has said."""
    text = gr.Textbox(label="Text", lines=3, max_length=LONGEST_TEXT)
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
        chosen = Choice(*values)
        recipe, _, model = model_of(context, chosen)
        words = _words(context, model, chosen)
        if not recipe.clones:
            voice = None
        elif dropped:
            voice = trials.keep_voice(model, trials.checked_audio(dropped, "reference clip"))
        elif named:
            voice = trials.checked_audio(str(context.places.file(named)), "reference clip")
        else:
            raise UsageError("there is no voice: drop or record a reference clip, or choose one")
        wish = trials.Wish(said, voice, float(heat), int(number or 0))
        row = trials.speak(context.models, model, wish, words)
        return _spoken(str(model.folder / row["file"])), _history(context, model)

    inputs = [text, upload, clip, temperature, seed, *choice.all()]
    on(button.click, speak, inputs, [result, history])
    return [clip, history, held_out, text]


def _words(context: Context, model: Model, chosen: Choice) -> tuple[str, ...]:
    return trials.on_device(model, context.places, chosen.device, chosen.allowed)


def _look(context: Context, voice: str | None, text: str, chosen: Choice) -> list:
    """The controls for the chosen model: a message; the two panels; whether there is a released
    model beside it, worst and best utterances; voices, history and held-out sentences; a sentence
    to speak in an empty field, because a voice has the letters of its language alone."""
    try:
        recipe, run, model = model_of(context, chosen)
    except Failure as failure:
        nothing = "There is no run with weights yet: the Train tab starts one."
        message = nothing if chosen.kind == OF_RUN and not chosen.run else str(failure)
        hidden = [gr.Column(visible=False)] * 2
        return [f"<p>{views.text(message)}</p>", *hidden, *[gr.skip()] * 7]
    hears = "transcribe" in recipe.commands
    speaks = "synthesize" in recipe.commands
    message = "" if hears or speaks else f"{recipe.name} has nothing to try here."
    training = runs.on_gpu(context.places.runs) if chosen.device == GPU else []
    if training:
        name = training[0].name
        message = f"{name} is training on the GPU. This model would be loaded beside it."
    before = trials.released_before(context.places, recipe, run) if run else None
    ranked = trials.evaluated(run) if run and hears else []
    worst = _utterances(context, ranked[:SHOWN], WORST, MARKS) or NO_EVALUATION
    voices = trials.voices(context.places, run, model.folder) if speaks else []
    clips = [path for _, path in voices]
    sentences = trials.held_out(context.places, run) if run and speaks else []
    chosen_voice = voice if voice in clips else next(iter(clips), None)
    return [
        f"<p>{views.text(message)}</p>" if message else "",
        gr.Column(visible=hears),
        gr.Column(visible=speaks),
        gr.Checkbox(visible=before is not None),
        worst if run and hears else "",
        _utterances(context, ranked[SHOWN:][: -SHOWN - 1 : -1], "The best utterances"),
        gr.Dropdown(choices=voices, **changed(chosen_voice, voice)),
        _history(context, model) if speaks else "",
        _held_out(context, sentences),
        sentences[0]["text"] if sentences and not text else gr.skip(),
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
    parts = row.get("words") or row.get("segments") or row.get("pieces", [])
    if len(parts) < 2:
        return ""
    rows = []
    for part in parts[:MOST_WORDS]:
        rows.append([f"{part['start']:.2f}", f"{part['end']:.2f}", views.text(part["text"])])
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
        player = _player(context, each.path, each.offset, each.seconds)
        rate = f"{100 * each.characters.rate:.0f} %"
        rows.append([player, views.difference(*texts), views.text(counts), rate])
    if not rows:
        return ""
    header = ["play", "difference", "wrong words", "wrong characters"]
    table = views.table(header, rows, title)
    return f'<div class="stacked">{table}<p>{views.text(marks)}</p></div>'


def _spoken(path: str) -> str:
    return f"<p>{views.player(path)} {views.download(path)}</p>"


def _history(context: Context, model: Model) -> str:
    rows = []
    for row in trials.history(model.folder)[:SAID]:
        when = views.moment(row.get("time"))
        how = f"temperature {row.get('temperature')}, seed {row.get('seed')}, {when}"
        voice = str(row.get("voice", "")).rsplit("/", 1)[-1]
        cells = [views.text(row.get(name, "")) for name in ("text", "model")]
        rows.append([_spoken(row["path"]), *cells, views.text(voice), views.text(how)])
    header = ["play", "text", "weights", "voice", "how"]
    return views.table(header, rows, "What was said") if rows else ""


def _held_out(context: Context, sentences: list[dict]) -> str:
    rows = []
    for row in sentences:
        sounds = [row.get(kind, "") for kind in trials.KINDS]
        texts = [views.text(row["text"]), views.text(row["speaker"])]
        rows.append([*texts, *(_player(context, path) if path else "" for path in sounds)])
    header = ["text", "speaker", "recording", "recording from its codes", "spoken by the model"]
    title = "Sentences that the run has not learned, spoken at its end"
    table = views.table(header, rows)
    return f"<details><summary>{title}</summary>{table}</details>" if rows else ""
