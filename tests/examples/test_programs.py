"""The programs in examples/ run, in a few steps here and in full with ``pytest -m slow``; so do all notebooks.

What the programs are made of is tested in the files beside this one.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import pytest

from benchmarks.quality.eviction import POLICIES, compare, held_out_passages
from docs.notebooks import lessons, notebook
from examples.character_model import LENGTH, read_corpus, trained
from tests.support.budgets import slow
from tests.test_docs import assert_printed

EXAMPLES = Path(__file__).parents[2] / "examples"
LARGEST = 300_000  # bytes, so that it opens at once where code is read


def run(out: Path, name: str, *options: str, launch: Sequence[str] = ()) -> tuple[dict[str, Any], str]:
    """Run a program as a user does: what it saved as figures, and what it printed."""
    command = [sys.executable, *launch, str(EXAMPLES / f"{name}.py"), "--out", str(out), *options]
    result = subprocess.run(command, capture_output=True, text=True, check=False, encoding="utf-8")
    assert result.returncode == 0, result.stderr
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8")), result.stdout


def test_dates_are_translated(tmp_path: Path) -> None:
    results, said = run(tmp_path, "translate_dates", "--steps", "2", "--held-out", "20")
    assert (results["steps"], results["held_out"]) == (2, 20)
    assert results["different_without_cache"] == {"greedy": 0, "beam": 0}
    assert set(results["looks"]) == {"year", "month", "day"}
    assert (tmp_path / "translate_dates.png").read_bytes().startswith(b"\x89PNG")
    for text in ("Tuesday 3 May 1979", "03.05.79", "May 3rd, '79"):
        assert text in said


def test_characters_are_written(tmp_path: Path) -> None:
    options = ["--steps", "2", "--count", "150", "--prompt", "The ", "--held-out", "20000"]
    results, said = run(tmp_path, "character_model", *options)
    assert len(results["text"]) == 154
    assert results["text"].startswith("The ")
    assert results["text"].split("\n")[0] in said
    assert 3 < results["bits_bigram"] < 4 < results["bits"] < 8


def test_digits_are_read(tmp_path: Path) -> None:
    results, said = run(tmp_path, "read_digits", "--steps", "2")
    assert 0.25 < results["area"] < 0.4
    for name in ("untrained", "trained"):
        assert abs(results[name]["mean"] - results["area"]) < 0.05, "blind heads read ink by its share of the area"
        assert f"{results[name]['mean']:.1%}" in said
    assert (tmp_path / "read_digits.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "read_digits.html").stat().st_size > 50_000


def test_long_passages_are_split_over_processes(tmp_path: Path) -> None:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    results, said = run(tmp_path, "long_context", "--length", "331", "--steps", "2", launch=launch)
    assert (results["processes"], len(results["losses"])) == (2, 2)
    assert said.count("steps 1 to 2 on 331 characters in 2 processes") == 1, "the first process alone speaks"
    assert said.count("2/2") == 1
    assert (tmp_path / "long_context" / "step_2" / ".metadata").exists()


@pytest.mark.slow
def test_in_full_trained_heads_do_not_read_digits_blindly(tmp_path: Path) -> None:
    results, _ = run(tmp_path, "read_digits")
    assert results["accuracy"] > 0.93
    assert abs(results["untrained"]["mean"] / results["area"] - 1) < 0.05
    assert abs(results["trained"]["mean"] / results["area"] - 1) > 0.2


@pytest.mark.slow
def test_in_full_almost_every_date_is_right(tmp_path: Path) -> None:
    results, _ = run(tmp_path, "translate_dates")
    assert results["exact"] >= 0.99
    assert results["beam_exact"] >= 0.99
    assert results["different_without_cache"] == {"greedy": 0, "beam": 0}
    for part, look in results["looks"].items():
        assert look["share"] > 2 * look["even"], part
        assert look["most"] > 0.8, part


@pytest.mark.slow
def test_in_full_characters_are_guessed_far_beyond_the_training_length_and_policies_beat_lots(tmp_path: Path) -> None:
    weights = tmp_path / "model.pt"
    results, _ = run(tmp_path, "character_model", "--weights", str(weights))
    assert results["bits"] < results["bits_bigram"] - 1
    assert results["bits_beyond_training_length"] < results["bits_in_passages"]

    corpus = read_corpus()
    model = trained(corpus, 0, 0, weights)
    found = compare(model, held_out_passages(corpus, 32), LENGTH // 4, seeds=5)
    lots = [loss for name, loss in found.items() if name.startswith("by lot")]
    assert len(lots) == 5
    for name in POLICIES:
        assert found[name].error < min(loss.error for loss in lots), name
        assert found[name].divergence < min(loss.divergence for loss in lots), name


#: What must hold in the notebook's own names after its last cell: the claims of its text.
CLAIMS = """
assert (layer, head) == (0, 2) and previous[layer, head] > 0.99 and previous.median() < 0.03
assert by_head("entropy").argmin() == 2, "the square that is almost black"
assert (sink_layer, sink_head) == (1, 11) and on_first[sink_layer, sink_head] > 0.7
assert changes[layer].argmax() == head, "no head of its layer is missed more"
assert changes[layer, head] > 3 * changes[layer].median()
assert changes[sink_layer, sink_head] < changes[sink_layer].median(), "the sink head is hardly missed"
"""


def _printed(cell: Any) -> str:
    return "".join(output.text for output in cell.outputs if output.output_type == "stream" and output.name == "stdout")


def execute(notebook: Any, folder: Path, **options: Any) -> None:
    """Run a notebook of `nbformat` with options of nbclient, or skip the test where nothing can run it."""
    nbclient: Any = pytest.importorskip("nbclient", reason="executing notebooks needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="executing notebooks needs a kernel: ipykernel")
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3", resources=resources, **options).execute()


def test_the_notebook_runs_its_claims_hold_and_it_is_committed_as_it_ran(tmp_path: Path) -> None:
    (path,) = EXAMPLES.glob("*.ipynb")
    assert path.stat().st_size < LARGEST
    example = nbformat.read(path, as_version=4)
    cells = [cell for cell in example.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    committed = [_printed(cell) for cell in cells]
    example.cells.append(nbformat.v4.new_code_cell(CLAIMS))
    execute(example, tmp_path)
    found = [_printed(cell) for cell in cells]
    assert found[0] == committed[0]
    assert [bool(text) for text in found] == [bool(text) for text in committed], "printed where it is committed as such"


#: What others write to stderr by themselves, before the lessons: bars of progress, and notes when they are imported.
QUIET = """
import os
os.environ["TQDM_DISABLE"] = "1"
try:
    from transformers import modeling_utils
