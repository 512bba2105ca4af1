"""What the Triton kernels compute scores from."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..._call.call import Call
from ...masks._terms import Terms, terms_of
from .._base import cut, rows_of_mask


class Operands(NamedTuple):
    """What the kernels compute scores from. The scores themselves are never stored.

    Args:
        query: (B, H, L, D), any strides.
        key: (B, Hkv, S, D), any strides; Hkv divides H.
        terms: the mask.
        scale: factor of the scores.
        softcap: c of s ← c·tanh(s/c); 0 for none.
    """

    query: Tensor
    key: Tensor
    terms: Terms
    scale: float
    softcap: float = 0.0

    def of_rows(self, rows: Tensor) -> Operands:
        """The operands of these rows, numbers (n,)."""
        terms, count = self.terms, self.key.shape[2]
        chosen = rows_of_mask(terms, rows, (self.query.shape[2], count)) | cut(terms, {"query_documents": 1}, rows)
        # Chosen rows need not be neighbours, so ALiBi becomes a bias.
        bias = terms._replace(bias=chosen.get("bias")).slopes_as_bias(rows, count)
        only_of_all_rows = dict.fromkeys(("slopes", "first_query", "last_query"))
        terms = terms._replace(shift=0, **{**chosen, **only_of_all_rows, "bias": bias})
        return self._replace(query=self.query.index_select(2, rows), terms=terms)

    def of_head(self, head: int) -> Operands:
        """The operands of one query head."""
        one, kv_head = slice(head, head + 1), head * self.key.shape[1] // self.query.shape[1]
        terms = self.terms._replace(**cut(self.terms, {"visible": 1, "bias": 1, "slopes": 0}, one))
        return self._replace(query=self.query[:, one], key=self.key[:, kv_head : kv_head + 1], terms=terms)


def operands_of(call: Call) -> Operands:
    """The operands of a call, whose kernels skip what lies outside the range of a document."""
    terms = call.bound.once("triton", lambda: terms_of(call.bound).with_all_ranges())
    return Operands(call.query, call.key, terms, call.layout.scale, call.layout.softcap or 0.0)
