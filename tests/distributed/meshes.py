"""Meshes of the processes of a test, made once in each process: making one is a collective of its own."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["grid", "line", "square"]


@cache
def line() -> DeviceMesh:
    """All processes in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@cache
def grid(rows: int) -> DeviceMesh:
    """All processes in two dimensions, `rows` in the first."""
    return init_device_mesh("cpu", (rows, dist.get_world_size() // rows), mesh_dim_names=("cp", "tp"))


def square() -> DeviceMesh:
    """Four processes as 2 × 2."""
    return grid(2)
