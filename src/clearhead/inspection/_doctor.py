"""Is this machine well? Versions, threads, kernels, and every kernel held against the reference in float64."""

from __future__ import annotations

import platform
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib import metadata

import torch
from torch import Tensor

from .._layer.linear import describe_backend
from .._native import instruction_set, why_missing
from .._version import __version__
from .._versions import untested_versions
from ..kernels._choice import KERNELS, use_kernel
from ._doctor_cases import CASES, Case, Inputs, Result
from ._doctor_report import Check, Measure, Report

#: The tolerances of docs/architecture.md: relative to the largest entry of the exact result …
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}
#: … and for half precision, how often the error of `reference` in the same dtype.
HALF_FACTOR = 2.0
OPTIONAL_PACKAGES = ("transformers", "safetensors", "typer", "rich", "matplotlib", "numpy")


def examine() -> Report:
    """Look at this machine and check every kernel on it against the reference in float64, on the CPU.

    The calls are those of `doctor_cases`, most of them on one thread: outputs and the gradients of all inputs, in
    float64, float32, bfloat16 and float16, within the tolerances that the design fixes (1e-10 and 1e-5 of the
    largest entry; for half precision twice the error of `reference` in the same dtype). A kernel that would first be
    compiled for every call (`flex`) is listed, but not checked.

    Returns:
        A `Report`: ``.passed``, ``.checks``, and a readable ``str()``.

    Example:
        >>> from clearhead.inspection._doctor import examine
        >>> report = examine()
        >>> report.kernels["reference"], report.checks[-1].status
        ((), 'ok')
    """
    threads = torch.get_num_threads()
    with _threads(1), torch.enable_grad():
        kernels = Inputs.generate(CASES[0], torch.float32).explain().reasons
        checks = [check for case in CASES for dtype in case.dtypes for check in _check_case(case, dtype, threads)]
    order = {name: index for index, name in enumerate(kernels)}
    versions = _versions()
    return Report(
        versions=versions,
        machine=_machine(),
        kernels=kernels,
        checks=tuple(sorted(checks, key=lambda check: order[check.kernel])),
        warning=untested_versions(versions),
    )


def _check_case(case: Case, dtype: torch.dtype, threads: int) -> list[Check]:
    inputs = Inputs.generate(case, dtype)
    exact = _attempt("reference", inputs.widened())
    yardstick = None if dtype in TOLERANCES else _attempt("reference", inputs)
    with_gradients = inputs.explain().reasons
    with torch.no_grad():
        without = inputs.explain().reasons
    checks: list[Check] = []
    for name in (kernel.name for kernel in KERNELS if not kernel.compiles):
        about = (name, case.name, str(dtype).removeprefix("torch."))
        if without[name]:
            checks.append(Check(*about, "refused", reasons=without[name]))
            continue
        with _threads(threads if case.all_threads else 1), torch.set_grad_enabled(not with_gradients[name]):
            got = _attempt(name, inputs)
        raised = tuple(dict.fromkeys(result for result in (got, exact, yardstick) if isinstance(result, str)))
        if isinstance(got, str) or isinstance(exact, str) or isinstance(yardstick, str):
            checks.append(Check(*about, "failed", reasons=raised))
            continue
        checks.append(_judge(about, _measure(got, exact, yardstick, dtype), with_gradients[name]))
    return checks


@contextmanager
def _threads(count: int) -> Generator[None, None, None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _attempt(kernel: str, inputs: Inputs) -> Result | str:
    """Run one kernel; whatever it dies of becomes a finding."""
    try:
        with use_kernel(kernel):
            return inputs.compute()
    except Exception as error:
        return f"{kernel} raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def _measure(got: Result, exact: Result, yardstick: Result | None, dtype: torch.dtype) -> dict[str, Measure]:
    """Error and limit of the output and of every gradient that was computed."""
    measures: dict[str, Measure] = {}
    for name, tensor in got.items():
        limit = TOLERANCES[dtype] if yardstick is None else HALF_FACTOR * _error(yardstick[name], exact[name])
        measures[name] = Measure(_error(tensor, exact[name]), limit)
    return measures


def _judge(about: tuple[str, str, str], measures: dict[str, Measure], reasons: tuple[str, ...]) -> Check:
    status = "ok" if all(measure.within for measure in measures.values()) else "failed"
    output = measures.pop("output")
    if not measures:
        return Check(*about, status, output, reasons=reasons)
    worst = max(measures, key=lambda name: measures[name].share)
    return Check(*about, status, output, measures[worst], worst)


def _error(got: Tensor, exact: Tensor) -> float:
    """Largest difference relative to the largest exact entry; NaN if there is one."""
    largest = float(exact.abs().max())
    difference = float((got.double() - exact).abs().max())
    return difference / largest if largest else difference


def _versions() -> dict[str, str]:
    versions = {
        "clearhead": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }
    for package in OPTIONAL_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return versions


def _machine() -> dict[str, str]:
    cuda = torch.cuda.is_available()
    return {
        "platform": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else "not available",
        "MPS": "available" if torch.backends.mps.is_available() else "not available",
        "projections": describe_backend(),
        "native kernel": instruction_set() or f"not available: {why_missing}",
        "threads": str(torch.get_num_threads()),
        "threads between operations": str(torch.get_num_interop_threads()),
    }
