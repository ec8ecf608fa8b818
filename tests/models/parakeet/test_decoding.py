"""Greedy TDT decoding, against transformers and a plain loop, and the times of words and segments,
with rows made by NeMo."""

import itertools
import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2
from transformers import ParakeetForTDT, ParakeetTDTConfig

from models.parakeet import decoding
from models.parakeet.decoding import greedy
from models.parakeet.tokenizer import BYTE, NORMAL, UNIGRAM, UNKNOWN, make_tokenizer
from speech.decoding.ngram import Fusion, NGram
from speech.decoding.timed import Token, segments, transcript

ENOUGH = 1000  # symbols a frame, never reached


# --- greedy ---------------------------------------------------------------------------------------


class Script:
    """A joint and a prediction network that do as they are told: `logits` (B, T, U, K) of every
    utterance, frame and number of labels. `moves` are the labels that the prediction network was
    given."""

    def __init__(self, logits: torch.Tensor):
        self.logits = logits
        self.encoded = torch.arange(logits.shape[0] * logits.shape[1]).view(*logits.shape[:2], 1)
        self.moves: list[int] = []

    def step(self, tokens, state):
        if tokens is None:
            count = torch.zeros(len(self.logits), 1, dtype=torch.long)
        else:
            assert state[0].shape == (1, len(tokens), 1)
            self.moves += tokens.tolist()
            count = state[0][0] + 1
        return count, (count[None],)

    def joint(self, encoded, predicted):
        return self.logits.flatten(0, 1)[encoded[:, 0], predicted[:, 0]]

    def decode(
        self, lengths: list[int], durations: tuple[int, ...], max_symbols: int = ENOUGH, **more
    ) -> list[list[Token]]:
        return greedy(self.step, self.joint, self.encoded, lengths, durations, max_symbols, **more)


def script(
    cells: dict[tuple[int, int], tuple[int, int]], frames: int, n_tokens: int, n_durations: int
) -> Script:
    """One utterance with these tokens and indices of durations by (frame, number of labels); any
    other cell is an error."""
    logits = torch.full(
        (1, frames, 1 + max(label for _, label in cells), n_tokens + n_durations), torch.nan
    )
    for (frame, label), (token, duration) in cells.items():
        logits[0, frame, label] = 0.0
        logits[0, frame, label, [token, n_tokens + duration]] = 1.0
    return Script(logits)


def plain_greedy(
    logits: torch.Tensor, length: int, durations: tuple[int, ...], max_symbols: int
) -> list[Token]:
    """NeMo's rules in a loop over one utterance's (T, U, K)."""
    blank = logits.shape[-1] - len(durations) - 1
    tokens: list[Token] = []
    frame = 0
    while frame < length:
        advance = 0
        for _ in range(max_symbols):
            cell = logits[frame, len(tokens)].tolist()
            token = max(range(blank + 1), key=cell.__getitem__)
            advance = durations[max(range(len(durations)), key=cell[blank + 1 :].__getitem__)]
            if token == blank:
                break
            tokens.append(Token(token, frame, advance))
            if advance:
                break
        frame += max(1, advance)
    return tokens


@pytest.mark.parametrize("durations", [(0, 1, 2, 3, 4), (0, 2, 5), (1, 2), (3, 0)])
@pytest.mark.parametrize("max_symbols", [1, 2, 3])
def test_greedy_is_a_plain_loop(durations, max_symbols):
    generator = torch.Generator().manual_seed(0)
    lengths = [12, 1, 7, 9, 2, 0]
    logits = torch.randn(6, 12, 12 * max_symbols + 1, 5 + len(durations), generator=generator)
    scripted = Script(logits)
    hypotheses = scripted.decode(lengths, durations, max_symbols)
    assert hypotheses == [
        plain_greedy(row, n, durations, max_symbols) for row, n in zip(logits, lengths, strict=True)
    ]
    assert sum(map(len, hypotheses)) > 9 and hypotheses[5] == []
    assert sorted(scripted.moves) == sorted(
        token.piece for tokens in hypotheses for token in tokens
    )  # labels only
    for row, (tokens, length) in enumerate(zip(hypotheses, lengths, strict=True)):
        assert Script(logits[row : row + 1]).decode([length], durations, max_symbols) == [tokens]


