"""Recording, intervening, walking through."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

import clearhead
from clearhead import masks
from clearhead.integrations.transformers import AttentionMonitorCallback
from tests.malformed.calls import Call, case
from tests.malformed.values import OwnError, users_own

E, H = 12, 3


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = clearhead.MultiHeadAttention(E, H)

    def forward(self, x: Any) -> Any:
        return self.self_attn(x, mask=masks.causal())


@functools.cache
def model() -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        return Model().eval()


def x() -> Any:
    return torch.randn(2, 5, E, generator=torch.Generator().manual_seed(6))


@functools.cache
def recorded() -> Any:
    with clearhead.record(model(), keep="queries_keys") as rec:
        model()(x())
    return rec


def _record(**given: Any) -> Any:
    with clearhead.record(**given) as rec:
        model()(x())
    return rec


OPTIONS: dict[str, Any] = {"statistics": ("entropy", "rows", "offset"), "layers": [0], "heads": [0, 2], "queries": [0]}
OPTIONS |= {"query_mask": torch.ones(2, 5).bool(), "keep": "queries_keys", "offsets": (-1,)}
OTHERS = ("top_k", "map_size", "map_pooling", "sink_keys", "per")
case("record", weight=10, arguments=("model", *OPTIONS, *OTHERS))(lambda: Call(_record, model=model(), **OPTIONS))
case("record[...]", name="recorded")(lambda: Call(lambda name: recorded()[name], name="self_attn"))
case("record[...][...]")(lambda: Call(lambda index: recorded()["self_attn"][index], index=0))
case("record.name_of")(lambda: Call(recorded().name_of, layer=0))
case("record.kept_call")(lambda: Call(recorded().kept_call, layer=0, call=0))
case("record.weights", weight=6)(lambda: Call(recorded().weights, layer=0, head=1, queries=[0], call=0))
case("record.rollout", weight=6, layers="layer")(
    lambda: Call(recorded().rollout, targets=[0, 2], layers=["self_attn"], residual=0.5)
)
case("summary[...]")(lambda: Call(lambda statistic: recorded().summary()[statistic], statistic="entropy"))
case("AttentionStatistics.with_heads")(lambda: Call(recorded()["self_attn"][0].with_heads, heads=[0, 1]))
case("AttentionStatistics.head_sums")(lambda: Call(recorded()["self_attn"][0].head_sums, name="entropy"))


@case("intervene", weight=6)
def _() -> Call:
    def run(model: Any, changes: Any) -> Any:
        with clearhead.intervene(model, changes):
            return _model(x())

    _model = model()
    return Call(run, model=_model, changes={("self_attn", 1): 0.5})


@case("intervene, one change", weight=6, change="changes", head="changes", name="changes")
def _() -> Call:
    def run(name: Any, head: Any, change: Any) -> Any:
        try:
            key = (name, head)
            hash(key)
        except TypeError:
            raise OwnError from None
        change = users_own(change) if callable(change) else change
        with clearhead.intervene(model(), {key: change}):
            return model()(x())

    return Call(run, name="self_attn", head=0, change=torch.zeros(2, 5, 4))


def _importance(measure: Any, **options: Any) -> Call:
    def loss(model: Any, batch: Any) -> Any:
        try:
            return model(batch).square().mean()
        except Exception as error:
            raise OwnError from error  # what the batch makes of the user's own model

    def run(model: Any, batches: Any, loss: Any, **options: Any) -> Any:
        loss = users_own(loss) if callable(loss) else loss
        return measure(model, batches, loss, **options)

    return Call(run, model=model(), batches=[x()], loss=loss, progress=False, **options)


IMPORTANCE = ("model", "batches", "loss", "progress")
case("head_importance", arguments=IMPORTANCE)(lambda: _importance(clearhead.head_importance))
case("head_ablation", arguments=(*IMPORTANCE, "change"))(lambda: _importance(clearhead.head_ablation, change=0.5))


@case("walkthrough", weight=6)
def _() -> Call:
    given = {"module": model().self_attn, "query": x(), "key": x(), "value": x(), "mask": masks.causal()}
    return Call(clearhead.walkthrough, **given, language="en")


@functools.cache
def walked() -> Any:
    return clearhead.walkthrough(model().self_attn, x())


case("walkthrough[...]")(lambda: Call(lambda name: walked()[name], name="scores"))


MONITOR: dict[str, Any] = {"every": 2, "statistics": ("entropy", "sink"), "to": lambda step, values: None}
MONITOR |= {"entropy_threshold": 0.1, "logit_threshold": 9.0}


def _monitored(**given: Any) -> Any:
    to = given.get("to")
    if callable(to):
        given["to"] = users_own(to)
    with clearhead.monitor(**given):
        return model()(x())


case("monitor", weight=6, arguments=("model", *MONITOR))(lambda: Call(_monitored, model=model(), **MONITOR))
case("integrations.transformers.AttentionMonitorCallback", weight=3)(lambda: Call(AttentionMonitorCallback, **MONITOR))


@case("qk_clip_", weight=6)
def _() -> Call:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(8)
        attend = clearhead.MultiHeadAttention(E, H)
    given = {"module": attend, "max_logits": torch.tensor([[1.0, 7.0, 2.0]]), "threshold": 3.0}
    return Call(clearhead.qk_clip_, **given)
