"""Tokens of every kind of tokenizer are written in the characters of the text, and words are whole."""

from __future__ import annotations

import json
import random
from functools import cache
from typing import Any

import pytest
import torch

import clearhead
from clearhead.plot import Tokens, compare, given, page, plot_map, plot_received, read_tokens
from tests.plot.pages import Contents
from tests.support.vocabularies import KINDS, byte_level, byte_pieces

SIGNS = "⇠␣⏎⇥◌�"
WORDS = ["naïve", "你好", "😀", "été", "cat", "世界", "日本語"]
#: Kinds that have a token for every text and drop none of it.
FULL_RANGE = [kind for kind in KINDS if kind not in ("unigram", "word pieces", "clip")]


@cache
def tokenizer_of(kind: str) -> Any:
    return KINDS[kind]()


def encode(kind: str, text: str, words: bool) -> tuple[Any, list[int], list[int | None] | None]:
    tokenizer = tokenizer_of(kind)
    encoded = tokenizer(text)
    own = encoded.word_ids(0) if words and tokenizer.is_fast else None
    return tokenizer, encoded["input_ids"], own


def words_of(tokens: Tokens) -> list[str]:
    special = {word for word, is_special in zip(tokens.words, tokens.special, strict=True) if is_special}
    return [name for word, name in enumerate(tokens.word_names()) if word not in special]


@pytest.mark.parametrize("words", [True, False], ids=["own words", "guessed words"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_character_is_written_once_and_nothing_else_is(kind: str, words: bool) -> None:
    draw = random.Random(3)
    for _ in range(20):
        chosen = draw.choices(WORDS, k=draw.randint(1, 5))
        tokenizer, ids, own = encode(kind, " ".join(chosen), words)
        tokens = read_tokens(tokenizer, ids, words=own)
        shown = [name.removeprefix("##") for name in tokens if name not in SIGNS]
        special = [name for name, is_special in zip(tokens, tokens.special, strict=True) if is_special]
        assert [name for name in shown if name not in special] != []
        assert "".join(name for name in shown if name not in special) == "".join(chosen)
        assert "".join(words_of(tokens)) == "".join(chosen)
        spaced = [word for word in chosen if word < "\u2e80"]
        assert [word for word in words_of(tokens) if word < "\u2e80" and word != "␣"] == spaced


@pytest.mark.parametrize("kind", KINDS)
def test_stored_forms_alone_are_written_like_tokens_of_the_tokenizer(kind: str) -> None:
    tokenizer, ids, _ = encode(kind, " ".join(WORDS), words=False)
    stored = Tokens(tokenizer.convert_ids_to_tokens(ids), [number in tokenizer.all_special_ids for number in ids])
    tokens = read_tokens(tokenizer, ids)
    assert (stored.names, stored.words) == (tokens.names, tokens.words)


@pytest.mark.parametrize("kind", ["byte level", "byte pieces", "clip", "byt5", "perceiver"])
def test_a_character_is_at_its_first_token(kind: str) -> None:
    tokenizer, ids, _ = encode(kind, "你ï", words=False)
    names = [name for name in read_tokens(tokenizer, ids) if name != "␣" and not name.startswith(("<", "["))]
    assert names == ["你", "⇠", "⇠", "ï", "⇠"]


def test_merges_that_end_one_character_and_begin_the_next() -> None:
    """Bytes of 你, then of 好: e4 bd a0 e5 a5 bd."""
    parts = [b" \xe4", b"\xbd\xa0\xe5", b"\xa5\xbd!"]

    class Cut:
        all_special_ids = ()
        unk_token_id = None

        def convert_ids_to_tokens(self, ids: list[int]) -> list[bytes]:
            return [parts[number] for number in ids]

        def decode(self, ids: list[int], **_: Any) -> str:
            return b"".join(parts[number] for number in ids).decode(errors="replace")

    assert list(read_tokens(Cut(), [0, 1, 2])) == ["你", "好", "!"]
    assert list(read_tokens(Cut(), [0, 1])) == ["你", "�"]
    assert list(read_tokens(Cut(), [1, 2])) == ["�", "�!"]


@pytest.mark.parametrize("kind", FULL_RANGE)
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("cafe\u0301 nai\u0308ve", ["cafe\u0301", "nai\u0308ve"]),
        ("a हिन्दी", ["a", "हिन्दी"]),
        ("👩\u200d👧\u200d👦 a", ["👩\u200d👧\u200d👦", "a"]),
        ("👍🏽 ❤️", ["👍🏽", "❤️"]),
        ("שלום עולם مرحبا", ["שלום", "עולם", "مرحبا"]),
    ],
    ids=["combining marks", "vowel signs", "joined emoji", "modifiers", "right to left"],
)
@pytest.mark.parametrize("words", [True, False], ids=["own words", "guessed words"])
def test_what_belongs_to_one_character_stays_in_one_word(
    kind: str, text: str, expected: list[str], words: bool
) -> None:
    tokenizer, ids, own = encode(kind, text, words)
    assert [word for word in words_of(read_tokens(tokenizer, ids, words=own)) if word != "␣"] == expected


def test_flags_are_two_letters_each() -> None:
    tokenizer, ids, _ = encode("byte pieces", "🇩🇪🇫🇷", words=False)
    assert words_of(read_tokens(tokenizer, ids)) == ["🇩🇪", "🇫🇷"]


