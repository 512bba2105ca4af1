"""Graphs of `torch.compile` hold FlexAttention where none of PyTorch's other fused kernels runs a call.

A graph is traced for the device and run on the CPU, in float32. PyTorch computes FlexAttention and its gradients there
without compiling it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias
from tests.support.closeness import require_near
from tests.support.pretended_cuda.mode import PretendedDevice

B, H, HKV, L, D = 2, 4, 2, 150, 16
CPU = torch.device("cpu")


class Graph:
    """The graph of a function of tensors of the device, for the CPU."""

    def __init__(self, function: Callable[..., Any], inputs: Sequence[Tensor], patch: pytest.MonkeyPatch) -> None:
        self._inputs = inputs
        compiled = torch.compile(function, backend=self._backend, fullgraph=True, dynamic=True)
        with patch.context() as patched, _disable_current_modes():
            patched.setattr(torch.cuda, "is_available", lambda: False)  # tracing saves the state of its generators
            with pytest.raises(InterruptedError):
                compiled(*inputs)
        for part in self._graph.modules():
            if isinstance(part, GraphModule):
                for node in part.graph.nodes:
                    node.args, node.kwargs = tree_map(_on_cpu, node.args), tree_map(_on_cpu, node.kwargs)
                part.recompile()

    def _backend(self, graph: GraphModule, _: Any) -> Callable[..., Any]:
        self._graph = graph
        return self._keep

    def _keep(self, *arguments: Any) -> Any:
        self._arguments = arguments  # with sizes among them
        raise InterruptedError

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The results for these instead of the inputs."""
        others = {id(one): other for one, other in zip(self._inputs, inputs, strict=True)}
        return self._graph(*(others.get(id(each), each) for each in self._arguments))

    @property
    def kernels(self) -> list[str]:
        """The operations of attention, and products of matrices."""
        names = ("flex_attention", "scaled_dot_product_attention", "matmul", "bmm", "softmax")
        targets = [str(getattr(node.target, "__name__", node.target)) for node in self._graph.graph.nodes]
        return [name for target in targets for name in names if name in target]


def _on_cpu(argument: Any) -> Any:
    return CPU if isinstance(argument, torch.device) else argument


@pytest.fixture(autouse=True)
def _own_graphs() -> None:
    torch._dynamo.reset()


def operands(dtype: torch.dtype = torch.float32, dim: int = D) -> list[Tensor]:
    """Query, key, value and a bias."""
    generator = torch.Generator().manual_seed(1)
    shapes = (B, H, L, dim), (B, HKV, L, dim), (B, HKV, L, dim), (1, H, L, L)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


#: A mask, made with a bias, and options.
CALLS: dict[str, tuple[Callable[[Tensor], Any], dict[str, Any]]] = {
    "soft-cap": (lambda bias: None, {"softcap": 3.0}),
    "soft-cap, causal, lengths": (lambda bias: masks.causal() & masks.lengths(torch.tensor([L, 0])), {"softcap": 3.0}),
    "soft-cap, block_causal": (lambda bias: masks.block_causal(20), {"softcap": 3.0}),
    "ALiBi, causal": (lambda bias: ALiBi(H) & masks.causal(), {}),
    "lse": (lambda bias: masks.causal(), {"return_lse": True}),
}


@pytest.mark.parametrize("name", CALLS)
def test_outputs_and_gradients_of_a_graph(cuda: PretendedDevice, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, options = CALLS[name]

    def attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor) -> Any:
        return clearhead.attention(query, key, value, make(bias), **options)

    def with_gradients(function: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype).requires_grad_() for x in operands()]
        found = function(*leaves)
        results = found if isinstance(found, tuple) else (found,)
        generator = torch.Generator().manual_seed(2)
        of_results = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in results]
        gradients = torch.autograd.grad(results, leaves, of_results, allow_unused=True)
        return [each for each in (*results, *gradients) if each is not None]

    graph = Graph(attend, [x.to("cuda").requires_grad_() for x in operands(torch.bfloat16)], monkeypatch)
    assert graph.kernels == ["flex_attention"]
    with _disable_current_modes():
        require_near(with_gradients(graph, torch.float32), with_gradients(attend, torch.float64))


@pytest.mark.parametrize(
    ("mask", "dtype", "dim", "dropout_p"),
    [
        (None, torch.float32, D, 0.0),
        (None, torch.bfloat16, 256, 0.0),
        (None, torch.bfloat16, D, 0.5),
        (masks.mask_mod(lambda b, h, q, k: (q + k) % 3 > 0), torch.bfloat16, D, 0.0),
        (RelativeBias(H), torch.bfloat16, D, 0.0),
    ],
    ids=["float32", "a large head", "dropout", "a function", "a computed bias"],
)
def test_other_graphs_build_the_scores(
    cuda: PretendedDevice, mask: Any, dtype: torch.dtype, dim: int, dropout_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return clearhead.attention(query, key, value, mask, softcap=3.0, dropout_p=dropout_p)

    if isinstance(mask, torch.nn.Module):
        mask.to("cuda")
    graph = Graph(attend, [x.to("cuda") for x in operands(dtype, dim)[:3]], monkeypatch)
    assert "flex_attention" not in graph.kernels


def test_a_module(cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    module = clearhead.MultiHeadAttention(64, H, num_kv_heads=HKV, softcap=5.0, mask=masks.causal())
    module.to("cuda", torch.bfloat16)
    graph = Graph(module, [torch.randn(B, L, 64, dtype=torch.bfloat16, device="cuda")], monkeypatch)
    assert graph.kernels == ["flex_attention"]
