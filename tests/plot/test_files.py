"""Files appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from clearhead.errors import ArgumentError, FileError
from clearhead.plot import Page, given, page
from clearhead.plot._files import remove_unfinished, whole_file


@pytest.fixture(scope="module", name="made")
def _made() -> Page:
    return page(given([torch.eye(2)[None]]))


def files(folder: Path) -> list[tuple[str, str]]:
    return [(each.name, each.read_text(encoding="utf-8")) for each in folder.iterdir()]


def test_what_fails_leaves_what_was_there(made: Page, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")
    write = Path.write_text

    def write_half(part: Path, text: str, **options: str) -> int:
        write(part, text[:1000], **options)
        assert path.read_text() == "before"
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", write_half)
        with pytest.raises(KeyboardInterrupt):
            made.save(path)
    assert files(tmp_path) == [("page.html", "before")]
    made.save(path)
    assert files(tmp_path) == [("page.html", made.text)]


def test_a_process_that_ends_at_once_removes_what_it_has_begun(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        remove_unfinished()
        assert list(tmp_path.iterdir()) == []
        part.write_text("whole")
    assert files(tmp_path) == [("a.txt", "whole")]


def test_links_devices_and_modes_stay(made: Page, tmp_path: Path) -> None:
    target, link, new = (tmp_path / name for name in ("target.txt", "link.html", "new.html"))
    target.write_text("before")
    link.symlink_to(target)
    made.save(link)
    assert link.is_symlink()
    assert target.read_text(encoding="utf-8") == made.text
    made.save(os.devnull)
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    umask = os.umask(0o027)
    try:
        made.save(new)
    finally:
        os.umask(umask)
    assert stat.S_IMODE(new.stat().st_mode) == 0o640


def test_a_page_that_cannot_be_written_leaves_nothing(made: Page, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="in a folder that exists"):
        made.save(tmp_path / "nowhere" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(FileError, match="expected a file that can be written"):
        made.save(tmp_path / "page.html")
    for name in ("heads.png", "heads.SVG"):
        with pytest.raises(ArgumentError, match=r"path: expected the name of an HTML file, got .* writes a picture\."):
            made.save(tmp_path / name)
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]
