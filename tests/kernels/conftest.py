"""The kernels that take every call, one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest

import clearhead


@pytest.fixture(name="kernel", params=["chosen", "chunked", "reference"])
def _kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    with nullcontext() if request.param == "chosen" else clearhead.use_kernel(request.param):
        yield
