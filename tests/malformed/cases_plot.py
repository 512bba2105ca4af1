"""Pictures; slow, so drawn seldom."""

from __future__ import annotations

import os
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch

import clearhead
from clearhead import plot
from clearhead.plot import Tokens, read_tokens
from tests.malformed.calls import Call, case
from tests.malformed.cases_inspection import recorded

mpl.use("agg")

NAMES = ["it", "was", "too", "tired", "."]


def _closing(draw: Any) -> Any:
    """Draw, and let go of the figure."""
    from functools import wraps

    import matplotlib.pyplot as plt

    @wraps(draw)
    def drawn(*args: Any, **given: Any) -> Any:
        try:
            return draw(*args, **given)
        finally:
            plt.close("all")

    return drawn


@cache
def vision_record() -> Any:
    """Of a vision transformer with 2 × 2 patches."""
    from transformers import ViTConfig, ViTModel

    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    vit = ViTModel(ViTConfig(**sizes, image_size=4, patch_size=2)).eval()
    with torch.no_grad(), clearhead.record(vit, keep="queries_keys") as rec:
        vit(pixel_values=torch.rand(1, 3, 4, 4))
    return rec


TOKENS = {"tokens": [NAMES, NAMES]}
CELL = {"layer": 0, "head": 1, "item": 0}
ROLLOUT = {"item": 0, "layers": [0], "residual": 0.5}


def drawn(draw: Any, **arguments: Any) -> Call:
    return Call(_closing(draw), **arguments)


def _given() -> Any:
    return plot.given([torch.eye(3).expand(2, 3, 3)])


case("plot.page", weight=2)(
    lambda: Call(plot.page, rec=recorded(), **TOKENS, layer=0, head=1, labels=["a", "b"], title="t")
)
case("record.page", weight=2)(lambda: Call(recorded().page, **TOKENS, key_tokens=[NAMES, NAMES]))
case("plot.page, crops", weight=2)(lambda: Call(plot.page, rec=recorded(), crops=[(0, 1, slice(0, 3), slice(0, 2))]))
case("plot.plot_heads", weight=1)(lambda: drawn(plot.plot_heads, rec=recorded(), statistic="entropy"))
case("plot.plot_map", weight=1)(lambda: drawn(plot.plot_map, rec=recorded(), **CELL, **TOKENS, words=True))
case("plot.plot_received", weight=1)(lambda: drawn(plot.plot_received, rec=recorded(), **CELL, **TOKENS))
case("plot.plot_rollout", weight=1, layers="layer")(
    lambda: drawn(plot.plot_rollout, rec=recorded(), targets=0, **TOKENS, **ROLLOUT)
)
case("plot.plot_rollout of patches", weight=1, layers="layer")(
    lambda: drawn(plot.plot_rollout, rec=recorded(), targets=0, grid=(2, 2), image=torch.rand(4, 4, 3), **ROLLOUT)
)
case("plot.compare", weight=2)(
    lambda: Call(plot.compare, rec=recorded(), other=recorded(), **TOKENS, other_tokens=[NAMES, NAMES])
)
case("plot.Comparison", weight=2)(
    lambda: Call(plot.Comparison, first=recorded(), second=recorded(), **TOKENS, other_tokens=[NAMES, NAMES])
)
case("plot.plot_image", weight=1)(
    lambda: drawn(plot.plot_image, rec=vision_record(), image=torch.rand(4, 4, 3), query=(0, 1), **CELL)
)
case("plot.given")(lambda: Call(plot.given, weights=[torch.eye(3).expand(2, 3, 3)], names=["a"]))
case("plot.given, its methods", weight=4)(lambda: Call(_given().weights, layer=0, head=1, queries=[0], call=0))
case("plot.given, rollout", weight=2, layers="layer")(
    lambda: Call(_given().rollout, targets=[0], layers=[0], residual=0.5)
)
case("plot.Tokens", arguments=("names", "special", "words"), names=("tokens", "token"))(
    lambda: Call(lambda **given: Tokens(**given).word_names(), names=NAMES, special=[False] * 5, words=[0, 1, 2, 3, 3])
)
case("plot.Tokens.cut", weight=2)(lambda: Call(Tokens(NAMES).cut, start=0, stop=2))


class _Tokenizer:
    all_special_ids = (0,)
    unk_token_id = 1

    def convert_ids_to_tokens(self, ids: Any) -> list[str]:
        return [f"t{number}" for number in ids]

    def decode(self, ids: Any, **_options: Any) -> str:
        return f"t{ids[0]}"


case("plot.read_tokens", weight=2)(lambda: Call(read_tokens, tokenizer=_Tokenizer(), ids=[0, 3, 4], words=[None, 0, 1]))


@case("plot.Page.save", weight=1)
def _() -> Call:
    def save(path: Any) -> Any:
        # Whatever the path, what is written lies in a folder that goes again.
        before = Path.cwd()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            try:
                return plot.Page("text").save(path)
            finally:
                os.chdir(before)

    return Call(save, path="page.html")
