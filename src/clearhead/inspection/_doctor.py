"""Is this machine well? Versions, threads, kernels, and every kernel compared with the reference in float64."""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from itertools import groupby
from math import inf, isnan
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from .. import masks
from .._attention import attention, explain
from .._layer.linear import describe_backend
from .._native import instruction_set, why_missing
from .._version import __version__
from .._versions import untested_versions
from ..kernels._choice import KERNELS, use_kernel
from ..kernels._triton_check import table as check_triton

OPTIONAL_PACKAGES = ("transformers", "safetensors", "typer", "rich", "matplotlib", "numpy")
BUILD_NATIVE = "pip install --force-reinstall --no-deps --no-binary clearhead clearhead"
#: The allowed error in each dtype; ``None`` is twice the error of `reference` in the same dtype.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: None, torch.float16: None}
QKV = ("query", "key", "value")


@dataclass(frozen=True)
class Case:
    """A kind of call, with H = 6 and D = 16."""

    name: str
    mask: Callable[[Tensor], masks.Mask | None] = lambda bias: None
    sizes: tuple[int, int, int, int, int] = (2, 6, 37, 53, 16)  # B, Hkv, L, S, Dv
    learnt: tuple[str, ...] = QKV  # the inputs with gradients
    softcap: float | None = None
    first_hidden: int = 2  # keys and values are NaN from this item on, and the mask hides them
    dtypes: tuple[torch.dtype, ...] = tuple(TOLERANCES)

    def inputs(self, rounded_to: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors, the same on every machine."""
        (batch, kv_heads, length, keys, value_dim), generator = self.sizes, torch.Generator().manual_seed(7)
        shapes = {"query": (batch, 6, length, 16), "key": (batch, kv_heads, keys, 16)}
        shapes |= {"value": (batch, kv_heads, keys, value_dim), "output_gradient": (batch, 6, length, value_dim)}
        shapes |= {"sinks": (6,), "bias": (1, 6, length, keys)}
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        drawn["key"][self.first_hidden :] = drawn["value"][self.first_hidden :] = torch.nan
        return {name: x.to(rounded_to).to(dtype).requires_grad_(name in self.learnt) for name, x in drawn.items()}

    def arguments(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of `attention`."""
        tensors = {name: inputs[name] for name in (*QKV, "sinks") if name in self.learnt}
        return {**tensors, "mask": self.mask(inputs["bias"]), "softcap": self.softcap}


CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("causal", lambda _: masks.causal()),
    Case("window", lambda _: masks.sliding_window(5, 3)),
    Case("padding", lambda _: masks.lengths(torch.tensor([11, 0])), first_hidden=1),
    Case("grouped heads", sizes=(2, 2, 37, 53, 16)),
    Case("Dv differs", sizes=(2, 6, 37, 53, 11)),
    Case("bias", masks.bias),
    Case("bias + gradient", masks.bias, learnt=(*QKV, "bias")),
    Case("soft-cap + sinks", softcap=5.0, learnt=(*QKV, "sinks")),
    Case("long", lambda _: masks.causal("bottom_right"), (1, 6, 401, 601, 16), dtypes=(torch.float32, torch.bfloat16)),
)


