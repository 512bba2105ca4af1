"""Parts of the formula that a kernel does not declare: it refuses them, and nothing ignores them."""

from __future__ import annotations

import pytest
import torch

import clearhead
from clearhead.errors import KernelError
from clearhead.kernels import _blocks, _weights
from clearhead.kernels._choice import KERNELS
from tests.support.closeness import require_near

REASON = {
    "softcap": "it has no soft-cap",
    "sinks": "it has no sinks",
    "row_sinks": "it has no sinks of single queries",
}
OPTIONS = {
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.zeros(2)},
    "row_sinks": {"sinks": torch.zeros(1, 2, 3)},
}


@pytest.mark.parametrize("part", REASON)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_what_a_kernel_does_not_declare_is_refused(
    kernel: clearhead.kernels.Kernel, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(1, 2, 3, 4)
    options = OPTIONS[part]
    monkeypatch.setattr(type(kernel), "formula", frozenset(REASON) - {part})
    assert REASON[part] in clearhead.explain(x, x, x, **options).reasons[kernel.name]
    assert REASON[part] not in clearhead.explain(x, x, x).reasons[kernel.name]
    with clearhead.use_kernel(kernel.name), pytest.raises(KernelError, match=REASON[part]):
        clearhead.attention(x, x, x, **options)


def test_blocks_refuse_what_they_do_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """`reference` computes weights then, and statistics say why there are none."""
    x = torch.randn(1, 2, 3, 4, dtype=torch.float64)
    expected = clearhead.attention_weights(x, x, softcap=2.0)
    for module in (_blocks, _weights):
        monkeypatch.setattr(module, "BLOCK_FORMULA", frozenset({"sinks"}))
    require_near(clearhead.attention_weights(x, x, softcap=2.0), expected)
    with pytest.raises(KernelError, match=r"^blocks of scores, and statistics from them: it has no soft-cap\."):
        clearhead.attention_statistics(x, x, softcap=2.0, statistics=("entropy",))
