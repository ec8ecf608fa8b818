"""The table of gpu.json, in Markdown, and measured.json, which tier_tables.py reads."""

import json
from pathlib import Path

from benchmarks.tier_tables import markdown

GIB = 2**30


def text_of(run: dict) -> str:
    """All tables of a run: the card, then a table for each kind of piece, then what is missing."""
    pieces = run["pieces"]
    parts = [title(run)]
    for heading, begins, table in (
        ("Losses of the first updates against the CPU in fp32", "agreement ", agreement),
        ("Killed and resumed, against a run that was not", "resume ", resume),
        ("Memory that was short in the second update", "short of memory ", short),
        (
            "Levels of --use_cpu_offload: the change of the weights against that without",
            "offload ",
            offload,
        ),
        ("What the exported weights say on the CPU", "export ", export),
        ("Memory of the rows, under the cap of their tier", "row ", rows),
        ("The largest micro-batch that fits", "largest micro-batch ", largest),
        ("Speed", "speed ", speed),
        ("A step beside that of transformers", "peer ", peer),
        ("Long runs of the largest models", "", long),
    ):
        chosen = {name: entry for name, entry in pieces.items() if name.startswith(begins)}
        if not begins:
            chosen = {name: entry for name, entry in pieces.items() if " updates " in name}
        done = {
            name.removeprefix(begins): entry["found"]
            for name, entry in chosen.items()
            if entry["status"] == "done"
        }
        if done:
            parts.append(f"### {heading}\n\n{table(done, card_of(run))}")
    missing = [
        f"- {name}: {entry['status']}: {last_line(entry['reason'])}"
        for name, entry in pieces.items()
        if entry["status"] in ("failed", "skipped")
    ]
    if later := [name for name, entry in pieces.items() if entry["status"] == "later"]:
        missing.append(f"- no time until now: {', '.join(later)}")
    if missing:
        parts.append("### Not measured\n\n" + "\n".join(missing))
    return "\n\n".join(parts)


def card_of(run: dict) -> dict:
    return run["pieces"].get("card", {}).get("found", {})


def last_line(text: str) -> str:
    return text.strip().split("\n")[-1]


def title(run: dict) -> str:
    card = card_of(run)
    lines = [f"## {run['card']}, torch {run['torch']}, source {run['source']}", ""]
    if not card:
        return lines[0]
    products = ", ".join(f"{kind} {each / 1e12:.1f}" for kind, each in card["products"].items())
    lines += [
        f"- {card['gib']:.1f} GiB, compute capability {card['capability'] or '-'};"
        f" {card.get('checked', '')}",
        f"- products of matrices: {products} (1e12 operations a second); peak"
        f" {card['peak'] / 1e12:.1f}, {card['peak is']}",
        f"- attention that works: {card['attention']}",
    ]
    if "context" in card:
        lines.append(f"- beside the allocator, CUDA takes {gib(card['context'])} GiB")
    for width, names in card.get("kernels", {}).items():
        lines.append(f"- heads of {width}: {', '.join(names) or 'no fused kernel'}")
    return "\n".join(lines)


def gib(count: float | None) -> str:
    return "-" if count is None else f"{count / GIB:.2f}"


