"""The processes of a mesh of devices agree on the host, so that no call waits for a device."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead.distributed import context_parallel, tensor_parallel
from clearhead.errors import DTypeError


@pytest.mark.parametrize("split", [context_parallel, tensor_parallel])
@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("backend", ["gloo", "fake"])
def test_processes_of_a_mesh_of_devices_agree_over_gloo(backend: str, default: str, split: Any) -> None:
    """There is no CUDA device here. The backend "fake" stands for one that exchanges tensors of a device only."""
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh.from_group(cast(Any, dist.group.WORLD), "cuda")
        with torch.device(default):
            split(clearhead.MultiHeadAttention(12, 4), mesh)
            with pytest.raises(DTypeError, match="module: expected a MultiHeadAttention"):
                split(nn.Linear(2, 2), mesh)
    finally:
        dist.destroy_process_group()
