"""Caches on a CUDA device: cropping, reordering and evicting read nothing; a capture is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import caches, masks
from clearhead.caches import Cache
from clearhead.errors import CacheError
from tests.support.pretended_cuda.mode import PretendedDevice, Seen

B, H, D = 3, 2, 16
#: Caches of B rows. Each position is stored once.
_POLICY = caches.SinksAndRecent(2)
CACHES: dict[str, Callable[[str], Cache]] = {
    "KVCache": lambda device: caches.KVCache(B, H, 64, D, device=device),
    "SlidingKVCache": lambda device: caches.SlidingKVCache(B, H, 8, D, max_crop=8, device=device),
    "EvictingKVCache": lambda device: caches.EvictingKVCache(B, H, 8, D, policy=_POLICY, device=device),
}


def module(device: str) -> clearhead.MultiHeadAttention:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(H * D, H, position=clearhead.positions.Rotary(D)).eval().to(device)


def tokens(count: int, device: str, seed: int = 1) -> Tensor:
    return torch.randn(B, count, H * D, generator=torch.Generator().manual_seed(seed)).to(device)


def steps(cache: Cache, device: str, lengths: Tensor | int) -> list[Tensor]:
    """Outputs of a prompt, a crop, a new order of the rows, and four steps."""
    attend, causal = module(device), masks.causal()
    outputs = [attend(tokens(10, device), mask=causal, cache=cache)]
    cache.crop(lengths)
    cache.reorder(torch.tensor([2, 0, 0]).to(device))
    outputs += [attend(tokens(1, device, seed), mask=causal, cache=cache) for seed in range(4)]
    return outputs


@pytest.mark.parametrize("lengths", [7, [7, 4, 6]], ids=["int", "per row"])
@pytest.mark.parametrize("name", CACHES)
def test_a_cache_computes_what_it_computes_on_the_cpu(
    cuda: PretendedDevice, name: str, lengths: int | list[int]
) -> None:
    got: list[Tensor] = []
    crop = lengths if isinstance(lengths, int) else torch.tensor(lengths)
    on_device = crop if isinstance(crop, int) else crop.cuda()
    with torch.no_grad():
        expected = steps(CACHES[name]("cpu"), "cpu", crop)
        got = steps(CACHES[name]("cuda"), "cuda", on_device)
    for ours, judge in zip(got, expected, strict=True):
        assert float((ours.cpu() - judge).abs().max()) <= 1e-5 * float(judge.abs().max())


@pytest.mark.parametrize("name", CACHES)
def test_a_cache_reads_nothing(cuda: PretendedDevice, name: str) -> None:
    cache, attend = CACHES[name]("cuda"), module("cuda")
    order, causal = torch.tensor([2, 0, 0]).cuda(), masks.causal()
    prompt, token = tokens(10, "cuda"), tokens(1, "cuda")
    seen: list[Seen] = []
    with torch.no_grad():
        for run in (
            lambda: attend(prompt, mask=causal, cache=cache),
            lambda: cache.crop(7),
            lambda: cache.reorder(order),
            lambda: attend(token, mask=causal, cache=cache),
            lambda: attend(token, mask=causal, cache=cache),
            cache.reset,
        ):
            seen.append(cuda.count(run))
    assert [each.waits for each in seen] == [[]] * 6


def test_lengths_per_row_are_read_once(cuda: PretendedDevice) -> None:
    cache, key = CACHES["KVCache"]("cuda"), torch.zeros(B, H, 10, D, device="cuda")
    cache.update(key, key)
    lengths = torch.tensor([7, 4, 6]).cuda()
    assert len(cuda.count(lambda: cache.crop(lengths)).waits) == 1
    assert cache.length == 7


@pytest.mark.parametrize("name", CACHES)
def test_a_capture_is_refused(cuda: PretendedDevice, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cache, attend = CACHES[name]("cuda"), module("cuda")
    with torch.no_grad():
        attend(tokens(5, "cuda"), mask=masks.causal(), cache=cache)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(CacheError) as raised:
            attend(tokens(1, "cuda"), mask=masks.causal(), cache=cache)
    assert str(raised.value).startswith(
        "cache: expected a call outside of the capture of a CUDA graph: a replay would write to the same places again, "
        "got a capture. Capture calls without a cache, or decode with torch.compile."
    )
    assert cache.length == 5
