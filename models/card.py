"""The model card of an export: README.md, with the block of metadata that Hugging Face's hub
reads."""

import json
import os
import re
from dataclasses import dataclass, replace
from pathlib import Path

from huggingface_hub import EvalResult, ModelCardData

from common import checkpoint
from speech.data.columns import printable
from speech.data.splits import RunInfo
from speech.writing.languages import code_of
from speech.writing.text import NAMES, for_scoring, in_lower_case

RECOGNITION = "automatic-speech-recognition"  # Hugging Face's pipeline_tag
SYNTHESIS = "text-to-speech"
# How an export is used: a recogniser in transformers; adapters of the class CLASS in peft.
PIPELINE = """
from transformers import pipeline

print(pipeline("automatic-speech-recognition", "FOLDER")("recording.wav")["text"])
"""
PEFT = """
from peft import PeftModel
from transformers import CLASS

base = CLASS.from_pretrained("BASE")  # the folder of the base model
model = PeftModel.from_pretrained(base, "FOLDER")
"""
WITH_LM = """## Use with the language model

`lm.arpa` is an n-gram of the training texts."""
CPML = {
    "license": "other",
    "license_name": "coqui-public-model-license",
    "license_link": "https://coqui.ai/cpml",
}
NVIDIA = {
    "license": "other",
    "license_name": "nvidia-open-model-license",
    "license_link": "https://www.nvidia.com/en-us/agreements/enterprise-software/nvidia-open-model-license/",
}
OPENMDW = {
    "license": "other",
    "license_name": "openmdw-1.1",
    "license_link": "https://openmdw.ai/license/1-1/",
}
PARAKEET = r"(parakeet-(?:tdt|rnnt|ctc)-[\d.]+b(?:-v[23])?|parakeet-tdt_ctc-(?:110m|1\.1b))"
WHISPER = r"(?:whisper-)?((?:tiny|base|small|medium)(?:\.en)?|large(?:-v2|-v3)?)(?:\.pt)?"
TURBO = r"(?:whisper-)?(large-v3-turbo)(?:\.pt)?"
OMNIASR = r"(omniASR-(?:CTC|W2V)-(?:300M|1B|3B|7B))(?:\.pt)?"
WAV2VEC2 = (
    r"(wav2vec2-(?:xls-r-(?:300m|1b|2b)|large-xlsr-53|base(?:-960h)?|large(?:-960h)?(?:-lv60)?"
    r"(?:-self)?)|hubert-(?:base-ls960|large-ll60k|large-ls960-ft|xlarge-ll60k|xlarge-ls960-ft))"
)
MMS = r"(mms-(?:300m|1b(?:-all|-l1107|-fl102)?))"
# Released models by the name of their folder or file: the name on the hub, and the licence there.
RELEASED = (
    (WHISPER, r"openai/whisper-\1", {"license": "apache-2.0"}),
    (TURBO, r"openai/whisper-\1", {"license": "mit"}),
    (rf"{PARAKEET}(?:\.nemo)?", r"nvidia/\1", {"license": "cc-by-4.0"}),
    (r"(parakeet-unified-en-0\.6b)(?:\.nemo)?", r"nvidia/\1", {}),  # sources contradict each other
    (r"(nemotron-speech-streaming-en-0\.6b)(?:\.nemo)?", r"nvidia/\1", NVIDIA),
    (r"(nemotron-3\.5-asr-streaming-0\.6b)(?:\.nemo)?", r"nvidia/\1", OPENMDW),
    (r"XTTS-v2", "coqui/XTTS-v2", CPML),
    (OMNIASR, r"facebook/\1", {"license": "apache-2.0"}),
    (WAV2VEC2, r"facebook/\1", {"license": "apache-2.0"}),
    (MMS, r"facebook/\1", {"license": "cc-by-nc-4.0"}),
)  # fmt: skip
CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)")  # a folder of the hub's cache
SETS = {"train": "training", "replay": "replayed", "val": "evaluation", "test": "test"}
METRICS = ("wer", "cer")


@dataclass(frozen=True)
class Form:
    """The purpose of an export."""

    library: str  # the hub's names of the program
    task: str  # and of the task
    family: str  # such as "Whisper"
    use: str  # a few lines of Python in which FOLDER stands for the export
    with_lm: str = ""  # the same with the language model, if there is one beside the export


@dataclass(frozen=True)
class About:
    """A recipe's knowledge of the weights that it exports. A family fills in what follows
    `results`, unless the recipe does."""

    recipe: str
    base: str | None = None  # the folder or file of released weights that a flag names
    # The file of a run whose weights these are, beside which the loop has noted how they came
    # about; None for released weights, which are only converted.
    weights: Path | None = None
    data: RunInfo | None = None  # what the run has saved about its data
    results: dict | None = None  # what `results.results_of` returns
    languages: tuple[str, ...] | None = None  # their codes
    is_new: bool = False  # whether the weights began at random
    licence: dict | None = None  # of all that derives from the base, whatever its name is
    note: str = ""  # a sentence on the model
    reading: str = NAMES[for_scoring]  # how the recipe compares texts in training


