"""``python -m docs.notebooks``: write the notebook of every lesson, in both languages, beside its page.

The page is the source: its Python becomes cells of code, the rest cells of text. What the code prints is left out,
because the notebook prints it.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

import nbformat

DOCS = Path(__file__).parent
#: A block, and directly after a Python block what it prints.
CODE = re.compile(r"^```python\n(.*?)^```$(?:\s*^```text\n.*?^```$)?", re.MULTILINE | re.DOTALL)
ANCHOR = re.compile(r'^<a id="[\w-]+"></a>\n', re.MULTILINE)
#: The line of a lesson that saves the page of its heads. A notebook shows the page too.
SAVES = re.compile(r"^(rec\.page\(.*\))\.save\(.*\)$", re.MULTILINE)
KERNEL = {"display_name": "Python 3", "language": "python", "name": "python3"}


def lessons() -> list[Path]:
    """The pages of all lessons."""
    return sorted(page for language in ("en", "zh") for page in (DOCS / language / "lessons").glob("*.md"))


def notebook(page: Path) -> str:
    """The notebook of a page, as the text of its file."""
    parts: list[tuple[str, str]] = []
    end, text = 0, ANCHOR.sub("", page.read_text(encoding="utf-8"))
    for found in CODE.finditer(text):
        parts += [("markdown", text[end : found.start()]), ("code", textwrap.dedent(found[1]))]
        parts += [("code", shown[1]) for shown in SAVES.finditer(found[1])]
        end = found.end()
    parts.append(("markdown", text[end:]))
    makers = {"markdown": nbformat.v4.new_markdown_cell, "code": nbformat.v4.new_code_cell}
    cells = [
        makers[kind](content.strip("\n"), id=f"cell-{number:02}")
        for number, (kind, content) in enumerate((kind, content) for kind, content in parts if content.strip())
    ]
    made = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": KERNEL})
    return nbformat.writes(made) + "\n"


def main() -> None:
    """Write every notebook that changed, and name it."""
    for page in lessons():
        file, text = page.with_suffix(".ipynb"), notebook(page)
        if not file.exists() or file.read_text(encoding="utf-8") != text:
            file.write_text(text, encoding="utf-8")
            print(file.relative_to(DOCS.parent))


if __name__ == "__main__":
    main()