@pytest.mark.parametrize("weight", [0.0, 0.3, 100.0])
def test_a_language_model_helps_to_choose_among_labels_only(weight, monkeypatch):
    """Blanks and durations are the model's, as in NeMo's greedy fusion."""
    monkeypatch.setattr(decoding, "LABEL_WEIGHT", weight)
    torch.manual_seed(2)
    lm = NGram([[0, 1, 2, 0, 1, 2, 0, 1, 2]], 4, mark=3)
    durations = (0, 1, 2)
    # A prediction network without memory: what follows does not depend on the labels.
    logits = torch.randn(2, 9, 1, 4 + 3).expand(-1, -1, 30, -1).contiguous()
    plain = Script(logits).decode([9, 7], durations, 3)
    fused = Script(logits).decode([9, 7], durations, 3, fusion=Fusion(lm))
    tagged = Script(logits).decode([9, 7], durations, 3, fusion=Fusion(lm, tags=frozenset([1])))
    for before, after, with_tags in zip(plain, fused, tagged, strict=True):
        assert [(t.frame, t.duration) for t in before] == [(t.frame, t.duration) for t in after]
        pairs = zip(before, with_tags, strict=True)
        assert all(a == b for a, b in pairs if a.piece == 1)
    if not weight:
        assert fused == plain
    if weight == 100:
        for tokens in fused:
            state = lm.start
            for token in tokens:
                assert token.piece == lm.log_probs(state)[:3].argmax()
                _, state = lm.step(state, token.piece)


def test_a_blank_without_duration_takes_one_frame_and_does_not_move_the_lstm():
    scripted = script({(0, 0): (2, 0), (1, 0): (2, 2), (3, 0): (1, 1)}, 4, 3, 3)  # 2 is blank
    assert scripted.decode([4], (0, 1, 2)) == [[Token(1, 3, 1)]]
    assert scripted.moves == [1]


def test_no_utterances_and_no_frames_have_no_tokens():
    scripted = Script(torch.zeros(2, 1, 1, 4))
    assert scripted.decode([0, 0], (0, 1)) == [[], []] and scripted.moves == []


def make_peer() -> ParakeetForTDT:
    """A tiny model of transformers' in float64 with random weights, whose labels and durations
    vary."""
    torch.manual_seed(10)
    encoder = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "subsampling_conv_channels": 4,
        "num_mel_bins": 16,
        "model_type": "parakeet_encoder",
    }
    config = ParakeetTDTConfig(
        vocab_size=12,
        blank_token_id=11,
        pad_token_id=2,
        decoder_hidden_size=32,
        num_decoder_layers=2,
        durations=[0, 1, 2, 3, 4],
        encoder_config=encoder,
    )
    model = ParakeetForTDT(config).double().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn(parameter.shape) / parameter[0].numel() ** 0.5)
            elif name.endswith("bias"):
                parameter.zero_()
        model.decoder.embedding.weight *= 10
        model.decoder.decoder_projector.weight *= 4
        model.encoder_projector.weight *= 4
        model.joint.head.bias[11] += 2  # more blanks
    return model


