"""What attended inside a recorded model without being recorded, and the warning about it."""

from __future__ import annotations

import warnings
from collections.abc import Collection

from torch import nn

from ..errors import RecordError, UnseenAttentionWarning

SOFTMAX = "a softmax over four dimensions"


class Unseen:
    """Keeps what could not be recorded, by the module that ran.

    Args:
        model: whose modules are named.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules: dict[str, list[str]] = {}  # what → names

    def note(self, what: str, module: str) -> None:
        """Remember that a module computed something that may be attention, such as ``"a softmax …"``."""
        names = self._modules.setdefault(what, [])
        if module not in names:
            names.append(module)

    def report(self, recorded: Collection[str]) -> None:
        """Warn of what was noted.

        Args:
            recorded: names of the modules in the record. A softmax in one of them is most likely weights that it was
                asked to return besides.

        Raises:
            RecordError: if nothing was recorded.
        """
        if SOFTMAX in self._modules:
            self._modules[SOFTMAX] = [name for name in self._modules[SOFTMAX] if name not in recorded]
        self._modules = {what: names for what, names in self._modules.items() if names}
        if not recorded:
            noted = "".join(
                f"{what[0].upper()}{what[1:]} was computed by {self._named(what)}. " for what in self._modules
            )
            raise RecordError(
                f"record: no attention was seen. {noted}Attention is seen in Clearhead's modules, "
                "torch.nn.MultiheadAttention and wherever F.scaled_dot_product_attention is called, uncompiled. A "
                "transformers model needs model.set_attn_implementation('sdpa') or 'clearhead'; of a compiled model "
                "record model._orig_mod."
            )
        for what in self._modules:
            warnings.warn(
                f"record: {what} that is not in the record was computed by {self._named(what)}. "
                "If that is attention, switch it to F.scaled_dot_product_attention over plain tensors; for a "
                "transformers model model.set_attn_implementation('sdpa').",
                UnseenAttentionWarning,
                stacklevel=4,
            )

    def _named(self, what: str) -> str:
        return ", ".join(
            f"{name or 'the model itself'} ({type(self._model.get_submodule(name)).__name__})"
            for name in self._modules[what]
        )
