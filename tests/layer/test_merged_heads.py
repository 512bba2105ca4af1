"""Projections that a kernel reads as they are, without a dimension of heads, against calls that have one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

import clearhead
from clearhead import masks
from clearhead.errors import ShapeError
from tests.support.closeness import require_near

B, L, S, E, H = 2, 5, 7, 24, 6
MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(2, 1),
    "lengths": masks.lengths(torch.tensor([3, 7])),
    "each row": masks.lengths(torch.randint(0, S, (B, L), generator=torch.Generator().manual_seed(0))),
    "keep": masks.keep(torch.rand(B, 1, L, S, generator=torch.Generator().manual_seed(1)) > 0.3),
    "heads": masks.keep(torch.rand(1, H, L, S, generator=torch.Generator().manual_seed(2)) > 0.3),
    "bias": masks.causal() & masks.bias(torch.randn(L, S, generator=torch.Generator().manual_seed(3))),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"num_kv_heads": 2},
    "soft-cap": {"softcap": 1.5, "scale": 0.9},
    "sinks": {"sinks": True, "num_kv_heads": 3},
    "wide heads": {"head_dim": 5},
}


def drawn(batch: int = B, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    shapes = ((batch, L, E), (batch, S, E), (batch, S, E))
    query, key, value = (torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes)
    return query, key, value


def module(**settings: Any) -> clearhead.MultiHeadAttention:
    torch.manual_seed(5)
    made = clearhead.MultiHeadAttention(E, H, **settings)
    if made.sinks is not None:
        nn.init.normal_(made.sinks)
    return made


def with_heads(made: clearhead.MultiHeadAttention) -> None:
    """Give every kernel a dimension of heads, as where something is applied to them."""
    made.q_norm = nn.Identity()


def results(made: clearhead.MultiHeadAttention, mask: masks.Mask | None, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    output = made(*inputs, mask=mask)
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
    return [output, *torch.autograd.grad((output.double() * weight).sum(), [*inputs, *made.parameters()])]


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("setting", SETTINGS)
def test_results_and_gradients_are_those_with_heads(setting: str, name: str) -> None:
    made, inputs = module(**SETTINGS[setting]), drawn()
    merged = results(made, MASKS[name], inputs)
    with torch.no_grad():
        require_near(made(*inputs, mask=MASKS[name]), merged[0])
    with_heads(made)
    for found, expected in zip(merged, results(made, MASKS[name], inputs), strict=True):
        require_near(found, expected)


@pytest.mark.parametrize("kernel", ["chunked", "sdpa", "reference"])
def test_other_kernels_get_heads(kernel: str) -> None:
    made, inputs = module(), drawn()
    expected = results(made, MASKS["causal"], inputs)
    with clearhead.use_kernel(kernel):
        for found, judge in zip(results(made, MASKS["causal"], inputs), expected, strict=True):
            require_near(found, judge)


@pytest.mark.parametrize("batch", [0, 1, 3])
def test_any_batch(batch: int) -> None:
    made, inputs = module(), drawn(batch)
    merged = results(made, None, inputs)
    assert merged[0].shape == (batch, L, E)
    with_heads(made)
    for found, expected in zip(merged, results(made, None, inputs), strict=True):
        require_near(found, expected)


@pytest.mark.parametrize("name", ["none", "lengths", "bias"])
def test_second_derivatives(name: str) -> None:
    made, inputs = module(softcap=2.0), drawn()

    def second() -> tuple[Tensor, ...]:
        first = torch.autograd.grad(made(*inputs, mask=MASKS[name]).square().sum(), inputs, create_graph=True)
        return torch.autograd.grad(sum(x.square().sum() for x in first), inputs)

    merged = second()
    with_heads(made)
    for found, expected in zip(merged, second(), strict=True):
        require_near(found, expected)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("saved", ["as they are", "contiguous", "copied"])
def test_one_gemm_for_all_three_and_hooks_that_return_other_strides(batch_first: bool, saved: str) -> None:
    """The parts of one GEMM's output have gaps between their rows, which hooks on saved tensors close."""
    torch.manual_seed(6)
    ours = clearhead.nn.MultiheadAttention(E, H, batch_first=batch_first)
    theirs = nn.MultiheadAttention(E, H, batch_first=batch_first)
    theirs.load_state_dict(ours.state_dict())
    x = drawn()[1]
    hooks = {
        "as they are": lambda: saved_tensors_hooks(lambda each: each, lambda each: each),
        "contiguous": save_on_cpu,
        "copied": lambda: saved_tensors_hooks(
            lambda each: each.mT.clone() if each.dim() == 3 else each,
            lambda each: each.mT if each.dim() == 3 else each,
        ),
    }
    with hooks[saved]():
        found = ours(x, x, x, need_weights=False)[0]
    expected = theirs(x, x, x, need_weights=False)[0]
    require_near(found, expected)
    gradients = (
        torch.autograd.grad(y.square().sum(), [x, *each.parameters()])
        for y, each in ((found, ours), (expected, theirs))
    )
    for ours_gradient, their_gradient in zip(*gradients, strict=True):
        require_near(ours_gradient, their_gradient)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    made, inputs = module().to(dtype), drawn(dtype=dtype)
    with clearhead.use_kernel("reference"):
        expected = made(*inputs, mask=MASKS["lengths"])
    tolerance = 1e-10 if dtype == torch.float64 else 2e-2
    assert (made(*inputs, mask=MASKS["lengths"]) - expected).abs().amax() <= tolerance


