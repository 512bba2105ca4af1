"""Two records side by side: how far their heads are apart, head by head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, final

from .._statistics.recorded import Recorded
from ._collect import require_record
from ._compared_records import ComparedRecords
from ._comparison_page import comparison_page
from ._comparison_plots import plot_comparison
from ._html import Page
from ._spoken import spoken, spoken_picture
from ._tokens import Texts, as_texts

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def compare(
    rec: Recorded, other: Recorded, *, tokens: Texts | None = None, other_tokens: Texts | None = None
) -> Comparison:
    """Compare two records head by head: of two texts, of a model before and after training, with an intervention.

    Modules are paired in the order in which they ran. The models need equal numbers of attention layers and heads.
    Queries and keys with the same token in both are compared. Without tokens they are paired place by place, with
    tokens by the longest runs of equal ones. Without queries and keys, and for texts that cannot be paired, heads are
    compared by their statistics. `Comparison.note` has the reason.

    Args:
        rec: a record made with ``keep="queries_keys"``.
        other: the other record, likewise.
        tokens: those of `rec`, as for `clearhead.plot.page`. Default: both texts are the same, place by place.
        other_tokens: those of `other`. Default: `tokens`.

    Returns:
        A `Comparison`.

    Raises:
        ShapeError: if the numbers of layers or heads differ, or tokens do not fit.

    Example:
        >>> import torch, clearhead
        >>> model, x = clearhead.MultiHeadAttention(12, 3), torch.randn(1, 5, 12)
        >>> with clearhead.record(model, keep="queries_keys") as before:
        ...     _ = model(x)
        >>> with clearhead.record(model, keep="queries_keys") as after:
        ...     _ = model(2 * x)
        >>> before.compare(after).divergence[""].shape
        torch.Size([3])
        >>> before.compare(before).divergence[""].tolist()
        [0.0, 0.0, 0.0]
    """
    require_record(rec)
    require_record(other, "other")
    return Comparison(rec, other, tokens, other_tokens)


@final
class Comparison(ComparedRecords):
    """Two records with the same layers and heads; see `compare`.

    Args:
        first, second: the records.
        tokens, other_tokens: their texts, as for `compare`.

    Raises:
        DTypeError: for anything that is no record, or no tokens.
        ShapeError: if the numbers of layers or heads differ, or tokens do not fit.

    Example:
        >>> import torch
        >>> from clearhead.plot import given
        >>> eye, even = torch.eye(3).expand(2, 3, 3), torch.full((2, 3, 3), 1 / 3)
        >>> comparison = given([eye]).compare(given([even]))
        >>> comparison, comparison.divergence["0"]
        (<comparison of 2 heads by divergence>, tensor([0.3183, 0.3183], dtype=torch.float64))
    """

    def __init__(
        self, first: Recorded, second: Recorded, tokens: Texts | None = None, other_tokens: Texts | None = None
    ) -> None:
        require_record(first, "first")
        require_record(second, "second")
        super().__init__(first, second, as_texts(tokens), as_texts(other_tokens, "other_tokens"))

    @spoken_picture
    def plot_heads(self, statistic: str | None = None, *, ax: Axes | None = None, language: str = "en") -> Axes:
        """Draw one number per head, layers × heads.

        Args:
            statistic: one of `differences`, on a diverging scale. Default: the score of `scores`.
            ax: the axes. Default: a new figure.
            language: as for `clearhead.plot.plot_map`.

        Raises:
            ArgumentError: for a statistic that is not in both records, and for another language.

        Example:
            >>> import torch
            >>> from clearhead.plot import given
            >>> eye, even = torch.eye(3).expand(2, 3, 3), torch.full((2, 3, 3), 1 / 3)
            >>> given([eye]).compare(given([even])).plot_heads().get_title("left")
            'Jensen–Shannon divergence'
        """
        return plot_comparison(self, statistic, ax)

    @spoken
    def page(
        self,
        tokens: Texts | None = None,
        other_tokens: Texts | None = None,
        *,
        labels: Sequence[str] = ("first", "second"),
        title: str = "Attention",
        language: str = "en",
    ) -> Page:
        """Make one page of both: the same view of each and a third of the difference, heads ranked.

        Args:
            tokens, other_tokens: as for `compare`. Default: those given there.
            labels: the names of both. Default: "first" and "second", in the language of the page.
            title: the title of the page.
            language: as for `clearhead.plot.page`.

        Raises:
            RecordError: if the records lack what `clearhead.plot.page` needs, or were made with ``per="kv_head"``.
            ShapeError: if tokens do not fit.

        Example:
            >>> import torch
            >>> from clearhead.plot import given
            >>> eye, even = torch.eye(3).expand(2, 3, 3), torch.full((2, 3, 3), 1 / 3)
            >>> given([eye]).compare(given([even])).page(["a", "b", "c"])
            Page(0... MB; .save(path) writes it)
        """
        if tokens is None and other_tokens is None:
            return comparison_page(self, labels, title)
        return comparison_page(compare(*self.records, tokens=tokens, other_tokens=other_tokens), labels, title)
