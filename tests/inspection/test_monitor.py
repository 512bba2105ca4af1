"""`monitor`: which steps it measures, what it hands over, and that nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._environment import state
from clearhead.errors import ArgumentError, AttentionHealthWarning, DTypeError, RecordError, ShapeError

from .small_models import padding, small, token_ids
from .stacks import CAUSAL, HEADS, NAMES, WIDTH, Stack, hooks


class Kept:
    """Takes the scalars and keeps them, step by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.steps[step] = values


@pytest.fixture(name="kept")
def _kept() -> Kept:
    return Kept()


def test_the_scalars_are_means_and_worst_heads(model: Stack, x: Tensor, kept: Kept) -> None:
    """Against weights and scores in float64."""
    model, x = model.double().requires_grad_(False), x.double()
    statistics = ("entropy", "max_logit", "raw_max_logit", "sink", "confidence")
    with clearhead.monitor(model, statistics=statistics, to=kept):
        model(x)
    for name in NAMES:
        attend = model.get_submodule(name)
        p = attend(x, mask=CAUSAL, need_weights=True, average_attn_weights=False)[1]  # (B, H, L, L)
        q, k = (clearhead.split_heads(part(x), heads) for part, heads in ((attend.q_proj, HEADS), (attend.k_proj, 2)))
        scores = q @ k.repeat_interleave(2, 1).mT / math.sqrt(WIDTH / HEADS)
        largest = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf).amax((0, 2, 3))
        expected = {
            "entropy": -torch.xlogy(p, p).sum(-1).mean((0, 2)),
            "max_logit": largest,
            "raw_max_logit": largest,
            "sink": p[..., 0].mean((0, 2)),
            "confidence": p.amax(-1).mean((0, 2)),
        }
        for statistic, heads in expected.items():
            worst = int(heads.argmin() if statistic == "entropy" else heads.argmax())
            assert kept.steps[0][f"attention/{name}/{statistic}"] == pytest.approx(float(heads.mean()), abs=1e-10)
            found = {
                key: value for key, value in kept.steps[0].items() if key.startswith(f"attention/{name}/{statistic}/")
            }
            assert list(found) == [f"attention/{name}/{statistic}/head_{worst}"]
            assert list(found.values()) == pytest.approx([float(heads[worst])], abs=1e-10)
        x = x + attend(x, mask=CAUSAL)
    assert len(kept.steps[0]) == len(NAMES) * len(statistics) * 2


def test_a_model_that_is_the_attention_itself(kept: Kept) -> None:
    with clearhead.monitor(clearhead.MultiHeadAttention(WIDTH, HEADS), to=kept) as watching:
        watching._model(torch.randn(2, 5, WIDTH))
    assert {"attention/entropy", "attention/max_logit", "attention/sink"} <= set(kept.steps[0])


def test_steps_are_calls_in_training_mode_and_the_first_is_measured(model: Stack, x: Tensor, kept: Kept) -> None:
    with clearhead.monitor(model, 3, to=kept):
        for step in range(8):
            model.train()
            model(x)
            model.eval()
            model(x)
            assert list(kept.steps) == list(range(0, step + 1, 3))
    model.train()(x)
    assert list(kept.steps) == [0, 3, 6]


def test_what_checkpointing_repeats_is_no_step(model: Stack, x: Tensor, kept: Kept) -> None:
    x.requires_grad_()
    with clearhead.monitor(model, 2, to=kept):
        for _ in range(4):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert list(kept.steps) == [0, 2]


def test_results_and_gradients_are_the_same_to_the_bit(model: Stack, x: Tensor, kept: Kept) -> None:
    def step() -> list[Tensor]:
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    expected = step()
    with clearhead.monitor(model, 2, to=kept):
        for _ in range(3):
            for found, other in zip(step(), expected, strict=True):
                assert torch.equal(found, other)
    assert list(kept.steps) == [0, 2]


def test_between_measured_steps_one_hook_is_on_the_model_and_none_afterwards(model: Stack, x: Tensor) -> None:
    watching = clearhead.monitor(model, 2, to=lambda step, values: None)
    for _ in range(3):
        assert hooks(model) == ["._forward_pre_hooks", "._forward_pre_hooks_with_kwargs"]
        model(x)
    watching.remove()
    watching.remove()
    assert hooks(model) == []


class Failing(Stack):
    error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.error is not None:
            raise self.error
        return x


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_after_a_step_that_failed_it_goes_on(error: BaseException, x: Tensor, kept: Kept) -> None:
    model = Failing()
    with clearhead.monitor(model, to=kept, every=2):
        model.error = error
        with pytest.raises(type(error)):
            model(x)
        model.error = None
        model(x)
        assert len(hooks(model)) == 2
        model(x)
    assert list(kept.steps) == [2]
    assert hooks(model) == []


