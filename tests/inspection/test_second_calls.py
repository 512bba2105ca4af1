"""Records, monitors and interventions over calls that differ, and over some of the heads and layers.

Every accessor of a later call, and of a chosen head, gives what a record of that call alone, of all heads, gives.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._statistics.definitions import STATISTICS
from clearhead.errors import ClearheadError
from clearhead.integrations.transformers import register
from clearhead.masks import Mask
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.randomised import randomised
from tests.support.statistics_oracle import EVERY

from .small_models import small

E, H, KV, D = 20, 6, 2, 5
ALL: tuple[str, ...] = (*EVERY, "rows", "output")


class Two(nn.Module):
    """Two layers of different sizes, whose scores have settings other than the defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.first = clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, head_dim=D, scale=0.8, softcap=3.0)
        self.second = clearhead.MultiHeadAttention(E, 4, head_dim=3, sinks=True)
        randomised(self.double(), 0.5)

    def forward(self, x: Tensor, attention_mask: Tensor | None = None, rule: Mask | None = None) -> Tensor:
        mask = None if attention_mask is None else masks.keep(keys=attention_mask)
        mask = mask if rule is None else rule if mask is None else mask & rule
        return x + self.second(x + self.first(x, mask=mask), mask=mask)


def inputs(batch: int, length: int, *padded: int, side: str = "right", rule: Mask | None = None) -> dict[str, Any]:
    x = torch.randn(batch, length, E, dtype=torch.float64)
    counts = torch.tensor([*padded, *[0] * (batch - len(padded))])[:, None]
    at = torch.arange(length)
    kept = at < length - counts if side == "right" else at >= counts
    return {"x": x, "attention_mask": kept.long() if padded else None, "rule": rule}


#: Calls of one model, one after the other.
CALLS: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "lengths": lambda: [inputs(2, 7), inputs(2, 3), inputs(2, 11), inputs(2, 1)],
    "batches": lambda: [inputs(2, 5), inputs(3, 5), inputs(1, 5)],
    "paddings": lambda: [inputs(2, 7, 2), inputs(2, 7, 0, 4), inputs(2, 7), inputs(2, 7, 3, 1, side="left")],
    "masks": lambda: [inputs(2, 7, rule=rule) for rule in (masks.causal(), None, masks.sliding_window(2, 0))],
    "everything": lambda: [inputs(2, 7, 2, rule=masks.causal()), inputs(3, 4), inputs(1, 9, 3, side="left")],
}


def recorded(model: nn.Module, calls: list[dict[str, Any]], **options: Any) -> Any:
    settings: dict[str, Any] = {"statistics": ALL, "keep": "queries_keys", "top_k": 3, **options}
    with clearhead.record(model, **settings) as rec:
        for each in calls:
            model(**each)
    return rec