@torch.no_grad()
def test_greedy_is_transformers_generate():
    model, lengths = make_peer(), [160, 97, 8, 41]
    features = torch.randn(4, 160, 16, dtype=torch.float64)
    mask = torch.arange(160) < torch.tensor(lengths)[:, None]
    theirs = model.generate(
        features,
        attention_mask=mask,
        decoder_start_token_id=11,
        suppress_tokens=[*range(12, 17)],
        eos_token_id=None,
        max_new_tokens=199,
    )
    output = model.get_audio_features(
        input_features=features, attention_mask=mask, output_attention_mask=True
    )
    frames = output.attention_mask.sum(1).tolist()
    expected: list[list[Token]] = [[] for _ in lengths]
    blanks = 0
    for row, tokens in enumerate(expected):
        frame = 0
        for token, duration in zip(
            theirs.sequences[row, 1:].tolist(), theirs.durations[row, 1:].tolist(), strict=True
        ):
            if frame < frames[row] and token != 11:
                tokens.append(Token(token, frame, duration))
            blanks += token == 11
            frame += duration
        assert frame >= frames[row]  # it was not cut

    def step(tokens, state):
        inputs = torch.full((4,), 11) if tokens is None else tokens
        x, state = model.decoder.lstm(model.decoder.embedding(inputs[:, None]), state)
        return model.decoder.decoder_projector(x)[:, 0], state

    def joint(encoded, predicted):
        return model.joint.head((encoded + predicted).relu())

    ours = greedy(step, joint, output.pooler_output, frames, (0, 1, 2, 3, 4), ENOUGH)
    assert ours == expected and frames == [20, 13, 1, 6]
    assert blanks > 3
    assert {0, 1} < {token.duration for tokens in ours for token in tokens}
    assert all(ours[:2])


# --- words and segments ---------------------------------------------------------------------------


PIECES = ["<unk>", "▁", "▁the", "▁a", "▁b", "▁s", "▁t", "he", "in"]
PIECES += [*"abcdefghijklmnopqrstuvwxyz", *"HKNQRTW", *".,?!;'\"-"]
PIECES += ["...", "▁(", "▁¿", ")", "▁&", *"你好。क।؟", "▁-", "<0x20>", "<0xC3>", "<0xA9>"]


def make(pieces: list[str], prefix: bool = True):
    proto = sentencepiece_model_pb2.ModelProto()
    for number, piece in enumerate(pieces):
        kind = UNKNOWN if number == 0 else BYTE if piece.startswith("<0x") else NORMAL
        proto.pieces.add(piece=piece, score=-float(number), type=kind)
    proto.trainer_spec.vocab_size = len(pieces)
    proto.trainer_spec.model_type = UNIGRAM
    proto.normalizer_spec.add_dummy_prefix = prefix
    proto.normalizer_spec.remove_extra_whitespaces = prefix
    proto.trainer_spec.byte_fallback = "<0xC3>" in pieces
    return make_tokenizer({"sentencepiece": proto.SerializeToString().hex()}, len(pieces))


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TOKENIZER = make(
    [*PIECES, *(byte for byte in BYTES if byte not in PIECES)]
)  # a model has all bytes or none


def tokens_of(row: str, pieces: list[str]) -> list[Token]:
    """Of "piece:frame+duration ..."."""
    tokens = []
    for item in row.split():
        piece, times = item.rsplit(":", 1)
        tokens.append(Token(pieces.index(piece), *map(int, times.split("+"))))
    return tokens


def record_of(row: str, frames: int = 1000, tokenizer=TOKENIZER) -> dict:
    """`transcript` in frames instead of seconds, with tuples for words and segments."""
    record = transcript(tokens_of(row, tokenizer.pieces), tokenizer, 1.0, frames)
    for name in ("words", "segments"):
        record[name] = [(part["text"], part["start"], part["end"]) for part in record[name]]
    return record


def words_of(row: str, frames: int = 1000) -> list[tuple]:
    return record_of(row, frames)["words"]


