"""Parakeet's tokenizer: SentencePiece, `tokenizers` and transformers give the same ids and text in
every form of a tokenizer."""

import base64
import json
import os
import random
import unicodedata

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import sentencepiece
import tokenizers
import transformers
from sentencepiece import sentencepiece_model_pb2
from transformers.convert_slow_tokenizer import ParakeetConverter

from common.errors import UsageError
from models.parakeet.tokenizer import (
    BLANK,
    PAD,
    add_pieces,
    hf_files,
    make_tokenizer,
    pad_pieces,
    pieces,
    sentencepiece_model,
)
from tests.models.pieces import train_pieces

ALPHABETS = ["abcdefgh", "ABC", "àảãäñßÉ", "हिंदीकोंकणीांव", "0123456789", " .,!?'", "中文é☃Ω", " "]
BPE, UNIGRAM = {"model_type": "bpe"}, {"model_type": "unigram", "hard_vocab_limit": False}
KEPT, BARE = {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}
SYMBOLS = [PAD, "<|x|>", "1", "2"]
KINDS = {
    "bpe": {**BPE, "vocab_size": 200},
    "bpe kept spaces": {**BPE, "vocab_size": 180, **KEPT},
    "bpe without prefix": {**BPE, "vocab_size": 64, **BARE},
    "bpe without either": {**BPE, "vocab_size": 80, **BARE, **KEPT},
    "char": {"model_type": "char", "vocab_size": 500},
    "unigram": {**UNIGRAM, "vocab_size": 100},
    "bytes": {**BPE, "vocab_size": 400, "byte_fallback": True},
    "unigram bytes": {**UNIGRAM, "vocab_size": 330, "byte_fallback": True},
    "symbols": {**BPE, "vocab_size": 150, "user_defined_symbols": SYMBOLS},
    "unigram symbols": {**UNIGRAM, "vocab_size": 120, "user_defined_symbols": ["<|x|>", "7"]},
    "specials": {**BPE, "vocab_size": 120, "bos_id": 1, "eos_id": 2, "pad_id": 3},
    "table": {**BPE, "vocab_size": 200, "normalization_rule_name": "nmt_nfkc_cf"},
}
MODELS = {}


def corpus() -> list[str]:
    draw = random.Random(1)
    letters = "abcdefghabcdeabcabABCàñéäहांवोंकणीदि0123456789.,"
    words = ["".join(draw.choices(letters, k=draw.randint(1, 8))) for _ in range(150)]
    return [" ".join(draw.choices(words, k=6)) for _ in range(200)]


def train(kind: str) -> bytes:
    if kind not in MODELS:
        settings = {"normalization_rule_name": "identity", "pad_id": -1, **KINDS[kind]}
        MODELS[kind] = train_pieces(corpus(), character_coverage=0.99, **settings)
    return MODELS[kind]


def state_of(kind: str) -> dict:
    return {"sentencepiece": train(kind).hex()}


def random_texts(count: int, symbols: tuple[str, ...] = ()) -> list[str]:
    """With unknown characters, digits, capitals, runs of spaces, and spaces at both ends."""
    draw = random.Random(2)
    texts = ["", " ", "  ", "a", " a ", "☃", "☃☃ ☃", "a  b", "12"]
    for _ in range(count):
        words = [
            "".join(draw.choices(draw.choice(ALPHABETS), k=draw.randint(1, 8))) for _ in range(5)
        ]
        words += draw.choices(symbols, k=2) if symbols else []
        draw.shuffle(words)
        texts.append(draw.choice(["", " ", "  "]).join(["", *words, ""][draw.randint(0, 1) :]))
    return texts


def known(kind: str, texts: list[str]) -> list[str]:
    """Without marks for "table": `tokenizers` drops one after a character that it changes."""
    if kind != "table":
        return texts
    return ["".join(c for c in text if unicodedata.category(c)[0] != "M") for text in texts]


def symbols_of(kind: str) -> tuple[str, ...]:
    return tuple(symbol for symbol in KINDS[kind].get("user_defined_symbols", ()) if symbol != PAD)


