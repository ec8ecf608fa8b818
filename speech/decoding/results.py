"""The results of a recogniser: its error rates and examples, and the files in the log folder that
keep them."""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from common import files
from common.batches import EvalBatches
from common.errors import writing
from speech.data.columns import Codes
from speech.decoding import language_model
from speech.decoding.ngram import Fusion
from speech.decoding.recogniser import NORMALISERS, DecodingOptions, decode_texts
from speech.writing import metrics
from speech.writing.text import NAMES, for_scoring, in_lower_case, mark_share, style

AS_SENT = "as sent"  # what tables call the comparison of symbols that are no writing
LONG = "transcripts_long.jsonl"  # of whole recordings
REPORTS = ("transcripts.jsonl", LONG, "results.json")  # files in the log folder
EXAMPLES = 5  # transcripts printed at the end
MOST_MARKS = 0.02  # share of marks among letters above which Whisper's normaliser breaks words

STYLES = {  # what a warning says, and the difference between shares of texts that is worth it
    "case": ("capitals are", 0.3),
    "punctuation": ("punctuation is", 0.3),
    "digits": ("digits are", 0.05),
}


def report(
    how: DecodingOptions,
    model: torch.nn.Module,
    decode: Callable[..., list],
    evaluation: dict[str, EvalBatches],
    weights: str,
    normalise: Callable[[str], str] = for_scoring,
    tokens: language_model.Tokens | None = None,
    folder: Path | None = None,
) -> tuple[list[dict], EvalBatches]:
    """Prints and keeps the results of the test set, or of "val" without one (`print_results`), as
    `decode(batch)` decodes it (`decode_texts`). Returns its rows and the batches of the set.

    With the `tokens` of a language model it is `decode(batch, fusion=...)`, if that is better on
    "val"; then what it has changed is printed and kept, too, and the rows are those without it.
    `weights`: those of the `folder` that the model has."""

    @functools.cache
    def rows_of(name: str, fusion: Fusion | None = None) -> list[dict]:
        with_fusion = functools.partial(decode, fusion=fusion) if fusion else decode
        return decode_texts(model, with_fusion, evaluation[name].whole())

    name = "test" if "test" in evaluation else "val"
    fusion = None
    corpora = [batches.dataset.data.corpus for batches in evaluation.values()]
    held_out = itertools.chain.from_iterable(corpus.texts for corpus in corpora)
    if lm := language_model.make(how.lm, tokens, folder, held_out):
        judge = "val" if "val" in evaluation else name
        fusion = lm.judged(functools.partial(rows_of, judge), judge)
    rows = rows_of(name, fusion)
    eval_batches = evaluation[name].whole()
    title = f"{name} set, {weights}, {len(rows)} utterances"
    if how.beam_size:  # of several searches
        title += f", decoding: {how.decoding}"
    if fusion:
        title += ", with the language model"
    languages = eval_batches.dataset.data.corpus.languages
    print_results(rows, title, how, normalise, languages)
    if fusion:
        with_lm, rows = rows, rows_of(name)
        path = "decoding without the language model"
        add(how, without_lm=improvement(rows, with_lm, path, how, normalise))
    return rows, eval_batches


def print_results(
    rows: list[dict],
    title: str,
    how: DecodingOptions,
    normalise: Callable[[str], str] = for_scoring,
    languages: Codes | None = None,
) -> None:
    """Prints WER, CER and a few of `rows` ({"file", "seconds", "reference", "hypothesis"}, and
    perhaps timed "words"), and writes all of them with their "errors" to transcripts.jsonl. The
    texts are compared after `normalise`, and as `readings_of` says. The error rates are also
    written to results.json. If the set has several `languages`, by "index", each has error rates in
    the first reading. Translations have chrF in place of error rates. Raises `RunError`."""
    print(f"\n{title}")
    errors = {}
    results = {"title": title}
    if how.translates:
        from speech.writing import chrf

        results["chrf"] = chrf.of_corpus(rows)
        print(f"chrF2: {100 * results['chrf']:.2f}")
    else:
        errors = metrics.read_by(rows, readings_of(rows, how, normalise), how.cut)
        results["rates"] = metrics.rates(errors)
        print(metrics.error_table(errors, results["rates"]))
    spoken = [languages[row["index"]] for row in rows] if languages else []
    if errors and len(set(spoken)) > 1:
        rows = [{**row, "language": name} for row, name in zip(rows, spoken, strict=True)]
        results["languages"] = metrics.rates_by(spoken, next(iter(errors.values())))
        print(metrics.table_by_language(results["languages"]))
    for number in np.random.default_rng(how.seed).permutation(len(rows))[:EXAMPLES]:
        row = rows[number]
        print(f"  reference:  {row['reference']}\n  transcript: {row['hypothesis']}")
        words = row.get("words", ())
        times = [f"{word['start']:.2f}-{word['end']:.2f} {word['text']}" for word in words]
        print(f"  times:      {'  '.join(times)}\n" if times else "")
    counted = [
        {**row, "errors": metrics.errors_of_row(errors, number)} for number, row in enumerate(rows)
    ]
    write_rows(counted, how, "transcripts.jsonl")
    write_results(how, results)


