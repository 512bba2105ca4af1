"""The end of the process of a command."""

from __future__ import annotations

import subprocess
import sys

#: In place of the commands, whose import takes seconds.
PROGRAM = """
import atexit, sys, types
import clearhead_command
def main():
    atexit.register(print, "a library's own end")
    {ending}
sys.modules["clearhead"] = types.ModuleType("clearhead")
sys.modules["clearhead.cli"] = types.ModuleType("clearhead.cli")
sys.modules["clearhead.cli"].main = main
clearhead_command.main()
"""


def _run(ending: str) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.replace("{ending}", ending)
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_the_process_ends_with_the_code_and_the_output_of_the_command() -> None:
    for ending, code, error in (
        ("return", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('a reason')", 1, "a reason\n"),
    ):
        result = _run(ending)
        assert (result.returncode, result.stderr, result.stdout) == (code, error, "a library's own end\n")


def test_an_exception_that_nothing_handles_keeps_its_traceback() -> None:
    result = _run("raise LookupError('a bug')")
    assert (result.returncode, result.stdout) == (1, "a library's own end\n")
    assert result.stderr.startswith("Traceback")
    assert result.stderr.endswith("LookupError: a bug\n")
