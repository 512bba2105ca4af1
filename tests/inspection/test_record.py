"""What `record` hands out, how it is told what to record, and that it leaves nothing behind."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

import clearhead
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.inspection.record import RecordError, UnseenAttentionWarning
from clearhead.observe import watched

BATCH, LENGTH, WIDTH, HEADS = 2, 7, 12, 4
CAUSAL = clearhead.masks.causal()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(WIDTH, HEADS, num_kv_heads=2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attend(x, mask=CAUSAL)


class Stack(nn.Module):
    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(depth))

    def forward(self, x: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


NAMES = [f"blocks.{number}.attend" for number in range(3)]


@pytest.fixture(name="model")
def _model() -> Stack:
    return Stack()


@pytest.fixture(name="x")
def _x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def hooks(model: nn.Module) -> list[str]:
    """Names of all dictionaries of hooks that hold something."""
    return [
        f"{name}.{attribute}"
        for name, module in model.named_modules()
        for attribute, value in vars(module).items()
        if "hooks" in attribute and isinstance(value, Mapping) and value
    ]


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


# What to record.


@pytest.mark.parametrize("layers", [[1], ["blocks.1.attend"], (1, "blocks.1.attend")], ids=str)
def test_chosen_layers(layers: Any, model: Stack, x: Tensor) -> None:
    with clearhead.record(model, layers=layers) as rec:
        model(x)
    assert list(rec) == [NAMES[1]]


@pytest.mark.parametrize("layers", [["blocks.1.attention"], [3], [0, 99], [-1]], ids=str)
def test_layers_that_are_not_there(layers: Any, model: Stack, x: Tensor) -> None:
    with pytest.raises(ArgumentError, match="layers: expected"), clearhead.record(model, layers=layers):
        model(x)


def test_chosen_heads(model: Stack, x: Tensor) -> None:
    names = ("entropy", "top_k", "map", "head_average")
    with clearhead.record(model, names, heads=[3, -4], keep="queries_keys") as some:
        model(x)
    with clearhead.record(model, names) as every:
        model(x)
    found, expected = some[NAMES[0]][0], every[NAMES[0]][0]
    assert torch.equal(found.entropy, expected.entropy[:, [3, 0]])
    assert torch.equal(found.top_k.indices, expected.top_k.indices[:, [3, 0]])
    assert torch.equal(found.map, expected.map[:, [3, 0]])
    assert torch.equal(found.head_average, expected.head_average), "the average is over all heads"
    assert some.weights(0, head=3).shape == (BATCH, LENGTH, LENGTH)


def test_chosen_heads_of_key_value_heads(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy",), per="kv_head", heads=[1]) as rec:
        model(x)
    with clearhead.record(model, ("entropy",)) as every:
        model(x)
    expected = every[NAMES[0]].entropy.unflatten(1, (2, 2)).mean(2)[:, 1:]
    torch.testing.assert_close(rec[NAMES[0]].entropy, expected)
    assert rec.summary()["entropy"][NAMES[0]].shape == (1,)


@pytest.mark.parametrize(("heads", "per"), [([4], "query_head"), ([-5], "query_head"), ([2], "kv_head")])
def test_heads_that_are_not_there(heads: list[int], per: Any, model: Stack, x: Tensor) -> None:
    with (
        pytest.raises(ArgumentError, match="heads: expected numbers in 0 …"),
        clearhead.record(model, ("entropy",), heads=heads, per=per),
    ):
        model(x)


@pytest.mark.parametrize("how", ["keyword", "position", "given"])
def test_padding_is_found_in_the_root_call(how: str, model: Stack, x: Tensor) -> None:
    mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
    with clearhead.record(model, query_mask=mask if how == "given" else None) as rec:
        if how == "keyword":
            model(x, attention_mask=mask)
        elif how == "position":
            model(x, mask)
        else:
            model(x)
    with clearhead.record(model) as unmasked:
        model(x)
    for name in NAMES:
        assert rec[name].counted.tolist() == mask.bool().tolist()
        torch.testing.assert_close(rec[name].received[0], unmasked[name].received[0])
        torch.testing.assert_close(rec[name].received[1].sum(-1), torch.full((HEADS,), 4.0))


def test_padding_is_read_anew_for_every_root_call(model: Stack, x: Tensor) -> None:
    masks = [torch.tensor([[1] * 7, [1] * n + [0] * (7 - n)]) for n in (3, 5)]
    with clearhead.record(model) as rec:
        for mask in masks:
            model(x, attention_mask=mask)
        model(x)
    counted = [found.counted.sum().item() for found in rec[NAMES[0]]]
    assert counted == [10, 12, 14]


BAD_MASKS = {
    "shape": (torch.ones(BATCH, LENGTH + 2).bool(), ShapeError),
    "floats": (torch.zeros(BATCH, LENGTH), DTypeError),
    "no tensor": ([[1] * LENGTH] * BATCH, DTypeError),
}


@pytest.mark.parametrize("case", BAD_MASKS)
def test_a_query_mask_that_fits_nothing(case: str, model: Stack, x: Tensor) -> None:
    mask, kind = BAD_MASKS[case]
    with pytest.raises(kind, match="query_mask: expected"), clearhead.record(model, query_mask=mask):  # type: ignore[arg-type]
        model(x)


# What it answers later.


def test_weights_on_demand(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, keep="queries_keys") as rec:
        model(x)
        model(x[:, :4])
    assert rec.weights(layer=2, head=1, rows=slice(0, 4)).shape == (BATCH, 4, LENGTH)
    assert rec.weights(layer=NAMES[2], rows=[5]).shape == (BATCH, HEADS, 1, LENGTH)
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
    "row": ({"layer": 0, "rows": [9]}, "row numbers below L = 7"),
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


def test_summary_over_calls_is_over_all_their_queries(model: Stack) -> None:
    with clearhead.record(model, ("entropy",)) as rec:
        for length in (3, 5):
            model(torch.randn(1, length, WIDTH))
    entropies = torch.cat([found.entropy[0] for found in rec[NAMES[0]]], -1)
    torch.testing.assert_close(rec.summary()["entropy"][NAMES[0]], entropies.mean(-1))


# What cannot be seen.


class OwnSoftmax(nn.Module):
    """Attention by hand, in one of the ways people write it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.layer = nn.Softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        heads = clearhead.split_heads(x, HEADS)
        scores = heads @ heads.transpose(-2, -1)
        ways = {
            "torch.softmax": lambda: torch.softmax(scores, -1),
            "torch.softmax, by keyword": lambda: torch.softmax(input=scores, dim=-1),
            "functional": lambda: nn.functional.softmax(scores, dim=-1),
            "method": lambda: scores.softmax(dim=-1),
            "module": lambda: self.layer(scores),
        }
        return clearhead.merge_heads(ways[self.how]() @ heads)


