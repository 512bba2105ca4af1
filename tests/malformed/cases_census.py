"""A census of heads, its result, and the masses that it sums."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import clearhead
from tests.malformed.calls import Call, case
from tests.malformed.cases_plot import drawn
from tests.malformed.values import OwnError, users_own

VOCABULARY, E, H, L = 20, 12, 3, 7


@functools.cache
def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return nn.Sequential(nn.Embedding(VOCABULARY, E), clearhead.MultiHeadAttention(E, H)).eval()


def tokens() -> Any:
    return torch.randint(VOCABULARY, (2, L), generator=torch.Generator().manual_seed(6))


@functools.cache
def taken() -> clearhead.Census:
    return clearhead.census(model(), [tokens()])


def _run(model: Any, batch: Any) -> object:
    try:
        return model(batch)
    except Exception as error:
        raise OwnError from error  # what the batch makes of the user's own model


OPTIONS: dict[str, Any] = {"special": (0, 1), "window": 2, "strongest": 3, "layers": ["1"]}
OPTIONS |= {"pairs": {"chosen": ([1, 2], [3])}}


@case("census", weight=8, arguments=("model", "batches", *OPTIONS, "run", "checkpoint", "progress"))
def _() -> Call:
    def census(run: Any, progress: Any, **given: Any) -> Any:
        run, progress = (users_own(fn) if callable(fn) else fn for fn in (_run if run is None else run, progress))
        return clearhead.census(run=run, progress=progress, **given)

    return Call(census, model=model(), batches=[tokens()], **OPTIONS, run=_run, progress=None)


PLACE: dict[str, Any] = {"metric": "entropy", "layer": 0, "head": 1}
for _name in ("count", "mean", "share", "spread", "lowest", "highest", "rank_heads"):
    case(f"Census.{_name}", weight=1)(lambda name=_name: Call(getattr(taken(), name), metric="duplicate"))
case("Census.plot_heads", weight=1)(lambda: drawn(taken().plot_heads, metric="duplicate"))
case("Census.strongest")(lambda: Call(taken().strongest, **PLACE))
case("Census.kinds")(lambda: Call(taken().kinds, threshold=0.3))
case("Census.with_column", values="layer")(
    lambda: Call(taken().with_column, name="importance", values={"1": torch.zeros(H)})
)
case("Census.merged", weight=2)(lambda: Call(lambda others: taken().merged(others), others=taken()))
case("Census.name_of", weight=2)(lambda: Call(taken().name_of, layer=0))


@case("Mass", weight=8, arguments=("low", "high", "query_labels", "key_labels"))
def _() -> Call:
    def attend(**given: Any) -> Any:
        q, k = torch.randn(2, H, L, 4), torch.randn(2, H, L, 4)
        return clearhead.attention_statistics(q, k, statistics=("mass",), masses=[clearhead.Mass(**given)])

    return Call(attend, low=-3, high=-1, query_labels=tokens(), key_labels=tokens())


case("Mass, a list of them", weight=4)(
    lambda: Call(
        lambda masses: clearhead.attention_statistics(
            torch.randn(2, H, L, 4), torch.randn(2, H, L, 4), statistics=("mass",), masses=masses
        ),
        masses=[clearhead.Mass(-1, -1)],
    )
)
