"""ALiBi and relative biases: BLOOM's and T5's numbers, outputs and gradients, and the life of a module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.t5.modeling_t5 import T5Attention

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias

BATCH, HEADS, KV_HEADS, LENGTH, COUNT, HEAD_DIM = 2, 6, 3, 5, 7, 11
BUCKETS, DISTANCE = 8, 13


def bloom_slopes(heads: int) -> Tensor:
    return build_alibi_tensor(torch.ones(1, 2, dtype=torch.int64), heads, torch.float32)[:, 0, 1]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 8, 12, 13, 16, 40, 71])
def test_slopes_are_those_of_bloom(heads: int) -> None:
    torch.testing.assert_close(ALiBi(heads).slopes, bloom_slopes(heads), rtol=1e-6, atol=0)
    torch.testing.assert_close(ALiBi(heads).dense(2)[0, :, 0, 1], -bloom_slopes(heads), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(
    ("num_buckets", "max_distance"), [(32, 128), (8, 13), (16, 20), (32, 17), (64, 1000), (4, 3), (6, 40)]
)
def test_buckets_are_those_of_t5(num_buckets: int, max_distance: int, bidirectional: bool) -> None:
    if not bidirectional and max_distance <= num_buckets // 2:
        max_distance += num_buckets
    distances = torch.arange(-3 * max_distance, 3 * max_distance + 1)
    theirs = T5Attention._relative_position_bucket(distances, bidirectional, num_buckets, max_distance)
    mask = RelativeBias(1, num_buckets, max_distance, bidirectional)
    with torch.no_grad():
        mask.weight.copy_(torch.arange(num_buckets)[:, None])
        ours = mask.dense(1, len(distances), query_positions=torch.zeros(1).long(), key_positions=distances)
    assert torch.equal(ours.flatten().long(), theirs)


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> list[Tensor]:
    sizes = (HEADS, length, HEAD_DIM), (KV_HEADS, COUNT, HEAD_DIM), (KV_HEADS, COUNT, 3)
    return [torch.randn(BATCH, *size, dtype=dtype, requires_grad=True) for size in sizes]


def numbers(mask: masks.Mask, query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """The bias of every score by the formulas, (B, H, L, S), of positions (1 or B, L) and (1 or B, 1 or H, S)."""
    distances = key_positions[:, :, None] - query_positions[:, None, :, None]  # (B, 1 or H, L, S)
    distances = distances.expand(BATCH, HEADS, -1, -1)
    if isinstance(mask, ALiBi):
        return -bloom_slopes(HEADS).double()[:, None, None] * distances.abs()
    assert isinstance(mask, RelativeBias)
    chosen = T5Attention._relative_position_bucket(distances, mask.bidirectional, BUCKETS, DISTANCE)
    return torch.stack([mask.weight[chosen[:, h], h] for h in range(HEADS)], 1)


BIASES: dict[str, Callable[[], masks.Mask]] = {
    "ALiBi": lambda: ALiBi(HEADS),
    "T5": lambda: RelativeBias(HEADS, BUCKETS, DISTANCE).double(),
    "T5's decoder": lambda: RelativeBias(HEADS, BUCKETS, DISTANCE, bidirectional=False).double(),
}
PADDED = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, -1, 0, 1, 2]])
#: Positions of queries and keys; `None` counts from 0.
POSITIONS: dict[str, tuple[Tensor | None, Tensor | None]] = {
    "counted": (None, None),
    "shared": (torch.tensor([[9, 8, 3, 30, 4]]), torch.tensor([[0, 1, 2, 40, 4, 5, 6]])),
    "per item": (PADDED[:, 2:], PADDED),
    "one step": (torch.tensor([[6]]), None),
    "keys per head": (
        torch.arange(9, 14)[None],
        torch.arange(BATCH * HEADS * COUNT).view(BATCH, HEADS, COUNT) * 7 % 30,
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("positions", POSITIONS)
@pytest.mark.parametrize("name", BIASES)
@pytest.mark.usefixtures("small_blocks")
def test_outputs_and_gradients(name: str, positions: str, causal: bool) -> None:
    mask, tensors = BIASES[name](), inputs(length=1 if positions == "one step" else LENGTH)
    query_positions, key_positions = POSITIONS[positions]
    q = torch.arange(LENGTH)[None] if query_positions is None else query_positions
    k = torch.arange(COUNT)[None] if key_positions is None else key_positions
    k = k if k.dim() == 3 else k[:, None]
    visible = k[:, :, None] <= q[:, None, :, None] if causal else torch.ones(1, 1, 1, 1, dtype=torch.bool)
    leaves = [*tensors, *mask.bias_tensors()]
    with clearhead.use_kernel("reference"):
        expected = clearhead.attention(*tensors, masks.bias(numbers(mask, q, k)) & masks.keep(visible))
    upstream = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, leaves, upstream)
    for kernel in ("reference", "chunked"):
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(
                *tensors,
                mask & masks.causal() if causal else mask,
                query_positions=query_positions,
                key_positions=key_positions,
            )
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        torch.testing.assert_close(torch.autograd.grad(output, leaves, upstream), gradients, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", ["twice the same", "with ALiBi", "with a tensor"])
@pytest.mark.usefixtures("small_blocks")
def test_biases_add(name: str) -> None:
    tensors, mask = inputs(), RelativeBias(HEADS, BUCKETS, DISTANCE).double()
    added = torch.randn(HEADS, LENGTH, COUNT, dtype=torch.float64, requires_grad=True)
    combined = {
        "twice the same": mask & mask,
        "with ALiBi": ALiBi(HEADS) & mask & masks.sliding_window(3, 2),
        "with a tensor": masks.bias(added[None]) & mask,
    }[name]
    leaves = [*tensors, mask.weight, *([added] if name == "with a tensor" else [])]
    results = []
    for kernel in ("reference", "chunked"):
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(*tensors, combined)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=0, atol=1e-10)


@pytest.mark.parametrize("mask", [ALiBi(1), RelativeBias(1, BUCKETS, DISTANCE)], ids=["ALiBi", "T5"])
def test_pytorchs_kernel_takes_one_head_without_gradients(mask: masks.Mask) -> None:
    query, key = torch.randn(BATCH, 1, LENGTH, 8), torch.randn(BATCH, 1, COUNT, 8)
    with torch.no_grad(), clearhead.use_kernel("sdpa"):
        fused = clearhead.attention(query, key, key, mask)
    with torch.no_grad(), clearhead.use_kernel("reference"):
        torch.testing.assert_close(fused, clearhead.attention(query, key, key, mask))


def test_float32_gradients_of_many_scores_keep_their_digits() -> None:
    tensors = [torch.randn(1, 3, 700, 8, requires_grad=True) for _ in range(3)]
    mask = RelativeBias(3, BUCKETS, DISTANCE)
    exact = copy.deepcopy(mask).double()
    upstream = torch.randn(1, 3, 700, 8)
    with clearhead.use_kernel("chunked"):
        (gradient,) = torch.autograd.grad(clearhead.attention(*tensors, mask), mask.weight, upstream)
        output = clearhead.attention(*(tensor.double() for tensor in tensors), exact)
        (expected,) = torch.autograd.grad(output, exact.weight, upstream.double())
    torch.testing.assert_close(gradient.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_in_half_precision(dtype: torch.dtype) -> None:
    tensors, mask = inputs(torch.float32), RelativeBias(HEADS, BUCKETS, DISTANCE)
    rounded = copy.deepcopy(mask).to(dtype)
    with torch.no_grad():
        mask.weight.copy_(rounded.weight)
    torch.testing.assert_close(clearhead.attention(*tensors, rounded), clearhead.attention(*tensors, mask))
    clearhead.attention(*tensors, rounded).sum().backward()
    assert rounded.weight.grad.dtype == dtype


MOVES = {
    "deep copy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "to and back": lambda module: copy.deepcopy(module).to(torch.float64).to(torch.float32),
}


@pytest.mark.parametrize("move", MOVES)
def test_copies_of_a_model_keep_its_biases(move: str) -> None:
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE)
    moved = MOVES[move](nn.Sequential(mask))[0]
    assert moved.weight is not mask.weight
    assert torch.equal(moved.dense(COUNT), mask.dense(COUNT))


def test_a_model_made_on_meta_gets_its_buckets_with_its_memory() -> None:
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE, device="meta")
    assert mask.dense(5).device.type == "meta"
    mask = mask.to_empty(device="cpu")
    trained = RelativeBias(HEADS, BUCKETS, DISTANCE)
    assert {name: tuple(value.shape) for name, value in trained.state_dict().items()} == {"weight": (BUCKETS, HEADS)}
    mask.load_state_dict(trained.state_dict())
    assert torch.equal(mask.dense(LENGTH), trained.dense(LENGTH))


def test_they_are_shown_as_modules_and_as_masks() -> None:
    mask = RelativeBias(HEADS, bidirectional=False)
    text = "RelativeBias(num_heads=6, num_buckets=32, max_distance=128, bidirectional=False)"
    assert repr(mask) == mask.describe() == text
    assert repr(nn.Sequential(mask)) == f"Sequential(\n  (0): {text}\n)"
    assert repr(mask & masks.causal()).startswith(f"<mask {text} & causal()")
    assert repr(ALiBi(HEADS) & masks.causal()).startswith("<mask ALiBi(6) & causal(), item")


@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_all_steps() -> None:
    mask, counter = ALiBi(HEADS) & RelativeBias(HEADS) & masks.causal(), CompileCounter()

    def attend(query: Tensor, key: Tensor, position: int) -> Tensor:
        return clearhead.attention(query, key, key, mask, query_positions=torch.arange(1) + position)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    key = torch.randn(BATCH, KV_HEADS, 23, HEAD_DIM)
    with torch.no_grad():
        for position in range(3, 8):
            query = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
            torch.testing.assert_close(compiled(query, key, position), attend(query, key, position))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_reach_the_table_through_a_compiled_graph() -> None:
    mask, tensors = RelativeBias(HEADS, BUCKETS, DISTANCE), inputs(torch.float32)

    def loss() -> Tensor:
        return clearhead.attention(*tensors, mask & masks.causal()).square().sum()

    (expected,) = torch.autograd.grad(loss(), mask.weight)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (gradient,) = torch.autograd.grad(compiled(), mask.weight)
    torch.testing.assert_close(gradient, expected)
