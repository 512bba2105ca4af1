"""The ways to compute one attention call, each in a file of its own, and the choice between them."""

from ._base import Kernel, Refusal
from ._dispatch import KERNELS, Explanation, choose, explain_call, use_kernel

__all__ = ["KERNELS", "Explanation", "Kernel", "Refusal", "choose", "explain_call", "use_kernel"]
