"""How the command line fails: one readable line, a code other than zero, no traceback."""

from __future__ import annotations

import signal
import sys
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import ClearheadError

WRONG_USAGE, FAILED = 2, 1

EXTRAS = {"PIL": "plot", "matplotlib": "plot", "rich": "cli", "transformers": "hf"}


class UsageProblem(ClearheadError):
    """The options do not fit each other, or the text or the model."""


class OneLineErrors(TyperGroup):
    """A group of commands whose expected failures are lines on stderr.

    Wrong usage exits with 2, everything else that Clearhead can name with 1. What it cannot name is a bug and keeps
    its traceback.
    """

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command; see `click.Command.main`."""
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **extra)
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            result = super().main(arguments, *rest, standalone_mode=False, **extra)
        except UsageProblem as problem:
            _fail(str(problem), WRONG_USAGE)
        except ClearheadError as problem:
            _fail(str(problem), FAILED)
        except ModuleNotFoundError as missing:
            if missing.name not in EXTRAS:
                raise
            install = f"pip install 'clearhead[{EXTRAS[missing.name]}]'"
            _fail(f"this command needs {missing.name}. Install it with: {install}", FAILED)
        except typer.Abort:
            _fail("stopped", 128 + signal.SIGINT)
        except Exception as error:
            # Typer's own usage errors; their base class has no public name there.
            message = getattr(error, "format_message", None)
            if message is None:
                raise
            _fail(message(), WRONG_USAGE)
        sys.exit(result if isinstance(result, int) else 0)


def warn(message: str) -> None:
    """Write one line to stderr."""
    print(f"clearhead: {' '.join(message.split())}", file=sys.stderr)


def _fail(message: str, code: int) -> NoReturn:
    warn(message)
    sys.exit(code)
