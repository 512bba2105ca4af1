"""An `in_proj_bias` of another dtype than its module, such as one kept in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead.nn

N, L, S, E, H = 2, 5, 7, 12, 3
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32),
    (torch.bfloat16, torch.float16),
]
CALLS: dict[str, dict[str, Any]] = {
    "need_weights": {},
    "without weights": {"need_weights": False},
    "causal": {"need_weights": False, "is_causal": True, "attn_mask": torch.ones(L, L).triu(1).bool()},
    "padded": {"need_weights": False, "key_padding_mask": torch.arange(L).expand(N, L) > torch.tensor([[2], [4]])},
}


def with_bias(kind: type[nn.MultiheadAttention], dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> Any:
    torch.manual_seed(3)
    module = kind(E, H, dtype=dtypes[0], **options)
    module.in_proj_bias = nn.Parameter(torch.randn(3 * E).to(dtypes[1]))
    return module


def pair(dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> list[Any]:
    kinds = (clearhead.nn.MultiheadAttention, nn.MultiheadAttention)
    return [with_bias(kind, dtypes, batch_first=True, **options) for kind in kinds]


def derivatives(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], call: dict[str, Any]) -> list[Tensor]:
    leaves = (*(x.detach().requires_grad_() for x in inputs), *module.parameters())
    query, key, value = leaves[: len(inputs)] if len(inputs) == 3 else leaves[:1] * 3
    output, weights = module(query, key, value, **call)
    results = [output] if weights is None else [output, weights]
    gradients = torch.autograd.grad(sum(x.square().sum() for x in results), leaves, materialize_grads=True)
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    return [x.detach() for x in (*results, *gradients)]


def require_close(found: list[Tensor], expected: list[Tensor]) -> None:
    """Relative to the largest number: as exact as the coarser of its own dtype and the output's, the first result's."""
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        allowed = max(_tolerance(one.dtype), _tolerance(found[0].dtype))
        error = (one.double() - other.double()).abs().max()
        assert error <= allowed * max(1.0, float(other.abs().max()))


def _tolerance(dtype: torch.dtype) -> float:
    """In half precision four roundings."""
    return {torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype) or 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_as_pytorchs_class(dtypes: tuple[torch.dtype, torch.dtype], call: str) -> None:
    """Which takes it where the inputs are batch first."""
    ours, theirs = pair(dtypes)
    inputs = (torch.randn(N, L, E).to(dtypes[0]),)
    require_close(derivatives(ours, inputs, CALLS[call]), derivatives(theirs, inputs, CALLS[call]))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_keys_of_other_features(dtypes: tuple[torch.dtype, torch.dtype], several: bool) -> None:
    options = {"kdim": 11, "vdim": 13} if several else {}
    inputs = [torch.randn(N, length, size).to(dtypes[0]) for length, size in ((L, E), (S, 11), (S, 13))]
    if not several:
        inputs[1:] = [torch.randn(N, S, E).to(dtypes[0]) for _ in range(2)]
    ours, theirs = pair(dtypes, **options)
    require_close(derivatives(ours, tuple(inputs), {}), derivatives(theirs, tuple(inputs), {}))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_length_first_and_without_a_batch_too(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """Where PyTorch's class raises: the numbers are those of the batch-first call."""
    x = torch.randn(N, L, E).to(dtypes[0])
    first, last = (with_bias(clearhead.nn.MultiheadAttention, dtypes, batch_first=way) for way in (True, False))
    output, weights = first(x, x, x)
    other, other_weights = last(*(x.transpose(0, 1).contiguous(),) * 3)
    require_close([other.transpose(0, 1).detach(), other_weights.detach()], [output.detach(), weights.detach()])
    alone, alone_weights = last(x[0], x[0], x[0])
    require_close([alone.detach(), alone_weights.detach()], [output[0].detach(), weights[0].detach()])


def test_autocast_casts_it() -> None:
    ours, theirs = pair((torch.float32, torch.bfloat16))
    x = torch.randn(N, L, E)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = ours(x, x, x)[0], theirs(x, x, x)[0]
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0.02)


def test_derivatives() -> None:
    """Against finite differences, the float32 bias being far coarser than what is compared in float64."""
    module = with_bias(clearhead.nn.MultiheadAttention, (torch.float64, torch.float32))
    x = torch.randn(L, N, E, dtype=torch.float64, requires_grad=True)
    others = [leaf for leaf in module.parameters() if leaf.dtype == torch.float64]
    assert torch.autograd.gradcheck(lambda *_: module(x, x, x), (x, *others), fast_mode=True, check_batched_grad=True)