except ImportError:
    pass
"""


@dataclass(frozen=True)
class Lesson:
    """A lesson's committed notebook, executed in a folder."""

    cells: list[Any]
    folder: Path


LESSONS = {language: [page for page in lessons() if language in page.parts] for language in ("en", "zh")}


def _named(page: Path) -> str:
    return str(page.relative_to(EXAMPLES.parent))


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[Path, Lesson]]:
    """The lessons of a language, one after the other in one kernel without names of the one before.

    Starting a kernel takes longest.
    """

    @functools.cache
    def run_all(language: str) -> dict[Path, Lesson]:
        found: dict[Path, Lesson] = {}
        together = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(QUIET)])
        for page in LESSONS[language]:
            cells = nbformat.read(page.with_suffix(".ipynb"), as_version=4).cells
            code = [cell for cell in cells if cell.cell_type == "code"]
            found[page] = Lesson(code, tmp_path_factory.mktemp("lesson"))
            start = f"%reset -f\nimport os\nos.chdir({str(found[page].folder)!r})\ndel os"
            together.cells += [nbformat.v4.new_code_cell(start), *found[page].cells]
        execute(together, tmp_path_factory.mktemp("kernel"), allow_errors=True)
        return found

    return run_all


@pytest.mark.parametrize("page", lessons(), ids=_named)
def test_the_committed_notebook_of_a_lesson_is_made_from_its_page(page: Path) -> None:
    file = page.with_suffix(".ipynb")
    assert file.read_text(encoding="utf-8") == notebook(page), "run `python -m docs.notebooks`"
    assert file.stat().st_size < LARGEST / 10
    made: Any = nbformat.read(file, as_version=4)
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    assert any(cell.outputs for cell in cells)
    assert "\n".join(cell.source for cell in cells).count("rec.page(") == 2, "one saves the page and one shows it"
    assert f"[{'notebook' if 'en' in page.parts else '笔记本'}]({file.name})" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*LESSONS["en"], *slow(*LESSONS["zh"])], ids=_named)
def test_the_notebook_of_a_lesson_runs_and_shows_its_heads(
    page: Path, executed: Callable[[str], dict[Path, Lesson]]
) -> None:
    """Of the Chinese ones the pages run (tests/test_docs.py); their code is that of the English ones."""
    lesson = executed("en" if "en" in page.parts else "zh")[page]
    made: Any = nbformat.read(page.with_suffix(".ipynb"), as_version=4)
    cells = [cell for cell in made.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in lesson.cells)
    for ran, kept in zip(lesson.cells, cells, strict=True):
        assert_printed(_printed(ran), _printed(kept))
    outputs = [output for cell in lesson.cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert [output for output in outputs if "clearhead-page" in output.get("data", {}).get("text/html", "")]
    assert (lesson.folder / "heads.html").is_file()
