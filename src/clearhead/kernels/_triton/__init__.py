"""Statistics of the weights on a GPU by Triton kernels. The weights are never stored."""

from __future__ import annotations

from ._operators import available, columns, rows, top_k
from ._terms import Terms, terms_of

__all__ = ["Terms", "available", "columns", "rows", "terms_of", "top_k"]