# Made by NeMo 3.0: punctuation, an apostrophe, quotes and spaces of their own, whose durations
# vary.
NEMO = [  # tokens as piece:frame+duration, words as text:start-end
    (
        (
            "▁:2+3 T:5+4 he:15+0 ▁:16+4 o:20+3 l:23+0 d:23+1 ▁:25+4 c:29+1 l:36+0 o:42+0 c:42+3"
            " k:45+1 ,:46+0 ▁:47+0 i:47+0 t:53+2 ▁:56+0 w:56+0 a:56+0 s:56+0 n:56+1 ':57+0 t:63+3"
            " ▁:66+0 n:66+1 e:67+0 w:67+1 .:68+0 ▁:68+0 W:68+1 h:75+2 y:77+2 ?:79+0 ▁:79+1 N:80+1"
            " o:81+0 !:82+1"
        ),
        "The:2-15 old:16-24 clock,:25-46 it:47-55 wasn't:56-66 new.:66-68 Why?:68-79 No!:79-81",
        [("The old clock, it wasn't new.", 2, 68), ("Why?", 68, 79), ("No!", 79, 81)],
    ),
    (
        (
            '▁:0+1 H:1+3 e:4+4 ▁s:9+0 a:15+4 i:20+1 d:22+2 ▁:24+1 ":25+3 n:28+2 o:30+0 ":30+4'
            " ▁a:35+1 g:42+1 a:49+1 in:51+0 ;:57+3 ▁the:60+4 ▁b:64+0 e:65+0 l:65+1 l:72+2 ▁:74+0"
            " r:74+1 a:81+0 n:81+3 g:84+1 .:85+4"
        ),
        'He:0-8 said:9-24 "no":24-30 again;:35-51 the:60-64 bell:64-74 rang.:74-85',
        [('He said "no" again; the bell rang.', 0, 85)],
    ),
    (
        "R:0+0 ▁s:0+1 K:1+3 t:4+0 !:10+0 ▁t:16+4 ▁the:20+0 ▁b:20+1",
        "R:0-0 sKt!:0-4 t:16-20 the:20-20 b:20-21",
        [("R sKt!", 0, 4), ("t the b", 16, 21)],
    ),
    ("v:0+1 e:7+3 !:10+0 he:10+4 h:14+4", "ve!heh:0-18", [("ve!heh", 0, 18)]),
    (
        "▁s:2+3 !:5+4 ▁the:9+4 ,:13+4 j:23+1 .:25+3 ▁a:28+3 ▁the:37+0 in:37+3 b:46+3 ;:49+1 .:50+2",
        "s!:2-5 the,j.:9-24 a:28-31 theinb;.:37-49",
        [("s!", 2, 5), ("the,j.", 9, 24), ("a theinb;.", 28, 49)],
    ),
    ("▁:3+1 R:4+1 a:6+0 in:6+1", "Rain:3-7", [("Rain", 3, 7)]),
]


@pytest.mark.parametrize(("row", "words", "sentences"), NEMO)
def test_words_and_segments_are_those_of_nemo(row, words, sentences):
    record = record_of(row)
    assert (
        " ".join(f"{text}:{start:.0f}-{end:.0f}" for text, start, end in record["words"]) == words
    )
    assert record["segments"] == sentences
    assert record["text"] == " ".join(text for text, _, _ in record["words"])


WORDS = {  # pieces with their frames, and the words
    "no token": ("", ""),
    "spaces alone": ("▁:1+1 ▁:2+1", ""),
    "nothing ends after the utterance": ("▁a:0+1 ▁b:48+4 .:49+4", "a:0-1 b.:48-50"),
    "punctuation takes no time": ('▁b:1+2 .:6+3 ":10+4 ▁a:15+1', 'b.":1-3 a:15-16'),
    "several marks of a piece": ("▁b:1+2 ...:6+3", "b...:1-3"),
    "punctuation alone is of the word before": ("▁a:3+1 ▁:10+4 .:20+4 ▁b:30+1", "a .:3-14 b:30-31"),
    "also within a text": ("R:0+1 ▁&:2+1 ▁b:3+1", "R &:0-1 b:3-4"),
    "spaces are not words": ("▁t:0+4 ▁:10+4 ▁:20+3 in:24+2 ▁:30+1", "t:0-4 in:20-26"),
    "an unknown token begins a word": ("g:3+2 <unk>:6+2 ▁s:13+1", "g:3-5 ⁇:6-8 s:13-14"),
    "bytes make characters": ("▁b:0+1 <0xC3>:1+1 <0xA9>:2+1 .:4+1 ▁a:6+1", "bé.:0-3 a:6-7"),
    "bytes make punctuation": ("▁b:0+1 ▁:2+1 <0xC2>:3+1 <0xBB>:4+1", "b »:0-5"),
}


