"""Clearhead: multi-head attention for PyTorch that you can see into.

One exact meaning on every kernel, at fused-kernel memory, and the weights when you ask for them.
"""

from typing import TYPE_CHECKING

from . import caches, errors, kernels, masks, positions
from ._attention import attention, explain
from ._call.heads import merge_heads, split_heads
from ._environment import check_values
from ._layer.linear import use_linear
from ._multihead import MultiHeadAttention
from ._statistics.compute import attention_statistics
from ._statistics.masses import Mass
from ._statistics.result import AttentionStatistics
from ._statistics.summary import Summary
from ._statistics.vectors import TopK
from ._varlen import attention_varlen
from ._version import __version__
from ._weights import attention_weights
from .backend._activate import activate, register
from .kernels._choice import Explanation, use_kernel

if TYPE_CHECKING:  # `__getattr__` imports these on first use
    from . import checkpoints, nn, plot, transformer
    from ._latent import MultiHeadLatentAttention
    from .inspection._census._result import Census
    from .inspection._census._run import census
    from .inspection._importance import head_ablation, head_importance
    from .inspection._intervene import intervene
    from .inspection._monitor import monitor
    from .inspection._qk_clip import qk_clip_
    from .inspection._record import record
    from .inspection._walkthrough import walkthrough
    from .inspection._walkthrough_result import Walkthrough
    from .integrations._upgrade import UpgradeReport, downgrade, upgrade

__all__ = [
    "AttentionStatistics",
    "Census",
    "Explanation",
    "Mass",
    "MultiHeadAttention",
    "MultiHeadLatentAttention",
    "Summary",
    "TopK",
    "UpgradeReport",
    "Walkthrough",
    "__version__",
    "activate",
    "attention",
    "attention_statistics",
    "attention_varlen",
    "attention_weights",
    "caches",
    "census",
    "check_values",
    "checkpoints",
    "downgrade",
    "errors",
    "explain",
    "head_ablation",
    "head_importance",
    "intervene",
    "kernels",
    "masks",
    "merge_heads",
    "monitor",
    "nn",
    "plot",
    "positions",
    "qk_clip_",
    "record",
    "split_heads",
    "transformer",
    "upgrade",
    "use_kernel",
    "use_linear",
    "walkthrough",
]

register()

_PACKAGES = ("checkpoints", "inspection", "integrations", "nn", "plot", "transformer")
_NAMES = {
    "Census": "inspection._census._result",
    "MultiHeadLatentAttention": "_latent",
    "UpgradeReport": "integrations._upgrade",
    "Walkthrough": "inspection._walkthrough_result",
    "census": "inspection._census._run",
    "downgrade": "integrations._upgrade",
    "head_ablation": "inspection._importance",
    "head_importance": "inspection._importance",
    "intervene": "inspection._intervene",
    "monitor": "inspection._monitor",
    "qk_clip_": "inspection._qk_clip",
    "record": "inspection._record",
    "upgrade": "integrations._upgrade",
    "walkthrough": "inspection._walkthrough",
}


def __getattr__(name: str) -> object:
    """Import on first use what a forward pass does not need, so that `import clearhead` is quick."""
    from importlib import import_module

    if name in _PACKAGES:
        return import_module(f".{name}", __name__)
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_NAMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
