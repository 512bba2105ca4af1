"""What a kernel is, and why one refuses a call. `clearhead.use_kernel` forces one."""

from ._base import Kernel, Refusal

__all__ = ["Kernel", "Refusal"]
