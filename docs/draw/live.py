"""``python -m docs.draw.live FOLDER``: write the pages that the site shows live, ``FOLDER/LANGUAGE/NAME.html``.

``look`` is that of the landing page, a pretrained model on a sentence. The others are named after lessons.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.notebooks import SAVES

from .lessons import LESSONS, PAGES, run
from .pages import one_text


def write(folder: Path) -> None:
    """Write every page, in both languages."""
    codes = {lesson: SAVES.search((PAGES / f"{lesson}.md").read_text(encoding="utf-8")) for lesson in LESSONS}
    names = {lesson: run(PAGES / f"{lesson}.md") for lesson in LESSONS}
    for language in ("en", "zh"):
        (folder / language).mkdir(parents=True, exist_ok=True)
        one_text(language).save(folder / language / "look.html")
        for lesson, code in codes.items():
            if code is None:
                raise ValueError(f"lesson {lesson}: expected a line that saves rec.page(…), got none")
            page = eval(code[1].removesuffix(")") + f", language={language!r})", names[lesson])
            page.save(folder / language / f"{lesson}.html")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
