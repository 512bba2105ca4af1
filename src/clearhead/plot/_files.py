"""Files that appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

_unfinished: set[Path] = set()


@contextmanager
def whole_file(path: Path) -> Generator[Path]:
    """Give a file to write to that takes the name `path` when the block ends, and is gone if it fails or is stopped.

    A file of that name stays as it is until then. The folder must exist. A device or a pipe is written directly.
    """
    if path.exists() and not path.is_file():
        yield path
        return
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError(13, "Permission denied", str(path))
    target = path.resolve()  # of a link: what it leads to
    part = target.with_name(f".{target.stem}-{os.getpid()}{target.suffix}")
    _unfinished.add(part)
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
        _unfinished.discard(part)


def remove_unfinished() -> None:
    """Remove what `whole_file` has begun, for a process that ends without leaving its blocks."""
    for part in tuple(_unfinished):
        part.unlink(missing_ok=True)
