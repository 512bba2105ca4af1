"""`monitor`: the measured steps, their scalars, and that nothing else changes."""

from __future__ import annotations

import copy
import math
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

import clearhead
import clearhead.integrations.transformers
from clearhead import masks
from clearhead.errors import ArgumentError, AttentionHealthWarning, DTypeError, RecordError, ShapeError
from tests.integrations.architectures import padding, token_ids

from .conftest import HEADS, NAMES, WIDTH, Stack, hooks, nothing_left, recorded
from .small_models import small


class Scalars:
    """Receives scalars, step by step."""

    def __init__(self) -> None:
        self.steps: dict[int, dict[str, float]] = {}

    def __call__(self, step: int, values: dict[str, float]) -> None:
        self.steps[step] = values


@pytest.fixture(name="scalars")
def _scalars() -> Scalars:
    return Scalars()


def ignore(step: int, values: dict[str, float]) -> None: ...


def test_the_scalars_are_means_and_worst_heads(model: Stack, x: Tensor, scalars: Scalars) -> None:
    statistics = ("entropy", "max_logit", "raw_max_logit", "sink", "confidence")
    with clearhead.monitor(model, statistics=statistics, to=scalars):
        model(x)
    summary, expected = recorded(model, x, statistics=statistics).summary(), dict[str, float]()
    for statistic in statistics:
        for name, heads in summary[statistic].items():
            worst = int(heads.argmin() if statistic == "entropy" else heads.argmax())
            expected[f"attention/{name}/{statistic}"] = float(heads.mean())
            expected[f"attention/{name}/{statistic}/head_{worst}"] = float(heads[worst])
    assert scalars.steps == {0: pytest.approx(expected, abs=1e-6)}
    assert len(expected) == len(NAMES) * len(statistics) * 2


def test_a_model_that_is_the_attention_itself(scalars: Scalars) -> None:
    """A query that sees one key has an entropy of 0, without a warning."""
    model = clearhead.MultiHeadAttention(WIDTH, HEADS)
    with clearhead.monitor(model, to=scalars):
        model(torch.randn(2, 1, WIDTH))
    assert {"attention/max_logit", "attention/sink"} <= set(scalars.steps[0])
    assert scalars.steps[0]["attention/entropy"] == 0


def test_steps_are_calls_in_training_mode_and_the_first_is_measured(model: Stack, x: Tensor, scalars: Scalars) -> None:
    with clearhead.monitor(model, 3, to=scalars):
        for step in range(8):
            model.train()
            model(x)
            model.eval()
            model(x)
            assert list(scalars.steps) == list(range(0, step + 1, 3))
    model.train()(x)
    assert list(scalars.steps) == [0, 3, 6]


def test_what_checkpointing_repeats_is_no_step(model: Stack, x: Tensor, scalars: Scalars) -> None:
    x.requires_grad_()
    with clearhead.monitor(model, 2, to=scalars):
        for _ in range(4):
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
    assert list(scalars.steps) == [0, 2]


def test_results_and_gradients_are_the_same_to_the_bit(model: Stack, x: Tensor, scalars: Scalars) -> None:
    """Between measured steps the model has one hook, and afterwards none."""

    def step() -> list[Tensor]:
        model.zero_grad()
        output = model(x)
        output.square().sum().backward()
        return [output, *(parameter.grad for parameter in model.parameters())]

    expected = step()
    monitor = clearhead.monitor(model, 2, to=scalars)
    for _ in range(3):
        assert hooks(model) == ["._forward_pre_hooks", "._forward_pre_hooks_with_kwargs"]
        assert all(torch.equal(*pair) for pair in zip(step(), expected, strict=True))
    assert list(scalars.steps) == [0, 2]
    monitor.remove()
    monitor.remove()
    assert nothing_left(model)


@pytest.mark.parametrize("error", [ValueError(), KeyboardInterrupt()], ids=["error", "interrupt"])
def test_monitoring_goes_on_after_a_step_that_failed(error: BaseException, x: Tensor, scalars: Scalars) -> None:
    model = Stack()

    def fail(*_: object) -> None:
        raise error

    with clearhead.monitor(model, to=scalars, every=2):
        model.blocks[2].forward = fail
        with pytest.raises(type(error)):
            model(x)
        del model.blocks[2].forward
        model(x)
        assert len(hooks(model)) == 2
        model(x)
    assert list(scalars.steps) == [2]
    assert hooks(model) == []


