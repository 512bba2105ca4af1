"""All heads of a model in one HTML file that needs nothing else: no network, no framework."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .heads import KINDS, require_head, require_weights, summarize
from .labels import printable

__all__ = ["page_text", "write_page"]

# Weights are stored in ten-thousandths: the four decimals that the page shows.
UNIT = 10_000


def write_page(
    path: Path,
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    layer: int,
    head: int,
    *,
    key_tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    title: str = "Attention",
) -> Path:
    """Write the page that `page_text` describes, in UTF-8.

    Args:
        path: where to; the folder must exist. The other arguments are those of `page_text`.

    Returns:
        The path.

    Raises:
        ArgumentError, ShapeError: as `page_text`.
        OSError: if the file cannot be written.
    """
    text = page_text(weights, tokens, layer, head, key_tokens=key_tokens, special=special, title=title)
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def page_text(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    layer: int,
    head: int,
    *,
    key_tokens: Sequence[str] | None = None,
    special: Sequence[bool] | None = None,
    title: str = "Attention",
) -> str:
    """Make one self-contained HTML page: all heads as thumbnails, the chosen one large, weights under the pointer.

    The page carries every weight to four decimals and asks the network for nothing; its content security policy
    forbids it, and forbids any script but its own. Tokens are data, never markup: ``<script>`` is shown, not run.

    Args:
        weights: one (H, L, S) tensor per layer; rows sum to at most 1.
        tokens: L query tokens.
        layer, head: which head is large at first, counted from 0.
        key_tokens: S key tokens. Default: the query tokens.
        special: per key, whether it is a special token such as ``[CLS]``. Default: none is.
        title: of the page, also shown in it; the model's name for instance.

    Raises:
        ArgumentError: if there is no such layer or head.
        ShapeError: if weights and tokens do not fit.

    Example:
        >>> page = page_text([torch.eye(2)[None]], ["</script>", "b"], layer=0, head=0)
        >>> page.count("</script>")
        2
    """
    keys = tokens if key_tokens is None else key_tokens
    require_weights(weights, tokens, keys)
    require_head(weights, layer, head)
    data = _data(weights, tokens, keys, special, same=key_tokens is None)
    shown_title = printable([title])[0]
    data |= {"layer": layer, "head": head, "facts": f"{shown_title} · {_counted(weights, tokens)}"}
    style, script = _part("page.css"), _part("page.js")
    parts = {
        "policy": f"default-src 'none'; script-src {_source(script)}; style-src {_source(style)}; "
        "base-uri 'none'; form-action 'none'",
        "title": html.escape(shown_title),
        "style": style,
        "script": script,
        "data": _json(data),
    }
    # One pass: what is put in is never searched for places again.
    return re.sub(r"@(policy|title|style|script|data)@", lambda place: parts[place[1]], _part("page.html"))


def _data(
    weights: Sequence[Tensor],
    tokens: Sequence[str],
    keys: Sequence[str],
    special: Sequence[bool] | None,
    *,
    same: bool,
) -> dict[str, Any]:
    heads = [
        [{"entropy": round(head.entropy, 3), "kind": KINDS[head.kind]} for head in layer]
        for layer in summarize(weights, special)
    ]
    return {
        "tokens": printable(tokens),
        "keys": printable(keys),
        "same": same,
        "query": _first_ordinary(special, len(tokens)) if same else 0,
        "heads": heads,
        "unit": UNIT,
        "weights": _packed(weights),
    }


def _packed(weights: Sequence[Tensor]) -> str:
    """Heads one after the other, layer by layer, each row by row: little-endian uint16, deflated, in base64."""
    deflate = zlib.compressobj(6)
    parts = []
    for layer in weights:
        units = (layer.detach().float().clamp(0, 1) * UNIT).round().to(torch.int32).cpu().numpy().astype("<u2")
        parts.append(deflate.compress(units.tobytes()))
    parts.append(deflate.flush())
    return base64.b64encode(b"".join(parts)).decode("ascii")


def _json(data: dict[str, Any]) -> str:
    """JSON that HTML cannot misread: ASCII only, and no character that could end the element around it."""
    text = json.dumps(data, ensure_ascii=True, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _source(text: str) -> str:
    """The content security policy's name for one inline text."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode('ascii')}'"


def _part(name: str) -> str:
    return resources.files("clearhead.plot").joinpath(name).read_text(encoding="utf-8")


def _counted(weights: Sequence[Tensor], tokens: Sequence[str]) -> str:
    heads = sorted({layer.shape[0] for layer in weights})
    per_layer = str(heads[0]) if len(heads) == 1 else f"{heads[0]} to {heads[-1]}"
    return f"{len(weights)} layers × {per_layer} heads · {len(tokens)} tokens"


def _first_ordinary(special: Sequence[bool] | None, length: int) -> int:
    """The query the page starts with: in the middle of the text, and no special token if there is another."""
    order = sorted(range(length), key=lambda place: abs(place - 2 * length // 3))
    return next((place for place in order if special is None or not special[place]), order[0])
