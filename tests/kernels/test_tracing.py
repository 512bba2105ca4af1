"""`torch.compile` and `torch.export`: one graph for all lengths, the same numbers, and `use_kernel` obeyed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import EagerAndRecordGraphs
from torch.export import Dim, export

import clearhead
from clearhead import masks
from tests.support.budgets import slow
from tests.support.native import SETS, NativeArguments
from tests.support.requests import Offset, requested

# Sizes that occur nowhere else, so that no length is taken for the same as another size.
BATCH, HEADS, HEAD_DIM = 3, 2, 5
LENGTHS = (11, 13, 23)

#: Arguments of `attention`.
VARIANTS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"mask": masks.causal()},
    "bottom right": {"mask": masks.causal("bottom_right")},
    "window": {"mask": masks.sliding_window(3, 2)},
    "prefix": {"mask": masks.causal() | masks.prefix(2)},
    "blocks": {"mask": masks.block_causal(3)},
    "tree": {"mask": masks.tree(torch.tensor([-1, 0, 0, 1, 3]))},
    "lengths": {"mask": masks.lengths(torch.tensor([11, 4, 0]))},
    "where": {"mask": masks.mask_mod(lambda b, h, q, k: (q + k) % 3 != b)},
    "where per head": {"mask": masks.mask_mod(lambda b, h, q, k: (q + k + h) % 3 != b)},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -0.5], requires_grad=True)},
    "lse": {"return_lse": True},
    "scale": {"scale": 0.3, "mask": masks.causal() & masks.sliding_window(5, 0)},
}


def random(length: int, *, grad: bool = False) -> Tensor:
    return torch.randn(BATCH, HEADS, length, HEAD_DIM, requires_grad=grad)


def count(graph: torch.fx.GraphModule, operator: str) -> int:
    """The operations of a graph with this name."""
    return sum(operator in str(node.target) for node in graph.graph.nodes)


def check_compiled(function: Callable[..., object], calls: Iterable[tuple[Tensor, ...]]) -> list[torch.fx.GraphModule]:
    """Compare a function with its graphs in every call, and return the graphs."""
    backend = EagerAndRecordGraphs()
    compiled = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    for arguments in calls:
        torch.testing.assert_close(compiled(*arguments), function(*arguments))
    return backend.graphs


SDPA, NATIVE = "scaled_dot_product_attention", "clearhead.attention"


@pytest.fixture(name="operator", params=[SDPA, NATIVE])
def _operator(request: pytest.FixtureRequest, fresh_compiler: None) -> Iterator[str]:
    """The operator of `sdpa` and of `native` in graphs, with the one or the other kernel."""
    native = request.param == NATIVE
    if native and not SETS:
        pytest.skip("the extension was not built here")
    with pytest.MonkeyPatch.context() as patch, clearhead.use_kernel("native") if native else nullcontext():
        if not native:
            patch.setattr("clearhead.kernels._native_support.extension", None)
        yield request.param


def _only(operator: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A mark for tests of one of the two."""
    chosen = pytest.mark.parametrize("operator", [operator], indirect=True)
    return lambda test: pytest.mark.usefixtures("operator")(chosen(test))


without_native, with_native = _only(SDPA), _only(NATIVE)


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_graph_for_all_lengths_of_self_attention(variant: str, operator: str) -> None:
    if (operator, variant) == (NATIVE, "where per head"):
        pytest.skip("native refuses masks that differ between heads")
    calls = ((random(length),) for length in LENGTHS)
    (graph,) = check_compiled(lambda x: clearhead.attention(x, x, x, **VARIANTS[variant]), calls)
    if operator == NATIVE:
        assert count(graph, operator) == 1


@pytest.mark.usefixtures("fresh_compiler")
def test_the_choice_of_a_kernel_puts_no_limit_on_sizes_into_a_graph() -> None:
    calls = ((random(length),) for length in (7, 331, 5))
    assert len(check_compiled(lambda x: clearhead.attention(x, x, x), calls)) == 1


@without_native
@pytest.mark.parametrize("variant", ["bottom right", "lengths", *slow("plain", "causal", "scale", "lse")])
def test_one_graph_for_all_lengths_of_cross_attention(variant: str) -> None:
    calls = ((random(length), random(count)) for length, count in [(11, 13), (17, 29), (23, 19)])
    # Shorter and longer queries may need a graph each; a pair of lengths may not.
    assert len(check_compiled(lambda x, y: clearhead.attention(x, y, y, **VARIANTS[variant]), calls)) <= 2


