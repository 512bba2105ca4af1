"""The processes of each world size, started once for a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import cache

import pytest

from .processes import Groups, processes


@pytest.fixture(scope="module", name="groups")
def _groups() -> Iterator[Groups]:
    with ExitStack() as stack:
        yield cache(lambda count: stack.enter_context(processes(count)))
