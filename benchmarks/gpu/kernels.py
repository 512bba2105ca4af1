# pyright: reportMissingImports=false
"""Check the Triton kernels on a GPU against float64, and time them beside PyTorch's attention.

`python -m benchmarks.gpu.kernels` checks every mask, then times B=1 H=16 in bfloat16: D 64 and 128, L 8,192 and 16,384,
with and without a causal mask. `--tune` times other sizes of tiles first and takes the fastest. It exits with 1 if a
number is wrong.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu.kernel_checks import MASKS, errors_of, wrong_numbers
from clearhead.kernels._triton import Operands
from clearhead.kernels._triton._calls import rows, weights, weights_gradients
from clearhead.kernels._triton._launch import Launch, columns_launch, rows_launch
from clearhead.kernels._triton._tiles import Tiles, tiles_of
from clearhead.masks._terms import Terms

HEADS = 16
WANT = ("lse", "entropy", "max_logit", "confidence")
#: Queries, keys, warps, stages that `--tune` tries.
TILES = [
    *itertools.product((128,), (128,), (8,), (2, 3)),
    *itertools.product((128,), (64,), (4, 8), (2, 3)),
    *itertools.product((64,), (128,), (4, 8), (2, 3)),
    *itertools.product((64,), (64,), (4,), (2, 3, 4)),
    *itertools.product((128,), (32,), (4,), (3, 4)),
    *itertools.product((32,), (128,), (4,), (3, 4)),
]


def median_ms(run: Callable[[], object], repeats: int = 15) -> float:
    """The median time of a call in milliseconds, by events."""
    for _ in range(3):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for begin, end in pairs:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return sorted(begin.elapsed_time(end) for begin, end in pairs)[repeats // 2]


def check(device: torch.device) -> int:
    """Print the errors of every mask, dtype and some sizes of a head; return how many are too large."""
    faults = 0
    of_each = [(torch.float32, 64), (torch.bfloat16, 128), (torch.float16, 40)]
    of_causal = [*of_each, (torch.float32, 128), (torch.float32, 256), (torch.bfloat16, 16), (torch.bfloat16, 256)]
    for name in MASKS:
        for dtype, dim in of_causal if name == "causal" else of_each:
            wrong = wrong_numbers(errors_of(name, dtype, dim, device, length=333, heads=4, thorough=True))
            print(f"{name:16} {str(dtype)[6:]:9} D={dim:<4} {f'WRONG {wrong}' if wrong else 'ok'}", flush=True)
            faults += len(wrong)
    return faults


def operands(dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator(device=device).manual_seed(2)
    made = [torch.randn(1, HEADS, length, dim, device=device, generator=draw).bfloat16() for _ in range(3)]
    return made[0], made[1], made[2]


def operands_of(query: Tensor, key: Tensor, *, causal: bool) -> Operands:
    length = query.shape[2]
    return Operands(query, key, Terms(-length, 0 if causal else length, length), query.shape[3] ** -0.5)


def launch_of(kernel: str, call: Operands, lse: Tensor, tiles: Tiles | None) -> Launch:
    if kernel == "rows":
        return rows_launch(call, WANT, tiles=tiles)
    return columns_launch(call, lse, tiles=tiles)


def tune(dim: int, device: torch.device, seconds: float) -> dict[str, Tiles]:
    """The fastest tiles of each kernel for causal calls of 16,384 and full ones of 8,192."""
    fastest: dict[str, Tiles] = {}
    calls = [(True, operands(dim, 16384, device)), (False, operands(dim, 8192, device))]
    for kernel in ("columns", "rows"):
        times: dict[Tiles, float] = {}
        stop = time.monotonic() + seconds
        for tiles in itertools.starmap(Tiles, TILES):
            if time.monotonic() > stop:
                break
            try:
                each: list[float] = []
                for causal, (query, key, _) in calls:
                    lse = torch.full((1, HEADS, query.shape[2]), 9.0, device=device)
                    launch = launch_of(kernel, operands_of(query, key, causal=causal), lse, tiles)
                    each.append(median_ms(launch.run, 7))
                times[tiles] = sum(each)
                print(
                    f"  {kernel} D={dim} {tuple(tiles)}: causal 16k {each[0]:.3f} ms, full 8k {each[1]:.3f} ms",
                    flush=True,
                )
            except Exception as fault:  # a tile that does not fit the device
                print(f"  {kernel} D={dim} {tuple(tiles)}: {type(fault).__name__} {str(fault)[:80]}", flush=True)
        fastest[kernel] = min(times, key=times.__getitem__)
    return fastest


def attention_ms(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> float:
    """The fastest of PyTorch's fused kernels."""
    times = [float("inf")]
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        try:
            with sdpa_kernel(backend):
                times.append(median_ms(lambda: F.scaled_dot_product_attention(query, key, value, is_causal=causal)))
        except RuntimeError as fault:
            print(f"  {backend.name}: {str(fault)[:100]}")
    return min(times)


