"""``python -m docs.notebooks``: write the notebook of every lesson, in both languages, beside its page.

The page is the source: its Python becomes cells of code with what they print, the rest cells of text. A reader who only
looks, for example on GitHub, sees the outputs too. A test runs the pages, so the outputs are right.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import nbformat
from nbformat import NotebookNode

DOCS = Path(__file__).parent
#: A block, and directly after a Python block what it prints.
CODE = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
ANCHOR = re.compile(r'^<a id="[\w-]+"></a>\n', re.MULTILINE)
#: The line of a lesson that saves the page of its heads. A notebook shows the page too.
SAVES = re.compile(r"^(rec\.page\(.*\))\.save\(.*\)$", re.MULTILINE)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def lessons() -> list[Path]:
    """The pages of all lessons."""
    return sorted(page for language in ("en", "zh") for page in (DOCS / language / "lessons").glob("*.md"))


def notebook(page: Path) -> str:
    """The notebook of a page, as the text of its file."""
    cells: list[NotebookNode] = []
    end, text = 0, ANCHOR.sub("", page.read_text(encoding="utf-8"))
    for found in CODE.finditer(text):
        cells += [*_text(text[end : found.start()]), _code(textwrap.dedent(found[1]), found[2])]
        cells += [_code(shown[1]) for shown in SAVES.finditer(found[1])]
        end = found.end()
    cells += _text(text[end:])
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number:02}"
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    return nbformat.writes(made) + "\n"


def _text(part: str) -> list[NotebookNode]:
    """A cell of text, if there is some."""
    return [nbformat.v4.new_markdown_cell(part.strip("\n"))] if part.strip() else []


def _code(source: str, printed: str | None = None) -> NotebookNode:
    """A cell of code, with what it prints."""
    outputs = [] if printed is None else [nbformat.v4.new_output("stream", name="stdout", text=printed)]
    return nbformat.v4.new_code_cell(source.strip("\n"), outputs=outputs)


def main() -> None:
    """Write every notebook that changed, and name it."""
    for page in lessons():
        file, text = page.with_suffix(".ipynb"), notebook(page)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(file.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
