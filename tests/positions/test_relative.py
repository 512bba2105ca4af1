"""Relative biases: T5's buckets and biases, gradients on every kernel, and the life of a module."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import T5Config
from transformers.models.t5.modeling_t5 import T5Attention

import clearhead
from clearhead import masks
from clearhead.positions import ALiBi, RelativeBias
from tests.support.oracle import Problem, gradients, solve
from tests.support.positions_oracle import bucket, weight_gradient

BATCH, HEADS, KV_HEADS, LENGTH, COUNT, HEAD_DIM = 2, 6, 3, 5, 7, 11
BUCKETS, DISTANCE = 8, 13

TABLES = [(32, 128), (8, 13), (16, 20), (32, 17), (64, 1000), (4, 3), (6, 40)]


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("num_buckets", "max_distance"), TABLES)
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


@pytest.mark.parametrize("bidirectional", [True, False])
def test_biases_are_those_of_t5(bidirectional: bool) -> None:
    config = T5Config(
        d_model=HEADS * 4,
        d_kv=4,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=DISTANCE,
        is_decoder=not bidirectional,
    )
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBias(HEADS, BUCKETS, DISTANCE, bidirectional)
    ours.load_state_dict(theirs.relative_attention_bias.state_dict())
    assert torch.equal(ours.dense(41), theirs.compute_bias(41, 41))
    step = ours.dense(1, 41, query_positions=torch.tensor([40]))
    assert torch.equal(step, theirs.compute_bias(1, 41, past_seen_tokens=40))


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH) -> tuple[Tensor, ...]:
    return (
        torch.randn(BATCH, HEADS, length, HEAD_DIM, dtype=dtype, requires_grad=True),
        torch.randn(BATCH, KV_HEADS, COUNT, HEAD_DIM, dtype=dtype, requires_grad=True),
        torch.randn(BATCH, KV_HEADS, COUNT, 3, dtype=dtype, requires_grad=True),
    )


#: Queries and keys: where the items of the batch stand; `None` counts from 0.
PLACES: dict[str, tuple[list[list[int]] | None, list[list[int]] | None]] = {
    "counted": (None, None),
    "one place for all": ([[9, 8, 3, 30, 4]], [[0, 1, 2, 40, 4, 5, 6]]),
    "a place per item": ([[2, 3, 4, 5, 6], [-1, -1, 0, 1, 2]], [[0, 1, 2, 3, 4, 5, 6], [-1, -1, -1, -1, 0, 1, 2]]),
    "a step": ([[6]], None),
}


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
@pytest.mark.usefixtures("small_blocks")
def test_outputs_and_gradients(kernel: str, places: str, causal: bool, bidirectional: bool) -> None:
    given_q, given_k = PLACES[places]
    length = 1 if places == "a step" else LENGTH
    rows = [
        row for row in given_q or [list(range(length))] for _ in range(1 if given_q and len(given_q) > 1 else BATCH)
    ]
    columns = [
        row for row in given_k or [list(range(COUNT))] for _ in range(1 if given_k and len(given_k) > 1 else BATCH)
    ]
    buckets = [
        [[bucket(k - q, BUCKETS, DISTANCE, bidirectional=bidirectional) for k in columns[b]] for q in rows[b]]
        for b in range(BATCH)
    ]
    tensors = inputs(length=length)
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE, bidirectional).double()
    table = torch.stack([mask.weight.detach()[torch.tensor(item)].permute(2, 0, 1) for item in buckets])
    answer = solve(Problem(*tensors, lambda b, h, i, j: not causal or columns[b][j] <= rows[b][i], (table,)))
    with clearhead.use_kernel(kernel):
        output = clearhead.attention(
            *tensors,
            mask & masks.causal() if causal else mask,
            query_positions=None if given_q is None else torch.tensor(given_q),
            key_positions=None if given_k is None else torch.tensor(given_k),
        )
    torch.testing.assert_close(output, answer.output, rtol=0, atol=1e-10)
    upstream = torch.randn_like(output)
    *found, weight = torch.autograd.grad(output, [*tensors, mask.weight], upstream)
    *expected, per_score = gradients(answer, upstream)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)
    torch.testing.assert_close(weight, weight_gradient(per_score, buckets, BUCKETS), rtol=0, atol=1e-10)


@pytest.mark.parametrize("bias", ["twice the same", "with ALiBi", "with a tensor"])
@pytest.mark.usefixtures("small_blocks")
def test_biases_add(bias: str) -> None:
    tensors = inputs()
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE).double()
    added = torch.randn(HEADS, LENGTH, COUNT, dtype=torch.float64, requires_grad=True)
    combined = {
        "twice the same": mask & mask,
        "with ALiBi": ALiBi(HEADS) & mask & masks.sliding_window(3, 2),
        "with a tensor": masks.bias(added[None]) & mask,
    }[bias]
    leaves = [*tensors, mask.weight, *([added] if bias == "with a tensor" else [])]
    results = []
    for kernel in ("reference", "chunked"):
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(*tensors, combined)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


@pytest.mark.usefixtures("small_blocks")
def test_keys_that_differ_between_heads() -> None:
    tensors = inputs()
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE).double()
    keys = torch.randint(0, 30, (BATCH, HEADS, COUNT))
    chosen = torch.tensor(
        [
            [
                [[bucket(k - q, BUCKETS, DISTANCE, bidirectional=True) for k in head] for q in range(9, 14)]
                for head in item
            ]
            for item in keys.tolist()
        ]
    )  # (B, H, L, S)
    table = torch.stack([mask.weight[chosen[:, h], h] for h in range(HEADS)], 1)
    expected = clearhead.attention(*tensors, masks.bias(table))
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, [*tensors, mask.weight], upstream)
    for kernel in ("reference", "chunked"):
        with clearhead.use_kernel(kernel):
            output = clearhead.attention(*tensors, mask, query_positions=torch.arange(9, 14), key_positions=keys)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-10)
        for one, other in zip(torch.autograd.grad(output, [*tensors, mask.weight], upstream), wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_pytorchs_kernel_takes_it_without_gradients() -> None:
    query, key = torch.randn(BATCH, 1, LENGTH, 8), torch.randn(BATCH, 1, COUNT, 8)
    mask = RelativeBias(1, BUCKETS, DISTANCE)
    with torch.no_grad():
        with clearhead.use_kernel("sdpa"):
            fused = clearhead.attention(query, key, key, mask)
        with clearhead.use_kernel("reference"):
            torch.testing.assert_close(fused, clearhead.attention(query, key, key, mask))


def test_float32_gradients_of_many_scores_keep_their_digits() -> None:
    length = 700
    tensors = [torch.randn(1, 3, length, 8, requires_grad=True) for _ in range(3)]
    mask = RelativeBias(3, BUCKETS, DISTANCE)
    exact = copy.deepcopy(mask).double()
    upstream = torch.randn(1, 3, length, 8)
    with clearhead.use_kernel("chunked"):
        (found,) = torch.autograd.grad(clearhead.attention(*tensors, mask), mask.weight, upstream)
        output = clearhead.attention(*(tensor.double() for tensor in tensors), exact)
        (expected,) = torch.autograd.grad(output, exact.weight, upstream.double())
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_table_in_half_precision(dtype: torch.dtype) -> None:
    tensors = inputs(torch.float32)
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE)
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
def test_what_is_done_to_a_model(move: str) -> None:
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE)
    moved = MOVES[move](nn.Sequential(mask))[0]
    assert moved.weight is not mask.weight
    assert torch.equal(moved.dense(COUNT), mask.dense(COUNT))


def test_a_model_made_on_meta_gets_its_buckets_with_its_memory() -> None:
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE, device="meta").to_empty(device="cpu")
    trained = RelativeBias(HEADS, BUCKETS, DISTANCE)
    mask.load_state_dict(trained.state_dict())
    assert torch.equal(mask.dense(LENGTH), trained.dense(LENGTH))


def test_the_state_is_the_weight_alone() -> None:
    mask = RelativeBias(HEADS)
    assert {name: tuple(value.shape) for name, value in mask.state_dict().items()} == {"weight": (32, HEADS)}
    assert [name for name, _ in mask.named_parameters()] == ["weight"]


def test_it_learns_where_to_look() -> None:
    """The key three places back, from content that says nothing."""
    mask = RelativeBias(1, 16, 20, bidirectional=False)
    value = torch.randn(1, 1, 31, 4)
    nothing = torch.zeros(1, 1, 31, 4)
    optimiser = torch.optim.Adam(mask.parameters(), lr=0.3)
    for _ in range(100):
        output = clearhead.attention(nothing, nothing, value, mask & masks.causal())
        loss = (output[:, :, 3:] - value[:, :, :-3]).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert loss < 0.01
    assert int(mask.weight.argmax()) == 3


def test_it_is_shown_as_a_module_and_as_a_mask() -> None:
    mask = RelativeBias(HEADS, bidirectional=False)
    text = "RelativeBias(num_heads=6, num_buckets=32, max_distance=128, bidirectional=False)"
    assert repr(mask) == text
    assert mask.describe() == text
    assert repr(nn.Sequential(mask)) == f"Sequential(\n  (0): {text}\n)"
    assert repr(mask & masks.causal()).startswith(f"<mask {text} & causal()")


@pytest.mark.parametrize("make", [ALiBi, RelativeBias])
@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_all_steps(make: type) -> None:
    mask, counter = make(HEADS), CompileCounter()

    def attend(query: Tensor, key: Tensor, position: int) -> Tensor:
        positions = torch.arange(1) + position
        return clearhead.attention(query, key, key, mask & masks.causal(), query_positions=positions)

    compiled = torch.compile(attend, backend=counter, fullgraph=True)
    key = torch.randn(BATCH, KV_HEADS, 23, HEAD_DIM)
    with torch.no_grad():
        for position in range(3, 8):
            query = torch.randn(BATCH, HEADS, 1, HEAD_DIM)
            torch.testing.assert_close(compiled(query, key, position), attend(query, key, position))
    assert counter.frame_count <= 2


@pytest.mark.usefixtures("fresh_compiler")
def test_gradients_reach_the_table_through_a_compiled_graph() -> None:
    mask = RelativeBias(HEADS, BUCKETS, DISTANCE)
    tensors = inputs(torch.float32)

    def loss() -> Tensor:
        return clearhead.attention(*tensors, mask & masks.causal()).square().sum()

    (expected,) = torch.autograd.grad(loss(), mask.weight)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    (found,) = torch.autograd.grad(compiled(), mask.weight)
    torch.testing.assert_close(found, expected)
