"""What one call does on a GPU: for what it waits, which kernels run, which backend PyTorch takes, and its memory.

The facts of PyTorch that say it are read where the device is a real one; elsewhere they are unknown, or empty.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast, final

import torch
import torch.nn.functional as F

__all__ = ["Seen", "is_real", "probe"]

_SYNC = "synchronizing CUDA operation"
#: PyTorch's operators of fused attention, and the unfused one, by what a page calls them.
_BACKENDS = {
    "_scaled_dot_product_flash_attention": "flash",
    "_scaled_dot_product_efficient_attention": "efficient",
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_attention_math": "math",
    "_scaled_dot_product_flash_attention_for_cpu": "flash, CPU",
    "_varlen_attn": "varlen",
    "flex_attention": "flex",
}
_CHOICES = {0: "math", 1: "flash", 2: "efficient", 3: "cuDNN"}
_COPIES = re.compile(r"^(Memcpy|Memset)")


@final
@dataclass
class Seen:
    """What one call did.

    Args:
        waits: where Python waited for the device, as ``file:line``.
        backends: PyTorch's attention operators, in order.
        choices: the backend that PyTorch says it takes, for each call of its attention, and those that its predicates
            allow.
        kernels: how many kernels ran on the device; ``None`` where there is none.
        names: the kernels that took most of the device's time.
        memory: megabytes (10⁶ bytes) at the peak, beyond what was allocated before; ``None`` where it is unknown.
    """

    waits: list[str] = field(default_factory=list)
    backends: list[str] = field(default_factory=list)
    choices: list[tuple[str, list[str]]] = field(default_factory=list)
    kernels: int | None = None
    names: list[str] = field(default_factory=list)
    memory: float | None = None


def is_real(device: str) -> bool:
    """Whether it is a GPU with a driver, no pretended one."""
    return device.startswith("cuda") and torch.version.cuda is not None


def probe(run: Callable[[], object], device: str, *, asks: bool = True) -> Seen:
    """Watch calls: for waits and memory, for the choice of a backend, and for kernels.

    Args:
        run: called two or three times; it should have been called before, because first calls compile and allocate.
        device: on which it runs.
        asks: whether PyTorch is asked for its choice, which a graph cannot hold.
    """
    real, seen = is_real(device), Seen()
    if real:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        seen.waits = _waits(run)
        torch.cuda.synchronize()
        seen.memory = (torch.cuda.max_memory_allocated() - before) / 1e6
        if asks:
            with _asking(seen.choices):
                run()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if real:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if real:
            torch.cuda.synchronize()
    _read(profile, seen, real)
    return seen


def _waits(run: Callable[[], object]) -> list[str]:
    """Where PyTorch says that an operation made Python wait."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return [f"{Path(each.filename).name}:{each.lineno}" for each in caught if _SYNC in str(each.message)]


@contextmanager
def _asking(choices: list[tuple[str, list[str]]]) -> Generator[None]:
    """Ask PyTorch for the backend of each call of its attention."""
    original: Any = F.scaled_dot_product_attention

    def noting(*args: Any, **options: Any) -> Any:
        choices.append(_choice(*args, **options))
        return original(*args, **options)

    F.scaled_dot_product_attention = noting
    try:
        yield
    finally:
        F.scaled_dot_product_attention = original


def _choice(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[str, list[str]]:
    cuda, private = cast(Any, torch.backends.cuda), cast(Any, torch)
    options = {"scale": scale, "enable_gqa": enable_gqa}
    chosen = private._fused_sdp_choice(query, key, value, attn_mask, dropout_p, is_causal, **options)
    if attn_mask is not None and attn_mask.dtype == torch.bool:  # PyTorch asks after it has made a bias of it
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
    params = cuda.SDPAParams(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa)
    allowed = {
        "flash": cuda.flash_sdp_enabled() and cuda.can_use_flash_attention(params, False),
        "efficient": cuda.mem_efficient_sdp_enabled() and cuda.can_use_efficient_attention(params, False),
        "cuDNN": cuda.cudnn_sdp_enabled() and cuda.can_use_cudnn_attention(params, False),
    }
    return _CHOICES.get(int(chosen), "another"), [name for name, able in allowed.items() if able]


def _read(profile: Any, seen: Seen, real: bool) -> None:
    times: dict[str, float] = {}
    count = 0
    for event in profile.events():
        if "CUDA" in str(event.device_type):
            if not _COPIES.match(event.name):
                count += 1
                if "flex_attention" in event.name:  # compiled, so no operator says it
                    seen.backends.append("flex")
                times[event.name] = times.get(event.name, 0.0) + event.time_range.elapsed_us()
        else:
            backend = _BACKENDS.get(event.name.rpartition("::")[2])
            if backend is not None:
                seen.backends.append(backend)
    if real:
        seen.kernels = count
        seen.names = [name[:80] for name in sorted(times, key=lambda name: -times[name])[:3]]
