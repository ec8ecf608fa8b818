"""What every recipe promises, proved for each by one list. A new recipe is a `Case` in cases.py.
What the core guarantees is run for the template and Konkani here, and for the others with -m
slow."""

import copy
import pickle
import shutil
import signal

import pytest
import torch

from common import checkpoint, layers
from recipes import konkani_conformer, parakeet_tdt, template
from tests import contract
from tests.contract import LAST
from tests.recipes import adapters, runs
from tests.recipes.cases import CASES, make_small

FAST = {template, konkani_conformer}
# Of the core: each row is slow for all recipes but two.
OF_CORE = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=() if case.recipe in FAST else pytest.mark.slow, id=case.name)
        for case in CASES
    ],
    indirect=True,
)


@pytest.fixture(autouse=True, scope="module")
def small_models():
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        yield


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def case(request):
    return request.param


@pytest.fixture(scope="module")
def data(case, konkani, tmp_path_factory) -> list:
    return case.material(konkani, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def whole(case, data, tmp_path_factory):
    return contract.trained(case, data, tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def given(case, data, tmp_path_factory):
    """What the recipe hands to the loop."""
    place = ["--output_dir", tmp_path_factory.mktemp("given")]
    return contract.begun(case, *contract.flags_of(case, data), *place)


@pytest.fixture(scope="module")
def exact(case, data, tmp_path_factory):
    """The same in 64 bits and without chance."""
    place = ["--output_dir", tmp_path_factory.mktemp("exact")]
    return contract.in_64_bits(case, *contract.flags_of(case, data), *place)


# --- exactness ------------------------------------------------------------------------------------


def test_however_an_update_is_cut_its_loss_and_gradient_are_the_same(exact):
    contract.check_any_cut(exact)


def test_dropout_is_drawn_in_training_alone(case, data, tmp_path):
    flags = [*contract.flags_of(case, data), "--dropout", "0.2", "--output_dir", tmp_path]
    contract.check_dropout(contract.begun(case, *flags))


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
def test_checkpointing_changes_neither_loss_nor_gradient(given, autocast):
    contract.check_checkpointing(given, autocast)


def test_what_lean_chains_compute_again_changes_nothing_and_is_not_kept(case, exact):
    if case.lean == 1:
        pytest.skip("it has none")
    contract.check_lean_chains(exact, case.lean)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_losses_and_gradients_in_16_bits_are_near_those_in_32(given, dtype):
    contract.check_16_bits(given, dtype)


@pytest.mark.slow
def test_compiled_and_checkpointed_layers_give_the_same_losses_and_gradients(exact):
    if not exact.task.compiled:
        pytest.skip("it compiles none")
    contract.check_compiled(exact)


def test_adapters_are_as_exact(exact, monkeypatch):
    if exact.task.plans.adapters is None:
        pytest.skip("it has none")
    layers = exact.task.plans.adapters(2).layers
    adapters.check_exact(
        lambda: adapters.beside(copy.deepcopy(exact.model), layers),
        lambda model, sizes: contract.update(exact, model, sizes),
        contract.CUTS,
        exact.task.checkpointed,
        monkeypatch,
    )


def test_an_evaluation_adds_up_its_batches_and_ranks_without_any(given):
    contract.check_evaluation(given)


# --- data -----------------------------------------------------------------------------------------


def test_what_is_drawn_depends_on_seed_epoch_and_utterance_alone(case, given, data, tmp_path):
    sent = pickle.loads(pickle.dumps(given.data))  # as it travels to a data worker
    wanted = [(3, 0), (1, 2), (3, 2)]
    ours = [given.data.item(*place) for place in wanted]
    theirs = [sent.item(*place) for place in reversed(wanted)]  # the order does not matter
    assert all(map(contract.same_items, ours, reversed(theirs)))
    flags = [*contract.flags_of(case, data), "--output_dir", tmp_path, "--seed", "2"]
    seeded = contract.begun(case, *flags)
    for other in (ours[0], seeded.data.item(3, 2)):
        assert contract.same_items(other, ours[2]) != case.draws
    if "--val_manifest" in data:
        pairs = [[each.held_out.item(index, 0) for each in (given, seeded)] for index in range(4)]
        assert all(contract.same_items(*pair) for pair in pairs)


def test_an_utterance_is_as_long_as_its_data_set_says(case, given):
    if not case.counts_audio:
        pytest.skip("it counts something else")
    for data in (given.data, given.held_out):
        contract.check_lengths(data, case.recipe.SAMPLE_RATE, epoch=1)


def test_training_hears_silence_noise_and_other_levels(case, given, data, tmp_path):
    if not hasattr(given.data, "augmentation") or "--val_manifest" not in data:
        pytest.skip("it adds none")
    flags = [*contract.flags_of(case, data), "--output_dir", tmp_path, "--no_wave_augment"]
    plain = contract.begun(case, *flags).data
    assert given.data.augmentation and not plain.augmentation and not given.held_out.augmentation
    pairs = [[each.item(index, 1) for each in (given.data, plain)] for index in range(8)]
    assert not any(torch.equal(ours["audio"], theirs["audio"]) for ours, theirs in pairs)
    spoken = [pair for pair in pairs if len(pair[0]["tokens"])]  # the others are pauses
    assert len(spoken) > 4
    assert all(torch.equal(ours["tokens"], theirs["tokens"]) for ours, theirs in spoken)


# --- a run and what follows it --------------------------------------------------------------------


def exported(case, whole) -> list:
    """The flags of a run that starts from the export of another."""
    data = contract.without(whole.data, "--model_dir")
    return [*data, *case.limits.split(), "--model_dir", whole.folder / "exported"]


def test_a_run_leaves_what_it_promises(case, whole, given):
    checkpoints = whole.folder / "checkpoints"
    assert len(list(checkpoints.glob("checkpoint_step_*.pt"))) == LAST
    assert (checkpoints / "best.json").is_file() and whole.best.is_file()
    lines = contract.metrics(whole.folder)
    evaluated = [line["step"] for line in lines if "eval/loss" in line]
    assert evaluated[-2:] == [3, 6] and evaluated[:-2] in ([], [0])
    assert [line["step"] for line in lines if "train/loss" in line] == list(range(1, LAST + 1))
    assert "memory: peak " in whole.out and "resuming" not in whole.out
    assert case.reads_export == ("exported to" in whole.out)
    if case.transcribes:
        assert len(runs.error_lines(whole.out)) == 2 and "reference:" in whole.out
        rows = runs.rows(whole.folder / "logs" / "transcripts.jsonl")
        assert len(rows) == 4 and {"file", "reference", "hypothesis"} <= rows[0].keys()
    logs = whole.folder / "logs"
    moved = checkpoint._existing(logs, (*checkpoint.LOGS, *given.task.reports))
    written = {path for path in logs.iterdir() if path.is_file()}
    assert written <= {*moved}  # so that a new run writes over nothing


@pytest.mark.parametrize("step", [2, 5], ids=["within an epoch", "within the second"])
def test_resumed_it_ends_with_the_same_bits(case, whole, step, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "copy")
    contract.lose_steps_after(step, folder)
    out = runs.ran(case.recipe, *whole.flags, "--resume", "auto", "--output_dir", folder)
    assert f"(step {step})" in out
    runs.assert_same_state(runs.newest(folder, case.recipe), runs.newest(whole.folder, case.recipe))


def test_a_finished_run_that_is_started_again_only_prints_its_results(case, whole, tmp_path):
    folder = shutil.copytree(whole.folder, tmp_path / "copy")
    out = runs.ran(case.recipe, *whole.flags, "--resume", "auto", "--output_dir", folder)
    assert f"(step {LAST})" in out and "evaluation at step" not in out
    assert runs.error_lines(out) == runs.error_lines(whole.out)


def test_the_results_again_from_the_weights_alone(case, whole, tmp_path):
    flags = ["--evaluate", "--resume", whole.best, *case.limits.split()]
    flags += contract.held_out(whole.data)
    out = runs.ran(case.recipe, *flags, "--output_dir", tmp_path)
    assert runs.error_lines(out) == runs.error_lines(whole.out)
    assert not (tmp_path / "checkpoints").exists()


def test_a_plan_is_of_the_model_of_the_run_and_writes_nothing(case, whole, tmp_path):
    saved = runs.newest(whole.folder, case.recipe)
    shapes = {name: tensor.shape for name, tensor in saved.model.items()}
    starts = {
        "a checkpoint": ["--resume", saved.path, *whole.data, *case.limits.split()],
        "nothing": whole.flags,
    }
    if case.reads_export:
        starts["an export"] = exported(case, whole)
    for origin, flags in starts.items():
        model = runs.planned(case.recipe, *flags, "--output_dir", tmp_path).model
        found = {name: tensor.shape for name, tensor in model.state_dict().items()}
        lacking = shapes.items() - found.items()
        if origin == "an export":  # which may have no CTC head
            lacking = {(name, shape) for name, shape in lacking if "ctc_head" not in name}
        assert not lacking, origin
    assert not list(tmp_path.iterdir())


def test_an_export_alone_is_that_of_the_end(case, whole, tmp_path):
    if not case.reads_export:
        pytest.skip("it reads no export")
    base = whole.data[:2] if "--model_dir" in whole.data else []
    flags = ["--resume", whole.best, "--export", tmp_path / "alone"]
    runs.ran(case.recipe, *flags, *base, "--output_dir", tmp_path)
    during = whole.folder / "exported"
    weights = [path for path in (tmp_path / "alone").iterdir() if path.stat().st_size > 20_000]
    assert weights
    for path in weights:
        assert path.read_bytes() == (during / path.name).read_bytes(), path.name


def test_a_run_starts_from_an_export(case, whole, tmp_path):
    if not case.reads_export:
        pytest.skip("it does not read its export")
    model = contract.begun(case, *exported(case, whole), "--output_dir", tmp_path).model
    best = checkpoint.read_weights(whole.best, case.recipe.RECIPE).model
    read = model.state_dict()
    assert all(name in read or name.startswith("ctc_head.") for name in best)
    for name in best.keys() & read.keys():
        torch.testing.assert_close(read[name], best[name], rtol=0, atol=1e-6)


def test_align_hears_with_the_ctc_head(case, whole, konkani, tmp_path, monkeypatch):
    """The weights have learnt little, so nothing is found."""
    if not hasattr(case.recipe, "recogniser_to_align"):
        pytest.skip("it aligns nothing")
    (tmp_path / "book.txt").write_text("हांव घर वचता।", encoding="utf-8")
    audio = runs.rows_of(konkani["val"])[0]["audio_filepath"]
    words = ["--align", audio, tmp_path / "book.txt", "--output", tmp_path / "a.json"]
    words += ["--resume", whole.best]
    status, _, err = runs.run(case.recipe, *words)
    assert status == 1 and "nothing was found" in err and not (tmp_path / "a.json").exists()
    loaded = []
    monkeypatch.setattr(case.recipe.alignment, "align_files", lambda _, load: loaded.append(load()))
    runs.ran(case.recipe, *words)
    contract.check_heard(loaded[0], case.recipe.SAMPLE_RATE)


def test_silence_has_no_text(case, whole, silence, monkeypatch):
    if not hasattr(case.recipe, "final_texts"):
        pytest.skip("it decodes without a search")
    monkeypatch.setattr(case.recipe, "final_texts", lambda *_: pytest.fail("silence was decoded"))
    assert runs.ran(case.recipe, "--transcribe", silence, "--resume", whole.best) == "\n"


# --- what the core guarantees ---------------------------------------------------------------------


@OF_CORE
@pytest.mark.parametrize("how", ["killed in a save", "terminated"])
def test_stopped_in_a_process_of_its_own_and_resumed_it_ends_with_the_same_bits(
    case, whole, how, tmp_path
):
    """With a data worker, which has read ahead."""
    prelude = contract.PRELUDE
    if how == "terminated":
        prelude += runs.signal_after(5, signal.SIGTERM)
    else:
        prelude += contract.KILLED_WHILE_SAVING
    flags = [*whole.flags, "--resume", "auto"]
    process = runs.start(runs.command(case.recipe, *flags), tmp_path, prelude)
    _, err = process.communicate()
    if how == "terminated":
        assert process.returncode == 143 and "--resume auto" in err, err
    else:
        assert process.returncode == -signal.SIGKILL, err
        assert len(list((tmp_path / "checkpoints").glob(".*.tmp"))) == 1
    step = 5 if how == "terminated" else 1
    out = runs.ran(case.recipe, *flags, "--output_dir", tmp_path)
    assert f"(step {step})" in out and not list((tmp_path / "checkpoints").glob(".*.tmp"))
    runs.assert_same_state(
        runs.newest(tmp_path, case.recipe), runs.newest(whole.folder, case.recipe)
    )


@OF_CORE
def test_two_ranks_train_as_one_does(case, data, tmp_path):
    flags = [
        *contract.flags_of(case, data),
        *case.exact.split(),
        *contract.STEPS,
        "--max_steps",
        "2",
    ]
    runs.ran(case.recipe, *flags, "--output_dir", tmp_path / "one")
    (tmp_path / "two").mkdir()
    more = ["--gradient_accumulation_steps", "1", "--dataloader_num_workers", "0"]
    command = runs.command(case.recipe, *flags, *more)
    ranks = runs.start_ranks(command, tmp_path / "two", contract.PRELUDE)
    (out, err), (other, other_err) = (process.communicate() for process in ranks)
    assert [process.returncode for process in ranks] == [0, 0], err + other_err
    assert other == "" and out.count("evaluation at step 2") == 1
    one, two = (runs.newest(tmp_path / name, case.recipe) for name in ("one", "two"))
    assert two.progress.utterances == one.progress.utterances > 4
    assert len(two.state["rng"]) == 2
    contract.assert_near(tmp_path / "one", tmp_path / "two", case.recipe)


@OF_CORE
def test_a_level_of_offloading_changes_no_bit(case, data, tmp_path, monkeypatch):
    monkeypatch.setattr(layers, "SMALL", 0)  # small inputs are handled as large ones
    monkeypatch.setattr(template, "WIDTH", 16)  # a CPU computes slowly in fp16
    flags = contract.flags_of(case, data)
    if case.recipe in (template, parakeet_tdt):
        flags += ["--mixed_precision", "fp16", "--no_gradient_checkpointing"]
    runs.check_levels(case.recipe, tmp_path, *flags)


@OF_CORE
def test_what_was_held_out_is_held_out_again_whatever_the_seed(case, data, tmp_path):
    if "--val_manifest" not in data:
        pytest.skip("it makes its data")
    flags = contract.without(contract.flags_of(case, data), "--val_manifest")
    flags = [*flags, "--output_dir", tmp_path]
    runs.ran(case.recipe, *flags, *runs.SHORT, "--max_steps", "1")
    first, again, other = [
        contract.keys(contract.begun(case, *flags, *more))
        for more in (["--resume", "auto"], ["--resume", "auto", "--seed", "2"], ["--seed", "2"])
    ]
    assert first == again != other
    assert not set(first[0]) & set(first[1]) and len(first[1]) == 1


@OF_CORE
def test_old_utterances_and_a_watched_set(case, data, tmp_path):
    if not hasattr(case.recipe, "replay") or "--val_manifest" not in data:
        pytest.skip("it replays none")
    val = contract.held_out(data)[-1]
    runs.check_replay(case.recipe, tmp_path, val, val, *contract.flags_of(case, data))
