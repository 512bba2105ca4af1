"""`MultiHeadAttention`: what it computes, what its projections are, and how it lives as a module."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, masks, merge_heads, record, split_heads
from clearhead.errors import ArgumentError, ClearheadError, DTypeError, ShapeError
from clearhead.masks import Mask
from clearhead.positions import ALiBi, RelativeBias, Rotary
from tests.support.exact import exact_attention

B, L, S, E, H = 2, 5, 7, 12, 3


def test_key_defaults_to_query_and_value_to_key() -> None:
    module = MultiHeadAttention(E, H)
    x, memory = torch.randn(B, L, E), torch.randn(B, S, E)
    assert torch.equal(module(x), module(x, x, x))
    assert torch.equal(module(x, memory), module(x, memory, memory))
    assert module(x, memory).shape == (B, L, E)


def test_inputs_and_heads_of_other_sizes() -> None:
    module = MultiHeadAttention(E, 4, num_kv_heads=2, head_dim=5, qdim=11, kdim=13, vdim=17)
    sizes = [module.q_proj, module.k_proj, module.v_proj, module.out_proj]
    assert [(p.in_features, p.out_features) for p in sizes] == [(11, 20), (13, 10), (17, 10), (20, E)]
    query, key, value = torch.randn(B, L, 11), torch.randn(B, S, 13), torch.randn(B, S, 17)
    output, weights = module(query, key, value, need_weights=True, average_attn_weights=False)
    q, k, v = (split_heads(p(x), n) for p, x, n in zip(sizes, (query, key, value), (4, 2, 2), strict=False))
    expected = exact_attention(q, k, v)
    torch.testing.assert_close(weights.double(), expected.weights, rtol=0, atol=1e-5)
    torch.testing.assert_close(output, module.out_proj(merge_heads(expected.output.float())))


@pytest.mark.parametrize("gate", ["elementwise", "head"])
def test_a_gate_multiplies_the_heads_outputs(gate: Any) -> None:
    sizes = {"num_kv_heads": 1, "head_dim": 5, "qdim": 11, "kdim": 13}
    module = MultiHeadAttention(E, H, vdim=13, gate=gate, **sizes).double()
    bare = MultiHeadAttention(E, H, vdim=13, **sizes).double()
    bare.load_state_dict({name: x for name, x in module.state_dict().items() if "gate" not in name})
    bare.out_proj = nn.Identity()
    query, memory = torch.randn(B, L, 11).double(), torch.randn(B, S, 13).double()
    factors = torch.sigmoid(query @ module.gate_proj.weight.T + module.gate_proj.bias)
    factors = factors if gate == "elementwise" else factors.repeat_interleave(5, -1)
    expected = (bare(query, memory) * factors) @ module.out_proj.weight.T + module.out_proj.bias
    output, weights = module(query, memory, need_weights=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(module(query[0], memory[0]), expected[0], rtol=0, atol=1e-10)
    assert module(query[:, :0], memory).shape == (B, 0, E)
    torch.testing.assert_close(weights, bare(query, memory, need_weights=True)[1], rtol=0, atol=1e-10)
    assert torch.equal(module(query, memory, mask=~masks.sliding_window(9, 9)), module.out_proj.bias.expand(B, L, E))


@pytest.mark.parametrize("gate", ["elementwise", "head"])
@pytest.mark.parametrize("hooked", ["", "q_proj", "gate_proj", "out_proj"])
def test_a_gate_of_padded_and_jagged_batches(gate: Any, hooked: str) -> None:
    module, shapes = MultiHeadAttention(48, H, gate=gate), []
    if hooked:
        module.get_submodule(hooked).register_forward_hook(lambda part, inputs, output: shapes.append(inputs[0].shape))
    items, lengths = [torch.randn(length, 48) for length in (3, 250, 40)], torch.tensor([3, 250, 40])
    expected = [module(item, mask=masks.causal()) for item in items]
    shapes.clear()
    padded = torch.nn.utils.rnn.pad_sequence(items, batch_first=True)
    output = module(padded, mask=masks.causal() & masks.lengths(lengths, lengths))
    assert all(shape == (3, 250, 48) for shape in shapes)  # a hook sees what it would see without the removal
    jagged = module(torch.nested.as_nested_tensor(items, layout=torch.jagged), mask=masks.causal())
    for row, packed, item in zip(output, jagged.unbind(), expected, strict=True):
        torch.testing.assert_close(row[: len(item)], item, rtol=0, atol=1e-5)
        torch.testing.assert_close(packed, item, rtol=0, atol=1e-5)


@pytest.mark.parametrize("gate", ["elementwise", "head"])
@torch.no_grad()
def test_a_gate_with_caches_and_records(gate: Any) -> None:
    module, x = MultiHeadAttention(E, H, gate=gate).double(), torch.randn(B, 9, E, dtype=torch.float64)
    expected, weights = module(x, mask=masks.causal(), need_weights=True, average_attn_weights=False)
    cache = module.make_cache(B, 9)
    steps = [module(part, mask=masks.causal(), cache=cache) for part in x.split([5, 1, 3], 1)]
    torch.testing.assert_close(torch.cat(steps, 1), expected, rtol=0, atol=1e-10)
    with record(module, statistics=("rows",)) as rec:
        assert torch.equal(module(x, mask=masks.causal()), expected)
    torch.testing.assert_close(rec[""].rows, weights, rtol=0, atol=1e-10)


def test_another_gate_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"gate: expected 'elementwise' or 'head', got 'both'"):
        MultiHeadAttention(E, H, gate="both")  # type: ignore[arg-type]


def test_without_a_batch() -> None:
    module = MultiHeadAttention(E, H)
    query, memory = torch.randn(L, E), torch.randn(S, E)
    output, weights = module(query, memory, mask=masks.causal(), need_weights=True)
    batched = module(query[None], memory[None], mask=masks.causal(), need_weights=True)
    assert output.shape == (L, E)
    assert weights.shape == (L, S)
    torch.testing.assert_close((output[None], weights[None]), batched)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, L, S), (B, 0, S), (B, L, 0), (0, 0, 0)])
def test_sizes_of_zero(batch: int, queries: int, keys: int) -> None:
    module = MultiHeadAttention(E, H)
    query, memory = torch.randn(batch, queries, E, requires_grad=True), torch.randn(batch, keys, E)
    output, weights = module(query, memory, need_weights=True)
    assert output.shape == (batch, queries, E)
    assert weights.shape == (batch, queries, keys)
    assert module(query).shape == query.shape
    output.sum().backward()
    assert not query.grad.any()


@pytest.mark.parametrize("sizes", [{}, {"num_kv_heads": 1, "head_dim": 7, "qdim": 5, "kdim": 11, "vdim": 13}])
def test_each_projection_starts_xavier_uniform_with_zero_bias(sizes: dict[str, int]) -> None:
    for projection in MultiHeadAttention(96, 3, **sizes).children():
        bound = math.sqrt(6 / (projection.in_features + projection.out_features))
        assert projection.weight.abs().max() <= bound
        assert projection.weight.abs().max() > 0.95 * bound
        assert abs(projection.weight.std().item() - bound / math.sqrt(3)) < 0.06 * bound
        assert not projection.bias.any()


@pytest.mark.parametrize(("bias", "out_bias", "expected"), [(True, None, 4), (False, None, 0), (True, False, 3)])
def test_biases_can_be_left_out(bias: bool, out_bias: bool | None, expected: int) -> None:
    module = MultiHeadAttention(E, H, bias=bias, out_bias=out_bias)
    assert sum(projection.bias is not None for projection in module.children()) == expected
    assert (MultiHeadAttention(E, H, bias=False, out_bias=True).out_proj.bias is None) is False


def test_the_names_in_a_checkpoint() -> None:
    names = [f"{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")]
    assert list(MultiHeadAttention(E, H).state_dict()) == names


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_a_copy_computes_the_same_and_shares_nothing(duplicate: Any) -> None:
    module, x = MultiHeadAttention(E, H, num_kv_heads=1, dropout=0.1).eval(), torch.randn(B, L, E)
    expected, twin = module(x), duplicate(module)
    nn.init.zeros_(module.q_proj.weight)
    assert torch.equal(twin(x), expected)
    assert repr(twin) == repr(module)


def test_parameters_are_made_where_and_as_asked() -> None:
    module = MultiHeadAttention(E, H, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in module.parameters()} == {("meta", torch.bfloat16)}
    module = module.to_empty(device="cpu")
    module.reset_parameters()
    output, weights = module(torch.randn(B, L, E, dtype=torch.bfloat16), need_weights=True)
    assert output.dtype == torch.bfloat16
    assert weights.dtype == torch.float32
    assert MultiHeadAttention(E, H).double()(torch.randn(B, L, E).double()).dtype == torch.float64


def test_it_prints_its_sizes() -> None:
    first = repr(MultiHeadAttention(E, H)).splitlines()[1]
    assert first == "  embed_dim=12, num_heads=3, head_dim=4"
    first = repr(MultiHeadAttention(E, H, num_kv_heads=1, head_dim=5, dropout=0.1)).splitlines()[1]
    assert first == "  embed_dim=12, num_heads=3, num_kv_heads=1, head_dim=5, dropout=0.1"
    parts = made(position=Rotary(4), softcap=2.0, sinks=True, mask=masks.sliding_window(3, 0))
    assert "softcap=2.0, sinks=True, mask=sliding_window(3, 0)" in repr(parts)


def made(**parts: Any) -> MultiHeadAttention:
    torch.manual_seed(4)
    return MultiHeadAttention(E, 6, num_kv_heads=3, head_dim=4, dtype=torch.float64, **parts)


@pytest.mark.parametrize("combined", [False, True])
def test_a_bias_that_learns_belongs_to_the_module(combined: bool) -> None:
    bias = RelativeBias(6, 8, 16).double()
    module = made(mask=bias & masks.sliding_window(3, 3) if combined else bias)
    twin = copy.deepcopy(module)
    nn.init.normal_(bias.weight)
    x = torch.randn(B, L, E, dtype=torch.float64)
    output = module(x)
    assert not torch.allclose(output, twin(x))
    twin.load_state_dict(module.state_dict())
    torch.testing.assert_close(twin(x), output)
    output.square().sum().backward()
    gradients = [x.grad for x in module.parameters() if x is bias.weight]
    assert len(gradients) == 1
    assert gradients[0].abs().sum() > 0


def test_a_position_part_rotates_keys_by_the_positions_of_the_queries() -> None:
    """Also if key and query are two tensors of the same tokens, as after separate norms."""
    module, x = made(position=Rotary(4)), torch.randn(2, L, E, dtype=torch.float64)
    padded = torch.stack((torch.arange(L), torch.arange(L) - 3)).clamp(min=-1)
    for positions in (1000, padded):
        expected = module(x, mask=masks.causal(), positions=positions)
        assert torch.equal(module(x, x.clone(), mask=masks.causal(), positions=positions), expected)


# Cutting features into heads and laying them side by side again.


D = 7


@pytest.fixture
def features() -> Tensor:
    return torch.arange(B * L * H * D, dtype=torch.float32).reshape(B, L, H * D)


@pytest.mark.parametrize("batched", [True, False])
def test_head_h_reads_the_h_th_run_of_features(features: Tensor, batched: bool) -> None:
    x = features if batched else features[0]
    split = split_heads(x, H)
    assert split.shape == (*x.shape[:-2], H, L, D)
    for head in range(H):
        assert torch.equal(split.select(-3, head), x[..., head * D : (head + 1) * D])
    assert split.data_ptr() == x.data_ptr()  # nothing is copied
    assert torch.equal(merge_heads(split), x)


def test_tensors_that_are_not_contiguous(features: Tensor) -> None:
    strided = features.transpose(0, 1)  # (L, B, H·D)
    assert torch.equal(split_heads(strided, H), split_heads(strided.contiguous(), H))
    assert torch.equal(merge_heads(split_heads(strided, H)), strided)


@pytest.mark.parametrize("shape", [(0, L, H * D), (B, 0, H * D), (B, L, 0)], ids=str)
def test_heads_of_size_zero(shape: tuple[int, ...]) -> None:
    empty = torch.zeros(shape)
    assert split_heads(empty, H).shape == (shape[0], H, shape[1], shape[2] // H)
    assert merge_heads(split_heads(empty, H)).shape == shape


SPLIT, MERGED = (
    r"x: expected \(B, L, H·D\) with H = 3 heads dividing the last size",
    r"x: expected \(B, H, L, D\) or \(H, L, D\)",
)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: split_heads(torch.zeros(B, L, 20), H), ShapeError, rf"{SPLIT}, got \(2, 5, 20\)\.$"),
        (lambda: split_heads(torch.zeros(7), H), ShapeError, rf"{SPLIT}, got \(7,\)\.$"),
        (lambda: split_heads(torch.zeros(B, H, L, D), H), ShapeError, rf"{SPLIT}, got \(2, 3, 5, 7\)\.$"),
        (lambda: split_heads(torch.zeros(B, L, 6), 0), ArgumentError, r"num_heads: expected an int ≥ 1, got 0\."),
        (lambda: split_heads(torch.zeros(B, L, 6), 2.0), DTypeError, r"num_heads: expected an int ≥ 1, got 2\.0\."),
        (lambda: split_heads(torch.zeros(B, L, 6), True), DTypeError, r"num_heads: expected an int ≥ 1, got True\."),
        (lambda: split_heads([[1.0, 2.0]], 2), DTypeError, r"x: expected a torch\.Tensor, got list"),
        (lambda: merge_heads(torch.zeros(L, D)), ShapeError, rf"{MERGED}, got \("),
        (lambda: merge_heads(torch.zeros(1, B, H, L, D)), ShapeError, rf"{MERGED}, got \("),
        (lambda: merge_heads([[1.0, 2.0]]), DTypeError, r"x: expected a torch\.Tensor, got list"),
    ],
)
def test_arguments_of_heads_that_are_refused(call: Callable[[], Tensor], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{text}"):
        call()


# Jagged nested tensors through `MultiHeadAttention`: every row as if it were alone.


LENGTHS, OTHERS = [5, 1, 7], [3, 8, 2]


def rows(lengths: list[int], features: int = E) -> list[Tensor]:
    torch.manual_seed(sum(lengths))
    return [torch.randn(n, features, dtype=torch.float64) for n in lengths]


def jagged(parts: list[Tensor]) -> Tensor:
    return torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(1, 2)], ids=["none", "causal", "window"])
@pytest.mark.parametrize(
    ("parts", "keys"),
    [({"position": Rotary(4), "mask": ALiBi(6)}, None), ({}, OTHERS), ({"position": Rotary(4)}, LENGTHS)],
    ids=["self-attention", "a memory with lengths of its own", "keys beside queries"],
)
def test_each_row_is_alone(parts: dict[str, Any], keys: list[int] | None, mask: Mask | None) -> None:
    """Outputs and gradients of inputs and parameters."""
    attend, inputs = made(**parts), [rows(lengths) for lengths in (LENGTHS, keys) if lengths is not None]
    together, alone = [jagged(item) for item in inputs], [[row.clone().requires_grad_() for row in x] for x in inputs]
    output = attend(*together, mask=mask)
    assert output.is_nested
    assert (output + together[0]).shape == output.shape == together[0].shape  # the same lengths, as a residual needs
    expected = torch.cat([attend(*row, mask=mask) for row in zip(*alone, strict=True)])
    torch.testing.assert_close(output.values(), expected, rtol=0, atol=1e-10)
    parameters = [*attend.parameters()]
    of_together = torch.autograd.grad(output.values().square().sum(), [*together, *parameters])
    of_alone = [torch.autograd.grad(expected.square().sum(), [*x, *parameters], retain_graph=True) for x in alone]
    for result, of_rows in zip(of_together, of_alone, strict=False):
        torch.testing.assert_close(result.values(), torch.cat(of_rows[: len(LENGTHS)]), rtol=0, atol=1e-10)
    for result, of_parameter in zip(of_together[len(inputs) :], of_alone[0][len(LENGTHS) :], strict=True):
        torch.testing.assert_close(result, of_parameter, rtol=0, atol=1e-9)


BAD: dict[str, tuple[dict[str, Any], type[ClearheadError], str]] = {
    "padded key": ({"key": torch.zeros(3, 7, E).double()}, ShapeError, "key: expected a jagged .*got a padded tensor"),
    "rows": ({"key": jagged(rows([4, 4]))}, ShapeError, "key: expected the query's 3 rows, got 2"),
    "value": (
        {"key": jagged(rows(OTHERS)), "value": jagged(rows([3, 8, 4]))},
        ShapeError,
        "value: .*the key's lengths",
    ),
    "features": ({"key": jagged(rows(LENGTHS, 4))}, ShapeError, "key: expected"),
    # As many keys in all are not enough: each row has lengths of its own.
    "position part": ({"key": jagged(rows(LENGTHS[::-1]))}, ShapeError, "key: expected the query's lengths: a posi"),
    "weights": ({"need_weights": True}, ArgumentError, "need_weights: .*jagged.*to_padded_tensor"),
    "positions": ({"positions": 3}, ArgumentError, "positions: .*jagged"),
    "mask": ({"mask": masks.causal("bottom_right")}, ArgumentError, r"mask: expected causal\(\)"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit(case: str) -> None:
    inputs, kind, text = BAD[case]
    with pytest.raises(kind, match=text):
        made(position=Rotary(4))(jagged(rows(LENGTHS)), **inputs)
    with pytest.raises(ShapeError, match=r"expected the layout torch.jagged, got torch.strided"):
        made()(torch.nested.nested_tensor(rows(LENGTHS)))
