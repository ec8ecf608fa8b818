"""Further settings in the files of a streaming model and of a model with a prompt: between the
values by their keys (`Family.nemo`, `.hf` and `.hf_processor` of settings.py) and a
configuration."""

from pathlib import Path

from common import records
from common.errors import UsageError
from models.parakeet.languages import AUTO, SLOTS, are_slots

# Of the released models; a file may not say with which it was trained.
LOOKAHEADS = (0, 1, 3, 6, 13)
FILES = "window lookahead lookaheads contexts slots width auto languages".split()


def nested(values: dict, path: Path) -> tuple[dict, dict[str, int]]:
    """The configuration and the languages of a model with these values. Raises `UsageError`."""
    config = {name: value for name, value in values.items() if name not in FILES}
    names: dict[str, int] = {}
    if "contexts" in values:
        config["streaming"] = _contexts(values["contexts"], path)
    elif "window" in values:
        config["streaming"] = _window(values, path)
    if "slots" in values:
        width = values.get("width")
        if width is None and type(config["d_model"]) is int:
            width = 2 * config["d_model"]  # as in NeMo
        config["prompts"] = {"slots": values["slots"], "width": width}
        names = _languages(values, path)
    return config, names


def _window(values: dict, path: Path) -> dict:
    """`streaming` of Hugging Face's form: `window` is the frames before a chunk and one of it."""
    window = values["window"]
    if not records.is_within(window, range(2, 10_002)):
        raise UsageError(f"{path}: sliding_window is {str(window)[:40]!r}")
    usual = values["lookahead"]
    listed = values["lookaheads"]
    if not isinstance(listed, list):
        listed = [r for r in LOOKAHEADS if (window - 1) % (r + 1) == 0]
    return {"left": window - 1, "lookaheads": [usual, *(r for r in listed if r != usual)]}


def _contexts(contexts, path: Path) -> dict:
    """`streaming` of NeMo's form: [left, look-ahead] or a list of them."""
    if isinstance(contexts, list) and contexts and not isinstance(contexts[0], list):
        contexts = [contexts]
    try:
        lefts, lookaheads = zip(*contexts, strict=True)
        (left,) = set(lefts)
    except (TypeError, ValueError):
        raise UsageError(
            f"{path}: encoder.att_context_size is {str(contexts)[:80]!r}; this recipe's network"
            " takes pairs with one number of frames before a chunk"
        ) from None
    return {"left": left, "lookaheads": list(lookaheads)}


def _languages(values: dict, path: Path) -> dict[str, int]:
    names = values["languages"]
    if names is None:
        names = dict(SLOTS)
    if isinstance(names, dict):  # Norwegian without quotes is a truth value in yaml
        names = {"no" if name is False else name: slot for name, slot in names.items()}
    slots = values["slots"]
    are_fine = are_slots(names) and names and records.is_within(slots, range(1, 4097))
    if not are_fine or max(names.values()) >= slots:
        shown = str(slots)[:40]
        raise UsageError(f"{path}: its prompt_dictionary is not one of names and {shown} slots")
    return names


def flat(config: dict, languages: dict[str, int]) -> dict:
    """The values that the files of a model have; `config`'s, too."""
    values = dict(config)
    if streaming := config.get("streaming"):
        left = streaming["left"]
        values["window"] = left + 1
        values["lookahead"] = streaming["lookaheads"][0]
        values["lookaheads"] = [*streaming["lookaheads"]]
        values["contexts"] = [[left, lookahead] for lookahead in streaming["lookaheads"]]
    if prompts := config.get("prompts"):
        values["slots"] = prompts["slots"]
        values["width"] = prompts["width"]
        values["auto"] = languages.get(AUTO, 0)
        values["languages"] = dict(languages)
    return values
