"""What a census is turned into: JSON whose fields are documented, rows, columns, a merged census, a picture."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import Census
from clearhead.errors import ArgumentError, DTypeError

VOCABULARY, WIDTH = 7, 12


class Reader(nn.Module):
    """Two causal layers with different numbers of heads."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first, self.second = (clearhead.MultiHeadAttention(WIDTH, heads) for heads in (3, 2))

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids)  # (B, L, E)
        return self.second(self.first(x, mask=clearhead.masks.causal()), mask=clearhead.masks.causal())


@pytest.fixture(scope="module", name="model")
def _model() -> Reader:
    torch.manual_seed(0)
    return Reader().eval()


@pytest.fixture(scope="module", name="found")
def _found(model: Reader) -> Census:
    return clearhead.census(model, [torch.tensor([[2, 3, 2, 3, 5]]), torch.tensor([[4, 4, 1]])], special=(1,))


IMPORTANCE = {"first": torch.tensor([0.5, -1.0, 2.0])}


def documented(text: str | None) -> set[str]:
    return set(re.findall(r"``(\w+)``", text or ""))


def test_every_field_is_documented(found: Census, tmp_path: Path) -> None:
    found.with_column("importance", IMPORTANCE).write(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    head = index["heads"][0]
    fields = {*index, *head, *index["metrics"][0], *head["metrics"]["entropy"]} - {"file"}
    assert fields <= documented(Census.as_json.__doc__)
    of_head = json.loads((tmp_path / head["file"]).read_text())
    fields = {"file", *of_head, *of_head["strongest"]["entropy"][0]}
    assert fields <= documented(Census.write.__doc__)
    assert [row["name"] for row in index["metrics"]] == list(head["metrics"]) == list(of_head["strongest"])
    places = [(head["layer"], head["module"], head["head"]) for head in index["heads"]]
    assert places == [*((0, "first", head) for head in range(3)), *((1, "second", head) for head in range(2))]


def test_json_has_no_nan(model: Reader) -> None:
    none = clearhead.census(model, [torch.tensor([[2]])])  # one token has no previous one
    head = none.with_column("importance", IMPORTANCE).as_json()["heads"][3]
    assert head["metrics"]["previous"] == {"mean": None, "spread": None, "lowest": None, "highest": None, "count": 0}
    assert head["columns"] == {"importance": None}
    json.dumps(none.as_json(), allow_nan=False)


@pytest.mark.parametrize("package", ["stand-in", "pandas"])
def test_rows(found: Census, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if package == "stand-in":
        monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=list))
    elif importlib.util.find_spec("pandas") is None:
        pytest.skip("pandas is not installed")
    frame = found.with_column("importance", IMPORTANCE).frame()
    rows: list[dict[str, Any]] = frame if isinstance(frame, list) else frame.to_dict("records")
    assert [(row["layer"], row["module"], row["head"]) for row in rows][3] == (1, "second", 0)
    for row in rows:
        for metric in found.metrics:
            count = float(found.count(metric)[row["module"]][row["head"]])
            assert row[f"{metric}_count"] == count
            if count:
                assert row[metric] == float(found.mean(metric)[row["module"]][row["head"]])
                assert row[f"{metric}_highest"] == float(found.highest(metric)[row["module"]][row["head"]])
    assert [row["importance"] for row in rows[:3]] == [0.5, -1.0, 2.0]
    assert rows[3]["importance"] is None or math.isnan(rows[3]["importance"])


def test_a_layer_of_a_column_is_a_name_or_a_number(found: Census) -> None:
    one, two = (found.with_column("importance", {layer: IMPORTANCE["first"]}) for layer in ("first", 0))
    assert one.as_json() == two.as_json()
    assert list(two.mean("importance")) == ["first", "second"]


def test_merged_censuses_have_the_columns_of_both(found: Census) -> None:
    left, right = found.with_column("importance", IMPORTANCE), found.with_column("other", {1: torch.ones(2)})
    merged = left.merged(right, left)
    assert merged.mean("importance")["first"].tolist() == [0.5, -1.0, 2.0]
    assert merged.mean("other")["second"].tolist() == [1, 1]
    with pytest.raises(ArgumentError, match="others: expected the same column 'importance', got other numbers"):
        left.merged(found.with_column("importance", {"first": torch.zeros(3)}))


def test_censuses_that_do_not_fit_are_not_merged(model: Reader, found: Census) -> None:
    with pytest.raises(ArgumentError, match="others: expected the settings"):
        found.merged(clearhead.census(model, [torch.tensor([[1, 2]])], special=(1,), window=3))
    with pytest.raises(ArgumentError, match="others: expected the heads"):
        found.merged(clearhead.census(model, [torch.tensor([[1, 2]])], special=(1,), layers=["first"]))
    with pytest.raises(DTypeError, match="others: expected a Census"):
        found.merged(None)  # type: ignore[arg-type]


def test_a_checkpoint_of_other_layers_is_refused_after_one_batch(model: Reader, tmp_path: Path) -> None:
    path, ran = tmp_path / "census.safetensors", [0]
    batches = [torch.tensor([[1, 2, 3]])] * 3

    def run(model: nn.Module, batch: Tensor) -> None:
        ran[0] += 1
        model(batch)

    clearhead.census(model, batches[:1], layers=["first"], checkpoint=path)
    with pytest.raises(ArgumentError, match=r"checkpoint: expected one with the layers and heads .*second"):
        clearhead.census(model, batches, run=run, checkpoint=path)
    assert ran == [1]
    whole = clearhead.census(model, batches, run=run, layers=["first"], checkpoint=path)
    assert (ran, whole.batches) == ([3], 3)
    again = clearhead.census(model, batches, run=run, layers=["first"], checkpoint=path)
    assert (ran, again.as_json()) == ([3], whole.as_json())


def test_a_picture_of_a_metric_and_of_a_column(found: Census) -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    axes = found.plot_heads("duplicate")
    drawn = torch.from_numpy(axes.images[0].get_array().filled(float("nan")))  # (layers, most heads)
    torch.testing.assert_close(drawn[0].double(), found.mean("duplicate")["first"], atol=1e-6, rtol=0)
    assert drawn.isnan().tolist() == [[False] * 3, [False, False, True]]
    assert axes.images[0].get_clim() == (0, 1)
    column = found.with_column("importance", IMPORTANCE).plot_heads("importance")
    assert column.images[0].get_clim() == (-1, 2)
    pyplot.close("all")
