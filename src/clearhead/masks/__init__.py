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

from ._base import Mask
from ._block_causal import block_causal
from ._documents import documents
from ._lengths import lengths
from ._positional import causal, mask_mod, prefix, sliding_window
from ._prepared import PreparedMask
from ._report import MaskReport
from ._selected import selected
from ._tensors import bias, drop, keep
from ._tree import tree

__all__ = [
    "Mask",
    "MaskReport",
    "PreparedMask",
    "bias",
    "block_causal",
    "causal",
    "documents",
    "drop",
    "keep",
    "lengths",
    "mask_mod",
    "prefix",
    "selected",
    "sliding_window",
    "tree",
]