def require_same_statistics(found: Any, alone: Any, heads: list[int] | None = None) -> None:
    """The same statistics; of `heads` of the other where they are given."""
    sizes = ("batch_size", "query_length", "key_length", "num_heads", "num_kv_heads")
    assert all(getattr(found, name) == getattr(alone, name) for name in sizes)
    assert torch.equal(found.counted, alone.counted)
    chosen = slice(None) if heads is None else heads
    assert torch.equal(found.hidden_queries, alone.hidden_queries[:, chosen])
    for name in alone.names:
        ours, theirs = getattr(found, name), getattr(alone, name)
        if name == "top_k":
            assert torch.equal(ours.indices, theirs.indices[:, chosen])
            ours, theirs = ours.weights, theirs.weights
        theirs = theirs if name == "head_average" else theirs[:, chosen]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_a_record(name: str) -> None:
    model, calls = Two(), CALLS[name]()
    rec = recorded(model, calls)
    for number, call in enumerate(calls):
        alone = recorded(model, [call])
        for layer, module in enumerate(("first", "second")):
            require_same_statistics(rec[module][number], alone[module][0])
            require_near(rec.weights(layer, call=number), alone.weights(module))
            require_near(rec.weights(module, 3, call=number), alone.weights(layer)[:, 3])
            require_near(
                rec.weights(module, -1, queries=[-1, 0], call=number - len(calls)), alone.weights(layer, -1, [-1, 0])
            )
            assert rec.kept_call(module, number).grid.query_length == call["x"].shape[1]
        for item in range(len(call["x"])):
            ranked = rec.rank_heads(-1, 0, item=item, call=number)
            weights = {(each, head): w for each in alone for head, w in enumerate(alone.weights(each)[item, :, -1, 0])}
            assert [round(each.weight, 5) for each in ranked] == sorted([round(each.weight, 5) for each in ranked])[
                ::-1
            ]
            assert len(ranked) == len(weights) == H + 4
            for each in ranked:
                assert each.weight == pytest.approx(float(weights[each.layer, each.head]), abs=1e-6)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_made_of_all_calls(name: str) -> None:
    """`summary` and `reduce` are those of the calls, whatever their sizes."""
    model, calls = Two(), CALLS[name]()
    rec, alone = recorded(model, calls), [recorded(model, [call]) for call in calls]
    summary = rec.summary()
    for module in ("first", "second"):
        queries = [int(each[module][0].counted.sum()) for each in alone]
        of_calls = torch.stack([each.summary()["confidence"][module] for each in alone])
        mean = (of_calls * torch.tensor(queries)[:, None]).sum(0) / sum(queries)
        torch.testing.assert_close(summary["confidence"][module], mean, rtol=0, atol=1e-6)
        largest = torch.stack([each.summary()["max_logit"][module] for each in alone]).amax(0)
        torch.testing.assert_close(summary["max_logit"][module], largest, rtol=0, atol=1e-6)
        folded, start = rec.reduce()[module], 0
        for call, each in zip(calls, alone, strict=True):
            batch, length = call["x"].shape[:2]
            place, own = slice(start, start + batch), each[module][0]
            torch.testing.assert_close(folded.entropy[place, :, :length], own.entropy, rtol=0, atol=1e-6)
            torch.testing.assert_close(folded.received[place, :, :length], own.received, rtol=0, atol=1e-6)
            assert torch.equal(folded.top_k.indices[place, :, :length, : min(3, length)], own.top_k.indices)
            assert torch.equal(folded.counted[place, :length], own.counted)
            assert not folded.counted[place, length:].any()
            assert not folded.received[place, :, length:].any()
            assert torch.equal(folded.hidden_queries[place], own.hidden_queries)  # padding of a short call is none
            start += batch
        assert folded.batch_size == start


SUBSETS = ([3], [0, 2], [3, 0], [2, 2, 1], [-1, 0], [1, -4])


@in_turn({"heads": SUBSETS}, {"name": ["everything", "masks"]})
def test_some_of_the_heads(heads: list[int], name: str) -> None:
    """Layers of six and of four heads: numbers from the end are different heads in each."""
    model, calls = Two(), CALLS[name]()
    alone, rec = recorded(model, calls), recorded(model, calls, heads=heads)
    for module, count in (("first", H), ("second", 4)):
        numbers = [head % count for head in heads]
        for ours, theirs in zip(rec[module], alone[module], strict=True):
            assert ours.heads == tuple(numbers)
            require_same_statistics(ours, theirs, numbers)
            require_same_statistics(theirs.with_heads(heads), theirs, numbers)
        for statistic, values in alone.summary().values.items():
            torch.testing.assert_close(rec.summary()[statistic][module], values[module][numbers], rtol=0, atol=1e-6)
        folded, of_all = (each.reduce()[module] for each in (rec, alone))
        assert folded.heads == tuple(numbers)
        torch.testing.assert_close(folded.entropy, of_all.entropy[:, numbers], rtol=0, atol=1e-6)
        require_near(rec.weights(module, count - 1), alone.weights(module)[:, count - 1])
        assert rec.summary().heads_of[module] == tuple(numbers)
        header, row = str(
            clearhead.Summary({"x": {module: torch.zeros(len(heads))}}, (), rec.summary().heads_of)
        ).splitlines()
        assert header.split() == ["x", *(f"h{head}" for head in numbers)]
        assert row.split() == [module, *["0.000"] * len(heads)]
    assert rec.rank_heads(2, 1) == alone.rank_heads(2, 1)


