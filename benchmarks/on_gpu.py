"""Measures everything that a GPU is needed for: one command for anyone with a card.

    python benchmarks/on_gpu.py [--minutes 25] [--card 8gb] [--device cpu] [--output gpu.json]
    python benchmarks/on_gpu.py --table gpu.json             # prints the tables again
    python benchmarks/on_gpu.py --write_measured gpu.json    # measured.json, and the pages' tables

It needs requirements.txt, and neither network nor data: models have random weights, and recordings
are tones or noise. The pieces come in the order of what matters: losses against the CPU, kill and
resume, levels of offloading, short memory; the tightest rows of the preset scripts, each under a
cap that leaves what its tier's card has; speed; the largest models; the other rows. --card is for a
smaller card than the one that is there.

Each piece is in the output file as soon as it is done. A piece for which there is no time is
skipped: the same command, started again, continues. It begins anew for another card, another torch,
or other programs. On a machine that ends every command after ten minutes, say --minutes 9; if such
a machine forgets its files, bring gpu.json back after each call and name it with --output in the
next one. Every piece, row and run is a process of its own, forked from one that has imported torch,
which is killed if it takes too long. With --device cpu the pieces run at a small size, which shows
that they work."""

import argparse
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()  # before torch is imported

from benchmarks import tier_tables
from benchmarks.gpu import card, correctness, report, results, rows, speed
from benchmarks.gpu.bench import Bench, Failed, Piece, Skipped
from dry_run.cards import CONTEXT, GIB, Card, find_card

MEASURED = "benchmarks/measured.json"


def pieces(bench: Bench) -> list[Piece]:
    """All pieces, in the order of what matters."""
    of_rows = rows.pieces(bench)
    of_speed = speed.pieces(bench)
    return [
        *correctness.pieces(bench, "agreement", correctness.agreement, 60),
        *correctness.pieces(bench, "resume", correctness.resume, 45),
        *correctness.pieces(bench, "offload", correctness.offload, 50),
        *correctness.pieces(bench, "short of memory", rows.short_of_memory, 40),
        *of_rows[: rows.FIRST],
        *of_speed.pop("row"),
        *speed.long_pieces(bench),
        *correctness.pieces(bench, "export", correctness.export, 90),
        *of_rows[rows.FIRST :],
        *rows.largest_pieces(bench),
        *(piece for variant in of_speed.values() for piece in variant),
        *speed.peer_pieces(bench),
    ]


def run_all(args) -> dict:
    """Measures what is not in the output file yet. Returns the run."""
    bench = Bench(args.device, args.minutes)

    def stop(number: int, frame) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    try:
        bench.card = card.measured(bench)
    except (Failed, Skipped) as error:
        sys.exit(f"error: {str(error).strip().splitlines()[-1].removeprefix('error: ')}")
    bench.gib = bench.card["gib"]
    name = bench.card["name"]
    if args.card:
        bench.gib = min(bench.gib, args.card.total / GIB)
        bench.cap = 0 if bench.is_small else int(bench.gib * GIB) - CONTEXT
        name += f" as {args.card.name}"
    bench.results = results.Results(args.output, name, bench.card["torch"], args.retry)
    bench.results.note("card", {"status": "done", "found": bench.card, "seconds": 0})
    try:
        bench.measure([each for each in pieces(bench) if args.only in each.name])
    finally:
        bench.end_all()
    return bench.results.run


def write_measured(path: Path) -> None:
    """Writes the measured rows of a file's runs, and the tables of the pages."""
    for run in results.read(path):
        count = report.write_measured(run, tier_tables.ROOT / MEASURED)
        print(f"{run['card']}: {count} rows")
    if problems := tier_tables.write(tier_tables.SCRIPTS):
        sys.exit("\n".join(problems))


def a_card(text: str) -> Card:
    """An argparse type."""
    try:
        return find_card(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--minutes", type=float, default=25.0, help="time for this call (25)")
    add("--card", type=a_card, help="a smaller card, such as 8gb or t4 (the one that is there)")
    add(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu: small, to see that it works"
    )
    add("--output", type=Path, default=Path("gpu.json"), help="results, also of earlier calls")
    add("--retry", action="store_true", help="measure what has failed once more")
    add("--only", default="", metavar="TEXT", help="only pieces with this in their name")
    add("--table", type=Path, metavar="FILE", help="print the tables of a file of results")
    add("--write_measured", type=Path, metavar="FILE", help="write measured.json and the pages")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    if args.write_measured:
        write_measured(args.write_measured)
        return
    if args.table:
        print("\n\n".join(map(report.text_of, results.read(args.table))))
        return
    args.output = args.output.absolute()
    run = run_all(args)
    print(f"\n{report.text_of(run)}")
    left = [name for name, entry in run["pieces"].items() if entry["status"] == "later"]
    if left:
        print(f"\n{len(left)} pieces are left: the same command, started again, continues")


if __name__ == "__main__":
    main()
