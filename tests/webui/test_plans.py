"""What the page reads of --dry_run."""

import contextlib
import sys

import pytest

from common.errors import UsageError
from tests.webui.test_catalogue import copied
from webui import catalogue, plans

RECIPES = catalogue.find_recipes()


def planned(recipe: catalogue.Recipe, capsys, *flags: str) -> plans.Verdict:
    """What the page reads of the --dry_run of a recipe."""
    module = sys.modules[recipe.resolve.__module__]
    with contextlib.suppress(SystemExit):
        module.exit_with_one_line(lambda: module.main(recipe.parser.parse_args(list(flags))))
    captured = capsys.readouterr()
    return plans.verdict(recipe, captured.out + captured.err)


def test_verdicts_are_those_of_a_dry_run(tmp_path, capsys):
    recipe = copied(tmp_path, False)
    size = ["--batch_size", "8", "--output_dir", str(tmp_path)]
    fits = planned(recipe, capsys, *size, "--dry_run", "24gb")
    assert (fits.word, fits.after, fits.flags) == ("fits", "", {})
    memory = dict(fits.memory)
    assert memory["24gb"] == "22.00 GiB" and {"weights", "activations", "total", "left"} <= set(
        memory
    )
    assert any(line.startswith("Peak: ") for line in fits.lines)
    assert fits.lines[-1].endswith("hence the margin")

    helped = planned(recipe, capsys, *size, "--dry_run", "0.7")
    assert (helped.word, helped.after) == ("does not fit", "fits")
    assert helped.flags.keys() >= {"batch_size", "gradient_accumulation_steps"}
    assert int(helped.flags["batch_size"]) * int(helped.flags["gradient_accumulation_steps"]) == 32
    words = [f"--{name}={value}" for name, value in helped.flags.items()]
    assert planned(recipe, capsys, *size, *words, "--dry_run", "0.7").word == "fits"

    nothing = planned(recipe, capsys, *size, "--dry_run", "0.5")
    assert (nothing.word, nothing.after, nothing.flags) == ("does not fit", "does not fit", {})
    assert any("take a smaller model" in line for line in nothing.advice)
    assert not fits.advice

    with pytest.raises(UsageError, match="--dry_run: 'tomato' is not a GPU"):
        planned(recipe, capsys, *size, "--dry_run", "tomato")


@pytest.mark.parametrize(
    "flags, values",
    [
        (
            "--optimizer adamw --use_cpu_offload gradients",
            {"optimizer": "adamw", "use_cpu_offload": "gradients"},
        ),
        ("--freeze_encoder", {"freeze_encoder": "on"}),
        ("--no_tf32 --batch_size 1", {"tf32": "off", "batch_size": "1"}),
    ],
)
def test_flags_of_the_advice_are_values_of_a_form(flags, values):
    text = f"Verdict: does not fit (it ...)\n  {flags}: 1.20 GiB less\n"
    text += "Peak with these flags: 7.00 GiB of 8.00 GiB (8gb): tight"
    assert plans.verdict(RECIPES["whisper_morse"], text).flags == values