def test_an_error_of_the_receiver_ends_the_recording(model: Stack, x: Tensor, scalars: Scalars) -> None:
    def fail(step: int, values: dict[str, float]) -> None:
        raise OSError("disk full")

    with clearhead.monitor(model, to=fail), pytest.raises(OSError, match="disk full"):
        model(x)
    with clearhead.monitor(model, to=scalars):
        model(x)
    assert list(scalars.steps) == [0]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_of_a_model_are_not_watched(copied: Any, model: Stack, x: Tensor, scalars: Scalars) -> None:
    with clearhead.monitor(model, to=scalars):
        copied(model)(x)
    assert scalars.steps == {}


@pytest.fixture(name="llama")
def _llama() -> tuple[Any, dict[str, Any]]:
    model = small("llama").train()
    model.set_attn_implementation("sdpa")
    return model, {"input_ids": token_ids(7), "attention_mask": padding("right", 7)}


class Wrapper(nn.Module):
    """A model with another signature of its root call."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *features: Any) -> Any:
        return self.model(**features[0])


@pytest.mark.parametrize("implementation", ["clearhead", "sdpa"])
def test_a_model_of_transformers(implementation: str, llama: tuple[Any, dict[str, Any]], scalars: Scalars) -> None:
    model, inputs = llama
    model.set_attn_implementation(implementation)
    with clearhead.monitor(model, to=scalars):
        model(**inputs, labels=inputs["input_ids"]).loss.backward()
    with clearhead.record(model, ("entropy", "sink")) as rec:
        model(**inputs)
    for statistic, modules in rec.summary().values.items():
        if statistic != "normalized_entropy":
            for name, heads in modules.items():
                assert scalars.steps[0][f"attention/{name}/{statistic}"] == pytest.approx(float(heads.mean()), abs=1e-6)


def test_padding_is_found_in_a_batch_of_features(llama: tuple[Any, dict[str, Any]], scalars: Scalars) -> None:
    """A batch is one dictionary in sentence-transformers, and under wrappers such as DDP."""
    model, inputs = llama
    wrapper, wrapped = Wrapper(model), (Scalars(), Scalars())
    with clearhead.monitor(model, to=scalars), clearhead.monitor(wrapper, to=wrapped[0]):
        wrapper(inputs)
    wrapper.forward = lambda features: model(**features)
    with clearhead.monitor(wrapper, to=wrapped[1]):
        wrapper(inputs)
    for each in wrapped:
        assert {name.replace("/model.", "/", 1): value for name, value in each.steps[0].items()} == scalars.steps[0]


def test_padding_of_two_batches_is_not_mixed_up(llama: tuple[Any, dict[str, Any]]) -> None:
    model, inputs = llama
    both = Wrapper(model)
    both.forward = lambda first, second: (model(**first), model(**second))
    with clearhead.record(both, ("entropy",)) as rec:
        both(inputs, {**inputs, "attention_mask": padding("left", 7)})
    for calls in rec.values():
        assert [call.counted.tolist() for call in calls] == [
            padding(side, 7).bool().tolist() for side in ("right", "left")
        ]


def test_a_module_without_visible_keys_has_no_scalars(scalars: Scalars) -> None:
    hidden = masks.keep(torch.zeros(5, 5).bool())
    model = nn.Sequential(*(clearhead.MultiHeadAttention(WIDTH, HEADS, mask=mask) for mask in (None, hidden)))
    with clearhead.monitor(model, statistics=("max_logit",), to=scalars):
        model(torch.randn(2, 5, WIDTH))
    assert {name.split("/")[1] for name in scalars.steps[0]} == {"0"}


def test_the_result_of_torch_compile(model: Stack, x: Tensor, scalars: Scalars) -> None:
    """Measured steps run uncompiled. The scalars have the names of the model."""
    compiled = torch.compile(model, backend="eager")
    with clearhead.monitor(compiled, 2, to=scalars):
        for _ in range(3):
            torch.testing.assert_close(compiled(x), model(x))
    assert list(scalars.steps) == [0, 2]
    assert f"attention/{NAMES[0]}/entropy" in scalars.steps[0]


def test_a_model_without_attention_is_refused_at_its_first_step() -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    clearhead.monitor(model, to=ignore)
    with pytest.raises(RecordError, match=r"^monitor: no attention was seen\..*monitor what torch\.compile"):
        model(torch.randn(2, 3))
    assert nothing_left(model)
    model(torch.randn(2, 3))


def test_two_monitors_of_one_model(model: Stack, x: Tensor) -> None:
    first, second = Scalars(), Scalars()
    with clearhead.monitor(model, 2, to=first), clearhead.monitor(model, 3, to=second):
        for _ in range(6):
            model(x)
        with pytest.raises(ShapeError):
            model(x[..., :-1])  # while both record
        for _ in range(3):
            model(x)
    assert (list(first.steps), list(second.steps)) == ([0, 2, 4, 8], [0, 3, 9])
    assert first.steps[0] == second.steps[0]
    assert nothing_left(model)


def test_a_writer_of_scalars(model: Stack, x: Tensor, scalars: Scalars) -> None:
    events: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *event: events.append(event))  # as TensorBoard's SummaryWriter
    with clearhead.monitor(model, 2, to=writer), clearhead.monitor(model, 2, to=scalars):
        for _ in range(3):
            model(x)
    assert events == [(name, value, step) for step, values in scalars.steps.items() for name, value in values.items()]


def scaled(model: Stack, factor: float) -> Stack:
    with torch.no_grad():
        for name in NAMES:
            model.get_submodule(name).q_proj.weight *= factor
    return model


def test_it_warns_once_of_collapsed_entropy_and_names_heads(model: Stack, x: Tensor, scalars: Scalars) -> None:
    with clearhead.monitor(scaled(model, 1e6), 1, ("entropy",), to=scalars):
        with pytest.warns(AttentionHealthWarning, match=r"step 0: attention entropy has collapsed.*Zhai") as caught:
            model(x)
        model(x)
    assert len(caught) == 1
    assert f"{NAMES[0]} head 0 (entropy" in str(caught[0].message)
    assert "more." in str(caught[0].message)
    assert list(scalars.steps) == [0, 1]


@pytest.mark.parametrize("statistic", ["max_logit", "raw_max_logit"])
def test_it_warns_once_of_logits_that_grow(statistic: str, model: Stack, x: Tensor) -> None:
    grown = r"step 1: attention logits have grown, beyond 100.*when it was first measured.*Dehghani"
    with clearhead.monitor(model, 1, (statistic,), to=ignore):
        model(x)
        scaled(model, 1e4)
        with pytest.warns(AttentionHealthWarning, match=grown) as caught:
            model(x)
        scaled(model, 10)
        model(x)
    assert len(caught) == 1


def test_thresholds_are_arguments(model: Stack, x: Tensor) -> None:
    for threshold, text in (({"entropy_threshold": 9.0}, "below 9 nats"), ({"logit_threshold": 1e-3}, "beyond 0.001")):
        with clearhead.monitor(model, to=ignore, **threshold), pytest.warns(AttentionHealthWarning, match=text):
            model(x)
    with clearhead.monitor(scaled(model, 1e6), to=ignore, entropy_threshold=0, logit_threshold=math.inf):
        model(x)


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ({"statistics": ("entropy", "map")}, ArgumentError, r"number per head, got 'map'\. clearhead\.record gives"),
        ({"statistics": ()}, ArgumentError, "statistics: expected .*, got none"),
        ({"to": Scalars}, DTypeError, r"to: expected a function \(step, \{name: value\}\), or .* add_scalar"),
        ({"entropy_threshold": -1}, ArgumentError, "entropy_threshold: expected nats ≥ 0"),
        ({"logit_threshold": torch.nan}, ArgumentError, "logit_threshold: expected a logit > 0"),
        ({}, ArgumentError, r"^model: expected .* not compiled in place.*what torch\.compile\(model\) returns"),
    ],
)
def test_refused(given: dict[str, Any], kind: type[Exception], message: str, model: Stack) -> None:
    """The other arguments are in `tests/malformed`."""
    if not given:
        model.compile(backend="eager")
    with pytest.raises(kind, match=message):
        clearhead.monitor(**({"model": model, "to": ignore} | given))
    assert nothing_left(model)
