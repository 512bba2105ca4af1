"""The base class of kernels, and their reasons to refuse a call. `clearhead.use_kernel` forces a kernel."""

from ._base import Kernel, Refusal

__all__ = ["Kernel", "Refusal"]
