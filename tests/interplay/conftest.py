"""The process group of the tools that need one is closed after each file: other tests open their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

from .tools.parallel import close_group


@pytest.fixture(autouse=True, scope="module")
def _closed_group() -> Iterator[None]:
    yield
    close_group()
    assert not dist.is_initialized()
