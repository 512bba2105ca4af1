"""The changes of `upgrade` and `downgrade` to a model."""

from __future__ import annotations

from dataclasses import dataclass, field


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

    def __str__(self) -> str:
        kinds = (
            (self.changed, "attention module(s)", ""),
            (self.models, "model(s) of transformers", "attention: "),
            (self.linears, "linear layer(s)", "linear: "),
            (self.unpadded, "encoder(s) without padding", "without padding: "),
        )
        counts = ", ".join(f"{len(names)} {what}" for names, what, _ in kinds if names)
        lines = [f"{self.action}: {counts or 'nothing'}"]
        lines += [f"  {label}{_shown(name)}" for names, _, label in kinds for name in names]
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
