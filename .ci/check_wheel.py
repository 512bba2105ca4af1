"""Checks an installed wheel: it lies in site-packages, its kernel runs in threads, and the process has one OpenMP.

python .ci/check_wheel.py         the wheel of this processor
python .ci/check_wheel.py pure    the wheel for every platform, which has no kernel
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import clearhead
from clearhead._native import extension, why_missing


def main() -> str:
    """The first check that fails, else an empty text."""
    if "site-packages" not in Path(clearhead.__file__).parts:
        return f"clearhead comes from {clearhead.__file__}, which is no installed wheel"
    torch.set_num_threads(2)
    query = torch.randn(2, 8, 512, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    if not torch.allclose(clearhead.attention(query, query, query), expected, atol=1e-5):
        return "attention differs from PyTorch's"
    if sys.argv[1:] == ["pure"]:
        return "the pure wheel has a kernel" if extension is not None else ""
    if extension is None:
        return f"no native kernel: {why_missing}"
    with clearhead.use_kernel("native"):
        clearhead.attention(query, query, query)
    maps = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    found = sorted({line.split()[-1] for line in maps if "libgomp" in line})
    if len(found) != 1 or not Path(found[0]).is_relative_to(Path(torch.__file__).parents[1]):
        return f"expected one libgomp, PyTorch's, and found {found}"
    return ""


if __name__ == "__main__":
    sys.exit(main() or None)
