"""`clearhead.nn.MultiheadAttention`: `torch.nn.MultiheadAttention` to the letter, on Clearhead's core."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from .._call.call import weights_wanted
from .._call.call_types import DropInForward
from .._call.naming import add_module
from .._checks import flag, is_probability, number, require_factory, size, strided
from .._environment import Environment, read_environment
from .._layer.layer import Layer
from .._layer.layer_plan import plan_of_layer
from .._layer.linear import Multiply, require_same
from .._layer.unmodified import Linears, inputs_fit, parameters_of
from .._proxies import recorded_module
from .._torch_private import skips_idle_hook
from ..errors import ArgumentError, ClearheadError, ShapeError, shape_text
from ._convention import also_pytorchs, hidden_mask
from ._inputs import append_keys, is_nested_sequence, linear_of_any_bias, nest_again, pad_nested, project

#: Query, key and value.
Inputs = tuple[Tensor, Tensor, Tensor]


def keep_off_fast_path(module: nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing, as a forward pre-hook.

    In eval mode `nn.TransformerEncoderLayer` bypasses its attention module and computes with the module's parameters,
    unless the module has a hook. This is that hook.
    """


@skips_idle_hook(keep_off_fast_path)
class MultiheadAttention(nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` with one numerical path for training and eval.

    Signature, parameters, ``state_dict`` keys, initialisation under a seed and return values are PyTorch's. It
    differs where PyTorch is wrong or contradicts itself:

    * ``is_causal=True`` is causal without a mask too. (PyTorch: ignored in eval, an error in training.)
    * With an `attn_mask` as well, both hide. (PyTorch: a hint under which the mask may be dropped.)
    * The output of a fully masked row is ``out_proj(0)``, with zero weights. (PyTorch: NaN; pytorch#41508.)
    * Keys appended by `add_bias_kv` and `add_zero_attn` stay visible under every mask.
    * Returned weights are those before dropout.
    * `out_proj` is called as a module, so hooks, LoRA, pruning and parametrizations on it take effect.
    * Masks may also be (N, L, S) or (N, H, L, S), and bool and float masks mix without a warning.

    Args:
        embed_dim: E, features of query and output.
        num_heads: H, which divides E.
        dropout: probability that a weight is dropped in training. Default 0.
        bias: whether the projections have a bias. Default True.
        add_bias_kv: append one learned key and value. Default False.
        add_zero_attn: append one key and value of zeros. Default False.
        kdim: features of the key input. Default E.
        vdim: features of the value input. Default E.
        batch_first: (N, L, E) rather than (L, N, E). Default False.
        device, dtype: of the parameters.

    Raises:
        ArgumentError: for sizes that are not positive or do not divide. It is also an `AssertionError` where PyTorch
            raises one.

    Example:
        >>> import torch, clearhead
        >>> attend = clearhead.nn.MultiheadAttention(12, 3, batch_first=True).eval()
        >>> x = torch.randn(2, 5, 12)
        >>> output, weights = attend(x, x, x, is_causal=True)
        >>> output.shape, weights.shape, bool((weights.triu(1) == 0).all())
        (torch.Size([2, 5, 12]), torch.Size([2, 5, 5]), True)
    """

    __call__: DropInForward  # pyright: ignore[reportIncompatibleMethodOverride]

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        try:
            size("embed_dim", embed_dim)
            size("num_heads", num_heads)
            size("kdim", embed_dim if kdim is None else kdim)
            size("vdim", embed_dim if vdim is None else vdim)
            if embed_dim % num_heads:
                raise ArgumentError("embed_dim", expected=f"a multiple of num_heads = {num_heads}", got=str(embed_dim))
            number("dropout", dropout, "a probability in [0, 1]", is_probability)
            require_factory(device, dtype)
            bias, add_bias_kv = flag("bias", bias), flag("add_bias_kv", add_bias_kv)
            add_zero_attn, batch_first = flag("add_zero_attn", add_zero_attn), flag("batch_first", batch_first)
        except ClearheadError as error:
            raise also_pytorchs(error) from None
        flags = bias, add_bias_kv, add_zero_attn
        super().__init__(embed_dim, num_heads, dropout, *flags, kdim, vdim, batch_first, device, dtype)
        self.register_forward_pre_hook(keep_off_fast_path)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from `query` to `key` and mix `value`.

        Args:
            query: (L, N, E), (N, L, E) if ``batch_first``, or (L, E) without a batch. For self-attention without masks
                also one nested tensor with ``layout=torch.strided`` as query, key and value. The output is then nested
                too, and weights are padded with zeros.
            key: (S, N, kdim), (N, S, kdim) or (S, kdim).
            value: (S, N, vdim), (N, S, vdim) or (S, vdim).
            key_padding_mask: (N, S), or (S,) without a batch. Bool ``True`` = hidden. Float is added to the scores.
            need_weights: also return the weights. The output is the same to rounding. Default True.
            attn_mask: (L, S), (N·H, L, S), (N, L, S) or (N, H, L, S). Bool ``True`` = hidden. Float is added.
            average_attn_weights: average the weights over heads. Default True.
            is_causal: query i attends only to keys j ≤ i that the masks leave visible. Default False.

        Returns:
            The output in the layout of `query`, and the weights or ``None``. Weights are (N, L, S′), or (N, H, L, S′)
            if not averaged, where S′ includes appended keys. Unbatched inputs return unbatched outputs.

        Raises:
            ShapeError, DTypeError: for invalid arguments. They are also instances of the types that PyTorch raises.
        """
        environment = read_environment()
        try:
            wanted, is_causal = weights_wanted(need_weights, average_attn_weights), flag("is_causal", is_causal)
            padding = None
            if is_nested_sequence(query, key, value):
                has_masks = attn_mask is not None or key_padding_mask is not None
                query, padding = pad_nested(query, self.embed_dim, has_masks, self.batch_first)
                key, value, key_padding_mask = query, query, padding
            inputs = query, key, value
            output, weights = self._attend(inputs, (attn_mask, key_padding_mask, is_causal), wanted, environment)
            if padding is not None:
                output = nest_again(output, padding)
                if weights is not None:
                    padded_rows = padding[:, :, None] if wanted == "average" else padding[:, None, :, None]
                    weights = weights.masked_fill(padded_rows, 0)
        except ClearheadError as error:
            add_module(error, self)
            return recorded_module(self, also_pytorchs(error), locals())
        except RuntimeError:  # of a GEMM; the checks of the inputs say what is wrong, if it is one of them
            self._explain((query, key, value), environment)
            raise
        return output, None if weights is None else weights.to(output.dtype)

    def _attend(
        self,
        inputs: Inputs,
        masks: tuple[Tensor | None, Tensor | None, bool],
        wanted: str | None,
        environment: Environment,
    ) -> tuple[Tensor, Tensor | None]:
        """The output in the layout of `query`, and the weights."""
        attn_mask, key_padding_mask, is_causal = masks
        layer = self._layer(inputs[0], environment)
        layer.plan = plan = plan_of_layer(inputs, layer.linears, layer.settings, environment)
        if plan is None or not plan.fits:
            _require_inputs(self, inputs, environment)
        unbatched = inputs[0].dim() == 2
        # The core is batch first. These are views, and `_project` undoes them.
        if unbatched or not layer.batch_first:
            inputs = _each(inputs, lambda x: x.unsqueeze(0) if unbatched else x.transpose(0, 1))
        query, key, value = inputs  # (N, L or S, E)
        if unbatched and isinstance(key_padding_mask, Tensor) and key_padding_mask.dim() == 1:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        mask = None
        if attn_mask is not None or key_padding_mask is not None or is_causal:
            sizes = query.shape[0], self.num_heads, query.shape[1], key.shape[1]
            mask = hidden_mask(attn_mask, key_padding_mask, is_causal, sizes, self._appended)
        output, weights = layer.run(query, key, value, mask, environment, None, None, wanted)
        if unbatched:
            return output.squeeze(0), None if weights is None else weights.squeeze(0)
        return output if layer.batch_first else output.transpose(0, 1), weights

    def _explain(self, inputs: Inputs, environment: Environment) -> None:
        """Raise what is wrong with the inputs of a call whose GEMM failed, if they are to blame."""
        try:
            _require_inputs(self, inputs, environment)
        except ClearheadError as error:
            add_module(error, self)
            raise also_pytorchs(error) from None

    @property
    def _appended(self) -> int:
        """How many keys the module appends."""
        return (_parameter(self, "bias_k") is not None) + bool(self.add_zero_attn)

    def _layer(self, query: Tensor, environment: Environment) -> Layer:
        """The call of the module, as far as it does not depend on its arguments but for whether they have a batch."""
        heads, out_proj = self.num_heads, vars(self)["_modules"]["out_proj"]
        weight, bias = _parameter(self, "in_proj_weight"), _parameter(self, "in_proj_bias")
        sequence_first = not self.batch_first and not (isinstance(query, Tensor) and query.dim() == 2)
        options = {"dropout_p": self.dropout if self.training else 0.0}
        appended = self._appended
        return Layer(
            partial(self._project, sequence_first, weight, bias, appended),
            out_proj,
            heads,
            heads,
            None,
            options,
            # Appended keys belong to no token, so packed sequences cannot hold them.
            head_dim=None if appended else self.embed_dim // heads,
            batch_first=not sequence_first,
            linears=_linears(weight, bias, out_proj, environment),
            settings=(self.batch_first, heads, self.embed_dim, appended, self.add_zero_attn, options["dropout_p"]),
            multiply=linear_of_any_bias,
        )

    def _project(
        self,
        sequence_first: bool,
        weight: Tensor | None,
        bias: Tensor | None,
        appended: int,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        multiply: Multiply,
    ) -> Inputs:
        inputs = cast(Inputs, (query, key, value))
        batched = query.dim() == 3
        if sequence_first and batched:  # as they are in memory
            inputs = _each(inputs, lambda x: x.transpose(0, 1))
        separate = () if weight is not None else (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        q, k, v = project(*inputs, weight, bias, separate, multiply)
        if sequence_first and batched:
            q, k, v = q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1)
        if batched and appended:
            learned = _parameter(self, "bias_k"), _parameter(self, "bias_v")
            k, v = append_keys(k, v, *learned, self.add_zero_attn)  # (N, S′, E)
        return q, k, v


def _linears(
    weight: Tensor | None, bias: Tensor | None, out_proj: nn.Module, environment: Environment
) -> Linears | None:
    """The parameters of the projections, for a plan; ``None`` if there may be none."""
    if environment.tracing or environment.module_hooks or weight is None:
        return None
    of_output = parameters_of(out_proj) if bias is None or bias.dtype is weight.dtype else None
    return None if of_output is None else [weight, bias, of_output["weight"], of_output["bias"]]


def _parameter(module: nn.Module, name: str) -> Tensor | None:
    """A parameter, from the dictionary unless it is parametrized: attributes of modules are looked up slowly."""
    parameters: dict[str, Any] = vars(module)["_parameters"]
    return parameters[name] if name in parameters else getattr(module, name)


def _each(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The results of `change`. Inputs that are one tensor stay one."""
    query, key, value = inputs
    q = change(query)
    k = q if key is query else change(key)
    return q, k, k if value is key else q if value is query else change(value)


def _require_inputs(module: MultiheadAttention, inputs: Inputs, environment: Environment) -> None:
    weight = module.__dict__["_parameters"].get("in_proj_weight")
    batch_dim = 0 if module.batch_first else 1
    if not environment.tracing and inputs_fit(*inputs, (weight, weight, weight), batch_dim):
        return
    query, key, value = inputs
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor) or not x.is_nested:
            strided(name, x)
    nested = [f"{name} nested, {x.layout}" for name, x in named.items() if x.is_nested]
    if nested:
        expected = "plain tensors, or for self-attention one nested tensor with layout=torch.strided"
        fix = "Pad them with torch.nested.to_padded_tensor, and pass the padding as key_padding_mask."
        raise ShapeError("query, key, value", expected=expected, got=", ".join(nested), fix=fix)
    if query.dim() not in (2, 3) or key.dim() != query.dim() or value.dim() != query.dim():
        expected, fix = "all three-dimensional, or all two-dimensional without a batch", "Add the batch with unsqueeze."
        raise ShapeError("query, key, value", expected=expected, got=_shapes(named), fix=fix)
    for (name, x), features in zip(named.items(), (module.embed_dim, module.kdim, module.vdim), strict=True):
        if x.shape[-1] != features:
            fix = "Sizes of key and value inputs are set by kdim= and vdim=."
            raise ShapeError(name, expected=f"{features} features", got=shape_text(x.shape), fix=fix)
    fix = f"This module has batch_first={module.batch_first}."
    if key.shape[:-1] != value.shape[:-1]:
        raise ShapeError("key, value", expected="equal lengths and batch sizes", got=_shapes(named), fix=fix)
    if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
        expected = f"equal batch sizes N in dimension {batch_dim}"
        raise ShapeError("query, key", expected=expected, got=_shapes(named), fix=fix)
    weight = module.in_proj_weight if module.in_proj_weight is not None else module.q_proj_weight
    for name, x in named.items():
        require_same(name, x, cast(Tensor, weight))


def _shapes(inputs: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {shape_text(x.shape)}" for name, x in inputs.items())
