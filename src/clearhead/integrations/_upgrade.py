"""`upgrade` and `downgrade`: what Clearhead computes faster in a model, swapped in place and back."""

from __future__ import annotations

from typing import Any

from torch import nn

from .._call.naming import remember_names
from .._checks import flag, module
from .._layer.linear import Linear
from ..errors import ArgumentError
from ._linears import linears_to_swap, own_linears
from ._pretrained import (
    head_of,
    models_of_transformers,
    outermost,
    restore_attention,
    runs_on_clearhead,
    set_attention,
    why_not_set,
)
from ._torch_attention import swap_attention, swap_attention_back
from ._unpad import ENCODERS, is_unpadded, keep_padding, leave_out_padding, why_no_encoder, why_padded
from ._upgrade_report import UpgradeReport


def upgrade(model: nn.Module, *, attention: bool = True, linears: bool = True, unpad: bool = False) -> UpgradeReport:
    """Swap, in place, the parts of a model that Clearhead computes faster on this machine; `downgrade` undoes it.

    Parameters stay the same objects, so optimizers keep their references, and so does the ``state_dict``; the model
    trains, compiles and takes hooks as before. What cannot be swapped is left, and the report says why.

    Args:
        model: any module; it may itself be what is swapped.
        attention: turn every `torch.nn.MultiheadAttention` into `clearhead.nn.MultiheadAttention`, those inside
            `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` included, which PyTorch's inference fast path
            then no longer goes round (only that exact class: subclasses have code of their own), and set the attention
            of transformers' models to ``"clearhead"``. An `nn.TransformerEncoder` goes on zeroing its padded outputs in
            inference. Default True.
        linears: turn every `torch.nn.Linear` that nothing was changed on (no subclass, hook, parametrization, adapter
            or quantised weight) into `clearhead.nn.Linear`, on machines where its rule may choose another GEMM than
            PyTorch's. Default True.
        unpad: let the encoders of transformers' models run on the real tokens of a padded batch alone. Results are the
            same at real tokens and zero at padding. A call that this does not fit runs padded, as before: one with
            ``output_attentions``, masks of 3 or 4 dimensions, cross-attention, a text without tokens, a head that reads
            a first column of padding, hooks inside, chunked feed-forward, while recording or tracing. Default False.

    Returns:
        An `UpgradeReport`; print it.

    Raises:
        DTypeError: if `model` is not a module, or a choice not a bool.
        ArgumentError: for ``unpad=True`` if no model in it is an encoder that can leave padding out, by name, or if it
            is to keep another attention than Clearhead's. The model is then as it was.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> print(clearhead.upgrade(model, linears=False))
        upgraded: 1 attention module(s)
          self_attn
    """
    module("model", model)
    attention, linears, unpad = flag("attention", attention), flag("linears", linears), flag("unpad", unpad)
    pretrained = models_of_transformers(model)
    encoders, left_padded = _encoders(model, pretrained, attention) if unpad else ({}, {})
    swapped, left_linears = linears_to_swap(model) if linears else ({}, {})
    models: list[str] = []
    left: dict[str, str] = {}
    for name, each in outermost(pretrained).items() if attention else ():
        why = why_not_set(each) or set_attention(each)
        if why is None:
            models.append(name)
        else:
            left[name] = why
    for name in [name for name, encoder in encoders.items() if not runs_on_clearhead(encoder)]:
        del encoders[name]
        left_padded[name] = "its attention is not Clearhead's"
    changed, others, stacks = swap_attention(model) if attention else ([], {}, [])
    left = others | left
    for layer in swapped.values():
        layer.__class__ = Linear
    for name, encoder in encoders.items():
        leave_out_padding(encoder, head_of(pretrained, name))
    remember_names(model)
    return UpgradeReport(
        "upgraded",
        tuple(changed),
        left,
        tuple(stacks),
        tuple(models),
        tuple(swapped),
        left_linears,
        tuple(encoders),
        left_padded,
    )


def downgrade(model: nn.Module) -> UpgradeReport:
    """Undo `upgrade`, in place: PyTorch's classes everywhere, and the attention that transformers' models had before.

    Args:
        model: any module.

    Returns:
        An `UpgradeReport`; subclasses of Clearhead's attention are left alone and named, and so are models of
        transformers whose attention `upgrade` did not set.

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
    unpadded = [name for name, each in pretrained.items() if is_unpadded(each)]
    for name in unpadded:
        keep_padding(pretrained[name], head_of(pretrained, name))
    layers = own_linears(model)
    for layer in layers.values():
        layer.__class__ = nn.Linear  # pyright: ignore[reportAttributeAccessIssue]
    models = [name for name, each in pretrained.items() if restore_attention(each)]
    changed, left, stacks = swap_attention_back(model)
    for name, each in outermost(pretrained).items():
        if runs_on_clearhead(each):
            left[name] = "its attention was set by something else, or by upgrading a model that it is a part of"
    return UpgradeReport(
        "downgraded",
        tuple(changed),
        left,
        tuple(stacks),
        tuple(models),
        tuple(layers),
        unpadded=tuple(unpadded),
    )


def _encoders(
    model: nn.Module, pretrained: dict[str, Any], attention: bool
) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The encoders that can leave padding out, and why other models of transformers go on with theirs.

    Raises:
        ArgumentError: if there is no such architecture in the model, or if it is to keep another attention.
    """
    heads = {id(head_of(pretrained, name)) for name in pretrained}
    found = {name: (each, why_no_encoder(each)) for name, each in pretrained.items()}
    listed = {name: each for name, (each, why) in found.items() if why is None}
    left = {name: why for name, (each, why) in found.items() if why is not None and id(each) not in heads}
    if not listed:
        expected = f"one of the encoders that can leave padding out ({', '.join(ENCODERS)}) for unpad=True"
        got = "; ".join(left.values()) or f"{type(model).__name__}, which holds no model of transformers"
        fix = "Leave unpad out: upgrade(model) swaps the rest."
        raise ArgumentError("unpad", expected=expected, got=got, fix=fix)
    for name in listed:
        _require_attention(pretrained, name, attention)
    encoders: dict[str, nn.Module] = {}
    for name, each in listed.items():
        why = why_padded(each, head_of(pretrained, name))
        if why is None:
            encoders[name] = each
        else:
            left[name] = why
    return encoders, left


def _require_attention(pretrained: dict[str, Any], name: str, attention: bool) -> None:
    """Only Clearhead's attention keeps the texts of one row apart."""
    if runs_on_clearhead(pretrained[name]):
        return
    around = next(root for part, root in outermost(pretrained).items() if not part or f"{name}.".startswith(f"{part}."))
    why = why_not_set(around) if attention else "attention=False leaves it as it is"
    if why is not None:
        fix = 'Call model.set_attn_implementation("clearhead") or upgrade(model, unpad=True) on a model with "sdpa".'
        expected = f"Clearhead's attention in {name or 'the model'}, by which texts in one row are kept apart"
        raise ArgumentError("unpad", expected=expected, got=why, fix=fix)
