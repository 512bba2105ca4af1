"""Clearhead on a GPU beside float64 on the CPU: values, gradients, waits, backends and memory, one line a call.

    python -m benchmarks.gpu --check [--only PATTERN] [--out FILE] [--seconds 300] [--device cuda]

The calls run in a process of their own. Where it dies, another goes on with the next call. Without a GPU, ``--device
cpu`` shows that the command works.
"""

from __future__ import annotations

import argparse
import datetime
import json
import queue
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch

from benchmarks.figures import Figures, Kept
from benchmarks.gpu.check_cases import Check, attention_checks
from benchmarks.gpu.check_models import model_checks
from benchmarks.gpu.probe import Seen, is_real, probe
from benchmarks.machine import machine, versions
from benchmarks.peers.work import Outputs

__all__ = ["all_checks", "checked", "main", "texts"]

#: What is printed is copied by hand from some machines.
MOST_CHARACTERS, MOST_OF_A_LINE = 12_000, 260
#: Seconds after which a call counts as dead. The first compiled one is slow.
PATIENCE = 90
START = [sys.executable, "-m", "benchmarks.gpu.check"]


def all_checks() -> list[Check]:
    """In the order in which they run."""
    return [*model_checks(), *attention_checks()]


def checked(check: Check, device: str) -> dict[str, Any]:
    """Run one check: plain data, with what is wrong under ``faults``."""
    start = time.perf_counter()
    found: dict[str, Any] = {"name": check.name, "faults": []}
    try:
        _compare(check, device, found)
    except Exception as error:  # the next check is another call
        text = str(error).strip().splitlines() or [""]
        found["faults"].append(f"{type(error).__name__}: {text[-1] if len(text[-1]) > 20 else ' '.join(text)[-200:]}")
    found["seconds"] = round(time.perf_counter() - start, 2)
    return found


def _compare(check: Check, device: str, found: dict[str, Any]) -> None:
    faults: list[str] = found["faults"]
    run = check.ours(device)
    got = [each.cpu() for each in run()]
    if check.exact is not None:
        limits = _limits(check, device, exact := check.exact())
        shares = [_error(each, judge) / limit for each, judge, limit in zip(got, exact, limits, strict=True)]
        found["share"] = round(max(shares), 3)
        if max(shares) > 1 and check.stock is not None:
            errors = [_error(each.cpu(), judge) for each, judge in zip(check.stock(device), exact, strict=True)]
            found["stock"] = round(max(error / limit for error, limit in zip(errors, limits, strict=True)), 3)
            shares = [
                share * limit / max(limit, error) for share, limit, error in zip(shares, limits, errors, strict=True)
            ]
        if not max(shares) <= 1:
            faults.append(f"error {max(shares):.3g} of what is allowed, in {[f'{each:.3g}' for each in shares]}")
    elif not all(bool(each.isfinite().all()) for each in got):
        faults.append("results that are not finite")
    seen = probe(run, device, asks=not check.compiled)
    found |= vars(seen)
    if check.explain is not None:
        said = check.explain(device)
        found["kernel"] = said.kernel
        if seen.backends and said.backend not in ("", seen.backends[0]):
            faults.append(f"explain names {said.backend}, and {seen.backends[0]} runs")
    if device != "cpu" and check.backend is not None and check.backend not in seen.backends:
        faults.append(f"{seen.backends or 'no fused kernel'} instead of {check.backend}")
    if is_real(device):
        faults += _faults_of(check, seen)


def _limits(check: Check, device: str, exact: Outputs) -> list[float]:
    if check.same is None:
        return [check.most] * len(exact)
    same = [each.cpu() for each in check.same(device)]
    least = [check.most if each.dtype == torch.float32 else 1e-6 for each in same]
    return [max(2 * _error(*pair), each) for each, *pair in zip(least, same, exact, strict=True)]


def _error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """The largest distance, relative to the largest entry unless all are 0; equal infinities have none."""
    got, exact = got.detach().double(), exact.detach().double()
    same = got == exact
    distance = (got - exact).masked_fill(same, 0).abs().max()
    if bool(distance.isnan()):
        return float("inf")
    largest = float(exact[exact.isfinite()].abs().max())
    return float(distance) / (largest if largest > 1e-6 else 1.0)


def _faults_of(check: Check, seen: Seen) -> Iterator[str]:
    if check.waits is not None and len(seen.waits) > check.waits:
        yield f"waits {len(seen.waits)}: {', '.join(sorted(set(seen.waits)))}"
    if check.fused and (not seen.backends or "math" in seen.backends):
        yield f"no fused kernel, but {seen.backends or 'blocks of PyTorch operations'}"
    for chosen, allowed in seen.choices:
        if chosen == "math" and allowed:
            yield f"PyTorch takes math where its predicates allow {allowed}"
        elif chosen not in ("math", *allowed):
            yield f"PyTorch takes {chosen}, its predicates allow {allowed}"
    if check.memory is not None and seen.memory is not None and seen.memory > check.memory:
        yield f"{seen.memory:.0f} MB at the peak"


