"""Amharic text for synthesis: numbers, abbreviations and symbols in words, then letters to
phonemes.

    python -m speech.amharic < texts.txt > phonemes.txt     # one line for each line
    python -m speech.amharic --lexicon words.tsv --no_epenthesis < texts.txt
"""

from speech.amharic.letters import BLOCKS, ETHIOPIC, SYLLABLES, WORD
from speech.amharic.reading import spoken
from speech.amharic.sounds import PHONEMES, phonemes, read_lexicon

__all__ = [
    "BLOCKS", "ETHIOPIC", "PHONEMES", "SYLLABLES", "WORD", "phonemes", "read_lexicon", "spoken",
]  # fmt: skip
