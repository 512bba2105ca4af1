"""What `upgrade` and `downgrade` did to a model."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class UpgradeReport:
    """What `upgrade` or `downgrade` did.

    Args:
        changed: qualified names of the `nn.MultiheadAttention` modules whose class was swapped.
        left: names of attention modules and of models of transformers that were left alone, with the reason.
        encoders: names of the `nn.TransformerEncoder`s whose nested-tensor path was switched off or on.
        models: names of the models of transformers whose attention was set or set back.
        linears: names of the `nn.Linear` layers whose class was swapped.
        left_linears: names of linear layers that were left alone, with the reason.
        unpadded: names of the encoders of transformers that run on real tokens alone from now on, or no longer.
        left_padded: names of models of transformers that go on running padded, with the reason.

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
        counts = (
            (self.changed, "attention module(s)"),
            (self.models, "model(s) of transformers"),
            (self.linears, "linear layer(s)"),
            (self.unpadded, "encoder(s) without padding"),
        )
        found = ", ".join(f"{len(names)} {what}" for names, what in counts if names)
        lines = [f"{self.action}: {found or 'nothing'}"]
        lines += [f"  {_shown(name)}" for name in self.changed]
        lines += [f"  attention: {_shown(name)}" for name in self.models]
        lines += [f"  linear: {_shown(name)}" for name in self.linears]
        lines += [f"  without padding: {_shown(name)}" for name in self.unpadded]
        lines += [f"  left alone: {_shown(name)}, {reason}" for name, reason in self.left.items()]
        lines += [f"  left padded: {_shown(name)}, {reason}" for name, reason in self.left_padded.items()]
        for reason in dict.fromkeys(self.left_linears.values()):
            names = [name for name, its in self.left_linears.items() if its == reason]
            what = _shown(names[0]) if len(names) == 1 else f"{len(names)} linear layers"
            lines.append(f"  left alone: {what}, {reason}")
        switched = "switched off" if self.action == "upgraded" else "switched on again"
        lines += [f"  nested tensors {switched}: {_shown(name)}" for name in self.encoders]
        return "\n".join(lines)


def _shown(name: str) -> str:
    return name or "(the model itself)"
