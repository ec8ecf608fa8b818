"""Functions that the tabs of the page share."""

from dataclasses import dataclass
from pathlib import Path

import gradio as gr

# How `gr.Markdown` shows the HTML of `webui.views`.
HTML = {"sanitize_html": False, "latex_delimiters": []}


@dataclass(frozen=True)
class Shared:
    """`tab` is the own one, whose `select` is the time to read the disk anew. `settings` is what
    the form of a training shows (see `commands.command`), `chosen` the run that is looked at."""

    tabs: gr.Tabs  # with the ids "data", "train", "runs", "try", "export"
    tab: gr.Tab
    settings: gr.State
    chosen: gr.State


def with_own_names(payload) -> list[tuple[str, str]]:
    """Uploaded files as pairs (path, the name that the user knows). In place of
    `preprocess` of `gr.File`, which gives paths alone, whose names lack some signs."""
    return [(file.path, file.orig_name or Path(file.path).name) for file in payload or []]
