"""HTML of the page: tables, players, curves and differences. Every text from a file is escaped.

Each function returns one line of HTML for `gr.Markdown(sanitize_html=False)`: gradio's own HTML and
plots evaluate strings as code, which the page's content security policy forbids. A blank line would
end the HTML in Markdown."""

import html
from urllib.parse import urlencode


def text(value) -> str:
    """A text as HTML in one line."""
    return html.escape(" ".join(str(value).split()))


def player(path: str, offset: float = 0.0, seconds: float | None = None) -> str:
    """A player of an audio file, or of a part of it. The file is read when it is played."""
    part = {"path": path, "offset": offset}
    if seconds is not None:
        part["seconds"] = seconds
    label = text(f"Play {path.rsplit('/', 1)[-1]}")
    address = html.escape("audio?" + urlencode(part, errors="surrogateescape"))
    return f'<audio controls preload="none" aria-label="{label}" src="{address}"></audio>'


def table(header: list[str], rows: list[list[str]], caption: str = "") -> str:
    """A table of cells that are HTML already."""
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}<tr>{head}</tr>{body}</table></div>'
