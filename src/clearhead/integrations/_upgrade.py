"""`upgrade` and `downgrade`: swap the parts of a model that Clearhead computes faster, in place and back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .._call.naming import remember_names
from .._checks import flag, module, shown
from .._encoder.products import gains_by_bfloat16
from .._layer.linear import Linear
from ..errors import ArgumentError
from ._lean_stacks import run_in_loop, runs_in_loop, stacks_in
from ._pretrained import (
    head_of,
    models_of_transformers,
    outermost,
    parts_left,
    restore_attention,
    runs_on_clearhead,
    set_attention,
    why_not_set,
)
from ._torch_modules import linears_to_swap, own_linears, swap_attention, swap_attention_back
from ._unpad import ENCODERS, is_unpadded, keep_padding, remove_padding, restore_head, why_no_encoder, why_padded


def upgrade(
    model: nn.Module,
    *,
    attention: bool = True,
    linears: bool = True,
    unpad: bool = False,
    dtype: torch.dtype | None = None,
) -> UpgradeReport:
    """Swap, in place, the parts of a model that Clearhead computes faster on this machine. `downgrade` undoes it.

    Parameters and the ``state_dict`` stay the same objects, so optimizers keep their references. The model trains,
    compiles and accepts hooks as before. The report lists the parts that cannot be swapped, with the reason.

    With ``attention``, every `torch.nn.MultiheadAttention` becomes a `clearhead.nn.MultiheadAttention`. This includes
    those inside `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, which then do not use PyTorch's
    inference fast path. Parametrizations, `fully_shard` and hooks of accelerate keep working. Subclasses have code of
    their own and are not changed, and neither is a module whose attribute ``forward`` runs other code. The attention of
    transformers' models becomes ``"clearhead"``, unless no layer calls an attention function, or one passes it an
    argument that Clearhead does not take. DeBERTa, FlauBERT, LayoutLMv3, LUKE, Megatron-BERT, MPNet, RemBERT, RoFormer
    and XLM have attention code of their own, whose classes are swapped. An `nn.TransformerEncoder` still zeroes its
    padded outputs in inference.

    With ``linears``, every unmodified `torch.nn.Linear` becomes a `clearhead.nn.Linear`, on machines where that may
    choose another GEMM than PyTorch's. A subclass, hook, parametrization, adapter or quantised weight is a
    modification.

    With ``unpad``, the encoders of transformers' models run only on the real tokens of a padded batch. Results are the
    same at real tokens and zero at padding. Other calls run padded, as before. These are calls with
    ``output_attentions``, masks of 3 or 4 dimensions, cross-attention, a text without tokens, a head that reads a
    first column of padding, hooks inside or chunked feed-forward, and calls while recording or tracing.

    In inference on the CPU their layers, and those of each `clearhead.transformer.Encoder`, then run in one loop, on
    copies of their weights that are laid out for the processor. The first call makes the copies. They are made again
    when a parameter or a module was changed. What is written through ``parameter.data`` or NumPy, or to parameters made
    in inference mode, is not counted by PyTorch and found by samples: after such a write to a part of a weight, call
    `upgrade` again. With ``dtype=torch.bfloat16`` the loop multiplies in bfloat16, and computes
    norms and softmax in float32. Parameters and outputs keep their dtype. Calls that need the layers' own code
    (training, gradients, hidden states, hooks, autocast) run it in the parameters' dtype.

    Args:
        model: any module. It may itself be swapped.
        attention: whether to swap attention. Default True.
        linears: whether to swap linear layers. Default True.
        unpad: whether encoders run without padding. Default False.
        dtype: with ``unpad``, ``torch.bfloat16`` for the loop over the layers. Default: that of the parameters, as on
            processors without AVX512-BF16 and AMX, where bfloat16 gains nothing.

    Returns:
        An `UpgradeReport`. Print it.

    Raises:
        DTypeError: if `model` is not a module, or another argument not a bool.
        ArgumentError: for ``unpad=True`` without an encoder that supports it and without a stack of
            `clearhead.transformer`, or with another attention than Clearhead's. For a `dtype` without ``unpad``, or
            another than bfloat16. The model is then unchanged.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> print(clearhead.upgrade(model, linears=False))
        upgraded: 1 attention module(s)
          self_attn
    """
    module("model", model)
    attention, linears, unpad = flag("attention", attention), flag("linears", linears), flag("unpad", unpad)
    dtype, why_not = _read_dtype(dtype, unpad)
    pretrained = models_of_transformers(model)
    own_stacks = stacks_in(model) if unpad else {}
    encoders, padded = _encoders(model, pretrained, attention, bool(own_stacks)) if unpad else ({}, {})
    layers, other_layers = linears_to_swap(model) if linears else ({}, {})
    pretrained_models = outermost(pretrained) if attention else {}
    reasons = {name: why_not_set(part) or set_attention(part) for name, part in pretrained_models.items()}
    models = tuple(name for name, why in reasons.items() if why is None)
    for name in [name for name, encoder in encoders.items() if not runs_on_clearhead(encoder)]:
        del encoders[name]
        padded[name] = "its attention is not Clearhead's"
    changed, unchanged, stacks = swap_attention(model) if attention else ([], {}, [])
    unchanged |= {name: why for name, why in reasons.items() if why is not None}
    unchanged |= {name: why for root in models for name, why in parts_left(model, root).items()}
    for layer in layers.values():
        layer.__class__ = Linear
    loops = {name: remove_padding(each, head_of(pretrained, name), dtype) + why_not for name, each in encoders.items()}
    loops |= {name: run_in_loop(stack, dtype) + why_not for name, stack in own_stacks.items()}
    remember_names(model)
    attentions = tuple(changed), unchanged, tuple(stacks), models
    return UpgradeReport("upgraded", *attentions, tuple(layers), other_layers, tuple(encoders), padded, loops)


def _read_dtype(dtype: torch.dtype | None, unpad: bool) -> tuple[torch.dtype | None, str]:
    """The dtype of the loop over an encoder's layers, and for the report why it is not the one that was asked for."""
    if dtype is None:
        return None, ""
    if dtype is not torch.bfloat16:
        raise ArgumentError("dtype", expected="torch.bfloat16 or None", got=shown(dtype))
    if not unpad:
        fix = "Convert the model itself with model.to(torch.bfloat16), or pass unpad=True."
        raise ArgumentError(
            "dtype", expected="unpad=True, whose loop over an encoder's layers it is of", got="unpad=False", fix=fix
        )
    if not gains_by_bfloat16():
        return None, "; this processor has neither AVX512-BF16 nor AMX, so that bfloat16 would gain nothing"
    return dtype, ""


def downgrade(model: nn.Module) -> UpgradeReport:
    """Undo `upgrade`, in place: restore PyTorch's classes, and the previous attention of transformers' models.

    Args:
        model: any module.

    Returns:
        An `UpgradeReport`. It names subclasses of Clearhead's attention, and models of transformers whose attention
        `upgrade` did not set. Both stay unchanged.

    Raises:
        DTypeError: if `model` is not a module.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> _ = clearhead.upgrade(model, linears=False)
        >>> print(clearhead.downgrade(model))
        downgraded: 1 attention module(s)
          self_attn
    """
    module("model", model)
    pretrained = models_of_transformers(model)
    unpadded = tuple(name for name, part in pretrained.items() if is_unpadded(part))
    for name in unpadded:
        keep_padding(pretrained[name], head_of(pretrained, name))
    for part in pretrained.values():  # of encoders that were downgraded by themselves
        restore_head(part)
    for stack in filter(runs_in_loop, model.modules()):
        del stack.forward
    layers = own_linears(model)
    for layer in layers.values():
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    models = tuple(name for name, part in pretrained.items() if restore_attention(part))
    changed, unchanged, stacks = swap_attention_back(model)
    for name, part in outermost(pretrained).items():
        if runs_on_clearhead(part):
            unchanged[name] = "its attention was set by something else, or by upgrading a model that it is a part of"
    attentions = tuple(changed), unchanged, tuple(stacks), models
    return UpgradeReport("downgraded", *attentions, tuple(layers), unpadded=unpadded)


def _encoders(
    model: nn.Module, pretrained: dict[str, Any], attention: bool, has_stacks: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The encoders that can run without padding, and the reasons for other models of transformers."""
    heads = {id(head_of(pretrained, name)) for name in pretrained}
    kinds = {name: why_no_encoder(part) for name, part in pretrained.items()}
    padded = {name: why for name, why in kinds.items() if why is not None and id(pretrained[name]) not in heads}
    supported = [name for name, why in kinds.items() if why is None]
    if not supported and not has_stacks:
        expected = f"one of the encoders that can leave padding out ({', '.join(ENCODERS)}) for unpad=True"
        got = "; ".join(padded.values()) or f"{type(model).__name__}, which holds no model of transformers"
        fix = "Leave unpad out: upgrade(model) swaps the rest."
        raise ArgumentError("unpad", expected=expected, got=got, fix=fix)
    for name in supported:
        _require_attention(pretrained, name, attention)
    reasons = {name: why_padded(pretrained[name], head_of(pretrained, name)) for name in supported}
    padded |= {name: why for name, why in reasons.items() if why is not None}
    return {name: pretrained[name] for name, why in reasons.items() if why is None}, padded


def _require_attention(pretrained: dict[str, Any], name: str, attention: bool) -> None:
    """Raise if the encoder will not run on Clearhead's attention, which separates the texts of one row."""
    if runs_on_clearhead(pretrained[name]):
        return
    root = next(outer for path, outer in outermost(pretrained).items() if not path or f"{name}.".startswith(f"{path}."))
    why = why_not_set(root) if attention else "attention=False leaves it as it is"
    if why is not None:
        fix = 'Call model.set_attn_implementation("clearhead") or upgrade(model, unpad=True) on a model with "sdpa".'
        expected = f"Clearhead's attention in {name or 'the model'}, by which texts in one row are kept apart"
        raise ArgumentError("unpad", expected=expected, got=why, fix=fix)


@dataclass(frozen=True)
class UpgradeReport:
    """The changes of `upgrade` or `downgrade`.

    Args:
        action: ``"upgraded"`` or ``"downgraded"``.
        changed: qualified names of the `nn.MultiheadAttention` modules with a new class.
        left: attention modules and models of transformers that were not changed, with the reason.
        encoders: the `nn.TransformerEncoder`s whose nested-tensor path was switched off or on.
        models: the models of transformers whose attention was set or restored.
        linears: the `nn.Linear` layers with a new class.
        left_linears: linear layers that were not changed, with the reason.
        unpadded: the encoders of transformers that now run without padding, or with padding again.
        left_padded: models of transformers that still run with padding, with the reason.
        loops: how the layers of each encoder without padding run in inference.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(12, 2, batch_first=True), 1)
        >>> report = clearhead.upgrade(model)
        >>> report.changed, report.left, report.encoders
        (('layers.0.self_attn',), {}, ('',))
    """

    action: str
    changed: tuple[str, ...]
    left: dict[str, str]
    encoders: tuple[str, ...]
    models: tuple[str, ...] = ()
    linears: tuple[str, ...] = ()
    left_linears: dict[str, str] = field(default_factory=dict)
    unpadded: tuple[str, ...] = ()
    left_padded: dict[str, str] = field(default_factory=dict)
    loops: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        kinds = (
            (self.changed, "attention module(s)", ""),
            (self.models, "model(s) of transformers", "attention: "),
            (self.linears, "linear layer(s)", "linear: "),
            (self.unpadded, "encoder(s) without padding", "without padding: "),
            (tuple(name for name in self.loops if name not in self.unpadded), "stack(s) in a loop", "in a loop: "),
        )
        counts = ", ".join(f"{len(names)} {what}" for names, what, _ in kinds if names)
        lines = [f"{self.action}: {counts or 'nothing'}"]
        lines += [f"  {label}{_shown(name)}" for names, _, label in kinds for name in names]
        lines += [f"  {_shown(name)}: {how}" for name, how in self.loops.items()]
        lines += [f"  left alone: {_shown(name)}, {reason}" for name, reason in self.left.items()]
        lines += [f"  left padded: {_shown(name)}, {reason}" for name, reason in self.left_padded.items()]
        for reason in dict.fromkeys(self.left_linears.values()):
            names = [name for name, why in self.left_linears.items() if why == reason]
            what = _shown(names[0]) if len(names) == 1 else f"{len(names)} linear layers"
            lines.append(f"  left alone: {what}, {reason}")
        switched = "switched off" if self.action == "upgraded" else "switched on again"
        lines += [f"  nested tensors {switched}: {_shown(name)}" for name in self.encoders]
        return "\n".join(lines)


def _shown(name: str) -> str:
    return name or "(the model itself)"
