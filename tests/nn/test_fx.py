"""`torch.fx`: attention is one node of a graph, as PyTorch's modules and functions are."""

# Without the import of annotations: PyTorch cannot pickle a graph whose annotations are strings.
import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import clearhead
from clearhead import masks
from clearhead.transformer import Encoder, EncoderLayer, FeedForward

E, HEADS, BATCH, LENGTH = 16, 4, 2, 5


class Block(nn.Module):
    """The shape of a block of torchvision's vision transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln = nn.LayerNorm(E)
        self.self_attention = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.mlp = nn.Linear(E, E)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln(x)
        return self.mlp(x + self.self_attention(y, y, y, need_weights=False)[0])


class Calls(nn.Module):
    """A function of parts, which call it as a user's forward does."""

    def __init__(self, function: Callable[..., Tensor], *parts: nn.Module) -> None:
        super().__init__()
        self.parts, self.function = nn.ModuleList(parts), function

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function(*self.parts, x, other)


def own(**options: Any) -> clearhead.MultiHeadAttention:
    return clearhead.MultiHeadAttention(E, HEADS, **options)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, E // HEADS)).transpose(1, 2)


def packed(x: Tensor, ends: Tensor) -> Tensor:
    return clearhead.attention_varlen(x, x, x, ends, ends)


def layer() -> EncoderLayer:
    return EncoderLayer(E, own(), FeedForward(E, 2 * E))


DROP_IN = clearhead.nn.MultiheadAttention(E, HEADS, batch_first=True)
LATENT: dict[str, Any] = {"kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
VISIBLE, LENGTHS = torch.rand(LENGTH, LENGTH) > 0.3, torch.tensor([5, 3])
CALLS: dict[str, tuple[Calls, Tensor]] = {
    "drop-in": (
        Calls(lambda a, x, m: a(x, x, x, attn_mask=m)[0], clearhead.nn.MultiheadAttention(E, HEADS, batch_first=True)),
        ~VISIBLE,
    ),
    "own": (Calls(lambda a, x, m: a(x, mask=m), own(position=clearhead.positions.Rotary(4))), VISIBLE),
    "own with a rule": (Calls(lambda a, x, _: a(x, mask=masks.causal()), own()), LENGTHS),
    "own with lengths": (Calls(lambda a, x, n: a(x, mask=masks.lengths(n) & masks.causal()), own()), LENGTHS),
    "rule and tensor": (Calls(lambda a, x, m: a(x, mask=masks.causal() & masks.drop(m)), own()), ~VISIBLE),
    "rule or prefix": (Calls(lambda a, x, n: a(x, mask=masks.causal() | masks.prefix(n)), own()), LENGTHS),
    "bias": (Calls(lambda a, x, b: a(x, mask=masks.bias(b)), own()), torch.randn(LENGTH, LENGTH)),
    "documents": (Calls(lambda a, x, d: a(x, mask=masks.documents(d)), own()), torch.tensor([0, 0, 1, 1, 1])),
    "latent": (
        Calls(
            lambda a, x, _: a(x, mask=masks.causal()),
            clearhead.MultiHeadLatentAttention(E, HEADS, **LATENT, position=clearhead.positions.Rotary(4)),
        ),
        LENGTHS,
    ),
    "encoder": (Calls(lambda e, x, _: e(x, mask=masks.causal()), Encoder([layer(), layer()])), LENGTHS),
    "attention": (
        Calls(lambda x, m: clearhead.attention(heads(x), heads(x), heads(x), masks.keep(m), scale=0.3)),
        VISIBLE,
    ),
    "weights": (Calls(lambda x, m: clearhead.attention_weights(heads(x), heads(x), m)), VISIBLE),
    "packed": (
        Calls(lambda x, n: packed(x.flatten(0, 1)[:, None], n)),
        torch.tensor([0, 3, BATCH * LENGTH]),
    ),
    "sdpa": (
        Calls(lambda x, m: clearhead.nn.functional.scaled_dot_product_attention(x, x, x, m)),
        VISIBLE,
    ),
}


def nodes(graph: fx.Graph) -> list[tuple[str, object, object]]:
    """Operations and targets, without parameters that nothing uses."""
    graph.eliminate_dead_code()
    return [(node.op, node.target, str(node.args) + str(node.kwargs)) for node in graph.nodes]


def test_an_upgraded_model_has_the_graph_of_pytorchs() -> None:
    block = Block().eval()
    expected = nodes(fx.symbolic_trace(block).graph)
    clearhead.upgrade(block)
    assert nodes(fx.symbolic_trace(block).graph) == expected


@pytest.mark.parametrize("stack", [False, True])
def test_an_upgraded_layer_or_stack_is_one_node(stack: bool) -> None:
    part = nn.TransformerEncoderLayer(E, HEADS, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(part, 2) if stack else part, nn.Tanh()).eval()
    clearhead.upgrade(model)
    graph, x = fx.symbolic_trace(model), torch.randn(BATCH, LENGTH, E)
    assert [target for op, target, _ in nodes(graph.graph) if op == "call_module"] == ["0", "1"]
    torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("name", CALLS)
def test_graphs_run_as_their_models(name: str) -> None:
    model, other = CALLS[name]
    x = torch.randn(BATCH, LENGTH, E)
    graph = fx.symbolic_trace(model.eval())
    expected = model(x, other)
    for copied in (graph, copy.deepcopy(graph), pickle.loads(pickle.dumps(graph)), fx.symbolic_trace(graph)):
        torch.testing.assert_close(copied(x, other), expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_quantization_prepares_an_upgraded_model_as_pytorchs() -> None:
    from torch.ao.quantization import get_default_qconfig_mapping
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx  # pyright: ignore[reportDeprecated]

    block, x = Block().eval(), torch.randn(BATCH, LENGTH, E)
    with torch.no_grad():
        expected = block(x)
        clearhead.upgrade(block)
        prepared = prepare_fx(block, get_default_qconfig_mapping("x86"), (x,))  # pyright: ignore[reportDeprecated]
        prepared(x)
        quantized = convert_fx(prepared)  # pyright: ignore[reportDeprecated]
        assert any(
            "quantized" in str(node.target) or "quantized" in str(type(module))
            for node in quantized.graph.nodes
            for module in [dict(quantized.named_modules()).get(str(node.target))]
        )
        torch.testing.assert_close(quantized(x), expected, atol=0.2, rtol=0.1)


def test_a_whole_model_cannot_be_one_node() -> None:
    with pytest.raises(clearhead.errors.DTypeError) as raised:
        fx.symbolic_trace(own())
    assert any("Trace a module that contains it" in note for note in raised.value.__notes__)


def test_what_is_no_proxy_is_refused_as_ever() -> None:
    with pytest.raises(clearhead.errors.DTypeError, match=r"query: expected a torch\.Tensor, got list"):
        clearhead.attention([1.0], [1.0], [1.0])  # pyright: ignore[reportArgumentType]
    with pytest.raises(clearhead.errors.MaskTypeError, match="a mask combines with another mask or a bool tensor"):
        _ = masks.causal() & 3
