"""`rank_heads`: the heads of all layers, ranked by one weight."""

import pytest
import torch

import clearhead
from clearhead.errors import ArgumentError, RecordError, ShapeError
from clearhead.plot import Tokens

WORDS = ["[CLS]", "it", "was", "too", "tired", "too", "[SEP]"]


@pytest.fixture
def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3), clearhead.MultiHeadAttention(12, 2)).double()


@pytest.mark.parametrize(("query", "key", "item"), [(4, 1, 0), (-2, -7, 1)])
def test_heads_follow_the_full_weights(model: torch.nn.Sequential, query: int, key: int, item: int) -> None:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(torch.randn(2, 7, 12, dtype=torch.float64))
    ranked = rec.rank_heads(query, key, item=item)
    assert [one.weight for one in ranked] == sorted((one.weight for one in ranked), reverse=True)
    assert {(one.layer, one.head) for one in ranked} == {(n, h) for n in rec for h in range(rec.weights(n).shape[1])}
    for layer, head, weight in ranked:
        assert weight == pytest.approx(rec.weights(layer)[item, head, query, key].item(), abs=1e-12)


@pytest.fixture
def rec(model: torch.nn.Sequential) -> clearhead.record:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(torch.randn(1, 7, 12, dtype=torch.float64))
    return rec


@pytest.mark.parametrize("tokens", [WORDS, Tokens(WORDS)])
def test_texts_stand_for_their_numbers(rec: clearhead.record, tokens: list[str] | Tokens) -> None:
    ranked = rec.rank_heads("tired", "it", tokens=tokens)
    assert ranked == rec.rank_heads(4, 1)
    assert ranked == rec.rank_heads("tired", "B", tokens=tokens, key_tokens=["A", "B", *"CDEFG"])
    assert ranked == rec.rank_heads("tired", 1, tokens=tokens)
    assert repr(ranked[0]) == f"<{ranked[0].layer} head {ranked[0].head}: {ranked[0].weight:.4f}>"


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"query": "it"}, ArgumentError, "query: expected a token's number, or tokens= beside its text, got 'it' with"),
        ({"tokens": WORDS, "query": "too"}, ArgumentError, "got 'too' at 3, 5. Pass its number."),
        (
            {"tokens": WORDS, "key_tokens": WORDS[::-1], "key": "dog"},
            ArgumentError,
            "key: expected the text of one of key_tokens, got 'dog', which is none of them. They are [SEP], too, ",
        ),
        ({"tokens": WORDS[1:], "query": "it"}, ShapeError, "tokens: expected 7, one for each that the layers have"),
        ({"query": 7}, ArgumentError, "query: expected"),
        ({"key": -8}, ArgumentError, "key: expected"),
        ({"item": 1}, ArgumentError, "item: expected"),
    ],
)
def test_a_text_of_no_token_or_of_two_raises(
    rec: clearhead.record, wrong: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        rec.rank_heads(**{"query": 0, "key": 0} | wrong)  # type: ignore[arg-type]
    assert message in str(raised.value)


def test_without_queries_and_keys_it_raises(model: torch.nn.Sequential) -> None:
    with clearhead.record(model) as without:
        model(torch.randn(1, 7, 12, dtype=torch.float64))
    with pytest.raises(RecordError):
        without.rank_heads(0, 0)
