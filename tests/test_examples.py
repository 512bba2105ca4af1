"""The notebooks in examples/ run, and are committed with the output of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient", reason="executing notebooks needs nbclient and ipykernel")
nbformat = pytest.importorskip("nbformat", reason="reading notebooks needs nbformat")
pytest.importorskip("ipykernel", reason="executing notebooks needs a kernel: ipykernel")

EXAMPLES = Path(__file__).parent.parent / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
LARGEST = 300_000  # bytes, so that it opens at once where code is read

#: What must hold in the notebook's own names after its last cell: the claims of its text.
CLAIMS = {
    "see_inside": """
assert (layer, head) == (0, 2) and previous[layer, head] > 0.99 and previous.median() < 0.03
assert by_head("entropy").argmin() == 2, "the square that is almost black"
assert (sink_layer, sink_head) == (1, 11) and on_first[sink_layer, sink_head] > 0.7
assert changes[layer].argmax() == head, "no head of its layer is missed more"
assert changes[layer, head] > 3 * changes[layer].median()
assert changes[sink_layer, sink_head] < changes[sink_layer].median(), "the sink head is hardly missed"
"""
}

notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(path: Path) -> list[Any]:
    return [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]


def printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == list(CLAIMS)


@notebooks
def test_every_cell_runs_and_its_claims_hold(path: Path, tmp_path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    committed = [printed(cell) for cell in notebook.cells if cell.cell_type == "code"]
    notebook.cells.append(nbformat.v4.new_code_cell(CLAIMS[path.stem]))
    client = nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()  # a cell that raises, raises here
    found = [printed(cell) for cell in notebook.cells[:-1] if cell.cell_type == "code"]
    assert found[0] == committed[0]
    assert [bool(text) for text in found] == [bool(text) for text in committed], "printed where it is committed as such"


@notebooks
def test_it_is_committed_as_it_ran_from_top_to_bottom(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert path.stat().st_size < LARGEST
