"""The processes of a mesh of devices agree on the host, so that no call waits for a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg

from clearhead.distributed._agreement import agree, group_for_agreements
from clearhead.errors import ArgumentError


@pytest.fixture(params=["gloo", "fake"])
def group(request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """A group of one process. The backend "fake" stands for one that exchanges tensors of a device only."""
    dist.init_process_group(request.param, store=dist.HashStore(), rank=0, world_size=1)
    yield cast(Any, dist.group.WORLD)
    dist.destroy_process_group()


def test_facts_of_a_mesh_of_devices_pass_over_gloo(group: dist.ProcessGroup) -> None:
    # There is no CUDA device here, so that a record on it would raise.
    assert agree("here", group, "cuda", {"length": 7, "heads": -3}) == [{"length": 7, "heads": -3}]
    assert dist.get_backend(group_for_agreements(group, "cuda")) == "gloo"
    with pytest.raises(ArgumentError, match="query"):
        agree("here", group, "cuda", ArgumentError("query", expected="another", got="this"))


def test_a_default_device_does_not_move_the_record(group: dist.ProcessGroup) -> None:
    torch.set_default_device("meta")
    try:
        assert agree("here", group, "cuda", {"length": 7}) == [{"length": 7}]
    finally:
        torch.set_default_device(None)
