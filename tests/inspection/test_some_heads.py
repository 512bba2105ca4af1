"""Interventions on some heads, their importance, and clipping: those heads change, and no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.masks import Mask
from clearhead.positions import ALiBi
from tests.support.budgets import in_turn
from tests.support.closeness import require_near
from tests.support.exact import exact_attention

from .test_second_calls import KV, D, E, H, Two, inputs, recorded

INTERVENTIONS: dict[str, Any] = {"scale": -0.5, "mean": "mean", "patch": torch.full((D,), 0.3), "function": torch.sin}


@in_turn({"name": INTERVENTIONS, "mask": ["none", "heads", "rows", "items"]}, {"heads": [(5,), (3, 1), (4, 2, 1)]})
def test_an_intervention_on_some_heads(name: str, mask: str, heads: tuple[int, ...]) -> None:
    """The masks hide other queries in each head, row or item, which the mean leaves out."""
    made: dict[str, Mask | None] = {
        "none": None,
        "heads": masks.keep((torch.arange(7)[:, None] >= torch.arange(H)[:, None, None] % 4).expand(1, H, 7, 7)),
        "rows": masks.keep((torch.arange(7) % 3 > 0)[:, None].expand(7, 7)),
        "items": masks.lengths(torch.tensor([7, 0])) & ALiBi(H),
    }
    module, x = Two().first, torch.randn(2, 7, E, dtype=torch.float64)
    q = clearhead.split_heads(module.q_proj(x), H)
    k, v = (clearhead.split_heads(p(x), KV) for p in (module.k_proj, module.v_proj))
    given = made[mask]
    dense = torch.ones(1, 1, 7, 7).bool() if given is None else given.dense(7, 7, batch_size=2, num_heads=H)
    seen, bias = (dense, None) if dense.dtype == torch.bool else (None, dense.double())
    inside = exact_attention(q, k, v, seen, bias=bias, scale=module.scale, softcap=module.softcap)
    output, sees = inside.output.clone(), inside.weights.sum(-1) > 0
    for head in heads:
        own, change = output[:, head], INTERVENTIONS[name]
        if name == "scale":
            own = own * change
        elif name == "mean":
            own = own[sees[:, head]].sum(0).expand_as(own) / sees[:, head].sum().clamp(min=1)
        else:
            own = change(own) if name == "function" else change.double().expand_as(own)
        output[:, head] = own
    for _ in range(2):
        with clearhead.intervene(module, {("", head): INTERVENTIONS[name] for head in heads}):
            require_near(module(x, mask=given), module.out_proj(clearhead.merge_heads(output)))


def test_the_importance_of_every_head_of_batches_that_differ() -> None:
    """The gradient in each head's gate, of each example, over batches of other sizes."""
    model, batches = Two(), [inputs(2, 7), inputs(3, 4), inputs(1, 9)]

    def loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return model(**batch).square().flatten(1).sum(1).mean()

    found = clearhead.head_importance(model, batches, loss, progress=False)
    for name, count in (("first", H), ("second", 4)):
        for head in range(count):
            total, step = 0.0, 1e-5
            for batch in batches:
                sides: list[Tensor] = []
                for factor in (1 + step, 1 - step):
                    with torch.no_grad(), clearhead.intervene(model, {(name, head): factor}):
                        sides.append(model(**batch).square().flatten(1).sum(1))
                total += float(((sides[0] - sides[1]) / (2 * step)).abs().sum())
            assert float(found[name][head]) == pytest.approx(total / 6, rel=1e-5)


@pytest.mark.parametrize("heads", [(1,), (4, 0), (5, 3, 2)])
def test_qk_clip_of_some_heads(heads: tuple[int, ...]) -> None:
    module, x = Two().first, torch.randn(2, 7, E, dtype=torch.float64) * 5
    module.softcap = None
    before = recorded(module, [{"query": x}])[""][0].raw_max_logit.amax(0)
    limits = before.clone()
    limits[list(heads)] *= 3
    # A threshold between the two, by what each head is told to have.
    threshold = float(limits.max()) / 2
    factors = clearhead.qk_clip_(module, limits, threshold)
    after = recorded(module, [{"query": x}])[""][0].raw_max_logit.amax(0)
    expected = torch.where(limits > threshold, threshold / limits, 1.0)
    torch.testing.assert_close(factors.double(), expected.double(), rtol=1e-6, atol=0)
    torch.testing.assert_close(after.double(), (before * expected).double(), rtol=1e-5, atol=1e-5)
