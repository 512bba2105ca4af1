"""`gradcheck` and `gradgradcheck` on PyTorch's samples for its attention and Transformer modules, as its tests do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.testing._internal.common_utils import gradcheck, gradgradcheck

from .test_module_samples import SAMPLES, pair, samples, tensors

#: One of so many samples is taken, since they cost minutes; `pytest -m slow` takes all of them, and stacks of layers.
STRIDES = {nn.MultiheadAttention: 5, nn.TransformerEncoderLayer: 17, nn.TransformerDecoderLayer: 31}


def cases() -> list[object]:
    ordinary = [pytest.param(kind, stride, id=kind.__name__) for kind, stride in STRIDES.items()]
    whole = [pytest.param(kind, 1, id=f"{kind.__name__}-all", marks=pytest.mark.slow) for kind in SAMPLES]
    return [*ordinary, *whole]


@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize(("module_class", "stride"), cases())
def test_batched_too(module_class: type[nn.Module], stride: int, training: bool) -> None:
    """In inputs and parameters; PyTorch's wrappers set ``check_batched_grad=True``."""
    found = samples(module_class, torch.float64, training)
    assert len(found) >= SAMPLES[module_class][0 if training else 1]
    for sample in found[::stride]:
        module = pair(module_class, sample, torch.float64)[0].train(training)
        args, options = sample.forward_input.args, sample.forward_input.kwargs
        given = {id(x): x for x in (*args, *options.values()) if isinstance(x, Tensor) and x.requires_grad}
        leaves = (*given.values(), *module.parameters())

        def function(*_: Tensor, module: nn.Module = module, args: tuple = args, options: dict = options) -> tuple:
            with sdpa_kernel(SDPBackend.MATH):  # of what is left of PyTorch's attention
                return tuple(tensors(module(*args, **options)))

        assert gradcheck(function, leaves), sample.desc
        assert gradgradcheck(function, leaves), sample.desc
