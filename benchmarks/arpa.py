"""Do the stock programs give sentences the probabilities that our language model gives them?

    python benchmarks/arpa.py texts.txt      # in an environment with kenlm or nemo_toolkit[asr]

texts.txt is a run's. Prints the largest difference of a token's log10 probability, over sentences
of random characters and the texts themselves, whole (<s> and </s> included), for each program."""

import importlib.util
import math
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import common

common.spin_briefly()

import numpy as np

from models.lm_files import ORDER
from speech.decoding.arpa import lines_of
from speech.decoding.ngram import NGram

OFFSET = 100  # of NeMo's names of tokens
COUNT = 500  # sentences of each kind


def expected(model: NGram, sentence: list[int]) -> list[float]:
    """log10 probabilities of the tokens and of the end."""
    state = model.start
    found = []
    for token in [*sentence, model.mark]:
        log_prob, state = model.step(state, token)
        found.append(log_prob / math.log(10))
    return found


def by_kenlm(path: Path, size: int) -> Callable[[list[int]], list[float]]:
    import kenlm

    model = kenlm.Model(str(path))

    def scores(sentence: list[int]) -> list[float]:
        names = " ".join(chr(token + OFFSET) for token in sentence)
        return [score for score, _, _ in model.full_scores(names)]

    return scores


def by_nemo(path: Path, size: int) -> Callable[[list[int]], list[float]]:
    import torch
    from nemo.collections.asr.parts.submodules.ngram_lm import NGramGPULanguageModel

    model = NGramGPULanguageModel.from_file(path, vocab_size=size, use_triton=False)

    def scores(sentence: list[int]) -> list[float]:
        labels = torch.tensor([sentence])
        lengths = torch.tensor([len(sentence)])
        with torch.no_grad():
            found = model.score_sentences(labels, lengths, bos=True, eos=True)[0]
        return [float(score) / math.log(10) for score in found]

    return scores


PROGRAMS = {"kenlm": by_kenlm, "nemo": by_nemo}


def main() -> None:
    texts = Path(sys.argv[1]).read_text(encoding="utf-8").splitlines()
    characters = sorted({*" ", *"".join(texts)})
    numbers = {character: token for token, character in enumerate(characters)}
    sentences = [[numbers[character] for character in text] for text in texts]
    model = NGram(sentences, len(characters), numbers[" "], ORDER)
    random = np.random.default_rng(0)
    drawn = [random.integers(0, model.size, random.integers(1, 40)) for _ in range(COUNT)]
    tried = [sentence.tolist() for sentence in drawn] + sentences[:COUNT]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "lm.arpa")
        names = {token: chr(token + OFFSET) for token in range(model.size)}
        path.write_text("".join(f"{line}\n" for line in lines_of(model, names)), encoding="utf-8")
        for name, program in PROGRAMS.items():
            if importlib.util.find_spec(name) is None:
                print(f"{name}: not installed")
                continue
            scores = program(path, model.size)
            worst = max(np.abs(np.subtract(scores(s), expected(model, s))).max() for s in tried)
            print(f"{name}: {len(tried)} sentences, the largest difference is {worst:.1e}")


if __name__ == "__main__":
    main()
