"""`MultiHeadLatentAttention`: keys and values from a small latent. A cache holds only the latents."""

from __future__ import annotations

from functools import partial
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from ._call.caching import Cache, Positions
from ._call.call import weights_wanted
from ._call.call_types import AttentionForward
from ._call.naming import add_module
from ._checks import flag, is_finite, is_probability, number, require_factory, settings_text, size
from ._environment import Environment, cast_for_autocast, read_environment
from ._latent_forms import LatentSizes, latent_form
from ._layer.layer import Layer
from ._layer.linear import Multiply
from ._layer.positions import PositionPart
from ._layer.unmodified import apply_linear
from ._multihead_checks import (
    cache_place,
    draw_projections,
    one_source,
    require_cache,
    require_features,
    require_parts,
    require_together,
    set_mask,
)
from ._proxies import recorded_module
from .caches._kv import KVCache
from .errors import ArgumentError, ClearheadError, ShapeError
from .masks._base import Mask


@final
class MultiHeadLatentAttention(nn.Module):
    """Multi-head attention whose keys and values come from one latent per token, batch first.

    ::

        c_j = norm(x_j Wc),  r_j = rotate(x_j Wr)             latent (R) and rotary key (Dr), shared by all heads
        a_ih = norm(x_i Wa) Wq_h = [a'_ih, a''_ih]            with q_lora_rank; without it  a_ih = x_i Wq_h
        s_ijh = scale · (a'_ih · c_j Wk_h + rotate(a''_ih) · r_j),   o_ih = Σ_j p_ijh c_j Wv_h,  output = concat(o_i) Wo

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1. Two forms compute the same result:

    * The *expanded* form makes every head's keys c_j Wk_h and values c_j Wv_h, and attends as usual. It runs without a
      cache, and for long prompts.
    * The *absorbed* form computes s' = (a'_ih Wk_hᵀ) · c_j and o_ih = (Σ_j p_ijh c_j) Wv_h. All heads share c_j as one
      key/value head, so past tokens are not expanded. It runs with a cache if it multiplies less. It does not run under
      `clearhead.record` and `intervene`, which receive the heads' own values.

    A cache holds only [c_j, r_j], as keys of one head. Use `make_cache`, or any cache of `clearhead.caches` with
    ``num_kv_heads=1, head_dim=cache_head_dim, value_head_dim=0``.

    The projections are ordinary `Linear` submodules. Hooks, LoRA and quantisation on them take effect, and each can be
    replaced. The absorbed form does not call ``kv_up`` on tokens but reads its weight. If ``kv_up`` is not a plain
    `Linear`, or has hooks, the form calls it on the identity to get the matrix.

    Args:
        embed_dim: E, the size of inputs and output.
        num_heads: H.
        kv_lora_rank: R, the size of the latent.
        qk_nope_head_dim: Dn, features of a head's query and key without positions.
        qk_rope_head_dim: Dr, features of a head's query, and of the one shared key, that `position` rotates.
        v_head_dim: Dv, features of a head's value.
        q_lora_rank: size of a latent of the queries. ``q_proj`` is then a sequence of ``down``, ``norm`` and ``up``.
            Default: none, and ``q_proj`` is a `Linear`.
        bias: whether the projections from the input to latents have a bias. Default False. Other input projections
            never have a bias.
        out_bias: whether the output projection has one. Default as `bias`.
        scale: factor of the scores. Default 1/√(Dn + Dr). DeepSeek multiplies it by YaRN's squared ``mscale``.
        dropout: probability that a weight is dropped in training. Default 0.
        position: rotates the rotary parts by their positions, ``(q (B, H, L, Dr), k (B, 1, L, Dr), positions) -> (q,
            k)``, such as ``clearhead.positions.Rotary(qk_rope_head_dim)``. Default: none.
        q_norm, kv_norm: modules applied to the latents. Default ``nn.RMSNorm(rank, eps=1e-6)``.
        mask: a mask of the module. It is combined with the mask of every call. Default: none.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: for sizes that are not positive, dropout outside [0, 1], or a `q_norm` without `q_lora_rank`.
        DTypeError, MaskTypeError: for parts of another kind.

    Example:
        >>> import torch, clearhead
        >>> from clearhead import MultiHeadLatentAttention
        >>> from clearhead.positions import Rotary
        >>> attend = MultiHeadLatentAttention(
        ...     12, 3, kv_lora_rank=5, qk_nope_head_dim=4, qk_rope_head_dim=2, v_head_dim=4, position=Rotary(2)
        ... ).eval()
        >>> x, cache, causal = torch.randn(2, 7, 12), attend.make_cache(2, max_length=7), clearhead.masks.causal()
        >>> with torch.no_grad():
        ...     whole = attend(x, mask=causal)
        ...     steps = [attend(x[:, [n]], mask=causal, cache=cache) for n in range(7)]
        >>> torch.allclose(torch.cat(steps, 1), whole, atol=1e-6), cache.key.shape, cache.value.numel()
        (True, torch.Size([2, 1, 7, 7]), 0)
    """

    mask: Mask | None
    __call__: AttentionForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        q_lora_rank: int | None = None,
        bias: bool = False,
        out_bias: bool | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        position: PositionPart | None = None,
        q_norm: nn.Module | None = None,
        kv_norm: nn.Module | None = None,
        mask: Mask | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim: int = size("embed_dim", embed_dim)
        self.num_heads: int = size("num_heads", num_heads)
        self.kv_lora_rank: int = size("kv_lora_rank", kv_lora_rank)
        self.qk_nope_head_dim: int = size("qk_nope_head_dim", qk_nope_head_dim)
        self.qk_rope_head_dim: int = size("qk_rope_head_dim", qk_rope_head_dim)
        self.v_head_dim: int = size("v_head_dim", v_head_dim)
        self.q_lora_rank: int | None = None if q_lora_rank is None else size("q_lora_rank", q_lora_rank)
        head_dim = qk_nope_head_dim + qk_rope_head_dim
        self.scale: float = head_dim**-0.5 if scale is None else number("scale", scale, "a finite number", is_finite)
        self.dropout: float = number("dropout", dropout, "a probability in [0, 1]", is_probability)
        require_parts(position, q_norm=q_norm, kv_norm=kv_norm)
        if q_norm is not None and q_lora_rank is None:
            fix, got = "It normalises the queries' latent: give q_lora_rank too.", type(q_norm).__name__
            raise ArgumentError("q_norm", expected="None without q_lora_rank", got=got, fix=fix)
        require_factory(device, dtype)
        bias = flag("bias", bias)
        out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        self.position = position
        set_mask(self, mask)

        def linear(inputs: int, outputs: int, has_bias: bool = False) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=has_bias, device=device, dtype=dtype)

        def norm(rank: int) -> nn.Module:
            return nn.RMSNorm(rank, eps=1e-6, device=device, dtype=dtype)

        self.q_proj: nn.Linear | nn.Sequential
        if q_lora_rank is None:
            self.q_proj = linear(embed_dim, num_heads * head_dim)
        else:
            self.q_proj = nn.Sequential()
            self.q_proj.add_module("down", linear(embed_dim, q_lora_rank, bias))
            self.q_proj.add_module("norm", norm(q_lora_rank) if q_norm is None else q_norm)
            self.q_proj.add_module("up", linear(q_lora_rank, num_heads * head_dim))
        self.kv_down: nn.Linear = linear(embed_dim, kv_lora_rank + qk_rope_head_dim, bias)
        self.kv_norm: nn.Module = norm(kv_lora_rank) if kv_norm is None else kv_norm
        self.kv_up: nn.Linear = linear(kv_lora_rank, num_heads * (qk_nope_head_dim + v_head_dim))
        self.out_proj: nn.Linear = linear(num_heads * v_head_dim, embed_dim, out_bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every projection from Xavier's uniform distribution and set biases to zero."""
        queries = [part for part in self.q_proj.modules() if isinstance(part, nn.Linear)]
        draw_projections(*queries, self.kv_down, self.kv_up, self.out_proj)

    @property
    def cache_head_dim(self) -> int:
        """R + Dr, the number of elements that a cache holds per token."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def make_cache(self, batch_size: int, max_length: int) -> KVCache:
        """An empty `clearhead.caches.KVCache` for this module's latents.

        It has the module's dtype, or autocast's where that is on, and its device.

        Args:
            batch_size: B.
            max_length: how many tokens it can hold.
        """
        place = cache_place("kv_down", self.kv_down, self.kv_down.weight)
        return KVCache(batch_size, 1, max_length, self.cache_head_dim, value_head_dim=0, **place)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        positions: Positions | None = None,
        cache: Cache | None = None,
        need_weights: bool = False,
        average_attn_weights: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend from `query` to `key`.

        Args:
            query: (B, L, E), or (L, E) without a batch.
            key: (B, S, E), the input of the latents. Default: the query, which makes it self-attention.
            value: the same tensor as `key`, or ``None``, because one latent makes keys and values.
            mask, positions, need_weights, average_attn_weights: as for `MultiHeadAttention`.
            cache: from `clearhead.caches`. The new latents are added to it, and the queries attend to all of its
                latents. Default: none.

        Returns:
            Output (B, L, E). With `need_weights` also the weights, (B, L, S), or (B, H, L, S) if not averaged. They are
            float32 (float64 for float64 inputs), and S counts the keys of the cache too. A fully masked row has zero
            weights and the output ``out_proj(0)``.

        Raises:
            ShapeError: if an input does not have E features, or shapes disagree.
            ArgumentError: if `value` is another tensor than `key`.
            CacheError: if the cache is full, or needs gradients.
            ClearheadError: for the reasons of `attention`.
        """
        try:
            wanted = weights_wanted(need_weights, average_attn_weights)
            environment = read_environment()
            require_cache(cache, self.position)
            self._require_input("query", query)
            source = None
            if cache is None or cache.get() is None:
                source = one_source(query, key, value)
                self._require_input("key", source)
                require_together(query=query, key=source)
            output, weights = self._layer(environment).run(
                query, source, source, mask, environment, positions=positions, cache=cache, weights=wanted
            )
            return output if weights is None else (output, weights)
        except ClearheadError as error:
            add_module(error, self)
            return recorded_module(self, error, locals())

    def _layer(self, environment: Environment) -> Layer:
        def project(query: Tensor, key: Tensor | None, value: Tensor | None, _: Multiply) -> tuple[Tensor, Any, Any]:
            """Queries (…, H·(Dn + Dr)), and latents beside rotary keys (…, R + Dr), which one cache entry holds."""
            q = apply_linear(self.q_proj, query, environment)
            if key is None:
                return q, None, None
            down = apply_linear(self.kv_down, key, environment)
            latent, k_rope = down.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
            latent = self.kv_norm(latent)
            if latent.dtype != k_rope.dtype:
                latent, k_rope = cast_for_autocast(latent, k_rope)
            k = torch.cat((latent, k_rope), -1)
            return q, k, k[..., :0]

        sizes = LatentSizes(self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim)
        return Layer(
            project,
            self.out_proj,
            self.num_heads,
            1,
            self.mask,
            {"scale": self.scale, "dropout_p": self.dropout if self.training else 0.0},
            position=None if self.position is None else self._rotate,
            form=partial(latent_form, self.kv_up, sizes, environment),
        )

    def _rotate(self, q: Tensor, k: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """The position part rotates the last Dr numbers of queries and keys."""
        rotary = self.qk_rope_head_dim
        (q_nope, q_rope), (latent, k_rope) = (x.split((x.shape[-1] - rotary, rotary), -1) for x in (q, k))
        q_rope, k_rope = cast(PositionPart, self.position)(q_rope, k_rope, positions)
        parts = ((q_nope, q_rope), (latent, k_rope))
        q, k = (torch.cat(cast_for_autocast(*pair), -1) for pair in parts)
        return q, k

    def _require_input(self, name: str, x: object) -> None:
        """Raise unless the projections can take it."""
        if isinstance(x, Tensor) and x.is_nested:
            expected = f"a padded tensor (B, length, {self.embed_dim})"
            fix = "Use torch.nested.to_padded_tensor(...) and masks.lengths(...)."
            raise ShapeError(name, expected=expected, got="a nested one", fix=fix)
        require_features(name, x, self.kv_down, "Inputs have embed_dim features, and the batch comes first.")

    def extra_repr(self) -> str:
        """The sizes, and the settings that are not the defaults."""
        ranks, dims = ("kv_lora_rank", "q_lora_rank"), ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = {name: getattr(self, name) for name in ("embed_dim", "num_heads", *ranks, *dims)}
        mask = None if self.mask is None else self.mask.describe()
        return settings_text(**sizes, scale=f"{self.scale:g}", mask=mask, dropout=self.dropout)
