"""The part of `benchmarks.gpu.call_counts` on the simulated GPU: prints JSON."""

from __future__ import annotations

from tests.support.pretended_cuda.build import load

load()  # before PyTorch is imported

import json  # noqa: E402

from benchmarks.gpu.call_counts import counts  # noqa: E402
from tests.support.pretended_cuda.mode import connect  # noqa: E402

if __name__ == "__main__":
    with connect(9):
        print(json.dumps(counts("cuda")))
