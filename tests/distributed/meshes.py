"""Meshes of the processes of a test, made once in each process: making one is a collective of its own."""

from __future__ import annotations

from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["line", "square"]


@cache
def line() -> DeviceMesh:
    """All processes in one dimension."""
    return init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("cp",))


@cache
def square() -> DeviceMesh:
    """Four processes as 2 × 2."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "tp"))
