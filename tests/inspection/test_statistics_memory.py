"""No statistic ever holds anything near the (B, H, L, S) tensor."""

from __future__ import annotations

import torch

import clearhead
from benchmarks.memory import growth_of_peak, in_a_process
from clearhead import masks
from tests.support.allocations import Allocations
from tests.support.budgets import in_turn
from tests.support.statistics_oracle import EVERY

FLOAT = 4  # bytes
MASKS = {"full": None, "causal": masks.causal(), "window": masks.sliding_window(100, 0)}


@in_turn({"statistic": [name for name in EVERY if name != "head_average"]}, {"mask": MASKS})
def test_no_block_is_near_the_full_tensor(statistic: str, mask: str) -> None:
    """The largest storage of any operation, compared with the (B, H, L, S) scores."""
    heads, length = 4, 3001
    query, key, value = (torch.randn(1, heads, length, 4) for _ in range(3))
    with Allocations(query, key, value) as allocations:
        clearhead.attention_statistics(query, key, MASKS[mask], value=value, statistics=(statistic,))
    scores = heads * length * length * FLOAT
    assert allocations.largest < scores / 10, f"{allocations.operation}: {allocations.largest} of {scores}"


def grown(length: int) -> float:
    """Megabytes that the default statistics and the output of 8 heads add to the peak of this process."""
    torch.set_num_threads(1)
    query, key, value = (torch.randn(1, 8, length, 4) for _ in range(3))
    names = ("entropy", "received", "max_logit", "top_k", "output")

    def attend(count: int) -> object:
        call = (tensor[:, :, :count] for tensor in (query, key))
        return clearhead.attention_statistics(*call, value=value[:, :, :count], statistics=names)

    attend(1025)
    return growth_of_peak(lambda: attend(length))[0]


def test_memory_of_the_process_stays_far_below_the_scores() -> None:
    """Only the operating system sees the memory of compiled code."""
    length = 6007
    assert in_a_process(grown, length) < 8 * length * length * FLOAT / 1e6 / 20
