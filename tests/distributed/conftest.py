"""The processes of each world size, started once for a file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .processes import Processes, processes


@pytest.fixture(scope="module", name="two")
def _two() -> Iterator[Processes]:
    with processes(2) as found:
        yield found


@pytest.fixture(scope="module", name="three")
def _three() -> Iterator[Processes]:
    with processes(3) as found:
        yield found


@pytest.fixture(scope="module", name="four")
def _four() -> Iterator[Processes]:
    with processes(4) as found:
        yield found
