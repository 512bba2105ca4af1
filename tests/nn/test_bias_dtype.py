"""An `in_proj_bias` of another dtype than its module, such as one in half precision."""

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
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32),
]
dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
CALLS: dict[str, dict[str, Any]] = {
    "self": {"need_weights": False},
    "memory": {},
    "three inputs": {"key_padding_mask": torch.arange(S).expand(N, S) > torch.tensor([[2], [4]])},
    "other features": {"need_weights": False},
}


def with_bias(kind: type[nn.MultiheadAttention], dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> Any:
    torch.manual_seed(3)
    module = kind(E, H, dtype=dtypes[0], **options)
    module.in_proj_bias = nn.Parameter(torch.randn(3 * E).to(dtypes[1]))
    return module


def derivatives(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], call: dict[str, Any]) -> list[Tensor]:
    leaves = (*(x.detach().requires_grad_() for x in inputs), *module.parameters())
    query, key, value = (leaves[min(i, len(inputs) - 1)] for i in range(3))
    results = [x for x in module(query, key, value, **call) if x is not None]
    gradients = torch.autograd.grad(sum(x.square().sum() for x in results), leaves, materialize_grads=True)
    assert [x.dtype for x in gradients] == [x.dtype for x in leaves]
    return [x.detach() for x in (*results, *gradients)]


def require_close(tensors: list[Tensor], expected: list[Tensor]) -> None:
    """Relative to the largest number: as exact as the coarser of its own dtype and the output's, the first result's."""
    for x, y in zip(tensors, expected, strict=True):
        assert x.dtype == y.dtype
        allowed = max(_tolerance(x.dtype), _tolerance(tensors[0].dtype))
        assert (x.double() - y.double()).abs().max() <= allowed * max(1.0, float(y.abs().max()))


def _tolerance(dtype: torch.dtype) -> float:
    """In half precision four roundings."""
    return {torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype) or 4 * torch.finfo(dtype).eps


@dtypes
@pytest.mark.parametrize("call", CALLS)
def test_as_pytorchs_class(dtypes: tuple[torch.dtype, torch.dtype], call: str) -> None:
    """PyTorch's class computes such a call if its inputs are batch first."""
    options = {"kdim": 11, "vdim": 13} if call == "other features" else {}
    sizes = [(L, E), (S, options.get("kdim", E)), (S, options.get("vdim", E))]
    count = {"self": 1, "memory": 2}.get(call, 3)
    inputs = tuple(torch.randn(N, *size).to(dtypes[0]) for size in sizes[:count])
    ours, theirs = (
        derivatives(with_bias(kind, dtypes, batch_first=True, **options), inputs, CALLS[call])
        for kind in (clearhead.nn.MultiheadAttention, nn.MultiheadAttention)
    )
    require_close(ours, theirs)


@dtypes
def test_length_first_and_without_a_batch_too(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """PyTorch's class raises here. The batch-first call has the same numbers."""
    x = torch.randn(N, L, E).to(dtypes[0])
    first, last = (with_bias(clearhead.nn.MultiheadAttention, dtypes, batch_first=b).eval() for b in (True, False))
    with torch.no_grad():
        output, weights = first(x, x, x)
        transposed, same_weights = last(*(x.transpose(0, 1).contiguous(),) * 3)
        require_close([transposed.transpose(0, 1), same_weights], [output, weights])
        require_close(list(last(x[0], x[0], x[0])), [output[0], weights[0]])
