"""Calls of these tests are small, and small calls are PyTorch's own."""

from __future__ import annotations

import pytest

from clearhead.backend import _sdpa


def compute_small_calls(patch: pytest.MonkeyPatch, forward: float = 0, backward: float = 0) -> None:
    """Let Clearhead's kernel compute calls from these sizes on, which is every size."""
    least = _sdpa._Least(forward, forward, forward, backward, backward)
    patch.setattr(_sdpa, "_LEAST", dict.fromkeys(_sdpa._LEAST, least))
