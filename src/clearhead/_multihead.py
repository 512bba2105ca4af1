"""`MultiHeadAttention`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from ._call.caching import Cache, Positions
from ._call.call import weights_wanted
from ._call.call_types import AttentionForward
from ._call.naming import add_module
from ._call.sharding import HeadShard, SequenceShard
from ._checks import choice, flag, is_finite, is_positive, is_probability, number, number_or_none, require_factory, size
from ._environment import Environment, read_environment
from ._layer.jagged import calling_with, is_jagged, read_jagged, refuse_jagged
from ._layer.layer import Layer
from ._layer.layer_plan import plan_of_layer
from ._layer.linear import Linear, Multiply
from ._layer.positions import PositionPart
from ._layer.unmodified import apply_linear, parameters_of_all, takes_packed
from ._multihead_checks import (
    cache_place,
    complete,
    default_head_dim,
    draw_projections,
    explain_inputs,
    kv_head_count,
    refuse_split_dropout,
    require_cache,
    require_features,
    require_inputs,
    require_parts,
    set_mask,
    unfit_projections,
)
from ._proxies import recorded_module
from .caches._kv import KVCache
from .errors import ClearheadError
from .masks._base import Mask
from .masks._tensors import as_mask

_PROJECTIONS = "q_proj", "k_proj", "v_proj", "out_proj"


class MultiHeadAttention(nn.Module):
    """Multi-head attention, batch first, with weights on request.

    ::

        head_h = attention(query Wq_h, key Wk_h, value Wv_h);  output = concat(head_1 … head_H) Wo

    Source: Vaswani et al., "Attention is all you need", 2017. The four projections are ordinary `Linear` submodules:
    hooks, LoRA and quantisation on them take effect. Newer models add a position part, norms, a mask or a cache.

    Args:
        embed_dim: E, the size of the output. The query has the same size unless `qdim` is passed.
        num_heads: H.
        num_kv_heads: Hkv, the number of key/value heads. It divides H. Default H.
        head_dim: D. Default E / H, which must then be whole.
        qdim: features of the query input. Default E.
        kdim: features of the key input. Default E.
        vdim: features of the value input. Default E.
        bias: whether query, key and value projections have a bias. Default True.
        out_bias: whether the output projection has one. Default as `bias`.
        scale: factor of the scores. Default 1/√D.
        dropout: probability that a weight is dropped in training. Default 0.
        position: rotates queries and keys by their positions, ``(q, k, positions) -> (q, k)``, such as
            `clearhead.positions.Rotary`. Default: none.
        q_norm, k_norm: modules applied to every head's query (B, H, L, D) and key (B, Hkv, S, D) before the
            position part, such as ``nn.RMSNorm(head_dim)`` (Qwen3). Default: none.
        softcap: c > 0 limits scores to (−c, c) (Gemma 2). Default: none.
        sinks: whether each head learns a logit that only enlarges the denominator of the softmax (gpt-oss). The
            parameter ``sinks`` (H,) holds them. Default False.
        gate: multiplies the heads' outputs by the sigmoid of a projection of the query, ``gate_proj``: one factor for
            each feature (``"elementwise"``: Qwen3-Next, AFMoE) or for each head (``"head"``: Step 3.5). It has a bias
            as the query projection. Source: Qiu et al., "Gated attention for large language models", 2025. Default:
            none.
        mask: a mask of the module, such as a sliding window, `ALiBi` or a `RelativeBias`. It is combined with the mask
            of every call. Default: none.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: for sizes that are not positive or do not divide, or dropout outside [0, 1].
        DTypeError, MaskTypeError: for parts of another kind.

    Example:
        >>> import torch, clearhead
        >>> attend = clearhead.MultiHeadAttention(embed_dim=12, num_heads=3)
        >>> x = torch.randn(2, 5, 12)
        >>> output, weights = attend(x, mask=clearhead.masks.causal(), need_weights=True)
        >>> output.shape, weights.shape
        (torch.Size([2, 5, 12]), torch.Size([2, 5, 5]))
    """

    #: Set by `clearhead.distributed`: the heads, and the part of the sequence, that are this process's.
    head_shard: HeadShard | None = None
    sequence_shard: SequenceShard | None = None
    mask: Mask | None
    __call__: AttentionForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        qdim: int | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        scale: float | None = None,
        dropout: float = 0.0,
        position: PositionPart | None = None,
        q_norm: nn.Module | None = None,
        k_norm: nn.Module | None = None,
        softcap: float | None = None,
        sinks: bool = False,
        gate: Literal["elementwise", "head"] | None = None,
        mask: Mask | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.embed_dim: int = size("embed_dim", embed_dim)
        self.num_heads: int = size("num_heads", num_heads)
        self.num_kv_heads: int = kv_head_count(num_kv_heads, num_heads)
        self.head_dim: int = default_head_dim(embed_dim, num_heads) if head_dim is None else size("head_dim", head_dim)
        self.scale: float | None = number_or_none("scale", scale, "a finite number, or None for 1/√D", is_finite)
        self.dropout: float = number("dropout", dropout, "a probability in [0, 1]", is_probability)
        self.softcap: float | None = number_or_none("softcap", softcap, "a number > 0, or None", is_positive)
        require_parts(position, q_norm=q_norm, k_norm=k_norm)
        self.position = position
        self.q_norm: nn.Module | None = q_norm
        self.k_norm: nn.Module | None = k_norm
        set_mask(self, mask)
        require_factory(device, dtype)
        bias = flag("bias", bias)
        inner, kv_inner = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        qdim, kdim, vdim = (embed_dim if features is None else features for features in (qdim, kdim, vdim))
        self.q_proj: Linear = Linear(size("qdim", qdim), inner, bias=bias, device=device, dtype=dtype)
        self.k_proj: Linear = Linear(size("kdim", kdim), kv_inner, bias=bias, device=device, dtype=dtype)
        self.v_proj: Linear = Linear(size("vdim", vdim), kv_inner, bias=bias, device=device, dtype=dtype)
        out_bias = bias if out_bias is None else flag("out_bias", out_bias)
        self.out_proj: Linear = Linear(inner, embed_dim, bias=out_bias, device=device, dtype=dtype)
        self.gate_proj: Linear | None = None
        if gate is not None:
            features = inner if choice("gate", gate, ("elementwise", "head")) == "elementwise" else self.num_heads
            self.gate_proj = Linear(qdim, features, bias=bias, device=device, dtype=dtype)
        logits = torch.empty(self.num_heads, device=device, dtype=dtype) if flag("sinks", sinks) else None
        self.sinks: nn.Parameter | None
        self.register_parameter("sinks", None if logits is None else nn.Parameter(logits))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw every projection from Xavier's uniform distribution and set biases and sinks to zero."""
        draw_projections(self.q_proj, self.k_proj, self.v_proj, self.out_proj, self.gate_proj)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def make_cache(self, batch_size: int, max_length: int) -> Cache:
        """An empty `clearhead.caches.KVCache` for `batch_size` sequences of at most `max_length` tokens.

        It has the module's dtype, or autocast's where that is on, and its device.
        """
        weight, kv_heads = self.k_proj.weight, self.num_kv_heads
        if self.head_shard is not None:
            weight, kv_heads = self.head_shard.local(weight), self.head_shard.num_kv_heads
        place = cache_place("k_proj", self.k_proj, weight)
        make = partial(KVCache, batch_size, kv_heads, head_dim=self.head_dim, **place)
        return make(max_length) if self.sequence_shard is None else self.sequence_shard.shared_cache(make, max_length)

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
        """Attend from `query` to `key` and mix `value`.

        Args:
            query: (B, L, qdim), or (L, qdim) without a batch. It may be jagged: ``torch.nested`` with
                ``layout=torch.jagged``, sequences of different lengths without padding. The positions of masks then
                count within each sequence.
            key: (B, S, kdim). Default: the query, which makes it self-attention.
            value: (B, S, vdim). Default: the key.
            mask: from `clearhead.masks`, or a bool tensor with ``True`` = may attend. Default: no key is hidden.
                A cache never implies causality. Pass ``masks.causal()``, which compares absolute positions.
            positions: absolute positions of the queries. In self-attention, and with a position part, they are also
                those of the keys. An int p means p … p + L − 1. A tensor has integers (L,) or (B, L), in which −1
                marks padding. For a `Rotary` with several ``axes`` they may be (axes, B, L); masks and caches then
                count tokens. Default: the positions after those in the cache, else 0 … L−1.
            cache: from `clearhead.caches`. The new keys and values are added to it, and the queries attend to all of
                its keys. Default: none.
            need_weights: also return the weights, before dropout. The output is the same to rounding. Default False.
            average_attn_weights: average them over the heads. Default True.

        Returns:
            Output (B, L, E), jagged like the query. With `need_weights` also the weights, (B, L, S), or (B, H, L, S) if
            not averaged. They are float32 (float64 for float64 inputs), and S counts the keys of the cache too. A
            fully masked row has zero weights and the output ``out_proj(0)``.

        Raises:
            ShapeError: if an input does not have the features of its projection, or shapes disagree.
            ArgumentError: if `value` is passed without `key`. For positions, a cache or weights with jagged inputs.
            CacheError: if the cache is full, or needs gradients.
            ClearheadError: for the reasons of `attention`.
        """
        try:
            if self.sequence_shard is not None:
                options = mask, positions, cache, need_weights, average_attn_weights
                output, weights = self.sequence_shard.call(self, query, key, value, *options)
                return output if weights is None else (output, weights)
            default = need_weights is False and average_attn_weights is True
            wanted = None if default else weights_wanted(need_weights, average_attn_weights)
            environment = read_environment()
            if self.head_shard is not None and mask is not None:
                mask = self.head_shard.mask(as_mask(mask))
            if (type(query) is not Tensor or query.is_nested or key is not None) and is_jagged(query, key, value):
                refuse_jagged(positions=positions, cache=cache, need_weights=wanted is not None)
                return self._run_jagged(query, *complete(query, key, value), mask, environment)
            if cache is not None:
                require_cache(cache, self.position)
            layer = layer_of(self, environment)
            if cache is None or cache.get() is None:
                if key is None is value:
                    key = value = query  # self-attention
                else:
                    key, value = complete(query, key, value)
                layer.plan = plan = plan_of_layer((query, key, value), layer.linears, layer.settings, environment)
                if plan is None or not plan.fits:
                    require_inputs(self, query, key, value, environment)
            else:  # a memory whose keys are projected already
                require_features("query", query, self.q_proj)
            output, weights = layer.run(query, key, value, mask, environment, positions, cache, wanted)
            return output if weights is None else (output, weights)
        except ClearheadError as error:
            add_module(error, self)
            return recorded_module(self, error, locals())
        except RuntimeError:  # of a GEMM; the checks of each input say what is wrong, if it is one of them
            explain_inputs(self, query, key, value)
            raise

    def _run_jagged(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, environment: Environment
    ) -> Tensor:
        tokens, sequences, jagged = read_jagged(query, key, value, side_by_side=self.position is not None)
        for name, projection, x in zip(("query", "key", "value"), ("q_proj", "k_proj", "v_proj"), tokens, strict=True):
            require_features(name, x, getattr(self, projection))
        layer = layer_of(self, environment, calling_with((query, key, value), tokens))
        refuse_split_dropout(layer.options.get("offset"))
        positions = 0 if self.position is None else sequences.query_positions
        mixed = layer.run_packed(*tokens, sequences, layer.combined(mask), environment, positions=positions)
        if takes_packed(self.out_proj):
            return jagged(apply_linear(self.out_proj, mixed, environment))
        return self.out_proj(jagged(mixed))

    def extra_repr(self) -> str:
        """The sizes, and the settings that are not the defaults."""
        kv_heads = None if self.num_kv_heads == self.num_heads else self.num_kv_heads
        sizes = {"embed_dim": self.embed_dim, "num_heads": self.num_heads, "num_kv_heads": kv_heads}
        mask = None if self.mask is None else self.mask.describe()
        options = {"softcap": self.softcap, "sinks": self.sinks is not None, "mask": mask, "dropout": self.dropout}
        settings = {**sizes, "head_dim": self.head_dim, **options}
        return ", ".join(f"{name}={value}" for name, value in settings.items() if value)