def folder_with(files: dict[str, str], folder):
    for name, text in {**files, "config.json": '{"model_type": "parakeet_tdt"}'}.items():
        (folder / name).write_text(text, encoding="utf-8")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_every_form_encodes_and_decodes_as_sentencepiece(kind, tmp_path):
    processor = sentencepiece.SentencePieceProcessor(model_proto=train(kind))
    size = processor.vocab_size()
    first = make_tokenizer(state_of(kind), size)
    files = hf_files(state_of(kind))
    second = make_tokenizer({"json": files["tokenizer.json"]}, size)
    peer = transformers.ParakeetTokenizer.from_pretrained(folder_with(files, tmp_path))
    names = [processor.id_to_piece(i) for i in range(size)]
    assert first.pieces == second.pieces == names == pieces(first.state()) == pieces(second.state())
    assert first.unknown == second.unknown == peer.unk_token_id == processor.unk_id()
    assert first.spaces == second.spaces >= {processor.piece_to_id("\u2581")}
    assert peer.convert_tokens_to_ids(BLANK) == size == len(peer) - 1
    for text in known(kind, random_texts(300, symbols_of(kind))):
        ids = processor.encode(text)
        for tokenizer in (first, second):
            assert tokenizer.encode(text) == ids, (text, tokenizer._backend)
            assert tokenizer.decode(ids) == processor.decode(ids)
        assert peer(text, add_special_tokens=False).input_ids == ids, text
        assert peer.decode(ids, group_tokens=False) == processor.decode(ids)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if KINDS[kind]["model_type"] == "bpe"])
def test_same_as_transformers_converter(kind, tmp_path):
    (tmp_path / "a.model").write_bytes(train(kind))
    backend = ParakeetConverter(str(tmp_path / "a.model")).converted()
    content = json.loads(backend.to_str())
    ours = json.loads(hf_files(state_of(kind))["tokenizer.json"])
    assert ours["model"]["vocab"] == content["model"]["vocab"]
    symbols = {*KINDS[kind].get("user_defined_symbols", ())}
    assert ours["model"]["merges"] == [
        pair for pair in content["model"]["merges"] if not symbols & {*pair}
    ]


@pytest.mark.parametrize("kind", ["bpe", "table", "specials", "bytes"])
def test_tokenizer_json_of_transformers(kind, tmp_path):
    """As NVIDIA's folders are made: the converter, then <unk>, <pad> and <blank> as added
    tokens."""
    (tmp_path / "a.model").write_bytes(train(kind))
    backend = ParakeetConverter(str(tmp_path / "a.model")).converted()
    size = backend.get_vocab_size()
    backend.add_special_tokens(["<unk>"])
    processor = sentencepiece.SentencePieceProcessor(model_proto=train(kind))
    made = {}
    for last in ([], [BLANK], [BLANK, "<extra>"], [PAD], [PAD, BLANK]):
        grown = type(backend).from_str(backend.to_str())
        grown.add_special_tokens(last)
        made[" ".join(last)] = state = {"json": grown.to_str()}
        tokenizer = make_tokenizer(state, size)
        assert tokenizer.pieces == [processor.id_to_piece(i) for i in range(size)]
        for text in known(kind, random_texts(40)):
            ids = processor.encode(text)
            assert tokenizer.encode(text) == ids, text
            assert tokenizer.decode(ids) == processor.decode(ids)
        folder = folder_with(hf_files(state), tmp_path)
        peer = transformers.AutoTokenizer.from_pretrained(folder)
        assert type(peer) is transformers.ParakeetTokenizer
        assert peer.convert_tokens_to_ids(BLANK) == size
        pad = processor.piece_to_id(PAD) if kind == "specials" else size
        assert (peer.pad_token_id, peer.unk_token_id) == (pad, processor.unk_id())
        assert peer("ab hg").input_ids == processor.encode("ab hg")
    assert hf_files(made[BLANK])["tokenizer.json"] == made[BLANK]["json"]
    files = {"tokenizer_config.json": "{}", "special_tokens_map.json": "{ }"}
    assert hf_files({**made[BLANK], "files": files}) == {
        "tokenizer.json": made[BLANK]["json"],
        **files,
    }
    assert hf_files({**made[""], "files": files})["tokenizer_config.json"] != "{}"


