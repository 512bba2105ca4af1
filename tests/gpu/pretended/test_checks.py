"""`benchmarks.gpu --check` compares what it compares on a GPU: here on the pretended device."""

from __future__ import annotations

import pytest

from benchmarks.gpu.check import all_checks, checked
from benchmarks.gpu.check_cases import Check
from tests.support.pretended_cuda.mode import PretendedDevice

#: A pretended device captures and compiles nothing, and has no dropout. `test_learned_bias.py` has biases that learn.
ABSENT = ("captured", "compiled", "MHA, ", "L=4096", "ALiBi", "dropout", "weights, ", "learned bias")
#: `test_masks.py` and `test_record.py` have the other masks, in other shapes.
CHECKS = [
    check
    for check in all_checks()
    if not any(part in check.name for part in ABSENT)
    and not check.name.endswith(" f16")  # takes the path of bfloat16
    and (check.explain is None or check.name.startswith("left-padded"))
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name.replace(" ", "_"))
def test_a_check_passes(cuda: PretendedDevice, check: Check) -> None:
    found = checked(check, "cuda")
    assert found["faults"] == []
