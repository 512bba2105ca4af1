"""`record`: its results, and the choice of layers, heads and queries."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

import clearhead
from clearhead.plot import Tokens

from .conftest import BATCH, HEADS, LENGTH, NAMES, WIDTH, Stack, recorded, require_same_training

MASK = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])


def test_a_mapping_from_names_to_statistics(model: Stack, x: Tensor) -> None:
    rec = recorded(model, x)
    assert list(rec) == NAMES
    assert len(rec) == 3
    assert "blocks.1.attend" in rec
    assert rec["blocks.1.attend"].entropy.shape == (BATCH, HEADS, LENGTH)
    assert rec["blocks.1.attend"][0].top_k.indices.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert repr(rec) == f"<record of 3 attention modules: {', '.join(NAMES)}>"
    with pytest.raises(KeyError, match=r"'blocks\.9': no attention was recorded there; recorded are 'blocks\.0\.att"):
        _ = rec["blocks.9"]


def test_outputs_and_gradients_stay_those_of_the_model(model: Stack, x: Tensor) -> None:
    require_same_training(model, lambda: model(x).square().sum())
    expected = model(x)
    with torch.inference_mode(), clearhead.record(model) as rec:
        assert torch.equal(model(x), expected)
    assert rec.summary()["entropy"][NAMES[2]].shape == (HEADS,)


def test_repeated_calls_append_and_the_summary_is_over_all_their_queries(model: Stack) -> None:
    rec = recorded(model, *(torch.randn(BATCH, length, WIDTH) for length in (3, 5)))
    calls = rec[NAMES[1]]
    assert [call.query_length for call in calls] == [3, 5]
    entropies = torch.cat([call.entropy for call in calls], -1)  # (B, H, 8)
    torch.testing.assert_close(rec.summary()["entropy"][NAMES[1]], entropies.mean((0, 2)))
    assert len(calls[:1]) == 1
    with pytest.raises(AttributeError, match=r"blocks\.1\.attend: called 2 times.*\[0\]\.entropy.*rec\.reduce\(\)"):
        _ = calls.entropy


def test_reduce_concatenates_batches(model: Stack) -> None:
    batches = torch.randn(2, 3, WIDTH), torch.randn(1, 5, WIDTH)
    rec = recorded(model, *batches, statistics=("entropy", "received", "top_k", "max_logit"))
    reduced = rec.reduce()[NAMES[0]]
    first, second = rec[NAMES[0]]
    assert reduced.entropy.shape == (3, HEADS, 5)
    torch.testing.assert_close(reduced.entropy[:2, :, :3], first.entropy)
    torch.testing.assert_close(reduced.entropy[2:], second.entropy)
    assert not reduced.entropy[:2, :, 3:].any()
    assert reduced.counted.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
    assert reduced.top_k.indices[0, 0, 4].eq(-1).all()
    assert (reduced.batch_size, reduced.query_length, reduced.key_length) == (3, 5, 5)
    torch.testing.assert_close(reduced.max_logit, torch.cat([first.max_logit, second.max_logit]))


def test_weights_on_demand(model: Stack, x: Tensor) -> None:
    rec = recorded(model, x, x[:, :4], keep="queries_keys")
    assert rec.weights(layer=2, head=1, queries=slice(0, 4)).shape == (BATCH, 4, LENGTH)
    assert rec.weights(layer=NAMES[2], queries=[5]).shape == (BATCH, HEADS, 1, LENGTH)
    assert rec.weights(layer=-1, head=-1, call=1).shape == (BATCH, 4, 4)
    weights = rec.weights(2)
    entropy = rec[NAMES[2]][0].entropy
    torch.testing.assert_close(-torch.xlogy(weights, weights).sum(-1), entropy, rtol=0, atol=1e-5)
    saved = rec.kept_call(0)
    assert not any(tensor.requires_grad for tensor in (saved.query, saved.key, saved.value))


def test_only_copies_of_queries_and_keys_are_saved() -> None:
    """Query and key may be views of a joint projection or of a cache, which the next sequence overwrites."""
    cache = torch.randn(BATCH, 19, 3, HEADS, 5)

    class Packed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(*x.permute(2, 0, 3, 1, 4).unbind(0))

    rec = recorded(Packed(), cache[:, :LENGTH], keep="queries_keys")
    expected = clearhead.attention_weights(*cache[:, :LENGTH, :2].permute(2, 0, 3, 1, 4))
    cache.zero_()
    torch.testing.assert_close(rec.weights(0), expected, rtol=0, atol=1e-6)
    saved = rec.kept_call(0)
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in (saved.query, saved.key, saved.value)}
    assert sum(storage.nbytes() for storage in storages.values()) == 2 * BATCH * HEADS * LENGTH * 5 * 4


def test_summary_is_one_number_per_head(model: Stack, x: Tensor) -> None:
    names = ("entropy", "max_logit", "offset", "top_k", "sink")
    rec = recorded(model, {"x": x, "attention_mask": MASK}, statistics=names, offsets=(-1, 2))
    summary, statistics = rec.summary(), rec[NAMES[1]]
    assert list(summary.values) == ["entropy", "normalized_entropy", "sink", "max_logit", "offset -1", "offset +2"]
    counted = torch.cat([statistics.entropy[0], statistics.entropy[1, :, :4]], -1)
    torch.testing.assert_close(summary["entropy"][NAMES[1]], counted.mean(-1))
    torch.testing.assert_close(summary["max_logit"][NAMES[1]], statistics.max_logit.amax(0))
    lines = str(summary).split("\n")
    assert lines[0].split() == ["entropy", "h0", "h1", "h2", "h3"]
    assert lines[1].split() == [NAMES[0], *(f"{value:.3f}" for value in summary["entropy"][NAMES[0]].tolist())]
    assert len({len(line) for line in lines[:4]}) == 1, "columns are aligned"


@pytest.mark.parametrize("layers", [[1], ["blocks.1.attend"], (1, "blocks.1.attend")], ids=str)
def test_chosen_layers(layers: Any, model: Stack, x: Tensor) -> None:
    """A layer has the same number in `layers=` and in `weights`."""
    rec = recorded(model, x, layers=layers, keep="queries_keys")
    assert list(rec) == [NAMES[1]]
    assert rec.weights(layer=1).shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert rec.name_of(1) == NAMES[1]


def test_chosen_heads(model: Stack, x: Tensor) -> None:
    names = ("entropy", "top_k", "map", "head_average")
    rec = recorded(model, x, statistics=names, heads=[3, -4], keep="queries_keys")
    chosen, complete = rec[NAMES[0]][0], recorded(model, x, statistics=names)[NAMES[0]][0]
    assert torch.equal(chosen.entropy, complete.entropy[:, [3, 0]])
    assert torch.equal(chosen.top_k.indices, complete.top_k.indices[:, [3, 0]])
    assert torch.equal(chosen.map, complete.map[:, [3, 0]])
    assert torch.equal(chosen.head_average, complete.head_average), "the average is over all heads"
    assert rec.weights(0, head=3).shape == (BATCH, LENGTH, LENGTH)
    assert str(rec.summary()).split("\n")[0].split() == ["entropy", "h3", "h0"]
    assert [label.get_text() for label in rec.plot_heads("entropy").get_xticklabels()] == ["3", "0"]
    rec = recorded(model, x, statistics=("entropy",), per="kv_head", heads=[1])
    torch.testing.assert_close(rec[NAMES[0]].entropy, complete.entropy.unflatten(1, (2, 2)).mean(2)[:, 1:])
    assert rec.summary()["entropy"][NAMES[0]].shape == (1,)


@pytest.mark.parametrize("how", ["keyword", "position", "argument"])
def test_padding_is_found_in_the_root_call(how: str, model: Stack, x: Tensor) -> None:
    with clearhead.record(model, query_mask=MASK if how == "argument" else None) as rec:
        model(x, *([MASK] if how == "position" else []), **({"attention_mask": MASK} if how == "keyword" else {}))
    unmasked = recorded(model, x)
    for name in NAMES:
        assert rec[name].counted.tolist() == MASK.bool().tolist()
        torch.testing.assert_close(rec[name].received[0], unmasked[name].received[0])
        torch.testing.assert_close(rec[name].received[1].sum(-1), torch.full((HEADS,), 4.0))


def test_padding_is_read_again_for_every_root_call(model: Stack, x: Tensor) -> None:
    masks = [torch.tensor([[1] * 7, [1] * n + [0] * (7 - n)]) for n in (3, 5)]
    rec = recorded(model, *({"x": x, "attention_mask": mask} for mask in masks), x)
    assert [call.counted.sum().item() for call in rec[NAMES[0]]] == [10, 12, 14]


def test_learned_queries_are_not_padded_by_their_keys(x: Tensor) -> None:
    class Latents(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.latents = nn.Parameter(torch.randn(1, 3, WIDTH))
            self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS)

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            mask = clearhead.masks.keep(keys=attention_mask)
            return self.attend(self.latents.expand(len(x), -1, -1), x, mask=mask)

    assert recorded(Latents(), {"x": x, "attention_mask": MASK})["attend"].counted.all()


@pytest.mark.parametrize(("query", "key", "item"), [(4, 1, 0), (-2, -7, 1)])
def test_heads_are_ranked_by_one_weight(query: int, key: int, item: int) -> None:
    model = nn.Sequential(*(clearhead.MultiHeadAttention(WIDTH, heads) for heads in (3, 2))).double()
    rec = recorded(model, torch.randn(BATCH, LENGTH, WIDTH).double(), keep="queries_keys")
    ranked = rec.rank_heads(query, key, item=item)
    assert [one.weight for one in ranked] == sorted((one.weight for one in ranked), reverse=True)
    assert {(one.layer, one.head) for one in ranked} == {(n, h) for n in rec for h in range(rec.weights(n).shape[1])}
    for layer, head, weight in ranked:
        assert weight == pytest.approx(rec.weights(layer)[item, head, query, key].item(), abs=1e-12)


WORDS = ["[CLS]", "it", "was", "too", "tired", "too", "[SEP]"]


@pytest.mark.parametrize("tokens", [WORDS, Tokens(WORDS)])
def test_texts_of_tokens_stand_for_their_numbers(tokens: list[str] | Tokens, model: Stack, x: Tensor) -> None:
    rec = recorded(model, x[:1], keep="queries_keys")
    ranked = rec.rank_heads("tired", "it", tokens=tokens)
    assert ranked == rec.rank_heads(4, 1)
    assert ranked == rec.rank_heads("tired", "B", tokens=tokens, key_tokens=["A", "B", *"CDEFG"])
    assert ranked == rec.rank_heads("tired", 1, tokens=tokens)
    assert repr(ranked[0]) == f"<{ranked[0].layer} head {ranked[0].head}: {ranked[0].weight:.4f}>"
