"""How the command line fails: one readable line, a code other than zero, no traceback."""

from __future__ import annotations

import errno
import os
import signal
import sys
from contextlib import suppress
from typing import Any, NoReturn

import typer
from typer.core import TyperGroup

from ..errors import ClearheadError
from ._encoding import use_ascii_where_needed

WRONG_USAGE, FAILED = 2, 1

EXTRAS = {"PIL": "plot", "matplotlib": "plot", "rich": "cli", "transformers": "hf"}
#: Numbers of the operating system's errors for an output without room.
NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}


class UsageProblem(ClearheadError):
    """The options do not fit each other, or the text or the model."""


class OneLineErrors(TyperGroup):
    """A group of commands whose expected failures are lines on stderr.

    Wrong usage exits with 2, and every other error of Clearhead with 1. Any other exception is a bug and keeps its
    traceback.
    """

    def main(self, args: Any = None, *rest: Any, standalone_mode: bool = True, **extra: Any) -> Any:
        """Run a command; see `click.Command.main`."""
        if not standalone_mode:
            return super().main(args, *rest, standalone_mode=False, **extra)
        use_ascii_where_needed()
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

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Read the arguments, which prints the help or the version if they ask for it."""
        with _WritableOutput():
            return super().make_context(*args, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name."""
        with _WritableOutput():
            return super().invoke(ctx)


class _WritableOutput:
    """Ends quietly with 0 where the reader of the output has left, and with one line where nothing can be written."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            sys.stdout.flush()
        except OSError as failed:
            error = failed
        if isinstance(error, BrokenPipeError):
            _discard_output()
            raise typer.Exit(0) from None
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            _discard_output()
            got = error.strerror or type(error).__name__
            raise ClearheadError(f"nothing more can be written to the output: {got}.") from error


def warn(message: str) -> None:
    """Write one line to stderr."""
    print(f"clearhead: {' '.join(message.split())}", file=sys.stderr)


def _discard_output() -> None:
    """Python flushes its buffer once more at its end, which would fail again."""
    with suppress(OSError, ValueError):  # the output of a test has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> NoReturn:
    warn(message)
    sys.exit(code)
