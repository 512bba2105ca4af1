"""Weights and their statistics on a GPU by Triton kernels. Statistics never store the weights."""

from __future__ import annotations

from ._available import available
from ._gradients_operator import weights_gradients
from ._operators import columns, rows
from ._terms import Terms, terms_of
from ._weights_operator import pooled, weights

__all__ = ["Terms", "available", "columns", "pooled", "rows", "terms_of", "weights", "weights_gradients"]
