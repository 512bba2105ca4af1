"""`torch.compile`, `torch.export` and ONNX, with lengths other than those that were traced."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import clearhead
from tests.support.budgets import slow

E, H = 12, 3


class Causal(nn.Module):
    """Padded causal self-attention, with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.nn.MultiheadAttention(E, H, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> tuple[Tensor, Tensor]:
        return self.attend(x, x, x, key_padding_mask=padding, is_causal=True)


def example(batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The last item of the batch is padding alone, so that a query without keys is among the cases."""
    padding = torch.zeros(batch, length, dtype=torch.bool)
    padding[0, -2:] = True
    padding[-1] = True
    return torch.randn(batch, length, E), padding


def mixture(answer: tuple[Tensor, Tensor]) -> Tensor:
    return answer[0].square().sum() + answer[1].square().sum()


@pytest.mark.parametrize("training", [True, *slow(False)])
def test_compile_makes_one_graph_for_all_lengths(training: bool) -> None:
    model = Causal().train(training)
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    compilations = []
    for length in (5, 13):
        x, padding = example(3, length)
        x.requires_grad_(training)
        result, expected = compiled(x, padding), model(x, padding)
        if training:
            result, expected = ((*out, *torch.autograd.grad(mixture(out), x)) for out in (result, expected))
        torch.testing.assert_close(result, expected, atol=1e-5, rtol=0)
        compilations.append(counter.frame_count)
    assert compilations[0] == compilations[-1]  # nothing was compiled for the second length


CALLS = {
    "causal, mask per item": {
        **{"need_weights": False, "is_causal": True},
        "attn_mask": torch.arange(3)[:, None, None] < torch.ones(5, 5).triu(1),
    },
    "float mask, weights per head": {
        "average_attn_weights": False,
        "attn_mask": torch.linspace(-1, 1, 25).reshape(5, 5),
    },
}


@pytest.mark.parametrize("name", CALLS)
def test_compile_with_fixed_sizes(name: str) -> None:
    module = clearhead.nn.MultiheadAttention(E, H, batch_first=True, add_zero_attn="float" in name)
    torch._dynamo.reset()
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    x = torch.randn(3, 5, E)
    torch.testing.assert_close(compiled(x, x, x, **CALLS[name]), module(x, x, x, **CALLS[name]), atol=1e-5, rtol=0)


SIZES = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}


def test_export_with_dynamic_batch_and_length() -> None:
    model = Causal().eval()
    exported = torch.export.export(model, example(2, 5), dynamic_shapes=(SIZES, SIZES)).module()
    for batch, length in ((2, 5), (3, 9), (1, 2), (7, 31)):
        inputs = example(batch, length)
        torch.testing.assert_close(exported(*inputs), model(*inputs), atol=1e-5, rtol=0)


def test_onnx_runs_in_onnxruntime_with_another_length(tmp_path: Path) -> None:
    import onnxruntime

    model = Causal().eval()
    path = tmp_path / "attention.onnx"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated", FutureWarning)
        warnings.filterwarnings("ignore", "# The axis name: .* will not be used", UserWarning)
        program = torch.onnx.export(
            model,
            example(2, 5),
            dynamo=True,
            dynamic_shapes=(SIZES, SIZES),
            input_names=["x", "padding"],
            output_names=["output", "weights"],
            verbose=False,
        )
    program.save(str(path))
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch, length in ((2, 5), (3, 9), (1, 31)):
        x, padding = example(batch, length)
        results = session.run(["output", "weights"], {"x": x.numpy(), "padding": padding.numpy()})
        torch.testing.assert_close(tuple(map(torch.from_numpy, results)), model(x, padding), atol=1e-5, rtol=0)
