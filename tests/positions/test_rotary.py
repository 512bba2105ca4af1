"""Rotary positions: the angles, the rotated features, the forms of positions, and exactness at any dtype."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.export import Dim, export

from clearhead.positions import DynamicNTKScaling, LinearScaling, Rotary, Scaling, YarnScaling
from tests.support.positions_oracle import BATCH, HEAD_DIM, HEADS, KV_HEADS, frequencies, states, turn

LENGTH = 7
FRACTIONS = {22: 1.0, 14: 14 / 22, 2: 2 / 22}

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def require_equal(turned: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    torch.testing.assert_close(turned, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("size", FRACTIONS)
def test_it_turns_pairs_as_complex_numbers(size: int, interleaved: bool, dtype: torch.dtype) -> None:
    q, k = states(LENGTH, dtype)
    positions = torch.randint(0, 40, (BATCH, LENGTH))
    rotary = Rotary(HEAD_DIM, base=500.0, fraction=FRACTIONS[size], interleaved=interleaved)
    for x, turned in zip((q, k), rotary(q, k, positions), strict=True):
        expected = turn(x, positions, frequencies(500.0, size), interleaved=interleaved)
        assert turned.dtype == dtype
        torch.testing.assert_close(turned.double(), expected, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_positions_come_as_a_start_a_list_or_a_list_per_item(dtype: torch.dtype) -> None:
    q, k = states(LENGTH)
    rotary = Rotary(HEAD_DIM)
    expected = rotary(q, k, 11)
    counted = torch.arange(11, 11 + LENGTH, dtype=dtype)
    for positions in (counted, counted[None], counted.expand(BATCH, LENGTH)):
        require_equal(rotary(q, k, positions), expected)


def test_left_padded_tokens_are_marked_by_minus_one_and_disturb_nobody() -> None:
    q, k = states(LENGTH)
    rotary = Rotary(HEAD_DIM)
    positions = torch.tensor([[-1, -1, -1, 0, 1, 2, 3], [-1, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 5, 6]])
    turned, _ = rotary(q, k, positions)
    assert torch.equal(turned[0, :, :3], q[0, :, :3])  # as at position 0: not turned, so finite where q is
    alone, _ = rotary(q[:1, :, 3:], k[:1, :, 3:], 0)
    torch.testing.assert_close(turned[:1, :, 3:], alone)


def test_no_position_is_too_long() -> None:
    q, k = states(LENGTH, torch.float64)
    far = 3_000_017
    turned, _ = Rotary(HEAD_DIM)(q, k, far)
    expected = turn(q, torch.arange(far, far + LENGTH).expand(BATCH, -1), frequencies(10000.0, HEAD_DIM))
    # The angle itself, 3e6 radians, is known to 3e6 · 2⁻⁵³.
    torch.testing.assert_close(turned, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("scaling", [None, DynamicNTKScaling(2.0, 11)])
def test_no_token(scaling: Scaling | None) -> None:
    q, k = states(0)
    require_equal(Rotary(HEAD_DIM, scaling=scaling)(q, k, 5), (q, k))


def test_strided_inputs() -> None:
    q = torch.randn(BATCH, LENGTH, HEADS, HEAD_DIM).transpose(1, 2)
    k = torch.randn(HEAD_DIM, LENGTH, KV_HEADS, BATCH).permute(3, 2, 1, 0)
    rotary = Rotary(HEAD_DIM, interleaved=True)
    torch.testing.assert_close(rotary(q, k, 3), rotary(q.contiguous(), k.contiguous(), 3))


@pytest.mark.parametrize("interleaved", [False, True])
def test_gradients(interleaved: bool) -> None:
    q, k = (torch.randn(1, heads, 2, 6, dtype=torch.float64, requires_grad=True) for heads in (2, 1))
    rotary = Rotary(6, fraction=0.7, interleaved=interleaved)
    assert torch.autograd.gradgradcheck(lambda q, k: rotary(q, k, 7), (q, k))
    assert torch.autograd.gradcheck(lambda q, k: rotary(q, k, 7), (q, k))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_turned_in_float32_and_rounded_once(dtype: torch.dtype) -> None:
    q, k = states(LENGTH, dtype)
    rotary = Rotary(HEAD_DIM)
    turned, _ = rotary(q, k, 1000)
    exact, _ = rotary(q.float(), k.float(), 1000)
    assert turned.dtype == dtype
    assert torch.equal(turned, exact.to(dtype))


MOVES = {
    "to bfloat16": lambda module: module.to(torch.bfloat16),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "there and back": lambda module: module.to(torch.bfloat16).float(),
    "by way of meta": lambda module: module.to("meta").to_empty(device="cpu"),
    "deep copy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
}


@pytest.mark.parametrize("scaling", [None, LinearScaling(3.0)])
@pytest.mark.parametrize("move", MOVES)
def test_frequencies_survive_what_is_done_to_a_model(move: str, scaling: LinearScaling | None) -> None:
    q, k = states(LENGTH)
    expected = Rotary(HEAD_DIM, scaling=scaling)(q, k, 4001)
    model = MOVES[move](nn.Sequential(nn.Linear(2, 3), Rotary(HEAD_DIM, scaling=scaling)))
    require_equal(model[1](q, k, 4001), expected)


def test_a_model_made_on_meta_gets_its_frequencies_with_its_memory() -> None:
    with torch.device("meta"):
        rotary = Rotary(HEAD_DIM)
    assert rotary.frequencies.is_meta
    q, k = states(LENGTH)
    assert torch.equal(rotary.to_empty(device="cpu")(q, k, 9)[0], Rotary(HEAD_DIM)(q, k, 9)[0])


def test_there_is_nothing_to_learn_or_to_store() -> None:
    rotary = Rotary(HEAD_DIM)
    assert list(rotary.parameters()) == []
    assert rotary.state_dict() == {}
    rotary.load_state_dict({})


def test_autocast_changes_nothing() -> None:
    q, k = states(LENGTH)
    rotary = Rotary(HEAD_DIM, interleaved=True)
    expected = rotary(q, k, 3001)
    with torch.autocast("cpu", torch.bfloat16):
        require_equal(rotary(q, k, 3001), expected)


def test_vmap_over_positions() -> None:
    q, k = states(LENGTH)
    rotary = Rotary(HEAD_DIM)
    starts = torch.tensor([0, 5, 9])
    counted = starts[:, None] + torch.arange(LENGTH)
    mapped, _ = torch.func.vmap(lambda q, k, p: tuple(x[0] for x in rotary(q[None], k[None], p)))(q, k, counted)
    torch.testing.assert_close(mapped, rotary(q, k, counted)[0])


def test_it_says_what_it_is() -> None:
    assert repr(Rotary(64)) == "Rotary(head_dim=64, base=10000)"
    described = repr(Rotary(64, base=5e5, fraction=0.25, interleaved=True, scaling=LinearScaling(2.0)))
    assert described == (
        "Rotary(head_dim=64, base=500000, fraction=0.25, interleaved=True, scaling=LinearScaling(factor=2.0))"
    )


# In a traced graph: one graph for all positions and lengths, with the same numbers.


#: Every option once, because each variant is several graphs.
VARIANTS = {
    "plain": Rotary(HEAD_DIM),
    "interleaved, linear": Rotary(HEAD_DIM, interleaved=True, scaling=LinearScaling(2.0)),
    "dynamic": Rotary(HEAD_DIM, scaling=DynamicNTKScaling(2.0, 11)),
    "partial, yarn": Rotary(HEAD_DIM, fraction=14 / 22, scaling=YarnScaling(8.0, 11)),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("fresh_compiler")
def test_growing_positions_need_one_graph_as_tensors_and_two_at_most_as_ints(variant: str) -> None:
    rotary, counter = VARIANTS[variant], CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True)
    for position in range(3, 15):
        q, k = states(1)
        for given in (torch.tensor([[-1], [position], [position]]), position):
            torch.testing.assert_close(compiled(q, k, given), rotary(q, k, given))
    assert counter.frame_count <= 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.usefixtures("fresh_compiler")
def test_one_graph_for_all_lengths(dtype: torch.dtype) -> None:
    rotary, counter = VARIANTS["plain"], CompileCounter()
    compiled = torch.compile(rotary, backend=counter, fullgraph=True, dynamic=True)
    for length in (13, 17, 23):
        q, k = states(length, dtype)
        torch.testing.assert_close(compiled(q, k, 4), rotary(q, k, 4), rtol=0, atol=100 * torch.finfo(dtype).eps)
    assert counter.frame_count == 1


class Turning(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, q: Tensor, k: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rotary(q, k, positions)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.usefixtures("fresh_compiler")
def test_export_with_an_open_length(variant: str) -> None:
    length = Dim("length", min=2, max=1000)
    module, (q, k) = Turning(VARIANTS[variant]), states(5)
    shapes = {"q": {2: length}, "k": {2: length}, "positions": {1: length}}
    program = export(module, (q, k, torch.arange(5).expand(BATCH, -1)), dynamic_shapes=shapes)
    q, k = states(23)
    positions = torch.arange(23).expand(BATCH, -1) - 1
    torch.testing.assert_close(program.module()(q, k, positions), module(q, k, positions))
