"""What every recipe promises, for tests/recipes/test_contract.py. A recipe is known here by its
command line, by what it hands to `train`, and by its files."""

import copy
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest import mock

import numpy as np
import torch

from common import checkpoint, layers, memory
from common.batches import to_device
from common.device import Setup
from common.engine import run_global_batch
from common.parts import compiling
from speech.data import splits
from tests.peers import assert_rounded
from tests.recipes import runs

CPU = torch.device("cpu")
COUNT = 7  # utterances of an update in 64 bits
CUTS = ([4, 3], [1] * COUNT, [5, 2])
# One and a half epochs of fourteen utterances.
STEPS = "--batch_size 2 --gradient_accumulation_steps 2 --max_steps 6 --warmup_steps 2".split()
STEPS += "--save_every 1 --keep_last 9 --eval_every 3 --log_every 1 --learning_rate 1e-3".split()
LAST = 6
# In a separate process: what makes the models small there, and a kill in the middle of a save.
PRELUDE = "from tests.recipes import cases; cases.make_small()\n"
KILLED_WHILE_SAVING = """
import os, signal
replace = os.replace
def killed(source, target):
    if str(target).endswith("00000002.pt"):
        os.kill(os.getpid(), signal.SIGKILL)
    replace(source, target)
os.replace = killed
"""


@dataclass(frozen=True)
class Case:
    """A recipe in the contract.

    `model`         the flags of a tiny model
    `material`      (corpus, folder) to the flags of its data, which may be made in the folder of
                    the manifests of a spoken corpus
    `exact`         flags without which a loss depends on chance, or on the size of a batch
    `draws`         whether training utterances are drawn anew in each epoch
    `counts_audio`  whether `seconds` are those of the audio
    `limits`        flags that the model's longest input asks for
    `reads_export`  whether a run can start from an export
    `transcribes`   whether it is a recogniser
    `lean`          the share of the memory for backward that is left with lean chains, at most; 1:
                    it has none"""

    recipe: ModuleType
    model: str
    material: Callable[[dict[str, str], Path], list]
    exact: str = "--dropout 0"
    draws: bool = True
    counts_audio: bool = True
    limits: str = ""
    reads_export: bool = False
    transcribes: bool = True
    lean: float = 1

    @property
    def name(self) -> str:
        return self.recipe.RECIPE


def flags_of(case: Case, data: list) -> list:
    return [*case.model.split(), *case.limits.split(), *data]


# --- what a recipe hands to the loop --------------------------------------------------------------


def begun(case: Case, *flags) -> SimpleNamespace:
    """The model, the task and the data sets of a run that ends before its first update."""
    given = []

    def train(args, run, model, task, global_batches, eval_batches):
        given.append(
            SimpleNamespace(
                model=model,
                task=task,
                data=global_batches.data,
                held_out=eval_batches.dataset.data,
                collate=global_batches.dataset.collate,
            )
        )
        raise SystemExit

    with mock.patch.object(case.recipe, "train", train):
        runs.ran(case.recipe, *flags)
    return given[0]