def test_as_the_processor_of_transformers_uses_it(tmp_path):
    """Its decoder input is the blank and the labels; its timestamps come from a stream of pieces;
    it skips padding."""
    for kind in ("bpe", "symbols", "unigram", "char"):
        peer = transformers.AutoTokenizer.from_pretrained(
            folder_with(hf_files(state_of(kind)), tmp_path)
        )
        blank = len(peer) - 1
        assert peer.pad_token_id == (
            peer.convert_tokens_to_ids(PAD) if kind == "symbols" else blank
        )
        for text in ("ab hg", "bad cab 12."):
            labels = peer(text, add_special_tokens=False).input_ids
            assert peer(BLANK + text, add_special_tokens=False).input_ids == [blank, *labels]
            padded = [blank, *labels, blank, peer.pad_token_id]
            assert peer.decode(padded, skip_special_tokens=True, group_tokens=False) == text
            stream = tokenizers.decoders.DecodeStream(skip_special_tokens=True)
            steps = [stream.step(peer._tokenizer, i) for i in labels]
            assert "".join(step or "" for step in steps) == text


def test_special_tokens_in_a_text_are_text():
    state = state_of("specials")
    for form in (state, {"json": hf_files(state)["tokenizer.json"]}):
        tokenizer = make_tokenizer(form, 120)
        special = {i for i, piece in enumerate(tokenizer.pieces) if piece in ("<s>", "</s>", PAD)}
        ids = tokenizer.encode(f"a<s>b</s>{PAD}{BLANK}")
        assert not special & {*ids} and max(ids) < 120
        assert len(special) == 3 and tokenizer.decode([*special, *tokenizer.encode("abc")]) == "abc"


def test_models_that_cannot_be_converted():
    def changed(change):
        proto = sentencepiece_model_pb2.ModelProto.FromString(train("bpe"))
        change(proto)
        return {"sentencepiece": proto.SerializeToString().hex()}

    for change in (
        lambda proto: setattr(proto.pieces[9], "type", 5),
        lambda proto: setattr(proto.pieces[9], "piece", BLANK),
        lambda proto: setattr(proto.pieces[9], "score", float("nan")),
        lambda proto: setattr(proto.trainer_spec, "treat_whitespace_as_suffix", True),
        lambda proto: setattr(proto.trainer_spec, "model_type", 3),
        lambda proto: setattr(proto.normalizer_spec, "escape_whitespaces", False),
    ):
        with pytest.raises(UsageError, match="the model's tokenizer cannot be used"):
            hf_files(changed(change))


def deep(depth: int) -> list:
    return [deep(depth - 1)] if depth else []


HOSTILE = {
    "gap": lambda c: c["model"]["vocab"].update({"zz": 5000}),
    "repeated id": lambda c: c["model"]["vocab"].update({"zz": 3}),
    "type of an id": lambda c: c["model"]["vocab"].update({"a": "3"}),
    "vocab": lambda c: c["model"].update(vocab=[1, 2]),
    "empty": lambda c: (c["model"].update(vocab={}, merges=[]), c.update(added_tokens=[])),
    "surrogate": lambda c: c["model"]["vocab"].update({"\ud800": c["model"]["vocab"].pop("h")}),
    "absent piece": lambda c: c["model"]["merges"].append(["xyz", "a"]),
    "merge": lambda c: c["model"]["merges"].append(7),
    "dropout": lambda c: c["model"].update(dropout=0.5),
    "no unknown": lambda c: c["model"].update(unk_token="<none>"),
    "word piece": lambda c: c["model"].update(type="WordPiece"),
    "two ids": lambda c: c["added_tokens"].append({"id": 3, "content": "<unk>"}),
    "type of a name": lambda c: c["added_tokens"].append({"id": 3, "content": 7}),
    "slow pattern": (
        lambda c: c["normalizer"]["normalizers"].append(
            {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
        )
    ),
    "a prefix by itself": lambda c: c.update(normalizer={"type": "Prepend", "prepend": "\u2581"}),
    "step": lambda c: c.update(normalizer={"type": "Lowercase"}),
    "splitter": lambda c: c.update(pre_tokenizer={"type": "Split", "pattern": {"Regex": "a"}}),
    "table": lambda c: c.update(normalizer={"type": "Precompiled", "precompiled_charsmap": "@@@"}),
    "deep decoder": lambda c: c.update(decoder=deep(900)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_tokenizer_json_is_refused(name):
    content = json.loads(hf_files(state_of("bpe"))["tokenizer.json"])
    HOSTILE[name](content)
    state = {"json": json.dumps(content)}
    for use in (lambda state: make_tokenizer(state, 200), pieces, hf_files, sentencepiece_model):
        with pytest.raises(UsageError, match="the model's tokenizer cannot be used") as error:
            use(state)
        assert "\n" not in str(error.value)


def unigram(vocab: list, unknown: int) -> dict:
    model = {"type": "Unigram", "vocab": vocab, "unk_id": unknown}
    return {"json": json.dumps({"model": model})}


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"sentencepiece": "00ff"},
        {"json": "{"},
        {"json": "[" * 100_000},
        {"json": "[]"},
        {"json": "{}", "files": {"../a": ""}},
        unigram([["a", 0.0], ["a", 1.0]], 0),
        unigram([["a", 0.0]], 1),
        unigram([["a", 0.0], ["", 0.0]], 0),
    ],
)
def test_damaged_state_is_refused(state):
    for use in (lambda state: make_tokenizer(state, 2), pieces, hf_files, sentencepiece_model):
        with pytest.raises(UsageError):
            use(state)


