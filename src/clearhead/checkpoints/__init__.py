"""Attention weights from elsewhere: recognise them by their names, load them, write them back.

`load` reads weights by their names; `from_transformers` reads a known model's attention with every setting of its
configuration.

Example:
    >>> import torch
    >>> from clearhead import checkpoints
    >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
    >>> ours = checkpoints.load(theirs)
    >>> x = torch.randn(2, 5, 12)
    >>> torch.allclose(ours(x), theirs(x, x, x)[0], atol=1e-6)
    True
"""

from ._load import identify, load
from ._models import from_transformers, layers_from_transformers
from ._namings import NAMINGS, Naming
from ._recognise import Finding
from ._save import save

__all__ = [
    "NAMINGS",
    "Finding",
    "Naming",
    "from_transformers",
    "identify",
    "layers_from_transformers",
    "load",
    "save",
]
