"""The warnings of `monitor` about heads beyond a threshold."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from ..errors import AttentionHealthWarning

#: (module name, statistic) → one number per head, (H,).
PerHead = Mapping[tuple[str, str], Tensor]

_MOST_NAMED = 3  # heads that a warning lists


@dataclass
class Alarm:
    """Warns once of heads beyond a threshold.

    Args:
        statistics: the statistics that it checks.
        is_beyond: whether the number of a head is beyond the threshold.
        warning: the text, a format string with ``{heads}``.
    """

    statistics: tuple[str, ...]
    is_beyond: Callable[[float], bool]
    warning: str
    first: dict[tuple[str, str, int], float] = field(default_factory=dict[tuple[str, str, int], float])
    has_warned: bool = False

    def check(self, step: int, heads: PerHead) -> None:
        """Check one measured step."""
        beyond: list[str] = []
        for (name, statistic), numbers in heads.items():
            if self.has_warned or statistic not in self.statistics:
                continue
            for head, value in enumerate(numbers.tolist()):
                first = self.first.setdefault((name, statistic, head), value)
                if self.is_beyond(value):
                    before = f", {first:.3g} when it was first measured" if step else ""
                    beyond.append(f"{name or 'the model itself'} head {head} ({statistic} {value:.3g}{before})")
        if beyond:
            self.has_warned = True
            more = f" and {len(beyond) - _MOST_NAMED} more" if len(beyond) > _MOST_NAMED else ""
            text = self.warning.format(heads=", ".join(beyond[:_MOST_NAMED]) + more)
            warnings.warn(f"monitor, step {step}: {text}", AttentionHealthWarning, stacklevel=4)


def entropy_collapse(threshold: float) -> Alarm:
    """An alarm for heads with an entropy below the threshold, in nats."""
    return Alarm(
        ("entropy",),
        lambda value: value < threshold,
        f"attention entropy has collapsed, below {threshold:g} nats, in {{heads}}. Each query attends to one "
        "key, hardly any gradient passes through these weights, and training may become unstable (Zhai et al., "
        "2023). A lower learning rate, a longer warm-up, q_norm and k_norm, or clearhead.qk_clip_ prevent it.",
    )


def logit_growth(threshold: float) -> Alarm:
    """An alarm for heads with a logit above the threshold."""
    return Alarm(
        ("max_logit", "raw_max_logit"),
        lambda value: value > threshold,
        f"attention logits have grown, beyond {threshold:g}, in {{heads}}. Weights become one-hot and the loss "
        "may diverge (Dehghani et al., 2023). q_norm and k_norm or clearhead.qk_clip_ bound them; a lower learning "
        "rate slows them.",
    )