def awake(model: torch.nn.Module, seed: int = 3) -> torch.nn.Module:
    """The model with values of which none is zero or one, so that a test sees every part."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
            elif name.endswith("running_var"):
                buffer.copy_(0.5 + torch.rand(buffer.shape, generator=generator))
    return model


def doubled(value):
    """An item, a model, or a loss with frozen networks, in 64 bits."""
    if isinstance(value, functools.partial):
        for each in (*value.args, *value.keywords.values()):
            doubled(each)
    elif isinstance(value, torch.nn.Module):
        value.double()
    elif isinstance(value, dict):
        return {name: doubled(each) for name, each in value.items()}
    elif isinstance(value, torch.Tensor):
        return value.double() if value.is_floating_point() else value
    elif hasattr(value, "__dict__"):
        for each in vars(value).values():
            if isinstance(each, torch.nn.Module):
                each.double()
    return value


def in_64_bits(case: Case, *flags) -> SimpleNamespace:
    """What `begun` gives, with `items`, utterances of the second epoch."""
    given = begun(case, *flags, *case.exact.split())
    doubled(given.task.compute_loss)
    given.model = awake(doubled(given.model)).train()
    given.items = [doubled(given.data.item(index, 1)) for index in range(COUNT)]
    return given


def moved(given: SimpleNamespace | ModuleType, items: list[dict]) -> dict:
    """Utterances as a batch on the device. `given`: a recipe, or what `begun` gives."""
    return next(to_device([given.collate(items)], CPU))


def loss_of(recipe: ModuleType, model, items: list[dict], weights: dict, loss=None):
    """What `check_any_cut` and `update` ask of a recipe, for a model and utterances in 64 bits."""
    task = SimpleNamespace(compute_loss=loss or recipe.compute_loss, loss_weights=weights)
    return SimpleNamespace(model=model, items=items, collate=recipe.collate, task=task)


def update(given: SimpleNamespace, model: torch.nn.Module, sizes: list[int]) -> torch.Tensor:
    """The sums of the loss's terms over `items`, cut into micro-batches of these sizes, whose
    gradient the model has then."""
    rest = iter(given.items)
    micro_batches = [given.collate([next(rest) for _ in range(size)]) for size in sizes]
    weights = given.task.loss_weights
    totals = {name: sum(batch["counts"][name] for batch in micro_batches) for name in weights}
    model.zero_grad()
    work = (model, micro_batches, totals, given.task.compute_loss, weights)
    outcome = run_global_batch(*work, Setup())
    assert outcome.failed is None
    return outcome.sums


def gradient(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def check_any_cut(given: SimpleNamespace) -> None:
    """The gradient of an update depends on its utterances alone."""
    whole = update(given, given.model, [COUNT])
    expected = gradient(given.model)
    assert expected.norm() > 0.01 and bool(whole.isfinite().all())
    for sizes in CUTS:
        sums = update(given, given.model, sizes)
        assert (sums - whole).abs().max() <= 1e-10 * whole.abs().max()
        assert (gradient(given.model) - expected).norm() <= 1e-10 * expected.norm()


def check_dropout(given: SimpleNamespace) -> None:
    """Chance is part of training alone."""
    batch = moved(given, [given.data.item(0, 1)])
    model = given.model
    for is_training in (True, False):
        model.train(is_training)
        with torch.no_grad():
            first, second = [sum(given.task.compute_loss(model, batch).values()) for _ in range(2)]
        assert torch.equal(first, second) != is_training


def keeping(
    given: SimpleNamespace, model: torch.nn.Module, items: list[dict], autocast=None
) -> tuple[list[torch.Tensor], int]:
    """The terms of the loss of utterances and their gradient, and how many bytes are kept for
    backward."""
    batch = moved(given, items)
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    model.zero_grad()
    torch.manual_seed(1)
    casting = torch.autocast("cpu", autocast, enabled=autocast is not None, cache_enabled=False)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), casting:
        terms = given.task.compute_loss(model, batch)
    sum(terms.values()).backward()
    terms = [term.detach() for term in terms.values()]
    return [*terms, gradient(model)], sum(kept.values())


def check_checkpointing(given: SimpleNamespace, autocast: torch.dtype | None) -> None:
    """Recomputed layers change no bit, with dropout, and keep less."""
    items = [given.data.item(index, 1) for index in range(4)]
    plain, recomputed = (copy.deepcopy(given.model).train() for _ in range(2))
    memory.checkpoint_layers(recomputed, given.task.checkpointed)
    results, all_kept = keeping(given, plain, items, autocast)
    again, kept = keeping(given, recomputed, items, autocast)
    assert all(map(torch.equal, results, again))
    assert kept < 0.9 * all_kept, "nothing was recomputed"


def check_lean_chains(given: SimpleNamespace, most: float) -> None:
    """Norms and activations of large inputs, which are computed again in backward, change no more
    than roundings and are not kept."""
    results = []
    for smallest in (math.inf, 0):
        with mock.patch.object(layers, "SMALL", smallest):
            results.append(keeping(given, given.model, given.items))
    (plain, all_kept), (lean, kept) = results
    assert_rounded(lean, plain)
    assert kept < most * all_kept, "a chain was not recomputed"


def check_16_bits(given: SimpleNamespace, dtype: torch.dtype) -> None:
    """Losses and gradients in 16 bits are near those in 32."""
    items = [given.data.item(index, 1) for index in range(4)]
    model = copy.deepcopy(given.model).eval()
    [*exact, slope], _ = keeping(given, model, items)
    [*found, other], _ = keeping(given, model, items, dtype)
    for one, term in zip(found, exact, strict=True):
        assert one.dtype == torch.float32 and abs(one - term) <= 0.05 * term
    assert 0 < (other - slope).norm() <= 0.2 * slope.norm()


def check_compiled(given: SimpleNamespace) -> None:
    """Compiled and recomputed layers give the same losses and gradients, for several lengths. This
    backend traces and differentiates as the default one does, and runs torch's own kernels."""
    model = copy.deepcopy(given.model)
    backend = functools.partial(torch.compile, backend="aot_eager")
    with mock.patch.object(torch, "compile", backend), mock.patch.object(layers, "SMALL", 0):
        compiling.compile_layers(model, given.task.compiled)
        memory.checkpoint_layers(model, given.task.checkpointed)
        for items in (given.items, given.items[:1]):
            ours, _ = keeping(given, model, items)
            theirs, _ = keeping(given, given.model, items)
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)
    torch._dynamo.reset()


