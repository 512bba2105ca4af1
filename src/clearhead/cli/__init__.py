"""The command line, ``clearhead``."""

from __future__ import annotations

import sys

__all__ = ["main"]

try:
    from ._app import main
except ModuleNotFoundError as _missing:
    if _missing.name not in {"rich", "typer"}:
        raise

    def main() -> None:  # type: ignore[misc]
        """Say what the command line needs."""
        sys.exit("clearhead: the command line needs typer and rich. Install them with: pip install 'clearhead[cli]'")
