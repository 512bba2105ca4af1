"""`python -m benchmarks.quality.mutants` on one mutant of a package of one function, and its faults in C++."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.quality.mutation.native import FAULTS, FOLDER

ROOT = Path(__file__).resolve().parents[2]

SOURCE = "def double(x: int | None) -> int:\n    if x is None:\n        raise ValueError(1 + 2)\n    return x + x\n"
TEST = """from clearhead.masks.doubling import double


def test_double() -> None:
    assert double({number}) == {twice}
"""


@pytest.fixture(name="checkout")
def _checkout(tmp_path: Path) -> Path:
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\n",
        "tests/__init__.py": "",
        "tests/masks/__init__.py": "",
        "src/clearhead/__init__.py": "",
        "src/clearhead/masks/__init__.py": "",
        "src/clearhead/masks/doubling.py": SOURCE,
        "tests/masks/test_doubling.py": TEST.format(number=3, twice=6),
    }
    for name, text in files.items():
        path = tmp_path / "checkout" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    subprocess.run(["git", "init", "--quiet", str(tmp_path / "checkout")], check=True)
    return tmp_path / "checkout"


def test_the_faults_in_cpp_fit_the_sources() -> None:
    assert len(FAULTS) == 20
    for fault in FAULTS:
        text = (ROOT / FOLDER / fault.file).read_text(encoding="utf-8")
        assert fault.apply(text) != text


def test_a_mutant_is_caught(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cosmic_ray")
    pytest.importorskip("coverage")
    from benchmarks.quality import mutants
    from benchmarks.quality.mutation import drawing, forking

    monkeypatch.setattr(mutants, "ROOT", checkout)
    drawn = drawing.draw(checkout, "src/clearhead/masks", 1, seed=1)
    changes = [each.change for each in drawing.mutants_of(checkout, "src/clearhead/masks/doubling.py")]
    assert len(changes) == 3  # the sum, "is", and "if"; neither the annotation nor the text of the error
    assert drawn == drawing.draw(checkout, "src/clearhead/masks", 1, seed=1)
    mutants.main(["--sample", "6", "--seed", "1", "--only", "masks", "--work", str(checkout.parent / "work")])
    printed = capsys.readouterr().out
    assert "caught (failed) tests/masks/test_doubling.py::test_double" in printed
    assert "masks           1 mutants,   0 equivalent,    1 caught, 100.0 %" in printed
    assert (checkout / "src/clearhead/masks/doubling.py").read_text(encoding="utf-8") == SOURCE
    assert forking.BROKEN not in range(6)  # the exit statuses of pytest


def test_mutants_of_chosen_files(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a package that is none of the six, with the tests of that package alone."""
    pytest.importorskip("cosmic_ray")
    pytest.importorskip("coverage")
    from benchmarks.quality import mutants

    monkeypatch.setattr(mutants, "ROOT", checkout)
    files = {
        "src/clearhead/plot/__init__.py": "",
        "src/clearhead/plot/halving.py": "def half(x: int) -> int:\n    return x // 2\n",
        "src/clearhead/plot/other.py": "def less(x: int) -> int:\n    return x - 2\n",
        "tests/plot/__init__.py": "",
        "tests/plot/test_halving.py": "from clearhead.plot.halving import half\n\n\n"
        "def test_half() -> None:\n    assert half(6) == 3\n",
        "tests/plot/test_in_browser.py": "def test_slow() -> None:\n    raise AssertionError\n",
    }
    for name, text in files.items():
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        (checkout / name).write_text(text, encoding="utf-8")
    work = checkout.parent / "work"
    mutants.main(["--files", "src/clearhead/plot/halving.py", "--work", str(work), "--json", str(work / "none.json")])
    printed = capsys.readouterr().out
    assert "Running 1 test files unchanged" in printed
    assert "caught (failed) tests/plot/test_halving.py::test_half" in printed
    assert "other.py" not in printed
    assert "all " in printed
    assert not (work / "none.json").exists(), "only whole runs are published"
    for wrong in ("src/clearhead/plot/nothing.py", "tests/plot/test_halving.py", "src/clearhead/plot"):
        with pytest.raises(SystemExit, match="--files: expected Python sources below src/clearhead"):
            mutants.main(["--files", wrong, "--work", str(work)])