@without_native
def test_tensors_of_masks_are_inputs_of_the_graph() -> None:
    def attend(x: Tensor, padding: Tensor, bias: Tensor) -> Tensor:
        return clearhead.attention(x, x, x, masks.keep(keys=padding) & masks.bias(bias) & masks.causal())

    calls = ((random(n), torch.rand(BATCH, n) > 0.5, torch.randn(n, n)) for n in LENGTHS)
    assert len(check_compiled(attend, calls)) == 1


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_sinks_of_queries_and_a_tree_that_is_made_in_the_graph(backend: str) -> None:
    def attend(x: Tensor, sinks: Tensor, parents: Tensor) -> Tensor:
        return clearhead.attention(x, x, x, masks.tree(parents), sinks=sinks)

    inputs = random(11, grad=True), torch.randn(BATCH, HEADS, 11, requires_grad=True)
    parents = torch.tensor([-1, 0, 0, 1, 3])
    compiled = torch.compile(attend, backend=backend, fullgraph=True)
    results = [function(*inputs, parents) for function in (compiled, attend)]
    gradients = [torch.autograd.grad(result.square().sum(), inputs) for result in results]
    torch.testing.assert_close(results[0], results[1])
    torch.testing.assert_close(gradients[0], gradients[1])


SLOW = [
    *((SDPA, backend, name) for name in ("plain", "window", "scale") for backend in ("aot_eager", "inductor")),
    *((NATIVE, "aot_eager", name) for name in ("plain", "causal", "softcap")),
    (SDPA, "inductor", "sinks"),
]
GRADIENTS = [
    *((SDPA, "aot_eager", "sinks"), (NATIVE, "aot_eager", "lse"), (NATIVE, "aot_eager", "sinks")),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
]


@pytest.mark.parametrize(("operator", "backend", "variant"), GRADIENTS, indirect=["operator"])
def test_gradients(operator: str, backend: str, variant: str) -> None:
    options = VARIANTS[variant]

    def loss(x: Tensor) -> Tensor:
        result = clearhead.attention(x, x, x, **options)
        return sum(part.square().sum() for part in (result if isinstance(result, tuple) else (result,)))

    function = torch.compile(loss, backend=backend, fullgraph=True, dynamic=True)
    for length in LENGTHS[:2]:
        x = random(length, grad=True)
        inputs = [x, *(option for option in options.values() if isinstance(option, Tensor))]
        torch.testing.assert_close(*(torch.autograd.grad(f(x), inputs) for f in (function, loss)))


@without_native
def test_hidden_rows_and_poisoned_padding() -> None:
    def attend(x: Tensor, y: Tensor, padding: Tensor) -> Tensor:
        return clearhead.attention(x, y, y, masks.keep(keys=padding))

    padding = torch.ones(BATCH, 13, dtype=torch.bool)
    padding[0, 4:], padding[1] = False, False
    y = random(13).masked_fill(~padding[:, None, :, None], torch.nan).requires_grad_()
    x = random(11, grad=True)
    function = torch.compile(attend, backend="aot_eager", fullgraph=True)
    output = function(x, y, padding)
    torch.testing.assert_close(output, attend(x, y, padding))
    assert not output[1].any()
    for gradient in torch.autograd.grad(output.square().sum(), (x, y)):
        assert gradient.isfinite().all()


@without_native
def test_dropout_keeps_the_mean() -> None:
    def attend(x: Tensor) -> Tensor:
        return clearhead.attention(x, x, torch.ones_like(x), softcap=50.0, dropout_p=0.25)

    output = torch.compile(attend, backend="eager", fullgraph=True)(torch.randn(7, 5, 53, 3))
    assert output.unique().numel() > 100
    assert abs(float(output.mean()) - 1) < 0.01


@without_native
@pytest.mark.parametrize("average", [True, *slow(False)])
def test_weights(average: bool) -> None:
    def weigh(x: Tensor, y: Tensor) -> Tensor:
        return clearhead.attention_weights(x, y, masks.causal("bottom_right"), average_attn_weights=average)

    calls = ((random(length), random(count)) for length, count in [(11, 13), (17, 23)])
    assert len(check_compiled(weigh, calls)) == 1


@without_native
def test_weights_of_chosen_queries() -> None:
    calls = [(random(11), torch.tensor([10, 0, -1]))]
    check_compiled(lambda x, rows: clearhead.attention_weights(x, x, queries=rows), calls)