def write_rows(rows: list[dict], how: DecodingOptions, name: str) -> None:
    """Writes decoded utterances to one of REPORTS. Raises `RunError`."""
    lines = []
    for row in rows:
        shown = {key: value for key, value in row.items() if key != "index"}
        lines.append(json.dumps(shown, ensure_ascii=False) + "\n")
    write_report(how, name, "".join(lines))


def write_report(how: DecodingOptions, name: str, text: str) -> None:
    """Writes one of REPORTS. Raises `RunError`."""
    with writing(how.log_dir, "--output_dir"):
        files.write_text(how.log_dir / name, text)


def write_results(how: DecodingOptions, results: dict) -> None:
    """Writes results.json: the "title" of the results, the "rates" of `metrics.rates`, those of
    several "languages" (`metrics.rates_by`), those "without_lm", if there is a language model, and,
    if a model was "compared_to", its rates as "before"; of translations "chrf" and "chrf_before";
    "watched" sets (`Watched.by_step`); a "warning". Raises `RunError`."""
    write_report(how, "results.json", files.json_text(results))


def read_results(log_dir: Path) -> dict:
    """The results that `print_results` has written in the log folder."""
    return files.read_json(log_dir / "results.json")


def results_of(log_dir: Path, weights: Path | None, are_new: bool) -> dict | None:
    """The results in the log folder, of an evaluation of these `weights` that was just made
    (`are_new`) or earlier: then results.json names this file. None if there are none. Raises
    `UsageError` and `OSError`."""
    path = log_dir / "results.json"
    if not (are_new or path.exists()):
        return None
    results = read_results(log_dir)
    if weights is None:
        return results if are_new else None
    state = weights.stat()
    file = {"file": str(weights.resolve()), "bytes": state.st_size, "time": state.st_mtime}
    if are_new:
        results["weights"] = file
        files.write_text(path, files.json_text(results))
    return results if results.get("weights") == file else None


def add(how: DecodingOptions, **more) -> None:
    """Adds to results.json, whose "warning" the card of an export repeats. Raises `RunError`."""
    write_results(how, {**read_results(how.log_dir), **more})


def add_watched(how: DecodingOptions, watched, progress) -> None:
    """Adds to results.json what a training's progress has of `watched` sets. Raises `RunError`."""
    if watched:
        add(how, watched=watched.by_step(progress))


def print_improvement(
    before: list[dict],
    rows: list[dict],
    path: str,
    how: DecodingOptions,
    normalise: Callable[[str], str] = for_scoring,
) -> None:
    """Prints how much lower the error rates of the rows that `report` returns are than those of the
    rows `before` of the model at `path`, of the same utterances, and adds the latter to
    results.json. `normalise` as in `report`. Raises `RunError`."""
    if how.translates:
        from speech.writing import chrf

        old = chrf.of_corpus(before)
        print(
            f"compared to {path} on the same {len(rows)} utterances: its chrF2 is {100 * old:.2f}"
        )
        return add(how, compared_to=path, chrf_before=old)
    has_lm = "without_lm" in read_results(how.log_dir)
    what = f"{path}, both without a language model," if has_lm else path
    add(how, compared_to=path, before=improvement(before, rows, what, how, normalise))


def improvement(
    before: list[dict],
    rows: list[dict],
    what: str,
    how: DecodingOptions,
    normalise: Callable[[str], str],
) -> dict:
    """Prints how much lower the error rates of `rows` are than those of the rows `before`. Returns
    the rates of the latter."""
    readings = readings_of(rows, how, normalise, warns=False)
    old, new = (metrics.read_by(each, readings, how.cut) for each in (before, rows))
    table = metrics.improvement_table(old, new)
    print(f"compared to {what} on the same {len(rows)} utterances:\n{table}")
    return metrics.rates(old)


def readings_of(
    rows: list[dict], how: DecodingOptions, normalise: Callable[[str], str], warns: bool = True
) -> dict[str, Callable[[str], str]]:
    """The ways in which texts are compared, by name: after a recipe's own `normalise`, in lower
    case without punctuation, and by --normaliser. Symbols that are no writing, whose `normalise` is
    not one of text.py's, are compared in this way only."""
    if normalise not in NAMES:
        return {AS_SENT: normalise}
    chosen = [normalise, in_lower_case]
    if how.normaliser:
        chosen.append(NORMALISERS[how.normaliser])
        share = mark_share(row["reference"] for row in rows)
        if warns and share > MOST_MARKS:
            print(
                f"warning: {NAMES[chosen[-1]]} puts spaces in place of the marks of this script,"
                f" {100 * share:.0f} % of its letters: its error rates say little"
            )
    return {NAMES[each]: each for each in chosen}


def warn_of_style(texts: list[str], rows: list[dict]) -> None:
    """Warns once if the training `texts` and the hypotheses in `rows` differ in style: error rates
    rise while a model learns another one. `texts` is emptied."""
    if texts and rows:
        trained = style(texts)
        decoded = style([row["hypothesis"] for row in rows])
        for name, (words, limit) in STYLES.items():
            if abs(trained[name] - decoded[name]) > limit:
                print(
                    f"warning: {words} in {100 * decoded[name]:.0f} % of the model's texts and in"
                    f" {100 * trained[name]:.0f} % of the training texts: error rates rise while"
                    " the model learns another style",
                    flush=True,
                )
    texts.clear()