def test_an_error_of_the_receiver_leaves_nothing_half_open(model: Stack, x: Tensor, kept: Kept) -> None:
    def fail(step: int, values: dict[str, float]) -> None:
        raise OSError("disk full")

    with clearhead.monitor(model, to=fail):
        with pytest.raises(OSError, match="disk full"):
            model(x)
        assert len(hooks(model)) == 2
    with clearhead.monitor(model, to=kept):
        model(x)
    assert list(kept.steps) == [0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_not_watched(copied: Any, model: Stack, x: Tensor, kept: Kept) -> None:
    with clearhead.monitor(model, to=kept):
        copied(model)(x)
    assert kept.steps == {}


# What it sees


def test_an_upgraded_model_with_padding(kept: Kept) -> None:
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).requires_grad_(False)
    clearhead.upgrade(model)
    before = hooks(model)
    x, hidden = torch.randn(2, 5, WIDTH), torch.tensor([[False] * 5, [False, False, True, True, True]])
    with clearhead.monitor(model, statistics=("entropy",), to=kept):
        model(x, src_key_padding_mask=hidden)
    attend = model.get_submodule("layers.0.self_attn")
    p = attend(x, x, x, key_padding_mask=hidden, average_attn_weights=False)[1]
    entropy = -torch.xlogy(p, p).sum(-1).transpose(1, 2)[~hidden].mean(0)  # (H,) over real queries
    assert kept.steps[0]["attention/layers.0.self_attn/entropy"] == pytest.approx(float(entropy.mean()), abs=1e-5)
    assert hooks(model) == before


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
def test_a_model_of_transformers(implementation: str, kept: Kept) -> None:
    import clearhead.integrations.transformers

    model = small("llama").train()
    model.set_attn_implementation(implementation)
    inputs = {"input_ids": token_ids(7), "attention_mask": padding("right", 7)}
    with clearhead.monitor(model, to=kept):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    with clearhead.record(model, ("entropy", "sink")) as rec:
        model(**inputs)
    for name in ("model.layers.0.self_attn", "model.layers.1.self_attn"):
        for statistic in ("entropy", "sink"):
            expected = float(rec.summary()[statistic][name].mean())
            assert kept.steps[0][f"attention/{name}/{statistic}"] == pytest.approx(expected, abs=1e-6)