def layer_of(
    module: MultiHeadAttention,
    environment: Environment,
    call: Callable[[nn.Module, Tensor, Environment], Tensor] = apply_linear,
) -> Layer:
    """The call of a module, as far as it does not depend on its arguments. `call` applies the input projections."""
    fields: dict[str, Any] = vars(module)  # attributes of modules are looked up slowly
    modules = fields["_modules"]
    linears = parameters_of_all(modules, _PROJECTIONS, environment) if call is apply_linear else None
    shard, heads, kv_heads, head_dim = module.head_shard, module.num_heads, module.num_kv_heads, module.head_dim
    own = fields["_parameters"]  # a parametrized one is elsewhere
    sinks = own.get("sinks") if "sinks" in own else module.sinks
    mask, dropout_p, offset = module.mask, module.dropout if module.training else 0.0, None
    if shard is not None:
        heads, kv_heads, mask = shard.num_heads, shard.num_kv_heads, shard.mask(mask)
        sinks = None if sinks is None else shard.local(sinks)
        offset = shard.offset if dropout_p else None
        linears = None  # inputs enter a shard through exchanges
    inner, kv_inner = heads * head_dim, kv_heads * head_dim
    scale, softcap, gate_proj = module.scale, module.softcap, module.gate_proj

    def gate(query: Tensor) -> Tensor:
        x = query if shard is None else cast(Tensor, shard.enter(query)[0])
        return call(cast(nn.Module, gate_proj), x, environment).sigmoid()

    def project(query: Tensor, key: Tensor | None, value: Tensor | None, multiply: Multiply) -> tuple[Tensor, Any, Any]:
        if shard is not None:
            query, key, value = cast("tuple[Tensor, Any, Any]", shard.enter(query, key, value))
        if linears is None or key is None or value is None:
            q = call(modules["q_proj"], query, environment)
            if key is None or value is None:
                return q, None, None
            k, v = call(modules["k_proj"], key, environment), call(modules["v_proj"], value, environment)
        else:
            q_weight, q_bias, k_weight, k_bias, v_weight, v_bias, _, _ = linears
            q = multiply(query, q_weight, q_bias)
            k, v = multiply(key, k_weight, k_bias), multiply(value, v_weight, v_bias)
        if q.shape[-1] != inner or k.shape[-1] != kv_inner or v.shape[-1] != kv_inner:
            raise unfit_projections((q, k, v), inner, kv_inner)
        return q, k, v

    return Layer(
        project,
        modules["out_proj"],
        heads,
        kv_heads,
        mask,
        {"scale": scale, "softcap": softcap, "sinks": sinks, "dropout_p": dropout_p, "offset": offset},
        (modules["q_proj"], modules["k_proj"], modules["v_proj"], *(() if gate_proj is None else (gate_proj,))),
        module.q_norm,
        module.k_norm,
        module.position,
        # Within the sequences of an unpadded batch dropout counts anew, which an offset among the heads of the whole
        # module does not describe: each process would drop different weights. Padding then stays in.
        head_dim if offset is None else None,
        True,
        None,
        None if shard is None else shard.all_weights,
        linears,
        (heads, kv_heads, head_dim, scale, softcap, dropout_p, sinks is None),
        gate=None if gate_proj is None else gate,
    )
