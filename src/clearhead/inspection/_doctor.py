"""Is this machine well? Versions, threads, kernels, and every kernel compared with the reference in float64."""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import metadata
from math import inf, isnan
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

OPTIONAL_PACKAGES = ("transformers", "safetensors", "typer", "rich", "matplotlib", "numpy")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}  # in half precision, twice the error of `reference`
TITLE = "checks: largest error of outputs and gradients against the reference in float64, on the CPU"
QKV = ("query", "key", "value")
BUILD_NATIVE = "pip install --force-reinstall --no-deps --no-binary clearhead clearhead"


@dataclass(frozen=True)
class Case:
    """A kind of call, with H = 6 and D = 16."""

    name: str
    mask: Callable[[dict[str, Tensor]], masks.Mask | None] = lambda inputs: None
    sizes: tuple[int, int, int, int, int] = (2, 6, 37, 53, 16)  # B, Hkv, L, S, Dv
    learnt: tuple[str, ...] = QKV  # the inputs with gradients
    softcap: float | None = None
    hidden_item: int | None = None  # its keys and values are NaN, and the mask hides them
    dtypes: tuple[torch.dtype, ...] = DTYPES
    all_threads: bool = False  # takes long on a busy machine

    def inputs(self, rounded_to: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor]:
        """The tensors, the same on every machine."""
        (batch, kv_heads, length, keys, value_dim), generator = self.sizes, torch.Generator().manual_seed(7)
        shapes = {"query": (batch, 6, length, 16), "key": (batch, kv_heads, keys, 16)}
        shapes |= {"value": (batch, kv_heads, keys, value_dim), "output_gradient": (batch, 6, length, value_dim)}
        shapes |= {"sinks": (6,), "bias": (1, 6, length, keys)}
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        if self.hidden_item is not None:
            drawn["key"][self.hidden_item] = drawn["value"][self.hidden_item] = torch.nan
        return {name: x.to(rounded_to).to(dtype).requires_grad_(name in self.learnt) for name, x in drawn.items()}

    def arguments(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """The arguments of `attention`."""
        tensors = {name: inputs[name] for name in (*QKV, "sinks") if name in self.learnt}
        return {**tensors, "mask": self.mask(inputs), "softcap": self.softcap}


CASES: tuple[Case, ...] = (
    Case("plain"),
    Case("causal", lambda _: masks.causal()),
    Case("window", lambda _: masks.sliding_window(5, 3)),
    Case("padding", lambda _: masks.lengths(torch.tensor([11, 0])), hidden_item=1),
    Case("grouped heads", sizes=(2, 2, 37, 53, 16)),
    Case("Dv differs", sizes=(2, 6, 37, 53, 11)),
    Case("bias", lambda inputs: masks.bias(inputs["bias"])),
    Case("bias + gradient", lambda inputs: masks.bias(inputs["bias"]), learnt=(*QKV, "bias")),
    Case("soft-cap + sinks", softcap=5.0, learnt=(*QKV, "sinks")),
    Case("long", lambda _: masks.causal("bottom_right"), (1, 6, 401, 601, 16), dtypes=DTYPES[1:3], all_threads=True),
)


def examine() -> dict[str, Any]:
    """What ``clearhead doctor --json`` prints. `flex`, which is compiled for each call, is listed but not checked."""
    versions = {"clearhead": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in OPTIONAL_PACKAGES:
        versions[name] = next((package.version for package in metadata.distributions(name=name)), "not installed")
    threads, plain = torch.get_num_threads(), CASES[0]
    try:
        with torch.enable_grad():
            kernels = explain(**plain.arguments(plain.inputs(torch.float32, torch.float32))).reasons
            checks = [check for case in CASES for dtype in case.dtypes for check in _check(case, dtype, threads)]
    finally:
        torch.set_num_threads(threads)
    checks.sort(key=lambda check: [*kernels].index(check["kernel"]))
    triton = _checks_of_triton()
    return {
        "passed": all(check["status"] != "failed" for check in checks)
        and all(word == "ok" for word in triton.values()),
        "versions": versions,
        "machine": _machine(),
        "kernels": kernels,
        "checks": checks,
        "triton": triton,
        "warning": untested_versions(versions),
    }


def _checks_of_triton() -> dict[str, str]:
    if not torch.cuda.is_available():
        return {}
    from ..kernels._triton_check import table  # registers operators, which only a GPU needs

    return table()


def _check(case: Case, dtype: torch.dtype, threads: int) -> Iterator[dict[str, Any]]:
    torch.set_num_threads(1)
    exact = _compute("reference", case, dtype, torch.float64)
    yardstick = exact if dtype in TOLERANCES else _compute("reference", case, dtype, dtype)
    arguments = case.arguments(case.inputs(dtype, dtype))
    refused_gradients = explain(**arguments).reasons
    with torch.no_grad():
        refused = explain(**arguments).reasons
    torch.set_num_threads(threads if case.all_threads else 1)
    for kernel in (kernel.name for kernel in KERNELS if not kernel.compiles):
        measures: dict[str, dict[str, float]] = {}
        status, reasons = "refused", refused[kernel]
        if not reasons:
            with torch.set_grad_enabled(not refused_gradients[kernel]):
                got = _compute(kernel, case, dtype, dtype)
            if isinstance(got, str) or isinstance(exact, str) or isinstance(yardstick, str):
                reasons = tuple(dict.fromkeys(result for result in (got, exact, yardstick) if isinstance(result, str)))
            else:
                reasons = refused_gradients[kernel]
                for name, x in got.items():
                    limit = TOLERANCES.get(dtype, 2 * _error(yardstick[name], exact[name]))
                    measures[name] = {"error": _error(x, exact[name]), "limit": limit}
            status = "ok" if measures and max(map(_share, measures.values())) <= 1 else "failed"
        output = measures.pop("output", None)
        worst = max(measures, key=lambda name: _share(measures[name]), default="")
        about = {"kernel": kernel, "case": case.name, "dtype": str(dtype).removeprefix("torch."), "status": status}
        measured = {"output": output, "gradient": measures.get(worst), "worst_gradient": worst, "reasons": reasons}
        yield about | measured


def _compute(kernel: str, case: Case, rounded_to: torch.dtype, dtype: torch.dtype) -> dict[str, Tensor] | str:
    """The output and, where they are enabled, the gradients by name; or what the kernel raised."""
    inputs = case.inputs(rounded_to, dtype)
    try:
        with use_kernel(kernel):
            output = attention(**case.arguments(inputs))
            if not torch.is_grad_enabled():
                return {"output": output}
            gradients = torch.autograd.grad(output, [inputs[name] for name in case.learnt], inputs["output_gradient"])
            return {"output": output.detach(), **dict(zip(case.learnt, gradients, strict=True))}
    except Exception as error:
        return f"{kernel} raised {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest exact entry; NaN if there is one."""
    return float((got.double() - exact).abs().max()) / (float(exact.abs().max()) or 1)


def _share(measure: dict[str, float]) -> float:
    """How much of its limit an error uses up, above 1 if it is beyond; infinite for NaN."""
    error, limit = measure.values()
    return inf if isnan(error) or error > limit == 0 else error / (limit or 1)


def _machine() -> dict[str, str]:
    cuda = torch.cuda.is_available()
    return {
        "platform": f"{platform.system()} {platform.machine()}, {sys.implementation.name}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else "not available",
        "MPS": "available" if torch.backends.mps.is_available() else "not available",
        "projections": describe_backend(),
        "native kernel": instruction_set() or f"not available: {why_missing}. To build it: {BUILD_NATIVE}",
        "threads": str(torch.get_num_threads()),
        "threads between operations": str(torch.get_num_interop_threads()),
    }


def text_of(report: dict[str, Any]) -> str:
    """What ``clearhead doctor`` prints."""
    checks: list[dict[str, Any]] = report["checks"]
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for check in checks:
        rows.setdefault((check["kernel"], check["case"]), {})[check["dtype"]] = check
    dtypes = tuple(dict.fromkeys(check["dtype"] for check in checks))
    cells = [
        (*row, *(_cell(by_dtype[dtype]) if dtype in by_dtype else "-" for dtype in dtypes))
        for row, by_dtype in rows.items()
    ]
    kernels = {name: "; ".join(reasons) or "available" for name, reasons in report["kernels"].items()}
    sections = {
        "versions": _columns(report["versions"].items()),
        "machine": _columns(report["machine"].items()),
        "kernels": _columns(kernels.items()),
        TITLE: _columns([("kernel", "call", *dtypes), *cells]),
        "statistics by Triton, compared with the reference": _columns(report["triton"].items()),
        "refused": _refusals(rows),
        "failed": [_failure(check) for check in checks if check["status"] == "failed"],
    }
    paragraphs = ["\n  ".join([title, *lines]) for title, lines in sections.items() if lines]
    if report["warning"]:
        paragraphs.append(f"warning: {report['warning']}")
    words = [check["status"] for check in checks]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("ok", "refused", "failed"))
    advice = ". Avoid the failed kernels with clearhead.use_kernel(...), and please report this."
    paragraphs.append(f"all checks passed: {counts}" if report["passed"] else f"checks failed: {counts}{advice}")
    return "\n\n".join(paragraphs)


def _columns(rows: Collection[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _cell(check: dict[str, Any]) -> str:
    """``3.1e-07 ok`` or ``2.0e-03 FAIL``: the error that uses up more of its limit."""
    measures = [measure for measure in (check["output"], check["gradient"]) if measure]
    word = "FAIL" if check["status"] == "failed" else check["status"]
    return f"{max(measures, key=_share)['error']:.1e} {word}" if measures else word


def _failure(check: dict[str, Any]) -> str:
    measures = {"output": check["output"], f"gradient of {check['worst_gradient']}": check["gradient"]}
    wrong = {what: measure.values() for what, measure in measures.items() if measure and _share(measure) > 1}
    said = [f"error of the {what} {error:.1e}, allowed {limit:.1e}" for what, (error, limit) in wrong.items()]
    return "{kernel}, {case}, {dtype}: ".format(**check) + "; ".join(said or check["reasons"])


def _refusals(rows: dict[tuple[str, str], dict[str, dict[str, Any]]]) -> list[str]:
    """A line for each kernel and its reasons against calls, or against their gradients, in the same dtypes."""
    cases: dict[tuple[str, str], list[str]] = {}
    for (kernel, case), checks in rows.items():
        dtypes: dict[tuple[str, str], list[str]] = {}
        for check in checks.values():
            if check["reasons"] and (check["output"] or check["status"] == "refused"):
                what = "gradients of " if check["output"] else ""
                dtypes.setdefault((what, "; ".join(check["reasons"])), []).append(check["dtype"])
        for (what, reasons), refused in dtypes.items():
            where = "" if len(refused) == len(checks) else f" in {' and '.join(refused)}"
            cases.setdefault((f"{kernel} refuses {what}", f"{where}: {reasons}"), []).append(case)
    return [f"{first}{', '.join(which)}{last}" for (first, last), which in cases.items()]
