"""The options that choose the large head, and the statistic of the overviews."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from .._statistics.definitions import OF_WEIGHTS, STATISTICS
from .._statistics.statistic import Options
from ..errors import explain_problem
from ..plot._collect import SectionPicture
from ..plot._heads import HeadSummary, clearest_head
from ._errors import UsageProblem

PREVIOUS = "offset -1"
#: Names after ``--stat`` → statistics of a record.
SHOWN = {
    "previous" if label == PREVIOUS else label: name
    for name, kind in STATISTICS.items()
    for label in kind.labels(Options())
}
RECORDED = (*OF_WEIGHTS, "max_logit")

#: A name, and one number per layer and head.
Numbers = tuple[str, list[list[float]]]


@dataclass(frozen=True)
class Choice:
    """The options of a look. ``None`` is chosen automatically. `statistic` is a key of `SHOWN`, or `UsageProblem`."""

    layer: int | None = None
    head: int | None = None
    statistic: str | None = None

    def __post_init__(self) -> None:
        if self.statistic is not None and self.statistic not in SHOWN:
            raise UsageProblem(explain_problem("--stat", expected=f"one of {', '.join(SHOWN)}", got=self.statistic))

    @property
    def recorded(self) -> tuple[str, ...]:
        """The statistics to record."""
        return RECORDED if self.statistic is None else tuple(dict.fromkeys((*RECORDED, SHOWN[self.statistic])))

    @property
    def on_page(self) -> str:
        """The statistic's name on a page. The default is the maps."""
        return {None: "maps", "previous": PREVIOUS}.get(self.statistic, self.statistic) or "maps"

    def numbers(self, every: Mapping[str, Sequence[Tensor]]) -> Numbers | None:
        """The chosen one of all statistics, from `numbers_of`; ``None`` where none is chosen."""
        return None if self.statistic is None else (self.statistic, [row.tolist() for row in every[self.statistic]])

    def places(self, heads: Sequence[int]) -> list[tuple[int, int]]:
        """The places (layer, head) of the choice, or `UsageProblem`. `heads` counts the heads of each layer."""
        if self.layer is not None and not 0 <= self.layer < len(heads):
            raise UsageProblem(explain_problem("--layer", expected=_range(len(heads)), got=str(self.layer)))
        layers = range(len(heads)) if self.layer is None else [self.layer]
        most = max(heads[layer] for layer in layers)
        if self.head is not None and not 0 <= self.head < most:
            raise UsageProblem(explain_problem("--head", expected=_range(most), got=str(self.head)))
        return [(layer, head) for layer in layers for head in range(heads[layer]) if self.head in (None, head)]

    def clearest(self, summaries: Sequence[Sequence[HeadSummary]]) -> tuple[int, int]:
        """The head to show large: what was chosen, and for the rest the head with the largest contrast."""
        return clearest_head(summaries, self.places([len(row) for row in summaries]))


def numbers_of(picture: SectionPicture) -> dict[str, list[Tensor]]:
    """Statistic, as `SHOWN` calls it → layer → (H,), of those that all layers have."""
    layers = picture.layers
    names = [name for name in layers[0].numbers if all(name in layer.numbers for layer in layers)]
    return {
        "previous" if name == PREVIOUS else name: [layer.numbers[name].double() for layer in layers] for name in names
    }


def _range(count: int) -> str:
    return f"0 to {count - 1}, counted from 0"
