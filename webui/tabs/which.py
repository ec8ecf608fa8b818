"""A part of the Data tab: which recipe, asked in plain words. The answers are those of README's
"Three questions", whose table for each language and purpose is `advise`."""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import gradio as gr

from common.errors import Failure
from models.whisper.tokenizer import LANGUAGES, RELATED
from speech.data.hours import hours_of
from speech.writing.languages import code_of, described
from webui import plans, views
from webui.corrections import Table
from webui.places import Places
from webui.tabs.events import on
from webui.tabs.shared import HTML

TEXT, VOICE, SOLD = "text of what is said", "a voice", "a voice that may be sold"
NONE, SMALL, LARGE = "none", "4 to 7 GB", "8 GB or more"
# Languages of parakeet-tdt-0.6b-v3.
PARAKEETS = "bg hr cs da nl en et fi fr de el hu it lv lt mt pl pt ro ru sk sl es sv uk".split()
LEAST = 10.0  # minutes to begin with, by README
OF_OWN_VOICE = 60.0  # minutes of one speaker for a voice from nothing
FROM_NOTHING = 20 * 60.0  # minutes from which a model from nothing is worth a try
ENOUGH = 21.0  # hours, after which nobody counts on


@dataclass(frozen=True)
class Released:
    """A released model: its licence, about how large it is, the line that fetches it, in which
    FOLDER is that of the data, and what is named then, as which option."""

    name: str
    licence: str
    size: str
    fetch: str
    path: str
    option: str


SMALL_WHISPER, BASE_WHISPER = (
    Released(
        f"Whisper {name}",
        "Apache-2.0",
        size,
        f"hf download openai/whisper-{name} --local-dir FOLDER/whisper-{name}",
        f"whisper-{name}",
        "model_dir",
    )
    for name, size in (("small", "1 GB"), ("base", "0.3 GB"))
)
PARAKEET = Released(
    "Parakeet TDT 0.6B v3",
    "CC-BY-4.0",
    "2.5 GB",
    "hf download nvidia/parakeet-tdt-0.6b-v3 --local-dir FOLDER/parakeet",
    "parakeet/parakeet-tdt-0.6b-v3.nemo",
    "model_file",
)
OMNI = Released(
    "omniASR CTC 300M",
    "Apache-2.0",
    "1.3 GB",
    "cd FOLDER && curl -LO https://dl.fbaipublicfiles.com/mms/omniASR-CTC-300M.pt && curl -LO"
    " https://dl.fbaipublicfiles.com/mms/omniASR_tokenizer.model",
    "omniASR-CTC-300M.pt",
    "model_file",
)
XTTS = Released(
    "XTTS-v2",
    "Coqui Public Model License: not for commercial use, nor is what you train",
    "2 GB",
    "hf download coqui/XTTS-v2 model.pth config.json vocab.json dvae.pth mel_stats.pth LICENSE.txt"
    " --local-dir FOLDER/XTTS-v2",
    "XTTS-v2",
    "model_dir",
)


@dataclass(frozen=True)
class Advice:
    """A recipe, what it begins from, the value of --language, and what is to be said."""

    recipe: str
    model: Released | None
    language: str
    said: list[str]


def advise(language: str, minutes: float, purpose: str, gpu: str) -> Advice:
    """What README's tables say for a language, minutes of speech (0: not known), and a GPU."""
    code = code_of(language) if language.strip() else ""
    said = []
    if 0 < minutes < LEAST:
        said.append(
            f"{minutes:.0f} minutes are too little: ten are the least to begin with. Record more,"
            " or let a model write a draft of more recordings and correct it."
        )
    if gpu == NONE:
        said.append(
            "Without a GPU, a released model learns slowly, in hours to days. A free notebook (Colab,"
            " Kaggle) has one: README says where."
        )
    if purpose != TEXT:
        return _of_voice(code, minutes, purpose, said)
    if not code:
        said.append("Name the language, and the advice fits it.")
    model, recipe = (BASE_WHISPER if gpu == NONE else SMALL_WHISPER), "whisper_vietnamese"
    relatives = [each for each in RELATED.get(code, ()) if each in LANGUAGES]
    if code in PARAKEETS:
        said.append(f"Parakeet ({PARAKEET.name}) knows this language, too, and writes quicker.")
    elif code in LANGUAGES:
        said.append("Whisper knows this language.")
    elif relatives:
        said.append(f"Whisper does not know it, but a relative: {described(relatives[0])}.")
        code = f"{code}={relatives[0]}"
    else:
        if code:
            said.append("Whisper does not know this language. omniASR knows 1,600.")
        model, recipe = OMNI, "wav2vec2_ctc"
    if minutes >= FROM_NOTHING:
        said.append("There is so much speech that a model from nothing (Konkani) is worth a try.")
    else:
        said.append("A model from nothing would need many hours of speech.")
    return Advice(recipe, model, code, said)


