"""The notebooks of the lessons are those of their pages, and run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from docs.notebooks import lessons, notebook

ROOT = Path(__file__).parent.parent
LARGEST = 30_000  # bytes
every_lesson = pytest.mark.parametrize("page", lessons(), ids=lambda page: str(page.relative_to(ROOT)))


@every_lesson
def test_the_committed_notebook_is_made_from_its_page(page: Path) -> None:
    file = page.with_suffix(".ipynb")
    assert file.read_text(encoding="utf-8") == notebook(page), "run `python -m docs.notebooks`"
    assert file.stat().st_size < LARGEST
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    assert code.count("rec.page(") == 2, "one saves the page and one shows it"
    assert f"[{'notebook' if 'en' in page.parts else '笔记本'}]({file.name})" in page.read_text(encoding="utf-8")


@every_lesson
def test_a_notebook_runs_and_shows_its_heads(page: Path, tmp_path: Path) -> None:
    nbclient: Any = pytest.importorskip("nbclient", reason="executing notebooks needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="executing notebooks needs a kernel: ipykernel")
    import nbformat

    found: Any = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(found, timeout=300, kernel_name="python3", resources=resources).execute()
    outputs = [output for cell in found.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.get("name") == "stderr"]
    assert [output for output in outputs if "clearhead-page" in output.get("data", {}).get("text/html", "")]
    assert (tmp_path / "heads.html").is_file()
