"""A pytest plugin, ``-p tests.support.pretended_cuda.plugin``: PyTorch starts with the pretended device."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.pretended_cuda.build import load

load()  # before PyTorch is imported

from tests.support.pretended_cuda.mode import connect  # noqa: E402

if TYPE_CHECKING:
    from tests.support.pretended_cuda.mode import PretendedDevice

_mode = connect(int(os.environ.get("PRETENDED_CAPABILITY", "9")))


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[PretendedDevice]:
    """The pretended device, which is on during the test."""
    # Its own dispatch mode is not one that calls have to heed.
    monkeypatch.setattr("clearhead._environment.dispatch_modes", lambda: 0)
    with _mode:
        yield _mode