@dataclass(frozen=True)
class Rate:
    """An error rate, a share. `reading`: how texts were compared; `before`: the rate of the weights
    at the start; `is_public`: others on the hub can compare it."""

    set: str
    reading: str
    metric: str
    after: float
    before: float | None = None
    is_public: bool = False


def noted(weights: Path | None) -> dict:
    """The content of the file that the loop has written beside weights; of those that are not of an
    evaluation, how the best ones of their run came about."""
    if weights is None:
        return {}
    best = checkpoint.noted(weights.with_name("best.safetensors"))
    return checkpoint.noted(weights) or {"made_by": best.get("made_by")}


def released(path: str | None) -> tuple[str | None, dict]:
    """The name on the hub, and the licence, of the released weights at this path, by its name; None
    and {} if it tells neither."""
    for part in reversed(Path(path or "").parts):
        if cached := CACHED.fullmatch(part):
            path = cached[2]
            known = released(path)
            name = f"{cached[1]}/{cached[2]}"
            return name, known[1] if known[0] == name else {}
    for pattern, name, licence in RELEASED:
        if match := re.fullmatch(pattern, Path(path or "").name):
            return match.expand(name), licence
    return None, {}


def readme(name: str, about: About, form: Form) -> str:
    """The text of README.md for an export called `name`. Says it in a line, too, if training has
    not changed these weights."""
    made = noted(about.weights)
    unchanged = made.get("step") == 0
    if unchanged:
        print(
            "the best weights are those before training, so the export is what the run began with:"
            " no evaluation after it was better"
        )
    by = made.get("made_by") or {}
    path = None if about.is_new else about.base or by.get("base")
    base, licence = released(path)
    licence = about.licence or licence
    rates = measured(about, by.get("base"), bool(form.with_lm)) + in_training(about, made)
    quoted = json.dumps(name, ensure_ascii=False)[1:-1]  # it is within a string there
    parts = [
        f"---\n{metadata(name, about, form, (base, licence), rates)}---\n\n# {plain(name)}",
        origin(about, form, path and plain(base or Path(path).name), licence, unchanged),
        f"## Use\n\n{code(form.use, quoted)}",
        form.with_lm and f"{WITH_LM}\n\n{code(form.with_lm, quoted)}",
        data_table(about),
        error_table(rates),
        (about.results or {}).get("warning"),
        training(about, made, by),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def code(lines: str, folder: str) -> str:
    return f"```python\n{lines.replace('FOLDER', folder).strip()}\n```"


def plain(text: str) -> str:
    """A name as part of a line or a table of Markdown, which it cannot end, and without HTML."""
    return re.sub(r"[\\`*<>&|\[\]]", r"\\\g<0>", printable(text))


def metadata(
    name: str, about: About, form: Form, base: tuple[str | None, dict], rates: list[Rate]
) -> str:
    """The hub's metadata in YAML, without what is not known. `base`: as `released` returns it."""
    of_training = about.data.sets.get("train", {}) if about.data else {}
    results = [
        EvalResult(
            task_type=form.task,
            dataset_type="own",
            dataset_name=rate.set,
            metric_type=rate.metric,
            metric_value=round(100 * rate.after, 2),
            metric_name=f"{rate.metric.upper()} in %, {rate.reading}",
        )
        for rate in rates
        if rate.is_public
    ]
    index = {}
    if results:
        metrics = list(dict.fromkeys(result.metric_type for result in results))
        index = {"metrics": metrics, "model_name": name, "eval_results": results}
    languages = about.languages or map(code_of, of_training.get("languages", []))
    data = ModelCardData(
        language=list(languages) or None,
        base_model=base[0],
        library_name=form.library,
        pipeline_tag=form.task,
        tags=[form.family.lower(), "speech"],
        **base[1],
        **index,
    )
    return data.to_yaml() + "\n"


def measured(about: About, base: str | None, has_lm: bool) -> list[Rate]:
    """The error rates of an evaluation of these weights, if there was one: those without a language
    model, and then those with it, if the export `has_lm`. `base`: the path of the weights with
    which the run began."""
    results = about.results or {}
    if not results:
        return []
    place = results["title"].partition(",")[0]
    bases = {os.path.realpath(path) for path in (about.base, base) if path}
    is_base = os.path.realpath(results.get("compared_to") or "") in bases
    first_rates = results.get("before", {}) if is_base else {}
    rates = results.get("rates", {})
    rows = rows_of(place, results.get("without_lm", rates), first_rates)
    if has_lm and "without_lm" in results:
        for row in rows_of(f"{place}, with the language model of these recipes", rates, {}):
            rows.append(replace(row, is_public=False))
    return rows


def rows_of(place: str, rates: dict, first_rates: dict) -> list[Rate]:
    """Rows of `metrics.rates`, and of those before training."""
    lower = NAMES[in_lower_case]
    rows = []
    for reading, values in rates.items():
        if reading != lower and values == rates.get(lower):
            continue
        for metric, rate in values.items():
            first = first_rates.get(reading, {}).get(metric, {}).get("rate")
            is_public = reading == lower or len(rates) == 1
            rows.append(Rate(place, reading, metric, rate["rate"], first, is_public))
    return rows


def in_training(about: About, made: dict) -> list[Rate]:
    """The error rates of the watched sets and of the evaluation set, by the loop's notes."""
    rows = []
    metric = made.get("metric")
    if metric in METRICS:
        for name, values in made.get("watched", {}).items():
            by_step = dict(map(tuple, values))
            if made["step"] in by_step:
                place = f"{name}, watched in training"
                rates = by_step[made["step"]], by_step.get(0)
                rows.append(Rate(place, about.reading, metric, *rates))
    for name in METRICS:
        if name in made:
            before = first_value(made) if name == metric else None
            place = "evaluation set, in training"
            rows.append(Rate(place, about.reading, name, made[name], before))
    return rows


def first_value(made: dict) -> float | None:
    """The metric of the evaluation before the first update, if there was one and these weights are
    later ones, by the loop's notes."""
    evaluations = made.get("evaluations") or [[None, None]]
    step, value = evaluations[0]
    return value if step == 0 and made.get("step") else None


def error_table(rates: list[Rate]) -> str:
    if not rates:
        return ""
    lines = [
        "## Error rates",
        "",
        "| set | texts compared | | before, % | after, % |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rate in rates:
        before = "-" if rate.before is None else f"{100 * rate.before:.2f}"
        values = f"{rate.metric.upper()} | {before} | {100 * rate.after:.2f}"
        lines.append(f"| {plain(rate.set)} | {rate.reading} | {values} |")
    return "\n".join(lines)


def origin(about: About, form: Form, base: str | None, licence: dict, unchanged: bool) -> str:
    """A sentence on the model's origin, whether training has not changed it, and its licence."""
    if about.weights is None:
        text = f"{form.family}: {base or 'released weights'}, converted and not trained."
    elif about.is_new:
        text = f"{form.family}, trained from random weights. Its licence is its author's choice."
    else:
        text = f"{form.family}, fine-tuned from {base or 'a released model'}."
        if unchanged:
            text += " Its weights are those before training: no evaluation after it was better."
    if licence == CPML:
        text += (
            f" The weights are under the [{licence['license_name']}]({licence['license_link']}):"
            " **non-commercial use only**, also of the speech that they make."
        )
    elif "license_name" in licence:
        link = f"[{licence['license_name']}]({licence['license_link']})"
        text += f" The licence of {base} is {link}."
    elif licence:
        text += f" The licence of {base} is {licence['license']}."
    elif not about.is_new:
        text += " The licence of that model holds for this one, too."
    if about.note and about.weights:
        text += f" {about.note}"
    if about.data and about.data.demo:
        text += " It was trained on synthetic audio only."
    return text


def data_table(about: About) -> str:
    """Utterances and hours of each set, if the run has saved them."""
    sets = about.data.sets if about.data else {}
    if not sets:
        return ""
    lines = ["## Data", "", "| set | utterances | hours |", "| --- | --- | --- |"]
    for name, numbers in sets.items():
        if name not in SETS:
            continue
        hours = numbers["hours"]
        shown = f"{hours:.1f}" if hours >= 10 else f"{hours:.2f}"
        lines.append(f"| {SETS[name]} | {numbers['utterances']:,} | {shown} |")
    drafted = sum(numbers.get("drafted", 0) for numbers in sets.values())
    if drafted:
        lines += ["", f"A recogniser wrote the texts of {drafted:,} of these utterances."]
    return "\n".join(lines)


def training(about: About, made: dict, by: dict) -> str:
    """Hardware, updates, versions and the command, as far as they were noted."""
    if not by:
        return ""
    facts = [f"on {plain(by['device'])}"] if by.get("device") else []
    if by.get("tier"):
        facts.append(f"tier {plain(by['tier'])}")
    if made.get("step"):
        facts.append(f"weights of update {made['step']}")
    facts += [plain(f"{name} {version}") for name, version in (by.get("versions") or {}).items()]
    metric = made.get("metric")
    if metric not in (None, *METRICS) and metric in made:
        before = first_value(made)
        change = "" if before is None else f", {before:.3f} before training"
        facts.append(f"{plain(metric)} loss of the evaluation set {made[metric]:.3f}{change}")
    text = f"## Training\n\nTrained by `recipes/{about.recipe}.py`"
    text += f" ({', '.join(facts)})." if facts else "."
    if by.get("command"):
        text += f"\n\n```bash\n{by['command']}\n```"
    return text
