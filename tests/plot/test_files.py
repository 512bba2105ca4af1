"""Files appear whole or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
import torch

from clearhead.errors import ArgumentError, FileError
from clearhead.plot import given, page
from clearhead.plot._files import remove_unfinished, whole_file


def test_what_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("before")

    def write_half() -> None:
        with whole_file(path) as part:
            part.write_text("half")
            assert path.read_text() == "before"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page.html", "before")]
    with whole_file(path) as part:
        part.write_text("after")
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [("page.html", "after")]


def test_a_process_that_ends_at_once_removes_what_it_has_begun(tmp_path: Path) -> None:
    with whole_file(tmp_path / "a.txt") as part:
        part.write_text("half")
        remove_unfinished()
        assert list(tmp_path.iterdir()) == []
        part.write_text("whole")
    assert (tmp_path / "a.txt").read_text() == "whole"


def test_links_devices_and_modes_stay(tmp_path: Path) -> None:
    target = tmp_path / "target.txt"
    target.write_text("before")
    (tmp_path / "link.txt").symlink_to(target)
    with whole_file(tmp_path / "link.txt") as part:
        part.write_text("after")
    assert (tmp_path / "link.txt").is_symlink()
    assert target.read_text() == "after"
    with whole_file(Path(os.devnull)) as part:
        part.write_text("anything")
    assert stat.S_ISCHR(Path(os.devnull).stat().st_mode)
    umask = os.umask(0o027)
    try:
        with whole_file(tmp_path / "new.txt") as part:
            part.write_text("new")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "new.txt").stat().st_mode) == 0o640


def test_a_page_in_no_folder_leaves_nothing(tmp_path: Path) -> None:
    made = page(given([torch.eye(2)[None]]))
    with pytest.raises(FileError, match="in a folder that exists"):
        made.save(tmp_path / "nowhere" / "page.html")
    (tmp_path / "page.html").mkdir()
    with pytest.raises(FileError, match="expected a file that can be written"):
        made.save(tmp_path / "page.html")
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", ["heads.png", "heads.SVG"])
def test_a_page_is_not_saved_under_the_name_of_a_picture(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"path: expected the name of an HTML file, got .* writes a picture\."):
        page(given([torch.eye(2)[None]])).save(tmp_path / name)
    assert not list(tmp_path.iterdir())