def _of_voice(code: str, minutes: float, purpose: str, said: list[str]) -> Advice:
    if purpose == SOLD or minutes >= OF_OWN_VOICE:
        if 0 < minutes < OF_OWN_VOICE:
            said.append("A voice from nothing needs an hour or more of one speaker, who agrees.")
        said = [*said, "It is trained from nothing: it is yours."]
        return Advice("matcha_voice", None, code, said)
    return Advice("xtts_amharic", XTTS, code, said)


def build(places: Places, table: list, form: list, looks: Callable) -> None:
    """The questions about a `table`, the controls of its name and tier. The answer is put into the
    `form`, those of the recipe and of its options: `looks(recipe, values)` gives the latter."""
    with gr.Accordion("Which recipe? Four questions", open=True):
        with gr.Row():
            language = gr.Textbox(label="Language that is spoken", info="a name or a code")
            minutes = gr.Number(
                0, minimum=0, label="Minutes of speech", info="0: those of the table above"
            )
        card = plans.this_card()
        with gr.Row():
            purpose = gr.Radio([TEXT, VOICE, SOLD], value=TEXT, label="What it shall make")
            gpu = gr.Radio([NONE, SMALL, LARGE], value=LARGE if card else NONE, label="GPU")
        button = gr.Button("Advise")
        answer = gr.Markdown(**HTML)

    def advised(language: str, given: float | None, purpose: str, gpu: str, *table) -> tuple:
        """The advice, the path of its model if that is there, and the advice as HTML."""
        count = given or _minutes(places, *table)
        advice = advise(language or "", count, purpose, gpu)
        path = ""
        if advice.model and places.data.joinpath(advice.model.path).exists():
            path = advice.model.path
        return advice, path, _shown(places, advice, count, path)

    def answered(*values) -> list:
        advice, path, said = advised(*values)
        values = {"language": advice.language, "model_dir": "", "model_file": ""}
        if path:
            values[advice.model.option] = path
        return [said, gr.update(value=advice.recipe), *looks(advice.recipe, values)]

    def warned(*values) -> str:
        """What is said of a table that was chosen: the form stays, which may be filled."""
        with suppress(Failure):  # of a name that is not a table's, which the buttons report
            return f"{advised(*values)[2]}<p>Press Advise, and this is chosen below.</p>"
        return ""

    asked = [language, minutes, purpose, gpu, *table]
    on(button.click, answered, asked, [answer, *form])
    on(table[0].change, warned, asked, answer, show_progress="hidden")


def _minutes(places: Places, name: str | None, tier: str | None) -> float:
    if not name:
        return 0.0
    table = Table(places.table(name), tier or "")
    tiers = [tier] if tier and table.latest == table.path else []
    return 60 * hours_of(table.latest, enough=ENOUGH, tiers=tiers)


def _shown(places: Places, advice: Advice, minutes: float, path: str) -> str:
    lines = [f"The recipe is <b>{advice.recipe}</b>; it learns any language, whatever its name."]
    if minutes:
        lines.append(f"{minutes:.0f} minutes of speech.")
    lines += map(views.text, advice.said)
    model = advice.model
    if model:
        about = f"{model.name}, about {model.size}, licence: {model.licence}"
        lines.append(f"Released model to begin from: {views.text(about)}.")
    if model and path:
        lines.append(f"It is there: <b>{views.text(path)}</b>, and chosen below.")
    elif model:
        fetch = model.fetch.replace("FOLDER", str(places.data))
        place = Path(places.data, model.path)
        lines.append(
            f"Fetch it once, in a terminal: <code>{views.text(fetch)}</code>. Then there is"
            f" {views.text(place)}; press Advise again."
        )
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"