@pytest.mark.parametrize("kind", FULL_RANGE)
def test_white_space_is_shown_by_signs(kind: str) -> None:
    tokenizer, ids, _ = encode(kind, "a\n\tb  c", words=False)
    joined = "".join(read_tokens(tokenizer, ids))
    assert set("⏎⇥␣") < set(joined)
    assert not set(joined) & set("ĠĊĉ▁\n\t\r")


@pytest.mark.parametrize("kind", ["byte level", "byte pieces without prefix", "byt5", "perceiver"])
def test_a_text_that_was_cut_inside_a_character(kind: str) -> None:
    tokenizer, ids, _ = encode(kind, "你 a 好", words=False)
    ids = [number for number in ids if number not in tokenizer.all_special_ids]
    assert list(read_tokens(tokenizer, ids[1:-1])) == ["�", "�", "␣", "a", "␣", "�", "�"]
    stored = Tokens(tokenizer.convert_ids_to_tokens(ids[1:]))
    assert list(stored) == ["�", "�", "␣", "a", "␣", "好", "⇠", "⇠"]


def test_what_was_added_to_the_vocabulary_is_text() -> None:
    tokenizer = byte_level(pad_token="<pad>", eos_token="<end>")
    tokenizer.add_tokens(["naïve", "你好"])
    encoded = tokenizer("so naïve, 你好<end>")
    tokens = read_tokens(tokenizer, encoded["input_ids"], words=encoded.word_ids(0))
    assert tokens.word_names() == ["so", "naïve", ",", "你好", "<end>"]
    assert [name for name, special in zip(tokens, tokens.special, strict=True) if special] == ["<end>"]


def test_one_token_in_all_roles_is_special() -> None:
    """GPT-2 has one token for the beginning, the end, padding and what is unknown."""
    roles: dict[str, Any] = {f"{role}_token": "<|endoftext|>" for role in ("bos", "eos", "unk", "pad")}
    tokenizer = byte_level(**roles)
    encoded = tokenizer(["你", "a"], padding=True, padding_side="left")
    padded = read_tokens(tokenizer, encoded["input_ids"][1])
    assert padded.special == (True, True, False)
    unknown = byte_pieces()
    assert read_tokens(unknown, [0]).special == (False,)


@pytest.mark.parametrize(
    "names",
    [
        ["čas", "je", "večer"],
        ["Łódź", "ąę"],
        ["naïve", "café"],
        ["Żejtun", "Ġgantija"],
        ["the", "", "cat"],
        ["Zürich", "ä", "½"],
        ["a b", "c\n"],
    ],
)
def test_words_that_are_no_stored_forms_stay(names: list[str]) -> None:
    assert Tokens(names).names == tuple(names)
    assert Tokens(names).words == tuple(range(len(names)))


def test_names_are_read_once() -> None:
    """A text about tokenizers: its words look like stored forms."""
    tokenizer, ids, _ = encode("byte level", "Ġa ä½ł ▁b", words=False)
    tokens = read_tokens(tokenizer, ids)
    assert tokens.word_names() == ["Ġa", "ä½ł", "▁", "b"]
    assert tokens.cut(0, len(tokens)).names == tokens.names


def attention(length: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(1, 2, length, length).softmax(-1)


def test_pictures_and_pages_show_the_text() -> None:
    tokenizer, ids, _ = encode("byte level", "naïve 你好", words=False)
    tokens, stored = read_tokens(tokenizer, ids), tokenizer.convert_ids_to_tokens(ids)
    rec = given([attention(len(ids))])
    for text in (tokens, stored, [stored]):
        contents = Contents(page(rec, text).text).text(0, 0, "queries")
        assert contents["names"] == list(tokens)
        assert contents["wordNames"] == ["naïve", "你", "好"]
        assert contents["sentence"] == "naïve 你 好"
    rows = plot_map(rec, 0, 0, tokens=stored, words=True)
    assert [label.get_text() for label in rows.get_yticklabels()] == ["naïve", "你", "好"]
    bars = plot_received(rec, 0, 0, tokens=stored)
    assert [label.get_text() for label in bars.get_xticklabels()] == list(tokens)
    both = compare(rec, given([attention(len(ids)).flip(-1)]), tokens=stored)
    assert Contents(both.page().text).text(0, 0, "queries")["names"] == list(tokens)


def test_padding_on_the_left_and_several_texts() -> None:
    tokenizer = byte_level(merges=True, pad_token="<pad>")
    texts = ["naïve 你好 😀", "été"]
    encoded = tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
    mask = encoded["attention_mask"].bool()
    attend = clearhead.MultiHeadAttention(12, 3).eval()
    with clearhead.record(attend, statistics=["entropy", "received", "top_k", "map"]) as rec, torch.no_grad():
        attend(torch.randn(*mask.shape, 12), mask=clearhead.masks.keep(keys=mask))
    tokens = [read_tokens(tokenizer, ids) for ids in encoded["input_ids"].tolist()]
    contents = Contents(page(rec, tokens).text)
    shown = [contents.text(item, 0, "keys")["sentence"] for item in range(2)]
    assert shown == ["naïve 你好 😀", "été"]


def test_long_texts_are_read_in_seconds(record_property: Any) -> None:
    import time

    tokenizer, ids, _ = encode("byte level", "你好，世界。naïve 😀 " * 1000, words=False)
    start = time.perf_counter()
    tokens = read_tokens(tokenizer, ids)
    taken = time.perf_counter() - start
    record_property("seconds", taken)
    assert len(tokens) > 28_000
    assert taken < 20, json.dumps(taken)
