"""``python -m docs.site FOLDER [LIVE]``: build both languages with `--strict`, and put them together in FOLDER.

English lies at the root and Chinese in ``zh/``. The build fails on every warning of Zensical or griffe, and on a page
that is empty. LIVE has the pages that `docs.draw.live` wrote, for the landing page and the lessons.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import tomli_w

from .breaks import with_breaks
from .configuration import configuration
from .reference import write_reference
from .staging import address, sources, stage

LANGUAGES = ("en", "zh")
WARNING = re.compile(r"warning|error|griffe", re.IGNORECASE)
SWITCH = re.compile(r'<a href="[^"]*" hreflang="(en|zh)"')


def build(language: str, folder: Path, live: Path | None) -> Path:
    """Build one language in `folder`; returns the folder of its pages."""
    reference = write_reference(folder / "docs") if language == "en" else []
    stage(language, folder / "docs", live)
    (folder / "zensical.toml").write_text(tomli_w.dumps(configuration(language, reference)), encoding="utf-8")
    command = [str(Path(sys.executable).parent / "zensical"), "build", "--strict", "--clean"]
    ended = subprocess.run(
        command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    wrong = [line for line in ended.stdout.splitlines() if WARNING.search(line)]
    if ended.returncode or wrong:
        raise SystemExit(f"{language}: zensical ended with {ended.returncode} and said\n{ended.stdout}")
    return folder / "site"


def switched(html: str, folder: str, language: str, both: bool) -> str:
    """A built page whose switcher leads to the same page of the other language, or to its first page."""
    up = "" if folder == "." else "../" * (folder.count("/") + 1)
    same = f"{folder}/" if both and folder != "." else ""
    other = (f"{up}../" if language == "zh" else f"{up}zh/") + same

    def replace(found: re.Match[str]) -> str:
        return f'<a href="{"./" if found[1] == language else other}" hreflang="{found[1]}"'

    return SWITCH.sub(replace, html)


def main(out: Path, live: Path | None = None) -> None:
    """Build both languages and put them together."""
    start = time.monotonic()
    shared = set.intersection(*({address(place) for place in sources(language)} for language in LANGUAGES))
    shutil.rmtree(out, ignore_errors=True)
    with tempfile.TemporaryDirectory() as scratch:
        for language in LANGUAGES:
            built = build(language, Path(scratch) / language, live)
            for page in built.rglob("index.html"):
                place = page.parent.relative_to(built).as_posix()
                html = switched(page.read_text(encoding="utf-8"), place, language, f"{place}/" in shared)
                page.write_text(with_breaks(html), encoding="utf-8")
            shutil.copytree(built, out if language == "en" else out / language, dirs_exist_ok=True)
    count = sum(1 for _ in out.rglob("index.html"))
    print(f"{count} pages in {os.path.relpath(out)}, {time.monotonic() - start:.0f} s")


main(*(Path(argument).resolve() for argument in sys.argv[1:]))
