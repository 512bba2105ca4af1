"""`clearhead look` on a model whose layers share one module."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .looking import LETTERS, contents, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SHARED = "encoder.albert_layer_groups.0.albert_layers.0.attention"


@pytest.mark.parametrize("text", [LETTERS, " ".join([LETTERS] * 7)], ids=["one window", "several windows"])
def test_every_layer_is_shown(text: str, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    result = look(text, "--model", str(model_folder("albert")), "--layer", "3", "--head", "1")
    assert "4 layers × 4 heads" in result.stdout
    assert "layer 3, head 1: what each token looks at most" in result.stdout
    data = contents(tmp_path / "attention.html").data
    [section] = data["sections"]
    assert [layer["name"] for layer in section["layers"]] == [f"{SHARED}/{run}" for run in range(4)]
    assert len(data["items"]) == (1 if text == LETTERS else 2)
