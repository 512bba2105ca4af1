"""Parts of a sequence: which positions they hold, that they make the whole again, and their gradients."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import clearhead.distributed._collectives
from clearhead.distributed import gather_sequence, shard_sequence
from clearhead.distributed._layout import LAYOUTS, Layout, Shards
from clearhead.errors import ArgumentError, ClearheadError, DTypeError

from .building import collectives
from .meshes import line, square
from .processes import Processes

LENGTHS = (0, 1, 3, 8, 13, 64)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("length", LENGTHS)
def test_parts_are_those_of_tensor_split(length: int, world: int) -> None:
    whole = torch.arange(length)
    contiguous, zigzag = (Shards(length, world, layout) for layout in LAYOUTS)
    halves = whole.tensor_split(2 * world)
    for rank in range(world):
        assert torch.equal(contiguous.take(whole, 0, rank), whole.tensor_split(world)[rank])
        expected = torch.cat((halves[rank], halves[2 * world - 1 - rank]))
        assert torch.equal(zigzag.take(whole, 0, rank), expected)
        assert torch.equal(zigzag.positions(rank, torch.device("cpu")), expected)
        assert zigzag.lengths[rank] == len(expected)
    for parts in (contiguous, zigzag):
        assert torch.equal(parts.join([parts.take(whole, 0, rank) for rank in range(world)], 0), whole)


def test_the_last_process_of_a_zigzag_holds_one_run() -> None:
    assert Shards(16, 2, "zigzag").intervals[1] == (slice(4, 12),)


def _around(length: int, layout: Layout, dim: int, dtype: torch.dtype) -> None:
    """A whole sequence and the sum of all processes' losses, in parts and on one process."""
    mesh, world = line(), dist.get_world_size()
    sizes = [3, 2, 5]
    sizes[dim] = length
    whole = torch.randn(sizes, dtype=dtype, requires_grad=True)
    factors = torch.randn(world, *sizes, dtype=dtype)  # every process weighs the gathered sequence in its own way
    part = shard_sequence(whole, mesh, dim=dim, layout=layout)
    again = gather_sequence(part.square(), mesh, dim=dim, layout=layout)
    assert torch.equal(again, whole.square())
    assert again.is_contiguous()
    (again.neg_() * factors[dist.get_rank()]).sum().backward()  # written to in place, as any tensor
    expected = -2 * whole.detach() * factors.double().sum(0).to(dtype)
    parts = Shards(length, world, layout)
    assert whole.grad is not None
    found = parts.take(whole.grad, dim, dist.get_rank())
    torch.testing.assert_close(found, parts.take(expected, dim, dist.get_rank()))
    assert torch.count_nonzero(whole.grad) <= found.numel()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("length", "dim"), [(64, 1), (13, 1), (2, -1), (0, 1), (7, 0)])
def test_what_is_cut_is_gathered_again_and_so_are_gradients(
    two: Processes, length: int, dim: int, layout: Layout
) -> None:
    two.run(_around, length, layout, dim, torch.float64)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_with_four_processes_and_fewer_positions(four: Processes, layout: Layout) -> None:
    for length in (3, 5, 9):
        four.run(_around, length, layout, 1, torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_dtypes(two: Processes, dtype: torch.dtype) -> None:
    two.run(_around, 11, "zigzag", 1, dtype)


def _as_other_devices(layout: Layout) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clearhead.distributed._collectives, "GLOO_DEVICE", "none")
        counted = collectives(lambda: _around(13, layout, 1, torch.float64))
        assert counted["allgather_base"] >= 1
        assert counted["reduce_scatter_base"] == 1
        _around(2, layout, 1, torch.bfloat16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_collectives_of_other_devices_than_the_cpu(three: Processes, layout: Layout) -> None:
    three.run(_as_other_devices, layout)


def _whole_numbers() -> None:
    tokens = torch.arange(22).view(2, 11)
    for dtype in (torch.int64, torch.int32, torch.bool):
        part = shard_sequence(tokens.to(dtype), line())
        assert torch.equal(gather_sequence(part, line()), tokens.to(dtype))


def test_token_ids_are_gathered_too(two: Processes) -> None:
    two.run(_whole_numbers)


def _refused(name: str) -> str:
    """One wrong argument, on the last process alone; what each process says."""
    mesh, x = line(), torch.zeros(2, 4, 3)
    wrong = dist.get_rank() == dist.get_world_size() - 1
    arguments: dict[str, object] = {"tensor": x, "mesh": mesh, "dim": 1, "layout": "contiguous"}
    others = {
        "mesh": ("mesh", None),
        "dim": ("dim", 3),
        "layout": ("layout", "spiral"),
        "tensor": ("tensor", [1.0]),
        "dtype": ("tensor", x.double()),
        "shape": ("tensor", torch.zeros(1, 4, 3)),
        "length": ("tensor", torch.zeros(2, 7, 3)),
        "another layout": ("layout", "zigzag"),
    }
    if wrong:
        arguments[others[name][0]] = others[name][1]
    with pytest.raises(ClearheadError) as caught:
        gather_sequence(arguments.pop("tensor"), arguments.pop("mesh"), **arguments)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mesh", "mesh: expected a DeviceMesh, got NoneType"),
        ("dim", "dim: expected an int from -3 to 2"),
        ("layout", "layout: expected 'contiguous' or 'zigzag', got 'spiral'"),
        ("tensor", "tensor: expected"),
        ("dtype", "gather_sequence: dtype: expected the same in every process"),
        ("shape", "gather_sequence: shape: expected the same in every process"),
        ("length", "as shard_sequence cuts them"),
        ("another layout", "gather_sequence: layout: expected the same in every process"),
    ],
)
def test_what_is_wrong_on_one_process_is_refused_on_all(two: Processes, name: str, said: str) -> None:
    for message in two.run(_refused, name):
        assert said in message


def _square_mesh() -> None:
    with pytest.raises(
        ArgumentError, match=r'mesh: expected one dimension, got 2. Take one dimension of it, as mesh\["cp"\]'
    ):
        shard_sequence(torch.zeros(2, 3), square())
    with pytest.raises(DTypeError, match="tensor: expected"):
        shard_sequence([1], square()["cp"])  # type: ignore[arg-type]
    part = shard_sequence(torch.arange(8).view(1, 8), square()["cp"])
    assert part[0, 0] == 4 * square()["cp"].get_local_rank()


def test_a_mesh_of_two_dimensions_and_one_of_them(four: Processes) -> None:
    four.run(_square_mesh)
