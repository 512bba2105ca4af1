"""A process that has imported what tests need, its arguments, and runs pytest in a fork of itself for each request.

It reads one JSON object a line, and answers each with the exit status of the fork. Nothing of Clearhead is imported
before the fork, so that each one sees the sources as they are then.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback

#: What tests of Clearhead need.
IMPORTED = (
    *("torch", "torch.testing._internal.common_utils", "torch._dynamo", "torch.utils.flop_counter", "numpy", "pytest"),
    *("hypothesis", "hypothesis.strategies", "transformers", "onnx", "sympy"),
    *("torch.distributed.tensor", "torch.nn.attention.flex_attention", "torch.export", "torch.func"),
)
MOST_MEMORY = 12 * 2**30
BROKEN = 99  # the exit status where pytest did not even start


def run(request: dict[str, object]) -> int:
    """The fork: limits, output and environment of its own, then pytest."""
    os.setsid()
    seconds = int(str(request["seconds"]))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 5))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, resource.RLIM_INFINITY))
    output = os.open(str(request["output"]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(request["environment"])  # type: ignore[arg-type]
    import pytest

    return int(pytest.main(request["arguments"]))  # type: ignore[arg-type]


def wait(child: int, seconds: float) -> int:
    """The exit status, negative where a signal ended the fork; what runs longer is ended."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def main() -> None:
    for name in sys.argv[1:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    loaded = [name for name in sys.modules if name.partition(".")[0] in ("clearhead", "tests")]
    if loaded:
        raise SystemExit(f"imported before the fork: {loaded}")
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            status = BROKEN
            try:
                status = run(request)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        print(wait(child, 6 * float(request["seconds"])), flush=True)


if __name__ == "__main__":
    main()