class OfFeatures(nn.Module):
    """Takes a batch as one dictionary, as sentence-transformers does, or as what wraps a model (DDP) hands it on."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *features: Any) -> Any:
        return self.model(**features[0])


def test_padding_is_found_in_a_batch_of_features(kept: Kept) -> None:
    model = small("llama").train()
    model.set_attn_implementation("sdpa")
    inputs, ways = {"input_ids": token_ids(7), "attention_mask": padding("right", 7)}, (Kept(), Kept())
    taking = OfFeatures(model)
    with clearhead.monitor(model, to=kept), clearhead.monitor(taking, to=ways[0]):
        taking(inputs)
    taking.forward = lambda features: model(**features)
    with clearhead.monitor(taking, to=ways[1]):
        taking(inputs)
    for way in ways:
        assert {name.replace("/model.", "/", 1): value for name, value in way.steps[0].items()} == kept.steps[0]


def test_padding_of_two_batches_is_not_mixed_up() -> None:
    model = small("llama")
    model.set_attn_implementation("sdpa")
    both = OfFeatures(model)
    both.forward = lambda first, second: (model(**first), model(**second))
    inputs = [{"input_ids": token_ids(7), "attention_mask": padding(side, 7)} for side in ("right", "left")]
    with clearhead.record(both, ("entropy",)) as recorded:
        both(*inputs)
    for calls in recorded.values():
        assert len(calls) == 2
        assert all(bool(call.counted.all()) for call in calls)


def test_a_model_that_is_not_reached_by_any_query_is_left_out(kept: Kept) -> None:
    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.open, self.shut = (clearhead.MultiHeadAttention(WIDTH, HEADS) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.open(x) + self.shut(x, mask=masks.keep(torch.zeros(x.shape[1], x.shape[1]).bool()))

    model = Hidden()
    with clearhead.monitor(model, statistics=("max_logit",), to=kept):
        model(torch.randn(2, 5, WIDTH))
    assert {name.split("/")[1] for name in kept.steps[0]} == {"open"}


def test_what_torch_compile_returned(model: Stack, x: Tensor, kept: Kept) -> None:
    """Measured steps run uncompiled, the others in the graph; names are those of the model."""
    compiled = torch.compile(model, backend="eager")
    with clearhead.monitor(compiled, 2, to=kept):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert list(kept.steps) == [0, 2]
    assert f"attention/{NAMES[0]}/entropy" in kept.steps[0]


def test_a_model_without_attention_is_refused_at_its_first_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    clearhead.monitor(model, to=print)
    with pytest.raises(RecordError, match=r"^monitor: no attention was seen\..*monitor what torch\.compile"):
        model(torch.randn(2, 3))
    assert hooks(model) == []
    model(torch.randn(2, 3))


# Where it goes


def test_two_monitors_of_one_model(model: Stack, x: Tensor) -> None:
    first, second = Kept(), Kept()
    with clearhead.monitor(model, 2, to=first), clearhead.monitor(model, 3, to=second):
        for _ in range(6):
            model(x)
        with pytest.raises(ShapeError):
            model(x[..., :-1])  # while both record
        for _ in range(3):
            model(x)
    assert (list(first.steps), list(second.steps)) == ([0, 2, 4, 8], [0, 3, 9])
    assert first.steps[0] == second.steps[0]
    assert not state.observers
    assert not hooks(model)


def test_tensorboards_event_file_holds_the_scalars(model: Stack, x: Tensor, kept: Kept, tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with (
        tensorboard.SummaryWriter(str(tmp_path)) as writer,
        clearhead.monitor(model, 2, to=writer),
        clearhead.monitor(model, 2, to=kept),
    ):
        for _ in range(5):
            model(x)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert set(events.Tags()["scalars"]) == {name for values in kept.steps.values() for name in values}
    for name in events.Tags()["scalars"]:
        read = {event.step: event.value for event in events.Scalars(name)}
        assert read == pytest.approx({step: found[name] for step, found in kept.steps.items() if name in found})


# Warnings


def scaled(model: Stack, factor: float) -> Stack:
    with torch.no_grad():
        for name in NAMES:
            model.get_submodule(name).q_proj.weight *= factor
    return model


def test_it_warns_once_of_collapsed_entropy_and_names_heads(model: Stack, x: Tensor, kept: Kept) -> None:
    with clearhead.monitor(scaled(model, 1e6), 1, ("entropy",), to=kept):
        with pytest.warns(AttentionHealthWarning, match=r"step 0: attention entropy has collapsed.*Zhai") as caught:
            model(x)
        model(x)
    assert len(caught) == 1
    assert f"{NAMES[0]} head 0 (entropy" in str(caught[0].message)
    assert "more." in str(caught[0].message)
    assert list(kept.steps) == [0, 1]


@pytest.mark.parametrize("statistic", ["max_logit", "raw_max_logit"])
def test_it_warns_once_of_logits_that_grow(statistic: str, model: Stack, x: Tensor) -> None:
    with clearhead.monitor(model, 1, (statistic,), to=lambda step, values: None):
        model(x)
        scaled(model, 1e4)
        with pytest.warns(
            AttentionHealthWarning, match=r"step 1: attention logits have grown, beyond 100.*Dehghani"
        ) as caught:
            model(x)
        scaled(model, 10)
        model(x)
    assert len(caught) == 1
    assert "when it was first measured" in str(caught[0].message)


def test_thresholds_are_arguments(model: Stack, x: Tensor) -> None:
    collapsed = pytest.warns(AttentionHealthWarning, match="below 9 nats")
    with clearhead.monitor(model, to=lambda step, values: None, entropy_threshold=9.0), collapsed:
        model(x)
    grown = pytest.warns(AttentionHealthWarning, match=r"beyond 0\.001")
    with clearhead.monitor(model, to=lambda step, values: None, logit_threshold=1e-3), grown:
        model(x)
    with clearhead.monitor(scaled(model, 1e6), to=lambda s, v: None, entropy_threshold=0, logit_threshold=math.inf):
        model(x)


def test_attention_to_a_single_key_has_not_collapsed(kept: Kept) -> None:
    with clearhead.monitor(clearhead.MultiHeadAttention(WIDTH, HEADS), to=kept) as watching:
        watching._model(torch.randn(2, 1, WIDTH))
    assert kept.steps[0]["attention/entropy"] == 0


# Bad input


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"model": "bert"}, DTypeError, "model: expected a torch.nn.Module"),
        ({"every": 0}, ArgumentError, "every: expected an int ≥ 1, got 0"),
        ({"every": 1.5}, DTypeError, "every: expected an int ≥ 1"),
        ({"statistics": ("entropie",)}, ArgumentError, "statistics: expected names among"),
        (
            {"statistics": ("entropy", "map")},
            ArgumentError,
            r"one number per head, got 'map'\. clearhead\.record gives",
        ),
        ({"statistics": ()}, ArgumentError, "statistics: expected .*, got none"),
        ({"to": None}, DTypeError, r"to: expected a function \(step, \{name: value\}\), or something with add_scalar"),
        ({"to": Kept}, DTypeError, "to: expected a function"),
        ({"entropy_threshold": -1}, ArgumentError, "entropy_threshold: expected nats ≥ 0"),
        ({"logit_threshold": 0}, ArgumentError, "logit_threshold: expected a logit > 0"),
        ({"logit_threshold": torch.nan}, ArgumentError, "logit_threshold: expected a logit > 0"),
    ],
)
def test_malformed_arguments(given: dict[str, Any], kind: type[Exception], message: str, model: Stack) -> None:
    with pytest.raises(kind, match=message):
        clearhead.monitor(**({"model": model, "to": print} | given))
    assert hooks(model) == []
