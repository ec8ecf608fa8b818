"""Runs with several sets, by the flags of a recipe."""

from recipes import parakeet_tdt
from speech.data import splits
from tests.recipes import runs


def parse(*flags):
    return resolved("--train_manifest", "t.json", *flags)


def resolved(*flags):
    args = runs.parse(parakeet_tdt, "--from_scratch", *flags)
    parakeet_tdt.resolve(args)
    return args


def read(manifests, **sets):
    """The corpora of `sets`: {name of the set: name in `manifests`}."""
    words = [
        word for name, value in sets.items() for word in (f"--{name}_manifest", manifests[value])
    ]
    data = splits.resolve(resolved(*words))
    return splits.load_splits(data, str)
