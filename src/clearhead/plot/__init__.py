"""Pictures of attention: a matplotlib figure, one self-contained HTML page, and text for the terminal.

Weights are given as a list with one (H, L, S) tensor per layer; of a transformers model for one text, that is
``[layer[0] for layer in outputs.attentions]``. matplotlib and rich are imported only where they draw.

Example:
    >>> import torch
    >>> from clearhead import plot
    >>> weights = [torch.eye(3).expand(2, 3, 3)]
    >>> figure = plot.draw_heads(weights, ["a", "b", "c"], layer=0, head=1)
    >>> page = plot.page_text(weights, ["a", "b", "c"], layer=0, head=1)
"""

from .heads import HeadSummary, clearest_head, summarize
from .html import page_text, write_page
from .matplotlib import draw_heads, save_figure

__all__ = [
    "HeadSummary",
    "clearest_head",
    "draw_heads",
    "page_text",
    "save_figure",
    "summarize",
    "write_page",
]
