"""Other people's attention weights: recognise them by their names, load them, write them back.

Example:
    >>> import torch
    >>> from clearhead import checkpoints
    >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    >>> ours = checkpoints.load(theirs)
    >>> x = torch.randn(2, 5, 12)
    >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    True
"""

from .load import identify, load
from .namings import NAMINGS, Naming
from .recognise import Finding
from .save import save

__all__ = ["NAMINGS", "Finding", "Naming", "identify", "load", "save"]