def compare(device: torch.device, tuned: dict[int, dict[str, Tiles]]) -> None:
    """Print times beside attention's, and their ratios."""
    capability = torch.cuda.get_device_capability(device)
    print("| D | L | mask | attention ms | received ms | ratio | four statistics ms | ratio | with top-8 |")
    print("|---|---|---|---|---|---|---|---|---|")
    for dim, length, causal in itertools.product((64, 128), (8192, 16384), (True, False)):
        query, key, value = operands(dim, length, device)
        attention = attention_ms(query, key, value, causal=causal)
        call = operands_of(query, key, causal=causal)
        lse = rows(call)["lse"]
        times: list[float] = []
        for kernel in ("columns", "rows"):
            tiles = tuned.get(dim, {}).get(kernel) or tiles_of(kernel, dim, query.dtype, capability, plain=True)
            times.append(median_ms(launch_of(kernel, call, lse, tiles).run))
        ratios = [each / attention for each in times]
        top = median_ms(functools.partial(rows, call, want=WANT, top=8), 3)
        print(
            f"| {dim} | {length} | {'causal' if causal else 'none'} "
            f"| {attention:.3f} | {times[0]:.3f} | {ratios[0]:.2f} | {times[1]:.3f} | {ratios[1]:.2f} | {top:.2f} |",
            flush=True,
        )


def memory(device: torch.device) -> None:
    """Print what top-8 of 131,072 queries and keys takes beyond query and key."""
    length, dim = 131072, 128
    query, key, _ = operands(dim, length, device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    begin = time.monotonic()
    rows(operands_of(query, key, causal=True), top=8)
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated(device) - before
    print(f"top-8 at L={length}, D={dim}: {taken / 1e9:.2f} GB, {time.monotonic() - begin:.2f} s", flush=True)


def averaged(device: torch.device) -> None:
    """Print the times of averaged and of full weights and of their gradients: B=8, H=16, D=64, L 2,048, no mask.

    Each includes the log-sum-exp.
    """
    length, dim = 2048, 64
    query, key = (torch.randn(8, HEADS, length, dim, device=device).bfloat16() for _ in range(2))
    call = operands_of(query, key, causal=False)

    def run(average: bool) -> Tensor:
        return weights(call, rows(call)["lse"], average=average)

    def backward(of_weights: Tensor) -> object:
        return weights_gradients(call, rows(call)["lse"], of_weights)

    for average in (True, False):
        of_weights = torch.randn(8, 1 if average else HEADS, length, length, device=device)
        times = median_ms(functools.partial(run, average)), median_ms(functools.partial(backward, of_weights))
        name = "averaged" if average else "full"
        print(
            f"B=8 L={length} D={dim}: {name} weights {times[0]:.2f} ms, their gradients {times[1]:.2f} ms", flush=True
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tune", action="store_true", help="time other tiles first, and take the fastest")
    parser.add_argument("--seconds", type=float, default=60, help="of tuning for each kernel and D; default 60")
    options = parser.parse_args()
    device = torch.device("cuda", 0)
    print(f"{torch.cuda.get_device_name(device)}, PyTorch {torch.__version__}, Triton {triton.__version__}")
    tuned: dict[int, dict[str, Tiles]] = {}
    if options.tune:
        tuned = {dim: tune(dim, device, options.seconds) for dim in (64, 128)}
        print(f"Fastest tiles: {tuned}")
    compare(device, tuned)
    memory(device)
    averaged(device)
    faults = check(device)
    print(f"{faults} wrong numbers")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