@pytest.mark.parametrize("heads", [[1], [1, 0]], ids=str)
def test_some_of_the_key_value_heads(heads: list[int]) -> None:
    model, calls = Two().first, [{"query": torch.randn(2, 7, E, dtype=torch.float64)} for _ in range(2)]
    names = tuple(name for name in EVERY if STATISTICS[name].averaged and "H" in STATISTICS[name].shape)
    rec, alone = (recorded(model, calls, statistics=names, per="kv_head", **each) for each in ({"heads": heads}, {}))
    whole = recorded(model, calls, statistics=names)
    for ours, theirs, each in zip(rec[""], alone[""], whole[""], strict=True):
        require_same_statistics(ours, theirs, heads)
        require_near(ours.confidence.double(), each.confidence.double().unflatten(1, (KV, H // KV)).mean(2)[:, heads])


@pytest.mark.parametrize("layers", [[1], ["second"], [0, "second"], ["first"]], ids=str)
def test_some_of_the_layers(layers: list[int | str]) -> None:
    model, calls = Two(), CALLS["everything"]()
    rec, alone = recorded(model, calls, layers=layers), recorded(model, calls)
    names = [name for n, name in enumerate(("first", "second")) if n in layers or name in layers]
    assert list(rec) == names
    for name in names:
        for ours, theirs in zip(rec[name], alone[name], strict=True):
            require_same_statistics(ours, theirs)
        number = ("first", "second").index(name)
        assert rec.name_of(number) == name
        require_near(rec.weights(number, 1, call=2), alone.weights(name, 1, call=2))
    ranked = [each for each in alone.rank_heads(2, 1) if each.layer in names]
    assert rec.rank_heads(2, 1) == ranked


@pytest.mark.parametrize("choice", [[0], [-2], slice(1, None, 2), [2, 0, -1]], ids=str)
def test_chosen_queries_of_calls_of_other_lengths(choice: Any) -> None:
    model, calls = Two(), [inputs(2, n) for n in (7, 3, 11)]
    rec, alone = recorded(model, calls, queries=choice), recorded(model, calls)
    for module, number in itertools.product(("first", "second"), range(3)):
        require_near(rec[module][number].rows, alone[module][number].rows[:, :, choice])


# Rollout over some layers, and its call.


def test_a_rollout_is_over_the_chosen_layers() -> None:
    model, calls = Two(), [inputs(2, 7, 2, rule=masks.causal())]
    rec = recorded(model, calls)
    maps = {name: rec.weights(name).mean(1).double() for name in rec}
    eye = torch.eye(7, dtype=torch.float64)[[5, 2]]
    for layers in (None, [1], ["first"], [1, 0]):
        rows = eye.expand(2, 2, 7)
        for layer in reversed(["first", "second"] if layers is None else [rec.name_of(each) for each in layers]):
            rows = 0.3 * rows + 0.7 * rows @ maps[layer]
        torch.testing.assert_close(rec.rollout([5, 2], layers=layers, residual=0.3).double(), rows, rtol=0, atol=1e-6)


# Padding is that of each call of the model.


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_each_root_call(side: str) -> None:
    model = Two()
    calls = [inputs(2, 7, *padded, side=side) for padded in ((3, 0), (), (0, 5), (2, 2))]
    rec = recorded(model, calls)
    for number, call in enumerate(calls):
        kept = call["attention_mask"]
        expected = torch.ones(2, 7, dtype=torch.bool) if kept is None else kept.bool()
        assert all(torch.equal(rec[name][number].counted, expected) for name in rec)


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@torch.no_grad()
def test_steps_of_a_left_padded_prompt(kind: str) -> None:
    """Each step's queries are the last keys: their padding is at the end of the mask."""
    model, ids = small(kind), torch.randint(3, 20, (3, 9))
    kept = (torch.arange(9) >= torch.tensor([[0], [4], [8]])).long()
    model.set_attn_implementation("sdpa")
    with clearhead.record(model, ("entropy", "rows"), keep="queries_keys") as rec:
        past = model(ids[:, :6], attention_mask=kept[:, :6]).past_key_values
        past = model(ids[:, 6:8], attention_mask=kept[:, :8], past_key_values=past).past_key_values
        model(ids[:, 8:], attention_mask=kept, past_key_values=past)
    for name in rec:
        for number, (start, stop) in enumerate(((0, 6), (6, 8), (8, 9))):
            found = rec[name][number]
            assert torch.equal(found.counted, kept[:, start:stop].bool())
            assert (found.query_length, found.key_length) == (stop - start, stop)
            weights = rec.weights(name, call=number)
            assert weights.shape == (3, found.num_heads, stop - start, stop)
            hidden = (kept[:, None, None, :stop] == 0) & found.counted[:, None, :, None]
            assert not weights.masked_select(hidden).any()


@pytest.mark.parametrize("heads", [(6, 2), (6, 3), (4, 1)])
@pytest.mark.parametrize("padded", [True, False])
@torch.no_grad()
def test_grouped_heads_of_transformers(heads: tuple[int, int], padded: bool) -> None:
    """transformers repeats keys for its query heads, or moves these into the rows of a step: both are undone."""
    model = small("llama", num_attention_heads=heads[0], num_key_value_heads=heads[1])
    ids, kept = torch.randint(3, 20, (2, 7)), (torch.arange(7) >= torch.tensor([[0], [3]])).long()
    register()

    def run(implementation: str) -> list[Any]:
        model.set_attn_implementation(implementation)
        past, results = None, []
        for start, stop in ((0, 5), (5, 6), (6, 7)):
            mask = kept[:, :stop] if padded else None
            more = {"output_attentions": True} if implementation == "eager" else {}
            results.append(model(ids[:, start:stop], attention_mask=mask, past_key_values=past, **more))
            past = results[-1].past_key_values
        return results

    expected = [result.attentions for result in run("eager")]
    for implementation in ("sdpa", "clearhead"):
        with clearhead.record(model, ("rows",), keep="queries_keys") as rec:
            run(implementation)
        for number, layer in itertools.product(range(3), range(2)):
            found, weights = rec[rec.name_of(layer)][number], expected[number][layer]
            assert (found.num_heads, found.num_kv_heads) == heads
            sees = (found.rows.sum(-1) > 0)[..., None]
            assert bool(sees.all()) or padded
            require_near([found.rows, rec.weights(layer, call=number)], [weights.where(sees, 0)] * 2)


# Monitors measure each step as if it were the first.


def scalars_of(model: nn.Module, calls: list[dict[str, Any]], **options: Any) -> list[dict[str, float]]:
    told: list[dict[str, float]] = []
    names = ("entropy", "max_logit", "raw_max_logit", "sink", "confidence")
    with clearhead.monitor(model.train(), 1, names, to=lambda step, values: told.append(values), **options):
        for call in calls:
            model(**call)
    return told


@pytest.mark.filterwarnings("ignore::clearhead.errors.AttentionHealthWarning")
@pytest.mark.parametrize("name", CALLS)
def test_a_monitor_of_steps_that_differ(name: str) -> None:
    model, calls = Two(), CALLS[name]()
    together = scalars_of(model, calls)
    for found, call in zip(together, calls, strict=True):
        (alone,) = scalars_of(model, [call])
        assert found == pytest.approx(alone, abs=1e-6)
        rec = recorded(model, [call])
        for statistic, module in itertools.product(("entropy", "sink", "max_logit"), rec):
            values = rec.summary()[statistic][module]
            worst = int(values.argmin() if statistic == "entropy" else values.argmax())
            assert found[f"attention/{module}/{statistic}"] == pytest.approx(float(values.mean()), abs=1e-6)
            assert found[f"attention/{module}/{statistic}/head_{worst}"] == pytest.approx(
                float(values[worst]), abs=1e-6
            )


class Growing(nn.Module):
    """A module that runs twice in a call: over one key, and over more."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(E, H, head_dim=D)

    def forward(self, x: Tensor, first: int = 1) -> Tensor:
        return self.attend(x[:, :first]).sum() + self.attend(x).sum()


@pytest.mark.parametrize("first", [1, 7])
def test_a_collapse_is_seen_in_whichever_call_of_a_module_has_keys(first: int) -> None:
    model = Growing()
    with torch.no_grad():
        model.attend.k_proj.weight.mul_(1000)
    x = torch.randn(2, 7, E)
    with (
        pytest.warns(clearhead.errors.AttentionHealthWarning, match="attend"),
        clearhead.monitor(model.train(), 1, ("entropy",), to=lambda *_: None, entropy_threshold=1.0),
    ):
        model(x, first)


class Again(nn.Module):
    """A module that runs once for each mask."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(E, H, head_dim=D)

    def forward(self, x: Tensor, *rules: Mask | None) -> list[Tensor]:
        return [self.attend(x, mask=rule) for rule in rules]


@pytest.mark.parametrize("place", range(3))
def test_a_module_is_monitored_in_whichever_of_its_calls_sees_a_key(place: int) -> None:
    model, x, found = Again(), torch.randn(2, 7, E), list[dict[str, float]]()
    rules: list[Mask | None] = [masks.lengths(torch.tensor([0, 0]))] * 3
    rules[place] = masks.causal()
    with clearhead.monitor(model.train(), 1, ("entropy",), to=lambda _, values: found.append(values)):
        model(x, *rules)
        model(x, masks.causal())
    assert len(found) == 2
    assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_record_after_a_refused_choice() -> None:
    model, calls = Two(), CALLS["batches"]()
    with pytest.raises(ClearheadError, match="heads: expected numbers in 0 … 3"):
        recorded(model, calls, heads=[5])
    assert recorded(model, calls, heads=[3])["second"][0].heads == (3,)