WAYS = ("torch.softmax", "torch.softmax, by keyword", "functional", "method", "module")


@pytest.mark.parametrize("how", WAYS)
def test_an_own_softmax_is_named(how: str, x: Tensor) -> None:
    name = r"odd\.layer \(Softmax\)" if how == "module" else r"odd \(OwnSoftmax\)"
    model = nn.Sequential()
    model.add_module("odd", OwnSoftmax(how))
    with pytest.raises(RecordError, match=f"no attention was seen.*computed by {name}"), clearhead.record(model):
        model(x)
    model.add_module("seen", Stack(1))
    warning = pytest.warns(UnseenAttentionWarning, match=f"not in the record was computed by {name}")
    with warning, clearhead.record(model) as rec:
        model(x)
    assert list(rec) == ["seen.blocks.0.attend"]


def test_a_softmax_over_classes_is_no_attention(model: Stack, x: Tensor) -> None:
    classify = nn.Sequential(model, nn.Softmax(-1))
    with clearhead.record(classify):
        classify(x)


EMPTY: dict[str, tuple[nn.Module, nn.Module]] = {
    "nothing runs": (Stack(1), nn.Identity()),
    "another model runs": (Stack(1), Stack(1)),
    "a model without attention": (shared := nn.Linear(WIDTH, WIDTH), shared),
}