def test_observers_and_interventions_see_heads() -> None:
    made, (query, key, value) = module().eval(), drawn()
    with torch.no_grad():
        alone = made(query, key, value)
        with clearhead.record(made) as rec:
            recorded = made(query, key, value)
    require_near(recorded, alone)
    (call,) = rec.values()
    assert call.entropy.shape == (B, H, L)
    with torch.no_grad(), clearhead.intervene(made, {("", 1): 0.0}):
        ablated = made(query, key, value)
    assert (ablated - alone).abs().amax() > 1e-3


def test_a_projection_that_gives_gaps_between_features() -> None:
    """Its rows cannot be read in place."""

    class Spread(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).mT.contiguous().mT

    made, inputs = module(), drawn()
    made.q_proj = Spread(E, E)
    merged = results(made, MASKS["window"], inputs)
    with_heads(made)
    for found, expected in zip(merged, results(made, MASKS["window"], inputs), strict=True):
        require_near(found, expected)


@pytest.mark.parametrize("name", MASKS)
def test_saved_projections_that_come_back_with_gaps_between_features(name: str) -> None:
    made, inputs = module(num_kv_heads=3), drawn()
    expected = results(made, MASKS[name], inputs)
    with saved_tensors_hooks(lambda x: x.mT.contiguous() if x.dim() == 3 else x, lambda x: x.mT if x.dim() == 3 else x):
        output = made(*inputs, mask=MASKS[name])
    weight = torch.linspace(-1, 1, output.numel()).view(output.shape)
    gradients = torch.autograd.grad((output.double() * weight).sum(), [*inputs, *made.parameters()])
    for found, judge in zip((output, *gradients), expected, strict=True):
        require_near(found, judge)


class Changed(nn.Linear):
    """A projection with another number of tokens or items."""

    change: Callable[[Tensor], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        return self.change(super().forward(x))


def changing(change: Callable[[Tensor], Tensor], *names: str) -> clearhead.MultiHeadAttention:
    made = module().eval()
    for name in names:
        projection = Changed(E, E)
        projection.change = change
        setattr(made, name, projection)
    return made


def test_a_mask_is_checked_against_the_sizes_that_projections_give() -> None:
    """A kernel would read beyond its tensors."""
    made, x = changing(lambda y: y.repeat(1, 20, 1), "q_proj"), drawn()[0]
    with torch.no_grad():
        assert made(x, mask=masks.causal()).shape == (B, 20 * L, E)
        for mask in (
            masks.keep(torch.ones(L, L, dtype=torch.bool)),
            masks.documents(torch.zeros(L, dtype=torch.int64)),
        ):
            with pytest.raises(ShapeError):
                made(x, mask=mask)
    made = changing(lambda y: y.repeat(3, 1, 1), "q_proj", "k_proj", "v_proj")
    with torch.no_grad(), pytest.raises(ShapeError):
        made(x, mask=masks.keep(torch.ones(B, 1, L, L, dtype=torch.bool)))


def test_projections_without_a_batch() -> None:
    made, x = changing(lambda y: y[0], "q_proj", "k_proj", "v_proj"), drawn()[0]
    with torch.no_grad():
        assert made(x).shape == (1, L, E)
