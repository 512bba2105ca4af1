"""Two processes whose devices share a sequence: their kernels stay fused, and no call waits for a device."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead import masks
from clearhead.distributed import context_parallel, gather_sequence, shard_sequence
from clearhead.masks import Mask
from tests.support.pretended_cuda.mode import PretendedDevice

E, H, L = 128, 4, 80
VARLEN = {"flash, variable lengths"}
#: Where the two processes meet. The first one starts the second one, which finds this in its environment.
STORE = "PRETENDED_STORE"


@pytest.fixture(name="mesh", scope="module")
def _mesh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceMesh]:
    store = os.environ.get(STORE) or str(tmp_path_factory.mktemp("group") / "store")
    first, other = STORE not in os.environ, None
    if first:
        options = ["-n", "0", "-q", "-p", "no:cacheprovider", "-p", "tests.support.pretended_cuda.plugin"]
        command = [sys.executable, "-m", "pytest", *options, str(Path(__file__))]
        other = subprocess.Popen(command, env={**os.environ, STORE: store}, stdout=subprocess.PIPE, text=True)
    where: Any = {"store": dist.FileStore(store, 2), "rank": int(not first), "world_size": 2}
    dist.init_process_group("gloo", timeout=timedelta(seconds=60), **where)
    group = cast(Any, dist.group.WORLD)
    yield DeviceMesh.from_group(group, "cuda", mesh=torch.arange(2), mesh_dim_names=("cp",))
    dist.destroy_process_group()
    if other is not None:
        output, _ = other.communicate(timeout=60)
        assert other.returncode == 0, output


def module(device: str) -> Any:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(E, H).bfloat16().to(device).eval()


def tokens(device: str) -> Tensor:
    return torch.randn(2, L, E, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)


def nearly(got: Tensor, mask: Mask | None) -> bool:
    exact = module("cpu").float()(tokens("cpu").float(), mask=mask).detach()
    return float((got.cpu().float() - exact).abs().max()) <= 0.02 * float(exact.abs().max())


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(9, 3)], ids=["none", "causal", "window"])
@torch.no_grad()
def test_a_ring_keeps_a_fused_kernel(cuda: PretendedDevice, mesh: DeviceMesh, mask: Mask | None) -> None:
    attend = context_parallel(module("cuda"), mesh, method="ring")
    part = shard_sequence(tokens("cuda"), mesh)
    output = attend(part, mask=mask)
    seen = cuda.count(lambda: attend(part, mask=mask))
    assert set(seen.backends) == VARLEN
    assert seen.waits == []
    assert nearly(gather_sequence(output, mesh), mask)


@torch.no_grad()
def test_decoding_keeps_a_fused_kernel(cuda: PretendedDevice, mesh: DeviceMesh) -> None:
    attend, x = context_parallel(module("cuda"), mesh), tokens("cuda")
    cache = attend.make_cache(2, L)
    outputs = [attend(x[:, :70], mask=masks.causal(), cache=cache)]
    for position in range(70, L):
        token = x[:, position : position + 1]
        seen = cuda.count(lambda token=token: outputs.append(attend(token, mask=masks.causal(), cache=cache)))
        assert set(seen.backends) == VARLEN
        assert seen.waits == []
    assert nearly(torch.cat(outputs, 1), masks.causal())
