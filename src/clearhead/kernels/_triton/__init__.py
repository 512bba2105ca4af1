"""Weights and their statistics on a GPU by Triton kernels. Statistics never store the weights."""

from __future__ import annotations

from ._available import available
from ._operands import Operands, operands_of

__all__ = ["Operands", "available", "operands_of"]
