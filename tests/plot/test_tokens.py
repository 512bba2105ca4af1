"""Tokens, which of them are special, and the words they are pieces of."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from clearhead.plot import Tokens, read_tokens
from tests.support.models import minilm


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("[CLS] un ##afford ##able ! [SEP]", "[CLS] unaffordable ! [SEP]"),
        ("<s> ▁un afford able ! ▁now", "<s> unaffordable ! now"),
        ("un afford Ġable , Ġnow s", "unafford able , nows"),
        ("▁今 天 天 气", "今 天 天 气"),
        ("no marks at all", "no marks at all"),
        ("<|endoftext|> ing", "<|endoftext|> ing"),
    ],
)
def test_words_are_guessed_from_the_marks_of_tokenizers(names: str, words: str) -> None:
    assert Tokens(names.split()).word_names() == words.split()


def test_special_tokens_are_recognised() -> None:
    names = ["[CLS]", "[SEP]", "<s>", "</s>", "<pad>", "<|im_start|>", "<script>", "[x]", "the", "["]
    assert Tokens(names).special == (True,) * 6 + (False,) * 4


def test_words_may_be_given_by_any_numbers() -> None:
    tokens = Tokens(list("abcde"), words=[7, 7, 3, 9, 9])
    assert tokens.words == (0, 0, 1, 2, 2)
    assert tokens.cut(1, 4).words == (0, 1, 2)
    assert tokens.cut(1, 4).word_names() == ["b", "c", "d"]


def test_a_tokenizers_own_words_and_special_tokens() -> None:
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    encoding = tokenizer("Tokenizers aren't [MASK]ed.")
    tokens = read_tokens(tokenizer, encoding["input_ids"], words=encoding.word_ids(0))
    assert tokens.names[:4] == ("[CLS]", "token", "##izer", "##s")
    assert tokens.word_names() == ["[CLS]", "tokenizers", "aren", "'", "t", "[MASK]", "ed", ".", "[SEP]"]
    assert [name for name, special in zip(tokens.names, tokens.special, strict=True) if special] == [
        "[CLS]", "[MASK]", "[SEP]",
    ]  # fmt: skip


def test_one_word_for_everything_is_no_word() -> None:
    class Joined:
        """A tokenizer that takes the whole text for one word, as some with ▁ do."""

        all_special_ids = (0,)
        unk_token_id = 9

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [["<s>", "▁The", "▁an", "imal"][number] for number in ids]

        def decode(self, ids: list[int], **options: Any) -> str:
            return self.convert_ids_to_tokens(ids)[0].replace("▁", " ")

    tokens = read_tokens(Joined(), [0, 1, 2, 3], words=[None, 0, 0, 0])
    assert (tokens.names, tokens.word_names()) == (("<s>", "The", "an", "imal"), ["<s>", "The", "animal"])
