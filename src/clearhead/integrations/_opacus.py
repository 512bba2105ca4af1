"""Opacus looks modules up by their class: what it says of PyTorch's attention holds for Clearhead's."""

from __future__ import annotations

import sys

from torch import nn

from ..nn._multihead_attention import MultiheadAttention


def register_with_opacus() -> None:
    """Let `ModuleValidator`, if Opacus is imported, report and replace Clearhead's attention as it does PyTorch's."""
    library = sys.modules.get("opacus.validators.module_validator")
    if library is None:
        return
    for registry in (library.ModuleValidator.VALIDATORS, library.ModuleValidator.FIXERS):
        if nn.MultiheadAttention in registry:
            registry.setdefault(MultiheadAttention, registry[nn.MultiheadAttention])