def _line(found: dict[str, Any]) -> str:
    """Such as ``ok  causal bf16: sdpa, flash; 0.41 of the error, 0 waits, 5 kernels, 1.2 MB, 0.1 s``."""
    how = [*([found["kernel"]] if found.get("kernel") else []), *dict.fromkeys(found.get("backends", ()))]
    parts = ["+".join(how)]
    if "share" in found:
        stock = f" (PyTorch's own {found['stock']:.2g})" if "stock" in found else ""
        parts.append(f"err {found['share']:.3g}{stock}")
    if found.get("kernels") is not None:
        parts += [f"{found['kernels']}k", f"{found['memory']:.0f}MB"]
        parts += [f"{len(found['waits'])}w"] if found["waits"] else []
    parts.append(f"{found['seconds']:.1f}s")
    line = f"{'FAIL' if found['faults'] else 'ok'} {found['name']}: {' '.join(parts)}"
    return "; ".join([line, *found["faults"]])[:MOST_OF_A_LINE]


def _child(numbers: list[int], device: str, answers: TextIO) -> None:
    """Run checks and write what each gives as one line of JSON."""
    checks = all_checks()
    for number in numbers:
        print(json.dumps({"number": number, "began": True}), file=answers, flush=True)
        found = checked(checks[number], device)
        if is_real(device):
            torch.cuda.synchronize()  # a device that has failed ends this process
        print(json.dumps({"number": number, **found}), file=answers, flush=True)


def _asked(numbers: list[int], device: str, until: float) -> Iterator[dict[str, Any]]:
    """What the checks give, from as many processes as it takes, until a point of time."""
    left = list(numbers)
    while left and time.monotonic() < until:
        command = [*START, "--device", device, "--child", *map(str, left)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        answers: queue.Queue[str | None] = queue.Queue()
        said: queue.Queue[str | None] = queue.Queue()
        readers = [
            threading.Thread(target=_read_all, args=pair) for pair in ((child.stdout, answers), (child.stderr, said))
        ]
        for reader in readers:
            reader.start()
        began: int | None = None
        while left and time.monotonic() < until:
            try:
                line = answers.get(timeout=max(0.1, min(PATIENCE, until - time.monotonic())))
            except queue.Empty:
                break
            if line is None:
                break
            answer = json.loads(line)
            began = answer["number"] if "began" in answer else None
            if began is None:
                left.remove(answer["number"])
                yield answer
        child.kill()
        child.wait()
        for reader in readers:
            reader.join()
        if left and time.monotonic() < until:
            dead = left[0] if began is None else began
            left.remove(dead)
            last = " ".join("".join(filter(None, said.queue)).split())[-160:]
            yield {
                "number": dead,
                "name": all_checks()[dead].name,
                "faults": [f"the process died: {last}"],
                "seconds": 0.0,
            }
    for number in left:
        yield {"number": number, "name": all_checks()[number].name, "faults": ["not run: out of time"], "seconds": 0.0}


def _read_all(stream: TextIO, lines: queue.Queue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main(arguments: list[str] | None = None) -> None:
    """Run the command.

    Raises:
        SystemExit: if something is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu --check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", metavar="PATTERN", default="", help="run checks whose name matches this regex")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write everything that was found as JSON")
    parser.add_argument("--seconds", type=float, default=300.0, help="stop after so long (default 300)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="name the checks and stop")
    parser.add_argument("--child", type=int, nargs="+", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.child is not None:
        answers, sys.stdout = sys.stdout, sys.stderr
        _child(chosen.child, chosen.device, answers)
        return
    numbers = [n for n, check in enumerate(all_checks()) if re.search(chosen.only, check.name, re.IGNORECASE)]
    if chosen.list:
        print("\n".join(all_checks()[number].name for number in numbers))
        return
    if chosen.device != "cpu" and not torch.cuda.is_available():
        raise SystemExit("no GPU: torch.cuda.is_available() is False; --device cpu shows that the command works")
    _report(numbers, chosen)


def texts(measured: Figures) -> dict[str, str]:
    """What a page says of a result file."""
    failed = [name for name, found in measured.items() if found["faults"]]
    passed = f"{len(measured) - len(failed)} of {len(measured)}"
    return {"passed": passed, "failed": "none" if not failed else ", ".join(f"`{name}`" for name in failed)}


def _short(found: dict[str, Any]) -> dict[str, Any]:
    """What a result file keeps: what is not empty, and of the kernels' names and of choices only those of a fault."""
    details = () if found["faults"] else ("names", "choices")
    kept = {what: value for what, value in found.items() if what not in ("name", "number", *details)}
    return {what: value for what, value in kept.items() if what == "faults" or value not in (None, [])}


def _report(numbers: list[int], chosen: argparse.Namespace) -> None:
    start = time.monotonic()
    device = torch.cuda.get_device_name() if chosen.device != "cpu" else machine()
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    kept = Kept(device, today, versions(("triton", "transformers")), "python -m benchmarks.gpu --check", {})
    print(f"{device}, {kept.versions}")
    printed = 0
    for found in _asked(numbers, chosen.device, start + chosen.seconds):
        line = _line(found)
        # Failures have the last third of the room to themselves.
        if printed + len(line) < (MOST_CHARACTERS - 300 if found["faults"] else MOST_CHARACTERS * 2 / 3):
            print(line, flush=True)
            printed += len(line) + 1
        kept.figures[found["name"]] = _short(found)
        if chosen.out is not None:
            kept.write(chosen.out)
    failed = sum(bool(found["faults"]) for found in kept.figures.values())
    print(f"{len(kept.figures)} checks, {failed} failed, {time.monotonic() - start:.0f} s")
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
