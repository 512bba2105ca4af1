"""The warning about attention of a recorded model that was not recorded."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable

from ..errors import RecordError, UnseenAttentionWarning
from ._naming import ModuleNames

SOFTMAX = "a softmax over four dimensions"


class Unseen:
    """Collects computations that could not be recorded.

    Args:
        running: follows the recorded model.
    """

    def __init__(self, running: ModuleNames) -> None:
        self._running = running
        self._modules: dict[str, list[str]] = {}  # from a description of the computation to names of modules

    def note(self, what: str) -> None:
        """Note that the running module computed something that may be attention, such as ``"a softmax …"``."""
        name, names = self._running.current, self._modules.setdefault(what, [])
        if name is not None and name not in names:
            names.append(name)

    def report(self, recorded: Collection[str]) -> None:
        """Warn of the noted computations.

        Args:
            recorded: names of the modules in the record. A softmax in one of them most likely computes weights.

        Raises:
            RecordError: if nothing was recorded.
        """
        modules = {
            what: self._described([name for name in names if what != SOFTMAX or name not in recorded])
            for what, names in self._modules.items()
        }
        modules = {what: described for what, described in modules.items() if described}
        if not recorded:
            noted = "".join(
                f"{what[0].upper()}{what[1:]} was computed by {described}. " for what, described in modules.items()
            )
            raise RecordError(
                f"record: no attention was seen. {noted}Attention is seen in Clearhead's modules, "
                "torch.nn.MultiheadAttention and wherever F.scaled_dot_product_attention is called, uncompiled. A "
                "transformers model needs model.set_attn_implementation('sdpa') or 'clearhead'; of a compiled model "
                "record model._orig_mod."
            )
        for what, described in modules.items():
            warnings.warn(
                f"record: {what} that is not in the record was computed by {described}. "
                "If that is attention, switch it to F.scaled_dot_product_attention over plain tensors; for a "
                "transformers model model.set_attn_implementation('sdpa').",
                UnseenAttentionWarning,
                stacklevel=4,
            )

    def _described(self, names: Iterable[str]) -> str:
        return ", ".join(
            f"{name or 'the model itself'} ({type(self._running.model.get_submodule(name)).__name__})" for name in names
        )