def test_sizes_and_forms_have_to_agree():
    state = state_of("bpe")
    for form in (state, {"json": hf_files(state)["tokenizer.json"]}):
        with pytest.raises(UsageError, match="it has 200 pieces and the model 201"):
            make_tokenizer(form, 201)
    both = {**state_of("bpe"), "json": hf_files(state_of("table"))["tokenizer.json"]}
    with pytest.raises(UsageError, match="different pieces"):
        make_tokenizer(both, 200)
    both["json"] = hf_files(state)["tokenizer.json"]
    assert make_tokenizer(both, 200).state() == both


def test_a_nemo_needs_a_sentencepiece_model():
    state = {"json": hf_files(state_of("bpe"))["tokenizer.json"]}
    with pytest.raises(UsageError, match="needs a SentencePiece model"):
        sentencepiece_model(state)
    assert sentencepiece_model(state_of("bpe")) == train("bpe")


@pytest.mark.parametrize("kind", ["bpe", "bytes", "symbols"])
def test_padding_adds_pieces_that_no_text_has(kind):
    processor = sentencepiece.SentencePieceProcessor(model_proto=train(kind))
    before = processor.vocab_size()
    state = {"sentencepiece": pad_pieces(train(kind), before + 30).hex()}
    files = hf_files(state)
    forms = [state, {"json": files["tokenizer.json"]}]
    assert hf_files(forms[1]) == files
    for form in forms:
        tokenizer = make_tokenizer(form, before + 30)
        assert tokenizer.pieces[:before] == make_tokenizer(state_of(kind), before).pieces
        assert len({*tokenizer.pieces}) == before + 30
        for text in [*random_texts(30, symbols_of(kind)), "<unused_0>", "<unused_29>"]:
            ids = processor.encode(text)
            assert tokenizer.encode(text) == ids
            assert tokenizer.decode(ids) == processor.decode(ids)
        for i in range(before, before + 30):
            assert tokenizer.decode([i]) == tokenizer.pieces[i]
    assert (
        pad_pieces(bytes.fromhex(state["sentencepiece"]), before + 30).hex()
        == state["sentencepiece"]
    )


def test_normalisation_tables_are_checked():
    proto = sentencepiece_model_pb2.ModelProto.FromString(train("table"))
    table = bytearray(proto.normalizer_spec.precompiled_charsmap)
    content = json.loads(hf_files(state_of("table"))["tokenizer.json"])
    draw, refused = random.Random(3), 0
    damaged = [b"", table[:3], table[:5000], table[:-1]]
    damaged += [bytes(4) + table[4:], b"\xff" * 4 + table[4:]]
    for _ in range(60):
        copy = bytearray(table)
        for _ in range(20):
            copy[draw.randrange(4, len(copy))] = draw.randrange(256)
        damaged.append(copy)
    for number, each in enumerate(damaged):
        step = {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(each).decode()}
        content["normalizer"]["normalizers"][0] = step
        try:
            tokenizer = make_tokenizer({"json": json.dumps(content)}, 200)
        except UsageError:
            refused += 1
        else:
            assert number > 5
            for text in random_texts(20):
                tokenizer.encode(text)
    assert refused > 20


