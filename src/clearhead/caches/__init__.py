"""Key/value caches: what a decoder remembers of the tokens before.

Plain objects that are passed to `MultiHeadAttention` as ``cache=``. All of them can `reorder` their rows (beam search),
`crop` their last tokens (speculative decoding) and hold rows of different lengths.

Example:
    >>> import torch
    >>> from clearhead.caches import KVCache
    >>> cache = KVCache(batch_size=2, num_kv_heads=3, max_length=16, head_dim=4)
    >>> stored = cache.update(torch.zeros(2, 3, 5, 4), torch.zeros(2, 3, 5, 4))
    >>> cache
    KVCache(5 of 16 tokens, B=2, Hkv=3, D=4)
"""

from .._call.caching import Cache, KeyValues
from ._evicting import EvictingKVCache
from ._kv import CrossKVCache, KVCache
from ._policies import EvictionPolicy, HeavyHitters, Held, RandomEviction, SinksAndRecent
from ._sliding import SlidingKVCache

__all__ = [
    "Cache",
    "CrossKVCache",
    "EvictingKVCache",
    "EvictionPolicy",
    "HeavyHitters",
    "Held",
    "KVCache",
    "KeyValues",
    "RandomEviction",
    "SinksAndRecent",
    "SlidingKVCache",
]
