"""Parts of a sequence: which positions they hold, that they make the whole again, and their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from clearhead.distributed import gather_sequence, shard_sequence
from clearhead.errors import ArgumentError, DTypeError

from .building import collectives, layouts, refuses
from .processes import in_processes, line, square


@in_processes(2, 3, 4)
def test_parts_are_those_of_tensor_split() -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    for length in (0, 1, 3, 8, 13, 64):
        whole = torch.arange(length)
        halves = whole.tensor_split(2 * world)
        pair = torch.cat((halves[rank], halves[2 * world - 1 - rank]))
        for layout, expected in (("contiguous", whole.tensor_split(world)[rank]), ("zigzag", pair)):
            assert torch.equal(shard_sequence(whole, line(), dim=0, layout=layout), expected)  # type: ignore[arg-type]
    last = shard_sequence(whole, line(), dim=0, layout="zigzag")
    is_view = last.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert is_view == (rank == world - 1)  # its two parts follow one another


def _around(length: int, layout: Any, dim: int, dtype: torch.dtype) -> None:
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
    assert whole.grad is not None
    found, own = (shard_sequence(x, mesh, dim=dim, layout=layout) for x in (whole.grad, expected))
    torch.testing.assert_close(found, own)
    assert torch.count_nonzero(whole.grad) <= found.numel()


@in_processes(2, 4)
@layouts
def test_what_is_cut_is_gathered_again_and_so_are_gradients(layout: Any) -> None:
    for length, dim in ((64, 1), (13, 1), (9, 1), (5, 1), (3, 1), (2, -1), (0, 1), (7, 0)):
        _around(length, layout, dim, torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        _around(11, layout, 1, dtype)
    for dtype in (torch.int64, torch.int32, torch.bool):
        tokens = torch.arange(22).view(2, 11).to(dtype)
        part = shard_sequence(tokens, line(), layout=layout)
        assert torch.equal(gather_sequence(part, line(), layout=layout), tokens)


@in_processes(3)
@layouts
def test_the_collectives_of_other_devices_than_the_cpu(layout: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("clearhead.distributed._collectives.GLOO_DEVICE", "none")
        counted = collectives(lambda: _around(13, layout, 1, torch.float64))
        assert counted["allgather_base"] >= 1
        assert counted["reduce_scatter_base"] == 1
        _around(2, layout, 1, torch.bfloat16)


_X = torch.zeros(2, 4, 3)
#: A wrong argument of one process, and what all of them say.
WRONG: list[tuple[str, Any, str]] = [
    ("mesh", None, "mesh: expected a DeviceMesh, got NoneType"),
    ("dim", 0.5, "dim: expected"),
    ("dim", 3, "dim: expected an int from -3 to 2"),
    ("layout", "spiral", "layout: expected 'contiguous' or 'zigzag', got 'spiral'"),
    ("layout", "zigzag", "gather_sequence: layout: expected the same in every process"),
    ("tensor", [1.0], "tensor: expected"),
    ("tensor", torch.zeros(()), "tensor: expected a dimension to cut, got a tensor of none"),
    ("tensor", _X.double(), "gather_sequence: dtype: expected the same in every process"),
    ("tensor", torch.zeros(1, 4, 3), "gather_sequence: shape: expected the same in every process"),
    ("tensor", torch.zeros(2, 7, 3), "as shard_sequence cuts them"),
]


@in_processes(2)
def test_what_is_wrong_on_one_process_is_refused_on_all() -> None:
    """The last process alone has it."""
    for name, value, said in WRONG:
        arguments: dict[str, Any] = {"tensor": _X, "mesh": line(), "dim": 1, "layout": "contiguous"}
        with refuses(said):
            gather_sequence(**(arguments | ({name: value} if dist.get_rank() == 1 else {})))


@in_processes(4)
def test_a_mesh_of_two_dimensions_and_one_of_them() -> None:
    with refuses('mesh: expected one dimension, got 2. Take one dimension of it, as mesh["cp"]', ArgumentError):
        shard_sequence(torch.zeros(2, 3), square())
    with refuses("tensor: expected", DTypeError):
        shard_sequence([1], square()["cp"])  # type: ignore[arg-type]
    part = shard_sequence(torch.arange(8).view(1, 8), square()["cp"])
    assert part[0, 0] == 4 * square()["cp"].get_local_rank()
