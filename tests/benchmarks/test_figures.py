"""Pages say what result files say, and no figure stands on a page that is not from one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks import figures
from benchmarks.figures import MARKED, RESULTS, ROOT, Kept, filled, pages, pictures_of, read
from benchmarks.machine import _processor
from benchmarks.writing import megabytes, milliseconds, percent, ratio, significant, table
from tests.support.pinned import needs_pinned

PAGES = pages()
COMMENT = re.compile(r"<!--(.*?)-->", re.S)
FENCED = re.compile(r"^ *```.*?^ *```", re.S | re.M)
#: A number with ×, % or a unit; a size such as 32 × 96 is none.
UNIT = r"(?:×(?! ?\d)|(?:%|ms|µs|s|seconds|kB|KB|MB|GB|TB|KiB|MiB|GiB|GFLOP/s|GB/s|MB/s)(?![\w/]))"
FIGURE = re.compile(rf"(?<![\w.,–])\d[\d.,]* ?{UNIT}")
#: Numbers with a unit that nobody measured, by page: a bar, a definition, or a size that is chosen.
MEANT = {
    "docs/extending.md": {"catch 85 % of the faults": "a bar"},
    "docs/en/benchmarks.md": {"above 1×, Clearhead": "how to read a ratio"},
    "docs/en/look.md": {"The limit is 5 MB": "a bar"},
    "docs/measured.md": {
        "above 1×, Clearhead": "how to read a ratio",
        "its row with 1.00× is the base": "how to read a ratio",
        "can be above 100 %": "how to read a ratio",
        "Calls are 20 ms apart": "a setting",
        "more than 5 % of the processors": "a bar",
    },
    "docs/en/comparing.md": {
        "Tokens agree in 89 % of the places": "the seed of an example decides it, which its test runs"
    },
}


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_every_marker_is_closed_and_says_what_its_result_file_says(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    paired = [figure for mark in MARKED.finditer(text) for figure in (f"{mark['file']}.{mark['what']}",) * 2]
    comments = [match[1].strip().removeprefix("/") for match in COMMENT.finditer(text)]
    assert sorted(one for one in comments if re.fullmatch(r"[a-z_]+\.[a-z0-9-]+", one)) == sorted(paired)
    for mark in MARKED.finditer(text):
        before = text[: mark.start()].rpartition("\n")[2]
        assert mark["text"].startswith("\n\n") or before.strip(" *->"), f"{mark[0]} begins a line of a sentence"
    expected, wrong = filled(text)
    assert not wrong
    assert text == expected, "python -m benchmarks.figures fills the pages"


#: Pages that lead to the others, and have figures.
FRONT = ("index.md", "start.md")


def test_every_file_with_markers_is_filled() -> None:
    files = [
        *ROOT.glob("*.md"),
        *(file for folder in ("docs", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.md")),
    ]
    marked = {file for file in files if MARKED.search(file.read_text(encoding="utf-8"))}
    assert marked <= set(PAGES)
    assert {ROOT / "README.md", ROOT / "README.zh.md"} < marked


@pytest.mark.parametrize("pair", [("README.md", "README.zh.md"), *((f"docs/en/{n}", f"docs/zh/{n}") for n in FRONT)])
def test_the_front_pages_of_both_languages_have_the_same_figures(pair: tuple[str, str]) -> None:
    said = [MARKED.findall((ROOT / page).read_text(encoding="utf-8")) for page in pair]
    assert len(said[0]) >= 5
    assert sorted(said[0]) == sorted(said[1])


@needs_pinned("matplotlib")
@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_pictures_are_those_of_the_result_files(path: Path) -> None:
    for picture, svg in pictures_of(path.stem).items():
        assert picture.read_text(encoding="utf-8") == svg, "python -m benchmarks.figures draws the pictures"


def test_result_files_are_small() -> None:
    sizes = {path.name: path.stat().st_size for path in RESULTS.glob("*.json")}
    assert max(sizes.values()) < 60_000, sizes


def outside_markers(page: Path) -> list[str]:
    """The figures of a page, each with its sentence, that stand in no marker and that nobody meant."""
    text = FENCED.sub("", MARKED.sub("", page.read_text(encoding="utf-8")))
    text = " ".join(re.sub(r"`[^`\n]*`", "", text).split())
    for meant in MEANT.get(name(page), ()):
        text = text.replace(re.sub(r"`[^`]*`", "", meant), "")
    return [text[max(0, match.start() - 60) : match.end() + 20] for match in FIGURE.finditer(text)]


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_no_figure_stands_outside_a_marker_and_what_is_meant_still_stands_there(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for meant in MEANT.get(name(page), ()):
        assert meant in text
    assert outside_markers(page) == []


def test_figures_are_recognised_and_sizes_are_none() -> None:
    for text in ("7.9×", "takes 97 MB", "12 ms", "50% of", "0.4 s.", "1,118 ms", "250 GFLOP/s", "(3 %)"):
        assert FIGURE.search(text), text
    for text in ("32 × 96 tokens", "L = 4096", "PyTorch 2.13.0", "3 sentences", "4 layers × 8 heads"):
        assert not FIGURE.search(text), text


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.name
        in ("README.md", "README.zh.md", "benchmarks.md", "encoders.md", "index.md", "start.md", "drop-in.md")
    ],
    ids=name,
)
def test_a_page_names_every_machine_of_its_figures(page: Path) -> None:
    marks = list(MARKED.finditer(page.read_text(encoding="utf-8")))
    machines = {mark["file"]: read(RESULTS / f"{mark['file']}.json").machine for mark in marks}
    named = {machines[mark["file"]] for mark in marks if mark["what"] in ("machine", "measured", "device")}
    assert {machines[file] for file in machines.keys() - {"architectures", "gpu"}} <= named


@pytest.mark.parametrize("apart", [{"activated", "sentences", "engines"}, set()], ids=["the others", "activated"])
def test_the_readme_benchmarks_and_encoders_are_of_one_machine_and_day(apart: set[str]) -> None:
    """But for `activated`, `sentences` and `engines`, which are of one machine and day together."""
    shown = [page for page in PAGES if name(page) in ("README.md", "docs/en/benchmarks.md", "docs/en/encoders.md")]
    names = {mark["file"] for page in shown for mark in MARKED.finditer(page.read_text(encoding="utf-8"))}
    chosen = names - {"architectures", "gpu"} - apart if apart else names & {"activated", "sentences", "engines"}
    kept = [read(RESULTS / f"{file}.json") for file in chosen]
    assert len({(one.machine, one.date) for one in kept}) == 1


MEASURED = {"clearhead.attention_weights": 276.4, "softmax of the full tensor": 4300.2}


@pytest.fixture(name="kept")
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    monkeypatch.setattr(figures, "RESULTS", tmp_path)
    figures._kept_texts.cache_clear()
    kept = Kept("a machine", "2026-01-02", "torch", "python", MEASURED)
    kept.write(tmp_path / "weights_memory.json")
    return kept


def test_markers_are_filled_where_they_stand_and_one_without_a_text_is_named_and_left(kept: Kept) -> None:
    page = (
        "It takes <!-- weights_memory.ours -->1 MB<!-- /weights_memory.ours --> "
        "on <!-- weights_memory.date --><!-- /weights_memory.date -->."
    )
    text, wrong = filled(page)
    assert not wrong
    assert text.startswith("It takes <!-- weights_memory.ours -->276 MB<!-- /weights_memory.ours --> on")
    assert "-->2026-01-02<!--" in text
    text, _ = filled("<!-- weights_memory.table -->old<!-- /weights_memory.table -->")
    assert text.startswith("<!-- weights_memory.table -->\n\n| way |")
    assert text.endswith("|\n\n<!-- /weights_memory.table -->")
    assert filled(text) == (text, [])
    page = "a <!-- weights_memory.nothing -->1 MB<!-- /weights_memory.nothing --> <!-- nofile.x -->2<!-- /nofile.x -->"
    text, wrong = filled(page)
    assert text == page
    assert "weights_memory.nothing" in wrong[0]
    assert "nofile.x" in wrong[1]


def test_texts_have_units() -> None:
    assert [ratio(value) for value in (0.964, 1.837, 7.86, 20.88)] == ["0.96×", "1.84×", "7.9×", "21×"]
    assert [megabytes(value) for value in (2.21, 97.4, 4299.0, 137439.0)] == ["2.2 MB", "97 MB", "4,299 MB", "137 GB"]
    figures = [significant(value) for value in (0.0123, 0.5, 7.863, 74.04, 1118.2)]
    assert figures == ["0.0123", "0.500", "7.86", "74.0", "1,118"]
    assert milliseconds(0.07404) == "74.0 ms"
    assert percent(0.0321) == "3.2 %"
    assert table(("a", "b"), [("c", "1")]) == "| a | b |\n| --- | ---: |\n| c | 1 |"


def test_a_processor_has_its_generation() -> None:
    intel = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "207", "flags": "avx2 avx512f amx_tile"}
    intel["model name"] = "Intel(R) Xeon(R) Processor @ 2.30GHz"
    assert _processor(intel) == "Intel Xeon (Emerald Rapids, family 6 model 207, AMX)"
    assert _processor({**intel, "model": "1", "flags": "avx2"}) == "Intel Xeon (family 6 model 1, AVX2)"
    assert _processor({"model name": "AMD EPYC"}) == "AMD EPYC"
    assert _processor({}) == "unknown processor"