@without_native
def test_use_kernel_inside_the_compiled_function() -> None:
    def attend(x: Tensor) -> Tensor:
        with clearhead.use_kernel("reference"):
            return clearhead.attention(x, x, x)

    (graph,) = check_compiled(attend, [(random(11),)])
    assert count(graph, SDPA) == 0


@without_native
def test_use_kernel_after_compiling_takes_effect() -> None:
    backend, x = EagerAndRecordGraphs(), random(11)
    function = torch.compile(lambda x: clearhead.attention(x, x, x), backend=backend, fullgraph=True)
    expected = function(x)
    assert [count(graph, SDPA) for graph in backend.graphs] == [1]
    with clearhead.use_kernel("reference"):
        torch.testing.assert_close(function(x), expected)
    assert [count(graph, SDPA) for graph in backend.graphs] == [1, 0]
    function(x)
    assert len(backend.graphs) == 2, "the first graph is still good"
    with clearhead.use_kernel("chunked"), pytest.raises(Exception, match="loop over blocks would tie a traced graph"):
        function(x)


class Padded(nn.Module):
    """A module with a padding mask as an input, exported as people export encoders."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = clearhead.MultiHeadAttention(HEADS * HEAD_DIM, HEADS, num_kv_heads=1)

    def forward(self, x: Tensor, padding: Tensor, need_weights: bool) -> Tensor | tuple[Tensor, Tensor]:
        return self.attend(x, mask=masks.drop(keys=padding) & masks.causal(), need_weights=need_weights)


@without_native
@pytest.mark.parametrize("need_weights", [False, True])
def test_exported_module_takes_any_batch_and_length(need_weights: bool) -> None:
    def arguments(*size: int) -> tuple[Tensor, Tensor, bool]:
        return torch.randn(*size, HEADS * HEAD_DIM), torch.rand(*size) > 0.7, need_weights

    module = Padded().eval()
    sizes = {0: Dim("batch", min=2, max=64), 1: Dim("length", min=2, max=512)}
    program = export(module, arguments(BATCH, LENGTHS[0]), dynamic_shapes=(sizes, sizes, None))
    for size in ((3, 11), (7, 29), (2, 2), (64, 5)):
        call = arguments(*size)
        torch.testing.assert_close(program.module()(*call), module(*call))


# The native kernel's own graphs, and what it says to those it refuses.


@with_native
def test_a_graph_drops_the_weights_of_a_part_that_reference_drops() -> None:
    def seeded(x: Tensor) -> Tensor:
        return requested(x, x, x, dropout_p=0.5, seed=torch.tensor(42), offset=Offset(11, 2, 3, 5)).output

    x = random(31, grad=True)
    found = torch.compile(seeded, backend="aot_eager", fullgraph=True)(x)
    with clearhead.use_kernel("reference"):
        expected = seeded(x)
    torch.testing.assert_close(found, expected)
    gradients = [torch.autograd.grad(output.square().sum(), x)[0] for output in (found, expected)]
    torch.testing.assert_close(*gradients)


@with_native
def test_an_exported_graph_holds_pytorchs_own_operators() -> None:
    class Module(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return clearhead.attention(x, x, x, masks.causal())

    x = random(11)
    with pytest.raises(Exception, match="an exported graph holds PyTorch's own operators only"):
        export(Module(), (x,))


@with_native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_operator_keeps_pytorchs_rules(dtype: torch.dtype) -> None:
    query, key, value = (random(length).to(dtype).requires_grad_() for length in (11, 13, 13))
    visible = torch.rand(11, 13)[None, None] > 0.3
    arguments = tuple(NativeArguments(query, key, value, visible=visible, scale=0.5, low=-11, high=13, stop=13))
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.clearhead.attention.default, arguments, test_utils=tests)


X = random(11)
PER_HEAD = masks.mask_mod(lambda b, h, q, k: k % 2 == h)


@with_native
@pytest.mark.parametrize(
    ("x", "mask", "reason"),
    [
        (X.double(), None, "it computes in float32, and the tensors are torch.float64"),
        (X.to("meta"), None, "it runs on the CPU, and the tensors are on meta"),
        (X, PER_HEAD, "the mask differs between heads and would have to be built whole, (B, H, L, S)"),
    ],
)
def test_reasons(x: Tensor, mask: masks.Mask | None, reason: str) -> None:
    assert clearhead.explain(x, x, x, mask).reasons["native"] == (reason,)


@with_native
def test_reasons_against_transforms() -> None:
    with pytest.raises(clearhead.errors.KernelError, match=r"cannot be transformed by torch\.func"):
        torch.func.grad(lambda y: clearhead.attention(y, y, y).sum())(X)
