"""Old material that a model is trained on beside the new, so that it does not forget: the flags,
its name among a run's sets, what it shares with evaluation sets."""

import itertools
from dataclasses import dataclass

from common import options
from common.options import TRAINS, flag
from speech.data.columns import Corpus, Strings
from speech.data.splits import REPLAY

# Rows for `Parser.refuse`.
NEEDS = (("replay_manifest", ("train_manifest",), ""), ("replay_share", ("replay_manifest",), ""))


@dataclass(frozen=True)
class ReplayFlags:
    """Flags of old material."""

    # fmt: off
    replay_manifest: str | None = flag(
        options.path, None, "FILE",
        "old material, such as the language that the model knows, to train on beside the new",
        TRAINS)
    replay_share: float = flag(
        options.number(float, 0.0, 1.0, open_low=True), 0.1, "S",
        "share of the utterances of every update that are old; an epoch is one of the new material"
        " (0.1)", TRAINS)


def add_arguments(parser) -> None:
    options.add_record(parser, "against forgetting: old material", ReplayFlags)
    parser.refuse((), NEEDS)


def texts(corpora: dict[str, Corpus]) -> Strings:
    """All texts that a model learns from, which a new vocabulary is made of."""
    if REPLAY not in corpora:
        return corpora["train"].texts
    return Strings(itertools.chain(*(corpora[name].texts for name in ("train", REPLAY))))


def languages(corpora: dict[str, Corpus]) -> set[str]:
    """The languages that the rows that a model learns from name."""
    sets = (corpora[name] for name in ("train", REPLAY) if name in corpora)
    return {name for corpus in sets for name in corpus.languages.names if name}