@pytest.mark.parametrize("case", WORDS)
def test_words_of_pieces(case):
    row, expected = WORDS[case]
    words = words_of(row, 50)
    assert " ".join(f"{text}:{start:.0f}-{end:.0f}" for text, start, end in words) == expected


def test_opening_punctuation_belongs_to_the_word_after_it():
    record = record_of("▁s:0+2 .:3+1 ▁¿:9+1 q:12+2 ?:15+1 ▁(:20+1 a:21+1 ):22+2")
    assert record["words"] == [("s.", 0, 2), ("¿q?", 9, 14), ("(a)", 20, 22)]
    assert record["segments"] == [("s.", 0, 2), ("¿q?", 9, 14), ("(a)", 20, 22)]


def test_a_space_that_is_decoded_to_one_is_no_part_of_a_word_as_in_nemo():
    tokenizer = make(["<unk>", "▁", *"abc"], prefix=False)  # as --train_tokenizer char makes it
    record = record_of("a:1+1 b:3+1 ▁:4+1 c:7+1 ▁:8+1 ▁:9+1 a:12+2", 20, tokenizer)
    assert record["words"] == [("ab", 1, 4), ("c", 7, 8), ("a", 12, 14)]


def test_words_of_a_script_without_spaces_are_pieces():
    record = record_of("▁:0+1 你:1+2 好:4+1 。:5+1 好:7+2 a:9+1 ▁the:12+2 好:15+1 ▁:17+0 好:18+1")
    assert record["text"] == "你好。好a the好 好"
    words = [("你", 0, 3), ("好。", 4, 5), ("好a", 7, 10), ("the", 12, 14)]
    assert record["words"] == [*words, ("好", 15, 16), ("好", 17, 19)]
    assert record["segments"] == [("你好。", 0, 5), ("好a the好 好", 7, 19)]


@pytest.mark.parametrize("mark", ["。", "।", "؟", "."])
def test_sentences_end_in_other_scripts_too(mark):
    record = record_of(f"▁:0+1 क:1+1 {mark}:2+1 ▁:3+1 好:4+1")
    assert record["segments"] == [(f"क{mark}", 0, 2), ("好", 3, 5)]


def test_a_sentence_does_not_end_within_a_word_or_before_a_closing_quote():
    words = [
        {"start": n, "end": n + 1, "text": text}
        for n, text in enumerate(["3.5", '"No!"', "e.g,", "he", "said.", "So"])
    ]
    text = " ".join(word["text"] for word in words)
    assert [(s["text"], s["start"], s["end"]) for s in segments(words, text)] == [
        ('3.5 "No!" e.g, he said.', 0, 5),
        ("So", 5, 6),
    ]


@given(
    st.lists(
        st.tuples(st.integers(0, len(PIECES) - 1), st.integers(0, 4), st.integers(0, 3)),
        max_size=15,
    ),
    st.integers(0, 3),
)
def test_words_are_in_order_and_make_up_the_text(moves, frame):
    tokens = []
    for piece, duration, pause in moves:
        tokens.append(Token(piece, frame, duration))
        frame += duration + pause
    frames = tokens[-1].frame + 1 if tokens else 1
    record = transcript(tokens, TOKENIZER, 1.0, frames)
    words, sentences = record["words"], record["segments"]
    for word, following in itertools.pairwise([*words, {"start": frames}]):
        assert 0 <= word["start"] <= word["end"] <= following["start"]
    letters = "".join(record["text"].split())
    assert "".join("".join(word["text"] for word in words).split()) == letters
    assert "".join("".join(part["text"] for part in sentences).split()) == letters
    assert all(part["start"] <= part["end"] for part in sentences)
    spans = {(a["start"], b["end"]) for a in words for b in words}
    assert {(part["start"], part["end"]) for part in sentences} <= spans
    if words:
        assert sentences[0]["start"] == words[0]["start"]
        assert sentences[-1]["end"] == words[-1]["end"]
    assert all(any(c not in ".,?!;'\"-()¿&。।؟ " for c in word["text"]) for word in words[1:])
