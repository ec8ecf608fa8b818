"""HTML of the page: tables, players, curves and differences. Every text from a file is escaped.

Each function returns one line of HTML for `gr.Markdown(sanitize_html=False)`: gradio's own HTML and
plots evaluate strings as code, which the page's content security policy forbids. A blank line would
end the HTML in Markdown."""

import html
import math
import time
from urllib.parse import urlencode

import jiwer


def text(value) -> str:
    """A text as HTML in one line. A name that is not UTF-8 gets question marks."""
    return _escaped(" ".join(str(value).split()))


def _escaped(text: str) -> str:
    return html.escape(text.encode("utf-8", "replace").decode())


def moment(seconds: float) -> str:
    """A time since 1970 as date and time here."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def player(path: str, offset: float = 0.0, seconds: float | None = None) -> str:
    """A player of an audio file, or of a part of it. The file is read when it is played."""
    part = {"path": path, "offset": offset}
    if seconds is not None:
        part["seconds"] = seconds
    label = text(f"Play {path.rsplit('/', 1)[-1]}")
    address = html.escape("audio?" + urlencode(part, errors="replace"))
    return f'<audio controls preload="none" aria-label="{label}" src="{address}"></audio>'


def download(path: str) -> str:
    """A link that saves a file of a run."""
    address = html.escape("download?" + urlencode({"path": path}, errors="replace"))
    return f'<a href="{address}" download>Download {text(path.rsplit("/", 1)[-1])}</a>'


def log(lines: str) -> str:
    """The lines of a log, which show the last one and can be scrolled."""
    if not lines:
        return ""
    content = _escaped(lines).replace("\n", "&#10;")
    return f'<div class="log" role="log" aria-label="Log" tabindex="0"><pre>{content}</pre></div>'


def table(header: list[str], rows: list[list[str]], caption: str = "") -> str:
    """A table of cells that are HTML already."""
    names = "".join(f'<th scope="col">{text(name)}</th>' for name in header)
    head = f"<tr>{names}</tr>" if header else ""
    body = "".join("<tr>" + "".join(f"<td>{c}</td>" for c in row) + "</tr>" for row in rows)
    title = f"<caption>{text(caption)}</caption>" if caption else ""
    return f'<div class="wide"><table>{title}{head}{body}</table></div>'


def bars(caption: str, rows: list[tuple[str, float]], unit: str) -> str:
    """A table of numbers, each with a bar as long as its share of the largest."""
    most = max((number for _, number in rows), default=0) or 1
    cells = []
    for label, number in rows:
        bar = f'<span class="bar" style="width:{12 * number / most:.2f}em"></span>'
        cells.append([text(label), f"{bar} {number:g} {text(unit)}"])
    return table([], cells, caption)


def difference(reference: str, hypothesis: str) -> str:
    """The hypothesis beside its reference, by words: <del> marks words of the reference that the
    hypothesis lacks, <ins> words that it has instead or in addition."""
    if not reference.split():
        return f"<ins>{text(hypothesis)}</ins>" if hypothesis.split() else ""
    aligned = jiwer.process_words(reference, hypothesis)
    said, heard = aligned.references[0], aligned.hypotheses[0]
    parts = []
    for chunk in aligned.alignments[0]:
        lost = text(" ".join(said[chunk.ref_start_idx : chunk.ref_end_idx]))
        new = text(" ".join(heard[chunk.hyp_start_idx : chunk.hyp_end_idx]))
        if chunk.type == "equal":
            parts.append(lost)
            continue
        if lost:
            parts.append(f"<del>{lost}</del>")
        if new:
            parts.append(f"<ins>{new}</ins>")
    return " ".join(parts)


# --- curves ---------------------------------------------------------------------------------------

WIDTH, HEIGHT = 480, 240  # of a plot, in its own units
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 24, 34  # its margins
MOST_POINTS = 400  # of a line
STYLES = ("", "6 3", "2 3", "8 3 2 3")  # dashes, so that lines are told apart without colours
Points = list[tuple[float, float]]


def curves(title: str, lines: dict[str, Points]) -> str:
    """A plot of several lines by updates as SVG."""
    lines = {name: _thinned(points) for name, points in lines.items()}
    if not lines:
        return f"<p>{text(title)}: nothing is measured yet.</p>"
    every = [point for points in lines.values() for point in points]
    x_ticks = _ticks(0, max(1, *(x for x, _ in every)))
    y_ticks = _ticks(min(0, *(y for _, y in every)), max(y for _, y in every))
    x_end = max(x_ticks[-1], max(x for x, _ in every))
    low, high = y_ticks[0], max(y_ticks[-1], max(y for _, y in every))

    def place(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * x / x_end
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low)
        return across, down

    parts = [_grid(place, x_ticks, y_ticks, x_end)]
    legend = []
    for number, (name, points) in enumerate(lines.items()):
        dashes = STYLES[number % len(STYLES)]
        corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        style = f'class="line line-{number % 4}" stroke-dasharray="{dashes}"'
        parts.append(f'<polyline {style} points="{corners}"/>')
        parts += [
            f'<circle class="line-{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>'
            for x, y in (place(*point) for point in points)
            if len(points) <= 40
        ]
        sample = f'<polyline {style} points="0,3 24,3"/>'
        sample = f'<svg viewBox="0 0 24 6" class="sample">{sample}</svg>'
        legend.append(f"<li>{sample} {text(name)}: {points[-1][1]:.4g}</li>")
    ends = "; ".join(f"{name} ends at {points[-1][1]:.4g}" for name, points in lines.items())
    label = f'role="img" aria-label="{text(title)}: {text(ends)}"'
    heading = f'<text x="{LEFT}" y="14" class="title">{text(title)}</text>'
    plot = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" {label}>{heading}{"".join(parts)}</svg>'
    return f'<div class="plot">{plot}<ul>{"".join(legend)}</ul></div>'


def _thinned(points: Points) -> Points:
    """At most MOST_POINTS of the points, the last one among them."""
    step = math.ceil(len(points) / MOST_POINTS)
    return points[::-1][::step][::-1]


def _ticks(low: float, high: float) -> list[float]:
    """About five round numbers from `low` or below it to about `high`."""
    span = (high - low) or abs(high) or 1.0
    magnitude = 10.0 ** math.floor(math.log10(span / 4))
    step = next(magnitude * factor for factor in (1, 2, 5, 10) if magnitude * factor >= span / 5)
    first = math.floor(low / step)
    last = max(first + 1, math.floor(high / step + 1e-9))
    return [number * step for number in range(first, last + 1)]


def _grid(place, x_ticks: list[float], y_ticks: list[float], x_end: float) -> str:
    """The lines and numbers behind the curves."""
    parts = []
    for y in y_ticks:
        left, down = place(0, y)
        right, _ = place(x_end, y)
        parts.append(f'<path class="grid" d="M{left:.1f} {down:.1f}H{right:.1f}"/>')
        parts.append(f'<text x="{left - 5:.1f}" y="{down + 4:.1f}" class="end">{y:.4g}</text>')
    for x in x_ticks:
        across, down = place(x, y_ticks[0])
        parts.append(f'<text x="{across:.1f}" y="{down + 15:.1f}" class="middle">{x:.6g}</text>')
    across, down = place(x_end, y_ticks[0])
    parts.append(f'<text x="{across:.1f}" y="{down + 30:.1f}" class="end">updates</text>')
    return "".join(parts)
