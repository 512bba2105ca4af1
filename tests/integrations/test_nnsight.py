"""nnsight on a model that computes attention by Clearhead: records, a census, and interventions inside a trace.

nnsight is no dependency of the tests, because it brings compiled packages of its own: install it to run them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import clearhead
import clearhead.integrations.transformers
from tests.cli.conftest import save_tokenizer
from tests.inspection.small_models import small

nnsight = pytest.importorskip("nnsight")
pytestmark = pytest.mark.filterwarnings("ignore")  # what other packages warn of is no error here

IDS = torch.tensor([[5, 3, 5, 3, 4, 5, 3]])


@pytest.fixture(scope="module", name="traced")
def _traced(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    small("gpt2").save_pretrained(folder)
    save_tokenizer(folder)
    model = nnsight.TransformersModel(
        str(folder), task="text-generation", attn_implementation="clearhead", dispatch=True
    )
    assert model._module.config._attn_implementation == "clearhead"
    return model


def test_a_trace_is_recorded(traced: Any) -> None:
    expected = traced._module(IDS).logits
    with clearhead.record(traced._module, ("entropy",), keep="queries_keys") as rec, traced.trace(IDS):
        logits = traced.lm_head.output.save()
    torch.testing.assert_close(logits, expected)
    assert list(rec) == ["transformer.h.0.attn", "transformer.h.1.attn"]
    weights = rec.weights(1, head=2, queries=[-1])
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1))


def test_a_census_sees_what_a_trace_changes(traced: Any) -> None:
    """The output of the first layer is replaced, so the second layer attends elsewhere."""

    def run(model: Any, batch: torch.Tensor) -> None:
        with traced.trace(batch):
            traced.transformer.h[0].output[0][:] = 0

    plain = clearhead.census(traced._module, [IDS])
    changed = clearhead.census(traced._module, [IDS], run=run)
    first, second = plain.layers
    assert torch.equal(changed.mean("entropy")[first], plain.mean("entropy")[first])
    assert not torch.allclose(changed.mean("entropy")[second], plain.mean("entropy")[second])


def test_a_head_is_changed_inside_a_trace(traced: Any) -> None:
    model = traced._module
    with clearhead.intervene(model, {("transformer.h.0.attn", 1): 0.0}):
        expected = model(IDS).logits
        with traced.trace(IDS):
            logits = traced.lm_head.output.save()
    torch.testing.assert_close(logits, expected)
    assert not torch.allclose(logits, model(IDS).logits)
