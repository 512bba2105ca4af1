"""Calls of every size reach Clearhead's kernel here, and the kernel is active in each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import clearhead
import clearhead._native

if clearhead._native.extension is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def active(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Clearhead behind PyTorch's names, for small calls too."""
    from tests.backend.small_calls import compute_small_calls

    compute_small_calls(monkeypatch)
    with clearhead.activate():
        yield
    assert torch.nn.attention.current_flash_attention_impl() is None
