"""--dry_run in every recipe: it reaches the plan with tensors without values, and writes
nothing."""

import functools
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from dry_run.plan import Plan
from models.whisper.decoding import Search, greedy
from models.xtts import formats
from recipes import (
    konkani_conformer,
    matcha_voice,
    parakeet_tdt,
    template,
    wav2vec2_ctc,
    whisper_morse,
    whisper_vietnamese,
    xtts_amharic,
)
from speech.data import demo
from speech.signal.audio import SAMPLE_RATE
from tests.recipes import runs
from tests.recipes.runs import planned, run

# Flags of each recipe, and the longest utterance that it trains on without data, seconds in an
# epoch.
RECIPES = {
    konkani_conformer: ([], 30 / 0.9),
    matcha_voice: ([], 15),
    whisper_morse: (["--clips_per_epoch", "40"], 3),
    whisper_vietnamese: ([], 30),
    parakeet_tdt: ([], 20 / 0.9),
    wav2vec2_ctc: ([], 20 / 0.9),
    xtts_amharic: ([], 22),  # the GPT's positions, in seconds of codes
}
SMALL = {
    matcha_voice: ["--model_size", "demo"],
    parakeet_tdt: ["--model_size", "demo"],
    wav2vec2_ctc: ["--model_size", "demo"],
    whisper_morse: ["--model_size", "demo"],
    whisper_vietnamese: ["--model_size", "demo"],
    konkani_conformer: "--d_model 32 --encoder_layers 2 --decoder_layers 1 --batch_size 64".split(),
}
EACH = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.RECIPE)


@pytest.fixture(autouse=True)
def nothing_is_written(tmp_path, monkeypatch):
    """In the current folder, which is that of the checkpoints and logs; and no corpus is made."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(formats, "RELEASED", {**formats.RELEASED, "layers": 2})
    monkeypatch.setattr(
        demo, "speech_corpus", lambda *inputs, **named: pytest.fail("a corpus was made")
    )
    yield
    assert not list(tmp_path.iterdir())


@functools.cache
def without_data(recipe):
    return planned(recipe, *RECIPES[recipe][0])


@EACH
def test_a_plan_without_data_is_of_the_longest_utterances(recipe):
    _, longest = RECIPES[recipe]
    plan = without_data(recipe)
    assert plan.task.name == recipe.RECIPE
    assert longest - 0.2 < max(plan.global_batches.data.seconds(0)) <= longest + 1e-3
    assert plan.batch["audio"].shape[1] and plan.batch["tokens_lengths"].min() > 0


@pytest.fixture(scope="module")
def manifest(tmp_path_factory) -> str:
    """Six utterances of noise."""
    words = ("one", "two", "three", "four", "five", "six")
    texts = [f"{word} and more" for word in words]
    return runs.write_noise(tmp_path_factory.mktemp("noise"), texts, [2] * 6, SAMPLE_RATE)


def start_of(recipe) -> list[str]:
    """A model that begins at random weights is asked for, where others are usual."""
    is_usual = recipe in (konkani_conformer, matcha_voice, xtts_amharic)
    return [] if is_usual else ["--from_scratch"]


@EACH
def test_a_plan_with_data_is_of_these(recipe, manifest):
    plan = planned(
        recipe, "--train_manifest", manifest, *start_of(recipe), "--cache_audio", "cache"
    )
    assert (
        len(plan.global_batches.data) == 5 and plan.batch["audio"].abs().max() > 0
    )  # one is held out
    assert max(plan.batch["seconds"]) < 2.3


@EACH
@pytest.mark.parametrize(("card", "fits"), [("t4", True), ("0.05GB", False)])
def test_the_answer_for_a_card(recipe, card, fits, manifest):
    """The whole plan, with CUDA's choices imposed: the parts add up, and flags are advised if it
    does not fit."""
    flags = ["--train_manifest", manifest, *start_of(recipe), *SMALL.get(recipe, ())]
    status, out, err = run(recipe, *flags, "--dry_run", card)
    assert status == (0 if fits else 3), err
    sizes = dict(re.findall(r"^  (\S.*?) {2,}([\d.]+ [GM]iB)$", out, re.MULTILINE))
    gib = {}
    for name, size in sizes.items():
        gib[name] = float(size.split()[0]) / (1 if size.endswith("GiB") else 1024)
    others = ("total", "left", "missing", "t4", "0.05 GiB")
    parts = [value for name, value in gib.items() if name not in others]
    assert len(parts) == 9 and gib["weights"] > 0
    assert sum(parts) == pytest.approx(gib["total"], abs=0.06)
    assert ("Verdict: fits" in out) == fits
    advised = any(word in out for word in ("--optimizer", "--batch_size", "smallest card"))
    assert advised != fits


def test_a_plan_of_a_billion_utterances_takes_seconds_and_leaves_nothing(tmp_path_factory):
    """Not even torch's folder for what it compiles."""
    folder = tmp_path_factory.mktemp("temporary")
    command = [sys.executable, template.__file__, "--dry_run", "8GB", "--batch_size", "2147483647"]
    limit = functools.partial(resource.setrlimit, resource.RLIMIT_CPU, (100, 100))
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment.pop("TORCHINDUCTOR_CACHE_DIR", None)  # left by a plan in this process
    ended = subprocess.run(
        command, env=environment, capture_output=True, text=True, preexec_fn=limit
    )
    assert ended.returncode == 3, ended.stderr
    assert "Verdict: does not fit" in ended.stdout and ": fits\n" in ended.stdout
    assert not list(folder.iterdir())


@EACH
def test_no_layer_with_a_convolution_is_compiled(recipe):
    """Inductor fixes the strides of a convolution's input. So each length would need a graph of its
    own, and the ninth would run uncompiled."""
    plan = without_data(recipe)
    layers = [layer for layer in plan.model.modules() if isinstance(layer, plan.task.compiled)]
    inside = [module for layer in layers for module in layer.modules()]
    assert layers
    assert not any(isinstance(module, torch.nn.modules.conv._ConvNd) for module in inside)


def test_the_last_steps_of_a_search_need_as_much_as_all():
    run_of = planned(whisper_vietnamese, "--model_size", "tiny", "--from_scratch")
    plan = Plan((8, 6), run_of.model)
    encoded = {"encoded": torch.empty(4, 1500, 384, device="meta")}

    def peak(search: Search) -> int:
        def step(batches: list[dict]) -> None:
            with torch.autocast("cpu", torch.bfloat16):
                greedy(run_of.model, batches[0]["encoded"], None, search)

        return plan.measure(step, [encoded]).total

    _, search, *_ = run_of.task.evaluate.args
    _, last_steps, *_ = run_of.task.plans.last_steps.args
    assert (search.max_new_tokens, last_steps.max_new_tokens) == (32, 2)
    cache = 2 * 4 * 4 * 384 * 2 * search.max_new_tokens  # keys and values of four layers, 16 bits
    assert peak(last_steps) == pytest.approx(peak(search), abs=0.1 * cache)
    assert peak(replace(search, max_new_tokens=2)) < peak(search) - 0.8 * cache
