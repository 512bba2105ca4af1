"""Clearhead's kernels behind the names that other libraries call.

`clearhead.activate` switches PyTorch's own `scaled_dot_product_attention` and `varlen_attn` over; ``import clearhead``
only registers the name. `flash_attn_func` and `flash_attn_varlen_func` have the arguments of flash-attn.
"""

from ._flash_attn import flash_attn_func, flash_attn_varlen_func

__all__ = ["flash_attn_func", "flash_attn_varlen_func"]
