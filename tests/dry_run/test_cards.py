"""Names and sizes of GPUs, and what CUDA's libraries keep."""

import types

import pytest
import torch

import dry_run.cards
from dry_run.cards import (
    CARDS,
    GIB,
    MIB,
    NCCL,
    Card,
    card_here,
    choose_card,
    find_card,
    plain,
    workspace,
)


@pytest.mark.parametrize(
    ("text", "gib", "capability"),
    [
        ("8gb", 7.7, (8, 6)),
        ("8-GB", 7.7, (8, 6)),
        ("T4", 14.6, (7, 5)),
        ("NVIDIA GeForce RTX 3060", 11.6, (8, 6)),
        ("a100_40gb", 39.4, (8, 0)),
        ("8", 8, (8, 6)),
        ("10-gib", 10, (8, 6)),
        ("11.5gib", 11.5, (8, 6)),
        (".5", 0.5, (8, 6)),
    ],
)
def test_a_tier_a_name_or_a_number(text, gib, capability):
    card = find_card(text)
    assert (card.total, card.capability) == (int(gib * GIB), capability)


@pytest.mark.parametrize(
    "text", ["", "gb", "0", "-8GB", "8-10", "nan", "1e3", "10001", "8TB", "8.5.1", "٨", "a\nb"]
)
def test_everything_else_is_refused_in_one_line(text):
    with pytest.raises(ValueError) as caught:
        find_card(text)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in ("8gb", "t4", "RTX 3060", "GiB"))


def test_every_card_is_found_by_its_name():
    assert len({plain(card.name) for card in CARDS}) == len(CARDS)
    for card in CARDS:
        assert find_card(card.name.upper()) is card


def test_the_card_of_this_computer(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert card_here() is None
    properties = types.SimpleNamespace(
        name="Tesla T4", total_memory=15_634_661_376, major=7, minor=5
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", {0: properties}.__getitem__)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert card_here() == card_here(0) == Card("Tesla T4", 15_634_661_376, (7, 5))
    assert card_here(1) is None


def test_workspaces_are_larger_on_hopper():
    small, large = int((2 * 8.125 + 32) * MIB), (2 * 32 + 32) * MIB
    assert [workspace(find_card(name)) for name in ("8gb", "t4", "rtx 5090")] == [small] * 3
    assert workspace(find_card("h100")) == large


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("2x16gb", 2, "16gb"),
        (" 4 X RTX 3060", 4, "RTX 3060"),
        ("2x11.5", 2, "11.5 GiB"),
        ("10000xH100", 10_000, "H100"),
        ("8gb", 1, "8gb"),
    ],
)
def test_a_number_of_cards(text, count, name):
    card = choose_card(text, "auto", ValueError)
    assert (card.count, card.name) == (count, name)
    assert workspace(card) == workspace(find_card(name)) + NCCL * (count > 1)


def test_several_of_the_card_that_is_here(monkeypatch):
    own = Card("Tesla T4", 14 * GIB, (7, 5))
    monkeypatch.setattr(dry_run.cards, "card_here", lambda index: own if index == 1 else None)
    assert choose_card("2x", "cuda:1", ValueError) == Card("Tesla T4", 14 * GIB, (7, 5), 2)
    assert choose_card(None, "auto", ValueError) is None
    with pytest.raises(ValueError, match="no GPU here, so name one"):
        choose_card("2x", "auto", ValueError)
