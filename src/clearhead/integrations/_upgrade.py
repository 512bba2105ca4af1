"""`upgrade` and `downgrade`: swap the class of every `torch.nn.MultiheadAttention` in a model, in place."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ..errors import DTypeError, explain_problem
from ..nn._encoder import drop_padding, keep_padding
from ..nn._multihead_attention import MultiheadAttention, keep_off_fast_path
from ..nn._sharing import STACKS, share_masks, stop_sharing

__all__ = ["UpgradeReport", "downgrade", "upgrade"]

_NESTED_BEFORE = "_clearhead_use_nested_tensor"


@dataclass(frozen=True)
class UpgradeReport:
    """What `upgrade` or `downgrade` did.

    Args:
        changed: qualified names of the modules whose class was swapped.
        left: names of attention modules that were left alone, with the reason.
        encoders: names of the `nn.TransformerEncoder`s whose nested-tensor path was switched off or on.

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

    def __str__(self) -> str:
        lines = [f"{self.action}: {len(self.changed)} attention module(s)"]
        lines += [f"  {name or '(the model itself)'}" for name in self.changed]
        lines += [f"  left alone: {name or '(the model itself)'}, {reason}" for name, reason in self.left.items()]
        lines += [
            f"  nested tensors {_switched(self.action)}: {name or '(the model itself)'}" for name in self.encoders
        ]
        return "\n".join(lines)


def upgrade(model: nn.Module) -> UpgradeReport:
    """Turn every `torch.nn.MultiheadAttention` inside a model into `clearhead.nn.MultiheadAttention`, in place.

    Parameters stay the same objects, so optimizers keep their references, and so does the ``state_dict``. Those
    inside `nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer` are included, and PyTorch's inference fast
    path no longer goes round them. Only that exact class is swapped; subclasses have code of their own. An
    `nn.TransformerEncoder` goes on zeroing its padded outputs in inference.

    Args:
        model: any module; it may itself be the attention module.

    Returns:
        An `UpgradeReport`; print it.

    Raises:
        DTypeError: if `model` is not a module.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> print(clearhead.upgrade(model))
        upgraded: 1 attention module(s)
          self_attn
    """
    _require_module(model)
    changed: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is nn.MultiheadAttention:
            module.__class__ = MultiheadAttention
            module.register_forward_pre_hook(keep_off_fast_path)
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            left[name] = "it is Clearhead's already"
        elif isinstance(module, nn.MultiheadAttention):
            left[name] = f"{type(module).__module__}.{type(module).__qualname__} is a subclass with code of its own"
    for module in model.modules():
        if isinstance(module, STACKS) and _holds_ours(module):
            share_masks(module)
    return UpgradeReport("upgraded", tuple(changed), left, _nested_off(model))


def downgrade(model: nn.Module) -> UpgradeReport:
    """Turn every `clearhead.nn.MultiheadAttention` inside a model back into PyTorch's, in place.

    Args:
        model: any module.

    Returns:
        An `UpgradeReport`; subclasses of Clearhead's class are left alone and named.

    Raises:
        DTypeError: if `model` is not a module.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.TransformerEncoderLayer(12, 3, batch_first=True)
        >>> _ = clearhead.upgrade(model)
        >>> print(clearhead.downgrade(model))
        downgraded: 1 attention module(s)
          self_attn
    """
    _require_module(model)
    changed: list[str] = []
    left: dict[str, str] = {}
    for name, module in model.named_modules():
        if type(module) is MultiheadAttention:
            hooks = module._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
            for key in [key for key, hook in hooks.items() if hook is keep_off_fast_path]:
                del hooks[key]
            module.__class__ = nn.MultiheadAttention  # pyright: ignore[reportAttributeAccessIssue]
            changed.append(name)
        elif isinstance(module, MultiheadAttention):
            left[name] = f"{type(module).__module__}.{type(module).__qualname__} is a subclass with code of its own"
    for module in model.modules():
        if isinstance(module, STACKS) and not _holds_ours(module):
            stop_sharing(module)
    return UpgradeReport("downgraded", tuple(changed), left, _nested_back(model))


def _nested_off(model: nn.Module) -> tuple[str, ...]:
    """`nn.TransformerEncoder` turns padded batches into nested tensors, which only its fast path can compute with."""
    encoders: list[str] = []
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.TransformerEncoder)
            and getattr(module, "use_nested_tensor", False)
            and _holds_ours(module)
        ):
            setattr(module, _NESTED_BEFORE, True)
            module.use_nested_tensor = False
            drop_padding(module)
            encoders.append(name)
    return tuple(encoders)


def _nested_back(model: nn.Module) -> tuple[str, ...]:
    encoders: list[str] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.TransformerEncoder) and hasattr(module, _NESTED_BEFORE) and not _holds_ours(module):
            delattr(module, _NESTED_BEFORE)
            module.use_nested_tensor = True
            keep_padding(module)
            encoders.append(name)
    return tuple(encoders)


def _holds_ours(module: nn.Module) -> bool:
    return any(isinstance(part, MultiheadAttention) for part in module.modules())


def _switched(action: str) -> str:
    return "switched off" if action == "upgraded" else "switched on again"


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise DTypeError(explain_problem("model", expected="a torch.nn.Module", got=type(model).__name__))