def examine() -> dict[str, Any]:
    """What ``clearhead doctor --json`` prints. `flex`, which is compiled for each call, is listed but not checked."""
    versions = {"clearhead": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in OPTIONAL_PACKAGES:
        versions[name] = next((package.version for package in metadata.distributions(name=name)), "not installed")
    cuda, triton, plain, compute = torch.cuda.is_available(), check_triton(), CASES[0], cache(_compute)
    machine = {
        "platform": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else "not available",
        "MPS": "available" if torch.backends.mps.is_available() else "not available",
        "projections": describe_backend(),
        "native kernel": instruction_set() or f"not available: {why_missing}. To build it: {BUILD_NATIVE}",
        "threads": str(torch.get_num_threads()),
        "threads between operations": str(torch.get_num_interop_threads()),
    }
    with torch.enable_grad():
        kernels = explain(**plain.arguments(plain.inputs(torch.float32, torch.float32))).reasons
        checked = [kernel.name for kernel in KERNELS if not kernel.compiles]
        checks = [_check(kernel, case, dtype, compute) for kernel in checked for case in CASES for dtype in case.dtypes]
    passed = all(check["status"] != "failed" for check in checks) and set(triton.values()) <= {"ok"}
    report = {"passed": passed, "versions": versions, "machine": machine, "kernels": kernels, "checks": checks}
    return report | {"triton": triton, "warning": untested_versions(versions)}


def _check(kernel: str, case: Case, dtype: torch.dtype, compute: Callable[..., dict[str, Tensor]]) -> dict[str, Any]:
    arguments, measures = case.arguments(case.inputs(dtype, dtype)), dict[str, dict[str, float]]()
    with torch.no_grad():
        refused = explain(**arguments).reasons[kernel]
    reasons = refused or explain(**arguments).reasons[kernel]
    try:
        exact, rounded = compute("reference", case, dtype, torch.float64), compute("reference", case, dtype, dtype)
        for name, x in ({} if refused else compute(kernel, case, dtype, dtype, not reasons)).items():
            limit = TOLERANCES[dtype] or 2 * _error(rounded[name], exact[name])
            measures[name] = {"error": _error(x, exact[name]), "limit": limit}
    except RuntimeError as error:
        reasons = refused or (str(error),)
    passed = measures and max(map(_share, measures.values())) <= 1
    output = measures.pop("output", None)
    worst = max(measures, key=lambda name: _share(measures[name]), default="")
    status = "refused" if refused else "ok" if passed else "failed"
    about = {"kernel": kernel, "case": case.name, "dtype": str(dtype).removeprefix("torch."), "status": status}
    return about | {"output": output, "gradient": measures.get(worst), "worst_gradient": worst, "reasons": reasons}


def _compute(kernel: str, case: Case, rounded_to: torch.dtype, dtype: torch.dtype, gradients: bool = True) -> Any:
    """The output and the gradients by name, or a `RuntimeError` that names the kernel."""
    inputs = case.inputs(rounded_to, dtype)
    try:
        with use_kernel(kernel), torch.set_grad_enabled(gradients):
            output, learnt = attention(**case.arguments(inputs)), [inputs[name] for name in case.learnt]
            of_learnt = torch.autograd.grad(output, learnt, inputs["output_gradient"]) if gradients else ()
    except Exception as error:
        message = (str(error).splitlines() or [""])[0]
        raise RuntimeError(f"{kernel} raised {type(error).__name__}: {message}") from error
    return {"output": output.detach(), **dict(zip(case.learnt, of_learnt, strict=gradients))}


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest exact entry; NaN if there is one."""
    return float((got.double() - exact).abs().max()) / (float(exact.abs().max()) or 1)


def _share(measure: dict[str, float]) -> float:
    """How much of its limit an error uses up, above 1 if it is beyond; infinite for NaN."""
    error, limit = measure.values()
    return inf if isnan(error) or error > limit == 0 else error / (limit or 1)


def text_of(report: dict[str, Any]) -> str:
    """What ``clearhead doctor`` prints."""
    checks: list[dict[str, Any]] = report["checks"]
    dtypes = tuple(dict.fromkeys(check["dtype"] for check in checks))
    table: list[tuple[str, ...]] = [("kernel", "call", *dtypes)]
    for place, of_place in groupby(checks, itemgetter("kernel", "case")):
        cells = {check["dtype"]: _cell(check) for check in of_place}
        table.append((*place, *(cells.get(dtype, "-") for dtype in dtypes)))
    sections: dict[str, Collection[tuple[str, ...]]] = {
        "versions": report["versions"].items(),
        "machine": report["machine"].items(),
        "kernels": [(name, "; ".join(reasons) or "available") for name, reasons in report["kernels"].items()],
        "checks: largest error of outputs and gradients against the reference in float64, on the CPU": table,
        "statistics by Triton, compared with the reference": report["triton"].items(),
        "refused": [(line,) for line in _refusals(checks)],
        "failed": [(_failure(check),) for check in checks if check["status"] == "failed"],
    }
    paragraphs: list[str] = []
    for title, rows in sections.items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        paragraphs += ["\n  ".join([title, *lines])] if lines else []
    if report["warning"]:
        paragraphs.append(f"warning: {report['warning']}")
    words = [check["status"] for check in checks]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("ok", "refused", "failed"))
    advice = ". Avoid the failed kernels with clearhead.use_kernel(...), and please report this."
    paragraphs.append(f"all checks passed: {counts}" if report["passed"] else f"checks failed: {counts}{advice}")
    return "\n\n".join(paragraphs)


def _cell(check: dict[str, Any]) -> str:
    """``3.1e-07 ok`` or ``2.0e-03 FAIL``: the error that uses up more of its limit."""
    worst = max(filter(None, (check["output"], check["gradient"])), key=_share, default=None)
    return (f"{worst['error']:.1e} " if worst else "") + check["status"].replace("failed", "FAIL")


def _failure(check: dict[str, Any]) -> str:
    measures = {"output": check["output"], f"gradient of {check['worst_gradient']}": check["gradient"]}
    wrong = {what: measure.values() for what, measure in measures.items() if measure and _share(measure) > 1}
    errors = [f"error of the {what} {error:.1e}, allowed {limit:.1e}" for what, (error, limit) in wrong.items()]
    return "{kernel}, {case}, {dtype}: ".format(**check) + "; ".join(errors or check["reasons"])


def _refusals(checks: list[dict[str, Any]]) -> list[str]:
    """A line for each kernel and its reasons against calls, or against their gradients, in the same dtypes."""
    cases = defaultdict[tuple[str, str], list[str]](list)
    refused = [check for check in checks if check["reasons"] and (check["output"] or check["status"] == "refused")]
    for (kernel, case, status, reasons), group in groupby(refused, itemgetter("kernel", "case", "status", "reasons")):
        what = f"{kernel} refuses {'' if status == 'refused' else 'gradients of '}"
        cases[what, f"{' and '.join(check['dtype'] for check in group)}: {'; '.join(reasons)}"].append(case)
    return [f"{what}{', '.join(of_cases)} in {why}" for (what, why), of_cases in cases.items()]
