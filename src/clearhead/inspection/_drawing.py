"""Pictures as methods of whatever was recorded; `clearhead.plot` draws them and is imported when it is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ..plot import Page
    from ..plot._crops import CropRequest
    from ..plot._protocol import Recorded
    from ..plot._tokens import Texts

__all__ = ["Drawable"]


class Drawable:
    """The pictures of a record: `page` makes an HTML page, the others draw with matplotlib."""

    __slots__ = ()

    def page(
        self: Recorded,
        tokens: Texts | None = None,
        *,
        key_tokens: Texts | None = None,
        layer: int | str | None = None,
        head: int | None = None,
        crops: Sequence[CropRequest] | None = None,
        labels: Sequence[str] | None = None,
        title: str = "Attention",
    ) -> Page:
        """Make one self-contained HTML page of all heads; a notebook shows it, ``.save(path)`` writes it.

        Needs the statistics entropy, received, top_k and map, or ``keep="queries_keys"``.

        Args:
            tokens, key_tokens, layer, head, crops, labels, title: as for `clearhead.plot.page`.

        Raises:
            RecordError: if the record lacks what the page needs. And what `clearhead.plot.page` raises.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with clearhead.record(model, keep="queries_keys") as rec:
            ...     _ = model(torch.randn(1, 3, 8))
            >>> rec.page(["it", "was", "tired"])
            Page(0... MB; .save(path) writes it)
        """
        from .. import plot

        return plot.page(
            self, tokens, key_tokens=key_tokens, layer=layer, head=head, crops=crops, labels=labels, title=title
        )

    def plot_heads(self: Recorded, statistic: str = "entropy", *, ax: Axes | None = None) -> Axes:
        """Draw one number per head, layers down and heads across.

        Args:
            statistic: a name of `summary`, such as ``"entropy"``, ``"max_logit"`` or ``"offset -1"``. Default entropy.
            ax: where to draw. Default: a new figure.

        Returns:
            The axes.

        Raises:
            ArgumentError: if the record has no such number per head.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with clearhead.record(model) as rec:
            ...     _ = model(torch.randn(1, 3, 8))
            >>> rec.plot_heads("entropy").get_title("left")
            'entropy'
        """
        from .. import plot

        return plot.plot_heads(self, statistic, ax=ax)

    def plot_map(
        self: Recorded,
        layer: int | str,
        head: int,
        *,
        tokens: Texts | None = None,
        key_tokens: Texts | None = None,
        item: int = 0,
        words: bool = False,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw the weights of one head, queries down and keys across.

        Args:
            layer, head, tokens, key_tokens, item, words: as for `clearhead.plot.plot_map`.
            ax: where to draw. Default: a new figure.

        Returns:
            The axes.

        Raises:
            RecordError, ArgumentError, ShapeError: as `clearhead.plot.plot_map`.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with clearhead.record(model, keep="queries_keys") as rec:
            ...     _ = model(torch.randn(1, 3, 8))
            >>> rec.plot_map(0, 1, tokens=["it", "was", "tired"]).get_title("left")
            'layer 0, head 1'
        """
        from .. import plot

        return plot.plot_map(self, layer, head, tokens=tokens, key_tokens=key_tokens, item=item, words=words, ax=ax)

    def plot_received(
        self: Recorded,
        layer: int | str | None = None,
        head: int | None = None,
        *,
        tokens: Texts | None = None,
        key_tokens: Texts | None = None,
        item: int = 0,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw what each key receives from all queries, Σ_i p_ij, as bars.

        Args:
            layer, head: which one. Default: the mean over all of them.
            tokens, key_tokens, item: as for `clearhead.plot.plot_map`.
            ax: where to draw. Default: a new figure.

        Returns:
            The axes.

        Raises:
            RecordError, ArgumentError, ShapeError: as `clearhead.plot.plot_map`.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with clearhead.record(model, keep="queries_keys") as rec:
            ...     _ = model(torch.randn(1, 3, 8))
            >>> len(rec.plot_received(tokens=["it", "was", "tired"]).patches)
            3
        """
        from .. import plot

        return plot.plot_received(self, layer, head, tokens=tokens, key_tokens=key_tokens, item=item, ax=ax)

    def plot_rollout(
        self: Recorded,
        targets: int | Sequence[int],
        *,
        tokens: Texts | None = None,
        grid: tuple[int, int] | None = None,
        image: Any = None,
        item: int = 0,
        layers: Sequence[int | str] | None = None,
        residual: float = 0.5,
        ax: Axes | None = None,
    ) -> Axes:
        """Draw attention rollout: what reaches the targets from each input token, or from each patch of an image.

        Args:
            targets, tokens, grid, image, item, layers, residual: as for `clearhead.plot.plot_rollout`.
            ax: where to draw. Default: a new figure.

        Returns:
            The axes.

        Raises:
            RecordError: if queries and keys were not kept. And what `clearhead.plot.plot_rollout` raises.

        Example:
            >>> import torch, clearhead
            >>> model = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
            >>> with clearhead.record(model, keep="queries_keys") as rec:
            ...     _ = model(torch.randn(1, 7, 8))
            >>> rec.plot_rollout(0, grid=(2, 3)).get_title("left")
            'rollout of token 0'
        """
        from .. import plot

        return plot.plot_rollout(
            self,
            targets,
            tokens=tokens,
            grid=grid,
            image=image,
            item=item,
            layers=layers,
            residual=residual,
            ax=ax,
        )
