"""A census in the measured steps of `monitor`: what TensorBoard and a logger of Weights & Biases' kind receive."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import DTypeError

from .conftest import nothing_left

VOCABULARY, WIDTH, HEADS, LENGTH = 11, 12, 3, 7


class Model(nn.Module):
    """Two layers with dropout between them, of which one is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(clearhead.MultiHeadAttention(WIDTH, HEADS) for _ in range(2))
        self.dropout = nn.Dropout(0.4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)  # (B, L, E)
        for layer in self.layers:
            x = self.dropout(x + layer(x, mask=masks.causal()))
        return x


@pytest.fixture(name="model")
def _model() -> Model:
    torch.manual_seed(0)
    return Model()


PROBE = [torch.tensor([[3, 5, 3, 5, 2, 3, 5]])]


def take(model: nn.Module) -> clearhead.Census:
    return clearhead.census(model, PROBE)


def step(model: nn.Module) -> Tensor:
    output = model(torch.arange(2 * LENGTH).view(2, LENGTH) % VOCABULARY)
    output.square().mean().backward()
    return output


def test_values_are_those_of_a_census_before_the_step(model: Model) -> None:
    logged: dict[int, dict[str, Any]] = {}  # as wandb.log(values, step=step) receives them
    with clearhead.monitor(model, 2, ("entropy",), to=logged.__setitem__, census=take):
        for _ in range(3):
            expected = take(copy.deepcopy(model).eval())
            step(model)
    assert list(logged) == [0, 2]
    values = logged[2]
    assert "attention/layers.0/entropy" in values
    for kind, heads in expected.kinds().items():
        ranked = expected.rank_heads(kind)
        found = [values.get(f"census/{kind}"), values.get(f"census/{kind}/heads")]
        assert found == ([ranked[0].weight, len(heads)] if ranked else [None, None])
    assert values["census/induction"] > 0
    figure = values["census/heads"]
    assert isinstance(figure, Figure)
    drawn = {axes.get_title("left"): axes for axes in figure.axes if axes.get_title("left")}
    assert set(drawn) == {kind for kind in expected.kinds() if expected.rank_heads(kind)}
    shown = torch.from_numpy(drawn["induction"].images[0].get_array().data)  # (layers, H)
    torch.testing.assert_close(shown, torch.stack([*expected.mean("induction").values()]).float())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own dependencies
def test_tensorboard_has_the_scalars_and_the_figure(model: Model, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer, clearhead.monitor(model, 2, to=writer, census=take):
        for _ in range(3):
            step(model)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("census/previous")] == [0, 2]
    assert [event.step for event in events.Scalars("attention/layers.1/sink")] == [0, 2]
    first, last = events.Images("census/heads")
    assert (first.step, last.step) == (0, 2)
    assert first.encoded_image_string.startswith(b"\x89PNG")


def test_training_is_the_same_to_the_bit(model: Model) -> None:
    model.layers[1].eval()
    results: list[list[Tensor]] = []
    for census in (None, take):
        trained = copy.deepcopy(model)
        torch.manual_seed(5)
        with clearhead.monitor(trained, 1, to=lambda *_: None, census=census):
            outputs = [step(trained) for _ in range(2)]
        results.append([*outputs, *(parameter.grad for parameter in trained.parameters())])
        assert [trained.training, trained.dropout.training, trained.layers[1].training] == [True, True, False]
        assert nothing_left(trained)
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_other_monitors_do_not_see_the_census(model: Model) -> None:
    """Whichever was made first."""
    plain, logged, after = ({} for _ in range(3))
    with (
        clearhead.monitor(model, 1, ("entropy",), to=plain.__setitem__),
        clearhead.monitor(model, 1, ("entropy",), to=logged.__setitem__, census=take),
        clearhead.monitor(model, 1, ("entropy",), to=after.__setitem__),
    ):
        step(model)
        step(model)
    assert list(plain) == list(logged) == list(after) == [0, 1]
    for number, values in plain.items():
        assert values == after[number] == {name: logged[number][name] for name in values}
        assert not any(name.startswith("census") for name in values)


def test_the_result_of_torch_compile(model: Model) -> None:
    compiled, logged = torch.compile(model, backend="eager"), {}
    with clearhead.monitor(compiled, 1, to=logged.__setitem__, census=take):
        step(compiled)
    assert logged[0]["census/previous"] == take(model.eval()).rank_heads("previous")[0].weight


def test_copies_and_evaluation_take_none(model: Model) -> None:
    taken: list[nn.Module] = []

    def counted(model: nn.Module) -> clearhead.Census:
        taken.append(model)
        return take(model)

    with clearhead.monitor(model, 1, to=lambda *_: None, census=counted):
        step(copy.deepcopy(model))
        step(model.eval())
    assert not taken


WRITER = SimpleNamespace(add_scalar=lambda *_: None)
REFUSED: dict[str, tuple[Callable[[nn.Module], object], str]] = {
    "no function": (lambda model: clearhead.monitor(model, to=print, census=PROBE), "census: expected a function"),  # type: ignore[arg-type]
    "no figures": (lambda model: clearhead.monitor(model, to=WRITER, census=take), "to: .* add_scalar and add_figure"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str, model: Model) -> None:
    make, text = REFUSED[name]
    with pytest.raises(DTypeError, match=text):
        make(model)
    assert nothing_left(model)


def test_a_function_that_returns_no_census(model: Model) -> None:
    with (
        clearhead.monitor(model, to=lambda *_: None, census=lambda model: None),  # type: ignore[arg-type,return-value]
        pytest.raises(DTypeError, match="census: expected a function that returns a Census, got None"),
    ):
        step(model)