def relative(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def agreement(done: dict, card: dict) -> str:
    lines = []
    for name, found in done.items():
        lines.append([name, shown(found["cpu"]), *precisions(found)])
    header = ["recipe", "CPU: first, last"]
    header += [f"{name}: first, last; differs by" for name in ("fp32", "bf16", "fp16")]
    return markdown(header, lines)


def precisions(found: dict) -> list[str]:
    cells = []
    for name in ("fp32", "bf16", "fp16"):
        if name in found:
            cells.append(f"{shown(found[name])}; {relative(found[f'{name} differs by'])}")
        else:
            cells.append("-")
    return cells


def shown(losses: list[float]) -> str:
    return f"{losses[0]:.5f}, {losses[-1]:.5f}"


def resume(done: dict, card: dict) -> str:
    header = ["recipe", "last loss", "resumed", "differs by", "two equal runs differ by"]
    return markdown(
        header,
        [
            [
                name,
                f"{found['losses'][-1]:.6f}",
                f"{found['resumed'][-1]:.6f}",
                relative(found["the resumed one differs by"]),
                relative(found["two runs differ by"]),
            ]
            for name, found in done.items()
        ],
    )


def short(done: dict, card: dict) -> str:
    header = ["recipe", "last loss", "with short memory", "differs by", "smaller micro-batches"]
    lines = []
    for name, found in done.items():
        last = f"{found['short'][-1]:.6f}"
        cell = found.get("failed") or relative(found["differs by"])
        count = str(found["smaller micro-batches"])
        lines.append([name, f"{found['losses'][-1]:.6f}", last, cell, count])
    return markdown(header, lines)


def offload(done: dict, card: dict) -> str:
    columns = ["none again", "states", "gradients", "weights"]
    lines = []
    for name, found in done.items():
        cells = [
            found.get(level) or relative(found.get(f"{level} differs by")) for level in columns
        ]
        lines.append([name, *cells])
    return markdown(["recipe", *columns], lines)


def export(done: dict, card: dict) -> str:
    lines = []
    for name, found in done.items():
        example = found["cpu"][-1] if found["cpu"] else ""
        path, tab, transcript = example.partition("\t")
        example = (transcript if tab else path).strip()[:60]
        lines.append([name, "the same" if found["same"] else "differs", example])
    return markdown(["recipe", "on the card and on the CPU", "example"], lines)


def rows(done: dict, card: dict) -> str:
    header = ["row", "micro-batch", "predicted", "allocated", "ratio", "reserved"]
    header += ["cap", "driver (whole card)", "remarks"]
    lines = []
    for found in done.values():
        allocated = found.get("peak_allocated")
        ratio = "-"
        if found["predicted"] and found["cap"]:
            ratio = f"{found['predicted'] * GIB / allocated:.3f}"
        remarks = found.get("failed", "")
        if found["short_of_memory"]:
            remarks = "out of memory: smaller micro-batches; " + remarks
        lines.append(
            [
                found["key"],
                found["row"],
                f"{found['predicted']:.2f}" if found["predicted"] else "-",
                gib(allocated),
                ratio,
                gib(found.get("peak_reserved")),
                gib(found["cap"] or None),
                gib(found.get("driver")),
                remarks.strip("; "),
            ]
        )
    return markdown(header, lines)


def largest(done: dict, card: dict) -> str:
    header = ["row", "micro-batch", "largest that fits", "too large"]
    return markdown(
        header,
        [
            [
                found["key"],
                found["row"],
                str(found.get("largest", "-")),
                str(found.get("too_large")),
            ]
            for found in done.values()
        ],
    )


def speed(done: dict, card: dict) -> str:
    flops = {}
    plain = {}
    for name, found in done.items():
        recipe, _, variant = name.partition(": ")
        if variant == "row":
            flops[recipe] = found.get("flops")
            plain[recipe] = found["utterances a second"]
    header = ["recipe", "row", "variant", "utterances a second", "of the row alone"]
    header += ["share of the peak", "waiting for data", "allocated, GiB", "attention"]
    lines = []
    for name, found in done.items():
        recipe, _, variant = name.partition(": ")
        rate = found["utterances a second"]
        share = "-"
        if flops.get(recipe) and card:
            share = f"{rate * flops[recipe] / card['peak']:.1%}"
        lines.append(
            [
                recipe,
                found["row"],
                "-" if variant == "row" else variant,
                f"{rate:.2f}",
                f"{rate / plain[recipe]:.2f}" if recipe in plain else "-",
                share,
                f"{found['waiting share']:.1%}",
                gib(found["peak_allocated"]),
                found.get("failed") or kernels(found),
            ]
        )
    note = (
        "Share of the peak: operations of forward and backward that torch.utils.flop_counter counts"
        " in an update of the row, without those that checkpointing repeats."
    )
    return f"{markdown(header, lines)}\n\n{note}"


def kernels(found: dict) -> str:
    names = [name.split("_attention")[0].split("_")[-1] for name in found.get("kernels", [])]
    return ", ".join(dict.fromkeys(names)) or "-"


def peer(done: dict, card: dict) -> str:
    lines = []
    for name, found in done.items():
        flags = found["flags"]
        for row, result in found.items():
            if row == "flags":
                continue
            if "failed" in result:
                lines.append([name, flags, row, result["failed"], "-", "-"])
                continue
            seconds = sorted(result["seconds"])[len(result["seconds"]) // 2]
            lines.append(
                [name, flags, row, f"{seconds:.3f}", gib(result["bytes"]), f"{result['loss']:.5f}"]
            )
    return markdown(["recipe", "flags", "who", "s a step", "memory, GiB", "loss"], lines)


def long(done: dict, card: dict) -> str:
    header = ["what", "row", "updates", "losses", "finite", "utterances a second"]
    header += ["allocated, GiB", "memory grew by, MiB", "remarks"]
    return markdown(
        header,
        [
            [
                name.partition(" updates ")[2],
                found["row"],
                str(found["updates"]),
                shown(found["losses"]),
                "yes" if found["finite"] else "NO",
                f"{found['utterances a second']:.2f}",
                gib(found["peak_allocated"]),
                f"{found['memory grew by'] / 2**20:.0f}",
                found.get("failed", ""),
            ]
            for name, found in done.items()
        ],
    )


# --- measured.json --------------------------------------------------------------------------------


def measured(run: dict) -> dict:
    """The rows of a run as measured.json has them: {"script tier size": {"row": cell, "gib":
    allocated, "card": name}}. Rows that ran out of memory, or without a cap, are left out."""
    found = {}
    for entry in run["pieces"].values():
        row = entry.get("found", {})
        if "key" not in row or "predicted" not in row or not row["cap"]:
            continue
        if row["short_of_memory"] or "failed" in row:
            continue
        allocated = round(row["peak_allocated"] / GIB, 2)
        found[row["key"]] = {"row": row["row"], "gib": allocated, "card": run["card"]}
    return found


def write_measured(run: dict, path: Path) -> int:
    """Adds the rows of a run to measured.json, a line each, and returns how many they are."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    found = measured(run)
    if not found:
        return 0
    lines = [
        f"  {json.dumps(key)}: {json.dumps(entry)}"
        for key, entry in sorted({**known, **found}.items())
    ]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    return len(found)
