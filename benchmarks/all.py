"""Every benchmark of the pages, each in a process of its own, one after the other.

    python -m benchmarks.all [--only NAME ...] [--without NAME ...] [--rounds N] [--docs]

Goes on where one fails, lists what failed and how long each took, and fails if one did. All result files have the day
on which the run began.
"""

from __future__ import annotations

import argparse
import datetime
import subprocess
import sys
import time

from benchmarks.figures import ROOT, command_of

__all__ = ["NAMES", "main"]

#: The longest last. Left out are `architectures` (ten minutes, no figure of this machine), `gpu` and the sanitizers.
NAMES = (
    "module",
    "record_memory",
    "census",
    "record_time",
    "weights_memory",
    "window",
    "tiles",
    "decoding",
    "selected",
    "eviction",
    "linear",
    "products",
    "long_sums",
    "monitor",
    "page_size",
    "page_actions",
    "call_counts",
    "varlen",
    "activated",
    "sentences",
    "deberta",
    "distributed",
    "look",
    "encoders",
    "cpu",
    "engines",
)


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: if a benchmark failed.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="NAME", nargs="+", choices=NAMES, default=NAMES, help="these")
    parser.add_argument("--without", metavar="NAME", nargs="+", choices=NAMES, default=[], help="all but these")
    parser.add_argument("--rounds", help="how often everything is timed, instead of each one's default")
    parser.add_argument("--smallest", action="store_true", help="tiny inputs: shows that the commands work")
    parser.add_argument("--docs", action="store_true", help="write the figures into the pages at the end")
    chosen = parser.parse_args(arguments)
    options = ["--date", datetime.datetime.now(datetime.UTC).date().isoformat()]
    options += ["--smallest", "--no-peers"] if chosen.smallest else []
    options += ["--rounds", chosen.rounds] if chosen.rounds else []
    said: list[str] = []
    failed = False
    for name in chosen.only:
        if name not in chosen.without:
            status, seconds = _run(command_of(name), options)
            failed |= status != 0
            said.append(f"{name}: {seconds:.0f} s{'' if status == 0 else f', FAILED with {status}'}")
    if chosen.docs:
        status, _ = _run("benchmarks.figures", [])
        failed |= status != 0
        said.append(f"the pages: {'filled' if status == 0 else 'FAILED'}")
    print("\n".join(said))
    if failed:
        raise SystemExit(1)


def _run(module: str, options: list[str]) -> tuple[int, float]:
    """The status of a command, and the seconds that it took."""
    print(f"== {module}", flush=True)
    started = time.perf_counter()
    status = subprocess.run([sys.executable, "-m", module, *options], cwd=ROOT, check=False).returncode
    return status, time.perf_counter() - started


if __name__ == "__main__":
    main()