@pytest.mark.parametrize("case", EMPTY)
def test_an_empty_record_is_an_error(case: str, x: Tensor) -> None:
    recorded, runs = EMPTY[case]
    text = r"no attention was seen\. Attention is seen in Clearhead's modules"
    with pytest.raises(RecordError, match=text), clearhead.record(recorded):
        runs(x)


@pytest.mark.parametrize("way", ["torch.compile", "module.compile"])
def test_a_compiled_model_is_recorded_uncompiled(way: str, model: Stack, x: Tensor) -> None:
    compiled: Any = model
    if way == "torch.compile":
        compiled = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    expected = compiled(x)
    with clearhead.record(compiled) as rec:
        found = compiled(x)
    torch.testing.assert_close(found, expected)
    assert [name.removeprefix("_orig_mod.") for name in rec] == NAMES
    graphs: list[object] = []

    def counting(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(lambda y: y + 1, backend=counting)(x)
    assert len(graphs) == 1, "the compiler is on again"


# Nothing is left behind.


def test_no_hooks_are_left(model: Stack, x: Tensor) -> None:
    with clearhead.record(model):
        assert hooks(model)
        assert watched()
        model(x)
    assert not hooks(model)
    assert not watched()


def test_the_users_own_hooks_stay(model: Stack, x: Tensor) -> None:
    seen: list[str] = []
    model.blocks[0].register_forward_hook(lambda *_: seen.append("after"))
    before = hooks(model)
    with clearhead.record(model):
        model(x)
    assert hooks(model) == before
    assert seen == ["after"]


@pytest.mark.parametrize("where", ["in the block", "in the model", "in a hook"])
def test_exceptions_pass_and_restore_everything(where: str, model: Stack, x: Tensor) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if where == "in a hook":
        model.blocks[1].register_forward_pre_hook(fail)
    if where == "in the model":
        model.blocks[1].attend.out_proj.forward = fail
    before, rec = hooks(model), clearhead.record(model)
    with contextlib.suppress(ZeroDivisionError), rec:
        model(x)
        fail()
    assert hooks(model) == before
    assert not watched()
    assert not torch.overrides._get_current_function_mode_stack()
    assert list(rec) == {"in the block": NAMES, "in the model": NAMES[:2], "in a hook": NAMES[:1]}[where]


def test_names_are_right_again_after_a_caught_exception(model: Stack, x: Tensor) -> None:
    with clearhead.record(model) as rec:
        with pytest.raises(Exception, match="features"):
            model(x[..., :5])
        model(x)
    assert list(rec) == NAMES


def test_an_error_while_recording_is_the_blocks_error_and_restores_everything(model: Stack, x: Tensor) -> None:
    with pytest.raises(ArgumentError, match="heads"), clearhead.record(model, heads=[7]):
        model(x)
    assert not hooks(model)
    assert not watched()


def test_two_threads_do_not_see_each_other() -> None:
    """Both are inside their blocks when both models run, one through PyTorch's function and one through Clearhead's."""

    class Theirs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            heads = clearhead.split_heads(x, HEADS)
            return scaled_dot_product_attention(heads, heads, heads)

    models = (Stack(2), Theirs())
    together = threading.Barrier(2, timeout=60)
    records: dict[int, Any] = {}

    def work(number: int) -> None:
        x = torch.randn(number + 1, LENGTH, WIDTH)
        with clearhead.record(models[number]) as rec:
            together.wait()
            for _ in range(5):
                models[number](x)
                models[1 - number](x)  # another thread's model, in this thread: not in this record
            together.wait()
        records[number] = rec

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert list(records[0]) == NAMES[:2]
    assert list(records[1]) == [""]
    for number, rec in records.items():
        assert all(len(calls) == 5 for calls in rec.values())
        assert all(found.batch_size == number + 1 for calls in rec.values() for found in calls)


def test_one_model_in_two_threads(model: Stack) -> None:
    together = threading.Barrier(2, timeout=60)
    records: dict[int, Any] = {}

    def work(number: int) -> None:
        with clearhead.record(model) as rec:
            together.wait()
            model(torch.randn(number + 1, LENGTH, WIDTH))
            together.wait()
        records[number] = rec

    threads = [threading.Thread(target=work, args=(number,)) for number in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [rec[NAMES[0]].batch_size for _, rec in sorted(records.items())] == [1, 2]
    assert not hooks(model)


def test_overlapping_threads_leave_the_compiler_on(model: Stack, x: Tensor) -> None:
    """The first to enter leaves first: what it restores must not be restored over by the second."""
    entered, left, second = threading.Event(), threading.Event(), Stack(1)
    torch.compile(lambda y: y * 2, backend="eager")(x)  # the compiler is loaded

    def first() -> None:
        with clearhead.record(model):
            model(x)
            entered.wait(60)
        left.set()

    thread = threading.Thread(target=first)
    thread.start()
    with clearhead.record(second):
        second(x)
        entered.set()
        assert left.wait(60)
    thread.join(60)
    graphs: list[object] = []

    def counting(graph: Any, inputs: object) -> Any:
        graphs.append(graph)
        return graph

    torch.compile(lambda y: y + 3, backend=counting)(x)
    assert len(graphs) == 1


def test_records_nest(model: Stack, x: Tensor) -> None:
    with clearhead.record(model, ("entropy",)) as outer:
        with clearhead.record(model.blocks[1], ("received",)) as inner:
            model(x)
        model(x)
    assert list(inner) == ["attend"]
    assert [len(calls) for calls in outer.values()] == [2, 2, 2]


@pytest.mark.parametrize("use_reentrant", [False, True], ids=["", "reentrant"])
def test_recomputation_is_not_a_second_call(use_reentrant: bool, model: Stack, x: Tensor) -> None:
    """Activation checkpointing runs modules again while gradients are computed."""

    class Checkpointed(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=use_reentrant)
            return x

    model = Checkpointed()
    with clearhead.record(model, ("entropy",)) as rec:
        model(x.requires_grad_()).sum().backward()
    assert [len(calls) for calls in rec.values()] == [1, 1, 1]
    assert model.blocks[0].attend.q_proj.weight.grad is not None


# What it refuses.


BAD_ARGUMENTS: dict[str, tuple[type[Exception], str, dict[str, Any]]] = {
    "statistic": (ArgumentError, "statistics: expected names among", {"statistics": ("mean",)}),
    "keep": (ArgumentError, "keep: expected 'statistics' or 'queries_keys', got 'all'", {"keep": "all"}),
    "top_k": (ArgumentError, "top_k: expected an int ≥ 1", {"top_k": 0}),
    "map_size": (ArgumentError, "map_size: expected an int ≥ 1", {"map_size": 0}),
    "per": (ArgumentError, "per: expected 'query_head' or 'kv_head'", {"per": "head"}),
    "per of top_k": (ArgumentError, "per: expected 'query_head' for top_k", {"per": "kv_head"}),
}


@pytest.mark.parametrize("case", BAD_ARGUMENTS)
def test_bad_arguments_are_refused_before_the_block(case: str, model: Stack) -> None:
    kind, text, arguments = BAD_ARGUMENTS[case]
    with pytest.raises(kind, match=text):
        clearhead.record(model, **arguments)


def test_only_modules_are_recorded() -> None:
    with pytest.raises(DTypeError, match=r"model: expected a torch\.nn\.Module, got function"):
        clearhead.record(lambda x: x)  # type: ignore[arg-type]
