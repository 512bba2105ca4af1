"""Pictures of a record: one self-contained HTML page, matplotlib axes, and text for the terminal.

Each takes what `clearhead.record` recorded, or weights that a model returned, through `given`. matplotlib and rich
are imported only where they draw.

Example:
    >>> import torch
    >>> from clearhead import plot
    >>> rec = plot.given([torch.eye(3).expand(2, 3, 3)])
    >>> plot.page(rec, ["a", "b", "c"], layer=0, head=1)
    Page(0... MB; .save(path) writes it)
"""

from ._comparison import Comparison, compare
from ._given import given
from ._html import Page, page
from ._image_plots import plot_image
from ._record_plots import plot_heads, plot_map, plot_received
from ._rollout_plot import plot_rollout
from ._tokens import Tokens, read_tokens

__all__ = [
    "Comparison",
    "Page",
    "Tokens",
    "compare",
    "given",
    "page",
    "plot_heads",
    "plot_image",
    "plot_map",
    "plot_received",
    "plot_rollout",
    "read_tokens",
]
