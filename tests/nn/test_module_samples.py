"""PyTorch's own samples for its attention and Transformer modules, run through Clearhead's attention."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_modules import ModuleInput, module_db

import clearhead
from tests.support.budgets import in_turn
from tests.support.derivatives import derivatives

#: How many samples torch 2.13 has, in training and in eval mode.
SAMPLES = {
    nn.MultiheadAttention: (64, 64),
    nn.TransformerEncoderLayer: (39, 35),
    nn.TransformerDecoderLayer: (67, 67),
    nn.TransformerEncoder: (39, 35),
    nn.Transformer: (64, 64),
}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}


def samples(module_class: type[nn.Module], dtype: torch.dtype, training: bool) -> list[ModuleInput]:
    (info,) = (info for info in module_db if info.module_cls is module_class)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        return info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)


def pair(module_class: type[nn.Module], sample: ModuleInput, dtype: torch.dtype) -> tuple[nn.Module, nn.Module]:
    """Clearhead's and PyTorch's, with equal weights and without dropout."""
    args, options = sample.constructor_input.args, {**sample.constructor_input.kwargs, "dtype": dtype}
    if module_class is nn.TransformerEncoder:
        del options["dtype"]  # its layer argument has it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "enable_nested_tensor is True")
        theirs = module_class(*copy.deepcopy(args), **options).to(dtype)
    for module in theirs.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    if module_class is nn.MultiheadAttention:
        ours: nn.Module = clearhead.nn.MultiheadAttention(*args, **options)
        ours.load_state_dict(theirs.state_dict())
    else:
        ours = copy.deepcopy(theirs)
        assert clearhead.upgrade(ours).changed
    return ours, theirs


def tensors(answer: Any) -> list[Tensor]:
    return [answer] if isinstance(answer, Tensor) else [part for part in answer if part is not None]


def orders(module: nn.Module, sample: ModuleInput, order: int) -> list[list[Tensor]]:
    """The answer, the gradients of a fixed mixture of it, and the gradients of a fixed mixture of those."""
    args, options = sample.forward_input.args, sample.forward_input.kwargs
    answer = tensors(module(*args, **options))
    inputs = {id(x): x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.requires_grad}
    leaves = [*inputs.values(), *module.parameters()]
    found = derivatives(answer, leaves, [partial(mixture, number) for number in range(order)], unused=True)
    ends = [len(answer) + number * len(leaves) for number in range(order + 1)]
    return [found[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def mixture(seed: int, tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all numbers that have a gradient, each with a factor of its own."""
    generator = torch.Generator().manual_seed(seed)
    factors = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in tensors]
    return sum((x * factor).sum() for x, factor in zip(tensors, factors, strict=True) if x.requires_grad)


def distance(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest difference, relative to the largest entry where that is above 1."""
    largest = max([1.0, *(x.abs().max().item() for x in theirs if x.numel())])
    differences = [(x.double() - y.double()).abs().max().item() for x, y in zip(ours, theirs, strict=True) if x.numel()]
    assert all(difference == difference for difference in differences), "NaN"
    return max(differences) / largest


@in_turn({"module_class": SAMPLES, "training": [True, False]}, {"dtype": TOLERANCE})
def test_outputs_and_derivatives(module_class: type[nn.Module], training: bool, dtype: torch.dtype) -> None:
    """Second derivatives in float64, because in float32 PyTorch's own rounding errors reach 8e-6."""
    cases, highest = samples(module_class, dtype, training), 2 if dtype == torch.float64 else 1
    for number, sample in enumerate(cases):
        ours, theirs = (module.train(training) for module in pair(module_class, sample, dtype))
        # PyTorch's fused CPU attention has no second derivative; its unfused one has.
        with sdpa_kernel(SDPBackend.MATH):
            expected = orders(theirs, sample, highest)
        for order, (mine, wanted) in enumerate(zip(orders(ours, sample, highest), expected, strict=True)):
            assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in wanted]
            difference = distance(mine, wanted)
            assert difference <= TOLERANCE[dtype], f"sample {number} ({sample.desc}), derivative {order}: {difference}"
    assert len(cases) >= SAMPLES[module_class][0 if training else 1]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("module_class", SAMPLES, ids=lambda module_class: module_class.__name__)
def test_inference_equals_pytorchs_fast_path(module_class: type[nn.Module], dtype: torch.dtype) -> None:
    """Under `no_grad` in eval mode PyTorch leaves its modules for fused code and nested tensors; ours has one path."""
    for number, sample in enumerate(samples(module_class, dtype, training=False)):
        ours, theirs = (module.eval() for module in pair(module_class, sample, dtype))
        args, options = sample.forward_input.args, sample.forward_input.kwargs
        with torch.no_grad(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Converting mask without torch.bool")
            warnings.filterwarnings("ignore", "The PyTorch API of nested tensors")
            wanted = tensors(theirs(*args, **options))
        with torch.no_grad():
            mine = tensors(ours(*args, **options))
        assert [(x.shape, x.dtype) for x in mine] == [(x.shape, x.dtype) for x in wanted]
        assert distance(mine, wanted) <= TOLERANCE[dtype], f"sample {number} ({sample.desc})"