def test_pieces_that_are_not_utf8_are_refused():
    proto = sentencepiece_model_pb2.ModelProto.FromString(train("bpe"))
    proto.pieces[20].piece = "zzqq"
    model = proto.SerializeToString().replace(b"zzqq", b"z\xffqq")
    for use in (lambda state: make_tokenizer(state, 200), pieces, hf_files, sentencepiece_model):
        with pytest.raises(UsageError):
            use({"sentencepiece": model.hex()})


def test_user_defined_symbols_of_transformers_converter(tmp_path):
    (tmp_path / "a.model").write_bytes(train("symbols"))
    state = {"json": ParakeetConverter(str(tmp_path / "a.model")).converted().to_str()}
    processor = sentencepiece.SentencePieceProcessor(model_proto=train("symbols"))
    first = make_tokenizer(state, processor.vocab_size())
    for text in random_texts(50):
        plain = text.replace("1", "").replace("2", "")
        assert first.encode(plain) == processor.encode(plain)


# --- added pieces ---------------------------------------------------------------------------------

SIGNS = ("(", ")", "%", "°", "x☃", "<laugh>", "ab☃")


def has_no_sign(text: str) -> bool:
    return not any(sign in text for sign in SIGNS)


def with_signs(texts: list[str]) -> list[str]:
    draw = random.Random(3)
    found = []
    for text in texts:
        words = text.split()
        for sign in draw.choices(SIGNS, k=3):
            words.insert(draw.randint(0, len(words)), sign)
        found.append(draw.choice([" ", ""]).join(words))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_added_pieces_are_the_same_in_every_form_and_change_no_other_text(kind, tmp_path):
    before = make_tokenizer(state_of(kind), len(pieces(state_of(kind))))
    state = add_pieces(state_of(kind), SIGNS)
    from_json = add_pieces({"json": hf_files(state_of(kind))["tokenizer.json"]}, SIGNS)
    size = before.size + len(SIGNS)
    first = make_tokenizer(state, size)
    second = make_tokenizer({"json": hf_files(state)["tokenizer.json"]}, size)
    third = make_tokenizer(from_json, size)
    assert first.pieces == second.pieces == third.pieces == [*before.pieces, *SIGNS]
    peer = transformers.ParakeetTokenizer.from_pretrained(folder_with(hf_files(state), tmp_path))
    assert peer.convert_tokens_to_ids(BLANK) == size
    texts = known(kind, random_texts(100, symbols_of(kind)))
    for text in filter(has_no_sign, texts):
        assert first.encode(text) == before.encode(text), text
    for text in with_signs(texts):
        ids = first.encode(text)
        assert ids == second.encode(text) == third.encode(text), text
        assert peer(text, add_special_tokens=False).input_ids == ids, text
        assert first.decode(ids) == second.decode(ids) == peer.decode(ids, group_tokens=False)
        assert max(ids) >= before.size


def test_pieces_are_added_to_a_tokenizer_json_of_transformers_converter(tmp_path):
    (tmp_path / "a.model").write_bytes(train("bpe"))
    backend = ParakeetConverter(str(tmp_path / "a.model")).converted()
    backend.add_special_tokens(["<unk>", BLANK])
    state = {"json": backend.to_str(), "files": {"tokenizer_config.json": "{}"}}
    both = (add_pieces(state, SIGNS), add_pieces(state_of("bpe"), SIGNS))
    first, second = (make_tokenizer(each, len(pieces(each))) for each in both)
    peer = transformers.ParakeetTokenizer.from_pretrained(folder_with(hf_files(both[0]), tmp_path))
    assert peer.convert_tokens_to_ids(BLANK) == first.size
    for text in with_signs(random_texts(30)):
        ids = first.encode(text)
        expected = second.encode(text)
        if text.startswith(SIGNS):  # such a text begins without a space here
            assert second.pieces[expected[0]] == "\u2581"
            expected = expected[1:]
        assert ids == expected == peer(text, add_special_tokens=False).input_ids, text
        assert first.decode(ids) == second.decode(ids)


@pytest.mark.parametrize("piece", ["A", "…", "ﬁ"])
def test_a_piece_that_no_text_can_have_is_refused(piece):
    with pytest.raises(UsageError, match="the model's vocabulary reads it as"):
        add_pieces(state_of("table"), [piece])
