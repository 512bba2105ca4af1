"""The report of `Mask.check`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MaskReport:
    """The findings of `Mask.check`; ``ok`` if there are none.

    Args:
        description: the mask as a user writes it.
        findings: one sentence each.

    Example:
        >>> from clearhead import masks
        >>> report = masks.causal().check(4)
        >>> report.ok, str(report)
        (True, 'causal(): nothing suspicious')
    """

    description: str
    findings: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.findings

    def __str__(self) -> str:
        if self.ok:
            return f"{self.description}: nothing suspicious"
        return "\n".join([f"{self.description}:", *(f"  - {finding}" for finding in self.findings)])
