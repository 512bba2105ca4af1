"""The mask algebra: say which keys a query may attend to, combine with ``&``, ``|`` and ``~``.

In every mask here ``True`` means *may attend*; the opposite convention enters only through `drop`.

Example:
    >>> import torch
    >>> from clearhead import masks
    >>> mask = masks.causal() & masks.lengths(torch.tensor([2, 3]))
    >>> mask.dense(3)[0, 0].int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 0]], dtype=torch.int32)
"""

from ._base import Mask, Tools, provide
from ._check import check_mask, grid_for
from ._documents import documents
from ._lowering import dense_mask
from ._picture import draw
from ._positional import causal, lengths, mask_mod, prefix, sliding_window
from ._prepared import PreparedMask, prepared
from ._report import MaskReport
from ._tensors import as_mask, bias, drop, keep

__all__ = [
    "Mask",
    "MaskReport",
    "PreparedMask",
    "bias",
    "causal",
    "documents",
    "drop",
    "keep",
    "lengths",
    "mask_mod",
    "prefix",
    "sliding_window",
]

provide(Tools(grid_for, dense_mask, prepared, check_mask, draw, as_mask))
