"""Events of the page: failures are shown in one line, and none is part of a public API."""

import functools
from collections.abc import Callable

import gradio as gr

from common.errors import Failure
from webui import views
from webui.catalogue import labelled

SECONDS = 30  # that a message is shown


def on(trigger: Callable, action: Callable, inputs=None, outputs=None, **settings):
    """Calls `action` at `trigger`, such as `button.click`. A `Failure` becomes a message."""

    @functools.wraps(action)
    def run(*values):
        try:
            return action(*values)
        except Failure as failure:
            # Gradio shows messages as HTML, and this one may name a file.
            text = views.text(labelled(str(failure)))
            raise gr.Error(text, duration=SECONDS, print_exception=False) from None

    return trigger(run, inputs, outputs, api_visibility="private", **settings)