def check_evaluation(given: SimpleNamespace) -> None:
    """The results of several ranks add up, also those of one without utterances."""
    model = given.model.eval()
    items = [given.held_out.item(index, 0) for index in range(len(given.held_out))]
    batches = [[given.collate(items)], [given.collate([item]) for item in items], []]
    with torch.no_grad():
        together, apart, nothing = [given.task.evaluate(model, each) for each in batches]
    assert together.keys() == apart.keys() == nothing.keys()
    assert {given.task.metric, *given.task.loss_weights} <= together.keys()
    for name, (total, count) in together.items():
        assert count == apart[name][1] > 0 and nothing[name] == (0, 0)
        assert abs(apart[name][0] - total) <= 1e-5 * abs(total), name


def check_heard(heard_by, sample_rate: int) -> None:
    """What --align is given: log-probabilities of every frame and spelling."""
    with torch.no_grad():
        log_probs = heard_by.hear(torch.randn(5 * sample_rate))
    assert log_probs.shape[1] == len(heard_by.vocabulary.spellings)
    assert abs(len(log_probs) - 5 / heard_by.frame) <= 1
    np.testing.assert_allclose(np.exp(log_probs).sum(1), 1, rtol=1e-5)


# --- data -----------------------------------------------------------------------------------------


def same_items(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def check_lengths(data, sample_rate: int, epoch: int) -> None:
    """Utterances are read as long as `seconds` says, but for dense ones, which are not made too
    short for their texts."""
    known = data.seconds(epoch)
    read = [len(data.item(index, epoch)["audio"]) / sample_rate for index in range(len(data))]
    assert np.mean(np.abs(read - known) < 0.002) > 0.7


def keys(given: SimpleNamespace) -> list[list[str]]:
    """Of the training set and of the held-out one: what names each utterance."""
    return [splits.held_out_keys(part.corpus) for part in (given.data, given.held_out)]


# --- runs -----------------------------------------------------------------------------------------


def trained(case: Case, data: list, folder: Path) -> SimpleNamespace:
    """A run that nothing has stopped: its flags, folder and stdout, and what it has exported."""
    flags = [*flags_of(case, data), *STEPS]
    more = ["--output_dir", folder]
    if case.reads_export:  # other exports are graphs, which take seconds
        more += ["--export", folder / "exported"]
    out = runs.ran(case.recipe, *flags, *more)
    best = folder / "checkpoints" / "best.safetensors"
    return SimpleNamespace(flags=flags, data=data, folder=folder, out=out, best=best)


def lose_steps_after(step: int, folder: Path) -> None:
    """Deletes what a run has saved after an update."""
    for later in range(step + 1, LAST + 1):
        (folder / "checkpoints" / f"checkpoint_step_{later:08d}.pt").unlink()


def metrics(folder: Path) -> list[dict]:
    return runs.rows(folder / "logs" / "metrics.jsonl")


def held_out(data: list) -> list:
    """The flags of the evaluation set, among those of the data, for a command that tests."""
    words = list(map(str, data))
    if "--eval_clips" in words:
        return ["--eval_clips", words[words.index("--eval_clips") + 1]]
    return ["--test_manifest", words[words.index("--val_manifest") + 1]]


def without(flags: list, name: str) -> list:
    """The flags without the one of this name and its value."""
    if name not in flags:
        return flags
    place = flags.index(name)
    return [*flags[:place], *flags[place + 2 :]]


def assert_near(one: Path, other: Path, recipe: ModuleType) -> None:
    """That two runs of two updates end alike, but for the order of sums in 32 bits. The gradient of
    a key's bias is nothing but that."""
    first, last = [
        checkpoint.read(path, recipe.RECIPE).model
        for path in reversed(checkpoint.list_checkpoints(one / "checkpoints"))
    ]
    theirs = runs.newest(other, recipe).model
    names = [name for name in last if not name.endswith("k_proj.bias")]
    apart, moved = [
        torch.cat([(last[name] - each[name]).double().flatten() for name in names]).norm()
        for each in (theirs, first)
    ]
    assert moved > 0 and apart <= 1e-2 * moved
