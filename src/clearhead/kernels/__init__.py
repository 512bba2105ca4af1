"""How a call is computed: one file per kernel, and the choice between them.

`Kernel` is what a new one derives from, `Refusal` a reason why one cannot run a call.
"""

from ._base import Kernel, Refusal

__all__ = ["Kernel", "Refusal"]
