"""What `record` hands out, during and after."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import clearhead
from clearhead.errors import ArgumentError, DTypeError, RecordError

from .stacks import BATCH, CAUSAL, HEADS, LENGTH, NAMES, WIDTH, Stack


def test_a_mapping_from_names_to_statistics(model: Stack, x: Tensor) -> None:
    with clearhead.record(model) as rec:
        model(x)
    assert list(rec) == NAMES
    assert len(rec) == 3
    assert "blocks.1.attend" in rec
    assert rec["blocks.1.attend"].entropy.shape == (BATCH, HEADS, LENGTH)
    assert rec["blocks.1.attend"][0].top_k.indices.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert repr(rec) == f"<record of 3 attention modules: {', '.join(NAMES)}>"
    with pytest.raises(KeyError, match=r"'blocks\.9': no attention was recorded there; recorded are 'blocks\.0\.att"):
        _ = rec["blocks.9"]


def test_statistics_are_those_of_the_functional_form(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy", "output_norm"), keep="queries_keys") as rec:
        model(x)
    attend = model.blocks[0].attend
    query, key, value = (
        clearhead.split_heads(projection(x), heads)
        for projection, heads in ((attend.q_proj, HEADS), (attend.k_proj, 2), (attend.v_proj, 2))
    )
    expected = clearhead.attention_statistics(query, key, CAUSAL, value=value, statistics=("entropy", "output_norm"))
    torch.testing.assert_close(rec[NAMES[0]].entropy, expected.entropy)
    torch.testing.assert_close(rec[NAMES[0]].output_norm, expected.output_norm)
    torch.testing.assert_close(rec.weights(0), clearhead.attention_weights(query, key, CAUSAL))


def test_outputs_and_gradients_stay_those_of_the_model(model: Stack, x: Tensor) -> None:
    expected = model(x)
    gradients = torch.autograd.grad(expected.square().sum(), list(model.parameters()))
    with clearhead.record(model) as rec:
        found = model(x)
        inside = torch.autograd.grad(found.square().sum(), list(model.parameters()))
    assert torch.equal(found, expected)
    assert all(torch.equal(*pair) for pair in zip(inside, gradients, strict=True))
    assert all(len(calls) == 1 for calls in rec.values())
    assert not rec[NAMES[0]].received.requires_grad


def test_recording_works_under_inference_mode(model: Stack, x: Tensor) -> None:
    with torch.inference_mode(), clearhead.record(model) as rec:
        model(x)
    assert rec.summary()["entropy"][NAMES[2]].shape == (HEADS,)


# Several calls.


def test_repeated_calls_append(model: Stack) -> None:
    with clearhead.record(model) as rec:
        for length in (3, 5):
            model(torch.randn(BATCH, length, WIDTH))
    calls = rec[NAMES[1]]
    assert len(calls) == 2
    assert [found.query_length for found in calls] == [3, 5]
    assert calls[1].entropy.shape == (BATCH, HEADS, 5)
    assert len(calls[:1]) == 1
    with pytest.raises(AttributeError, match=r"blocks\.1\.attend: called 2 times.*\[0\]\.entropy.*rec\.reduce\(\)"):
        _ = calls.entropy


def test_reduce_folds_batches(model: Stack) -> None:
    batches = [torch.randn(2, 3, WIDTH), torch.randn(1, 5, WIDTH)]
    with clearhead.record(model, ("entropy", "received", "top_k", "max_logit")) as rec:
        for batch in batches:
            model(batch)
    folded = rec.reduce()[NAMES[0]]
    first, second = rec[NAMES[0]]
    assert folded.entropy.shape == (3, HEADS, 5)
    torch.testing.assert_close(folded.entropy[:2, :, :3], first.entropy)
    torch.testing.assert_close(folded.entropy[2:], second.entropy)
    assert not folded.entropy[:2, :, 3:].any()
    assert folded.counted.tolist() == [[True] * 3 + [False] * 2] * 2 + [[True] * 5]
    assert folded.top_k.indices[0, 0, 4].eq(-1).all()
    assert (folded.batch_size, folded.query_length, folded.key_length) == (3, 5, 5)
    torch.testing.assert_close(folded.max_logit, torch.cat([first.max_logit, second.max_logit]))


def test_a_module_used_twice_in_one_pass_has_two_calls(x: Tensor) -> None:
    class Recurrent(Stack):
        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.blocks[0](x))

    model = Recurrent(1)
    with clearhead.record(model) as rec:
        model(x)
    assert len(rec[NAMES[0]]) == 2


# What it answers later.


def test_weights_on_demand(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
        model(x[:, :4])
    assert rec.weights(layer=2, head=1, queries=slice(0, 4)).shape == (BATCH, 4, LENGTH)
    assert rec.weights(layer=NAMES[2], queries=[5]).shape == (BATCH, HEADS, 1, LENGTH)
    assert rec.weights(layer=-1, head=-1, call=1).shape == (BATCH, 4, 4)
    entropy = rec[NAMES[2]][0].entropy
    weights = rec.weights(2)
    torch.testing.assert_close(-torch.xlogy(weights, weights).sum(-1), entropy, rtol=0, atol=1e-5)


def test_layers_are_numbered_as_they_run(model: Stack, x: Tensor) -> None:
    """The same number names a layer in `layers=` and in `weights`."""
    with clearhead.record(model, layers=[2], keep="queries_keys") as rec:
        model(x)
    assert rec.weights(layer=2).shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert rec.name_of(2) == NAMES[2]


BAD_QUESTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "layer": ({"layer": 3}, "layer: expected 0 … 2, got 3"),
    "head": ({"layer": 0, "head": 4}, "head: expected 0 … 3, got 4"),
    "row": ({"layer": 0, "queries": [9]}, "row numbers below L = 7"),
    "call": ({"layer": 0, "call": 1}, "call: expected 0 … 0, got 1"),
}


@pytest.mark.parametrize("case", BAD_QUESTIONS)
def test_questions_about_what_is_not_there(case: str, model: Stack, x: Tensor) -> None:
    arguments, text = BAD_QUESTIONS[case]
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
    with pytest.raises(ArgumentError, match=text):
        rec.weights(**arguments)


def test_weights_need_queries_and_keys(model: Stack, x: Tensor) -> None:
    with clearhead.record(model) as rec:
        model(x)
    with pytest.raises(RecordError, match="keep: expected a record made with keep='queries_keys', got keep='statist"):
        rec.weights(0)
    with pytest.raises(RecordError, match="keep: expected"):
        rec.rollout([0])


def test_what_is_kept_hangs_on_no_graph(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
    kept = rec.kept_call(0)
    assert not any(tensor.requires_grad for tensor in (kept.query, kept.key, kept.value))


def test_only_queries_and_keys_are_kept() -> None:
    """Not the values, nor the joint projection or the cache that query and key may be views of."""
    cache = torch.randn(BATCH, 19, 3, HEADS, 5)

    class Packed(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scaled_dot_product_attention(*x.permute(2, 0, 3, 1, 4).unbind(0))

    model = Packed()
    with clearhead.record(model, keep="queries_keys") as rec:
        model(cache[:, :LENGTH])
    expected = clearhead.attention_weights(*cache[:, :LENGTH, :2].permute(2, 0, 3, 1, 4))
    cache.zero_()  # the next sequence is written over it
    torch.testing.assert_close(rec.weights(0), expected, rtol=0, atol=1e-6)
    kept = rec.kept_call(0)
    bytes_kept = {
        x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in (kept.query, kept.key, kept.value)
    }
    assert sum(bytes_kept.values()) == 2 * BATCH * HEADS * LENGTH * 5 * 4


def test_summary_is_one_number_per_head(model: Stack, x: Tensor) -> None:
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    names = ("entropy", "max_logit", "offset", "top_k", "sink")
    with clearhead.record(model, names, offsets=(-1, 2)) as rec:
        model(x, attention_mask=mask)
    summary = rec.summary()
    assert list(summary.values) == ["entropy", "normalized_entropy", "sink", "max_logit", "offset -1", "offset +2"]
    found = rec[NAMES[1]]
    counted = torch.cat([found.entropy[0], found.entropy[1, :, :4]], -1)
    torch.testing.assert_close(summary["entropy"][NAMES[1]], counted.mean(-1))
    torch.testing.assert_close(summary["max_logit"][NAMES[1]], found.max_logit.amax(0))
    lines = str(summary).split("\n")
    assert lines[0].split() == ["entropy", "h0", "h1", "h2", "h3"]
    assert lines[1].split() == [NAMES[0], *(f"{value:.3f}" for value in summary["entropy"][NAMES[0]].tolist())]
    assert len({len(line) for line in lines[:4]}) == 1, "columns stand under each other"


def test_tables_name_the_recorded_heads(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy",), heads=[1, 3]) as rec:
        model(x)
    assert str(rec.summary()).split("\n")[0].split() == ["entropy", "h1", "h3"]
    assert [label.get_text() for label in rec.plot_heads("entropy").get_xticklabels()] == ["1", "3"]


def test_summary_over_calls_is_over_all_their_queries(model: Stack) -> None:
    with clearhead.record(model, ("entropy",)) as rec:
        for length in (3, 5):
            model(torch.randn(1, length, WIDTH))
    entropies = torch.cat([found.entropy[0] for found in rec[NAMES[0]]], -1)
    torch.testing.assert_close(rec.summary()["entropy"][NAMES[0]], entropies.mean(-1))


# What it refuses.


BAD_ARGUMENTS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "statistic": (ArgumentError, "statistics: expected names among", {"statistics": ("mean",)}),
    "keep": (ArgumentError, "keep: expected 'statistics' or 'queries_keys', got 'all'", {"keep": "all"}),
    "per": (ArgumentError, "per: expected 'query_head' or 'kv_head'", {"per": "head"}),
    "per of top_k": (
        ArgumentError,
        r"per: expected 'query_head' for top_k.*Write statistics=\('entropy', 'received', 'max_logit'\)",
        {"per": "kv_head"},
    ),
    "one head": (ArgumentError, "heads: expected a list of whole numbers, got 2", {"heads": 2}),
    "half a head": (ArgumentError, r"heads: expected a list of whole numbers, got \[0.5\]", {"heads": [0.5]}),
    "one offset": (ArgumentError, "offsets: expected a list of whole numbers, got -1", {"offsets": -1}),
    "one layer": (
        ArgumentError,
        r"layers: expected a list of names or numbers, got 'blocks'\. Write \['blocks'\]",
        {"layers": "blocks"},
    ),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_the_block(case: str, model: Stack) -> None:
    kind, text, arguments = BAD_ARGUMENTS[case]
    with pytest.raises(kind, match=text):
        clearhead.record(model, **arguments)


def test_only_modules_are_recorded() -> None:
    with pytest.raises(DTypeError, match=r"model: expected a torch\.nn\.Module, got function"):
        clearhead.record(lambda x: x)  # type: ignore[arg-type]
