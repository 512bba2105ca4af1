"""`clearhead doctor`: what this machine has, and every kernel compared with the reference in float64."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Collection, Iterable
from functools import cache
from importlib import metadata
from itertools import groupby
from operator import itemgetter
from typing import Annotated, Any, NamedTuple

import torch
import typer
from rich.console import Console
from rich.text import Text
from torch import Tensor

from .. import masks
from .._attention import attention, explain
from .._native import instruction_set, why_missing
from .._version import __version__
from .._versions import untested_versions
from ..kernels._choice import KERNELS, use_kernel
from ..kernels._triton_check import table as check_triton
from ._output import print_with

OPTIONAL_PACKAGES = ("transformers", "safetensors", "typer", "rich", "matplotlib", "numpy")
BUILD_NATIVE = "pip install --force-reinstall --no-deps --no-binary clearhead clearhead"
#: The allowed error in each dtype; ``None`` is twice the error of `reference` in the same dtype.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: None, torch.float16: None}
QKV = ("query", "key", "value")
#: The name of each group is its style.
_STYLES = r"(?m)(?P<bold>^.+(?=\n  ))|(?P<green>\S+ ok\b|^all .*)|(?P<red>\S+ FAIL\b|^checks .*)|(?P<yellow>^warn.*)"


class Case(NamedTuple):
    """A kind of call, with H = 6 and D = 16."""

    name: str
    mask: Callable[[Tensor], masks.Mask | None] = lambda bias: None
    sizes: tuple[int, int, int, int, int] = (2, 6, 37, 53, 16)  # B, Hkv, L, S, Dv
    learnt: tuple[str, ...] = QKV  # the inputs with gradients
    softcap: float | None = None
    first_hidden: int = 2  # keys and values are NaN from this item on, and the mask hides them

    def call(self, rounded_to: torch.dtype, dtype: torch.dtype) -> tuple[dict[str, Any], Tensor, dict[str, Tensor]]:
        """The arguments of `attention`, the gradient of its output, and its inputs by the names of their gradients."""
        (batch, kv_heads, length, keys, value_dim), generator = self.sizes, torch.Generator().manual_seed(7)
        shapes = {"query": (batch, 6, length, 16), "key": (batch, kv_heads, keys, 16)}
        shapes |= {"value": (batch, kv_heads, keys, value_dim), "gradient": (batch, 6, length, value_dim)}
        shapes |= {"sinks": (6,), "bias": (1, 6, length, keys)}
        drawn = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
        drawn["key"][self.first_hidden :] = drawn["value"][self.first_hidden :] = torch.nan
        x = {name: x.to(rounded_to).to(dtype).requires_grad_(name in self.learnt) for name, x in drawn.items()}
        arguments = {"mask": self.mask(x["bias"]), "softcap": self.softcap}
        arguments |= {name: x[name] for name in self.learnt if name != "bias"}
        return arguments, x["gradient"], {f"gradient of {name}": x[name] for name in self.learnt}


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
    Case("long", lambda _: masks.causal("bottom_right"), (1, 6, 401, 601, 16)),
)


def examine() -> dict[str, Any]:
    """What ``clearhead doctor --json`` prints. `flex`, which is compiled for each call, is listed but not checked."""
    versions = {"clearhead": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    for name in OPTIONAL_PACKAGES:
        versions[name] = next((package.version for package in metadata.distributions(name=name)), "not installed")
    with torch.enable_grad():
        explanation = explain(**CASES[0].call(torch.float32, torch.float32)[0])
        checked, compute = [kernel.name for kernel in KERNELS if not kernel.compiles], cache(_compute)
        checks = [_check(kernel, case, dtype, compute) for kernel in checked for case in CASES for dtype in TOLERANCES]
    cuda, triton = torch.cuda.is_available(), check_triton()
    machine = {
        "platform": f"{platform.system()} {platform.machine()}, {platform.python_implementation()}",
        "CPU capability": torch.backends.cpu.get_cpu_capability(),
        "CUDA": f"{torch.cuda.get_device_name()}, CUDA {torch.version.cuda}" if cuda else "not available",
        "MPS": "available" if torch.backends.mps.is_available() else "not available",
        "projections": explanation.projections,
        "native kernel": instruction_set() or f"not available: {why_missing}. To build it: {BUILD_NATIVE}",
        "PyTorch's own attention": "runs on the native kernel (clearhead.activate)"
        if explanation.active
        else "PyTorch's",
        "threads": str(torch.get_num_threads()),
        "threads between operations": str(torch.get_num_interop_threads()),
    }
    passed = all(check["status"] != "failed" for check in checks) and set(triton.values()) <= {"ok"}
    report = {"passed": passed, "versions": versions, "machine": machine, "kernels": explanation.reasons}
    return report | {"checks": checks, "triton": triton, "warning": untested_versions(versions)}


def _check(kernel: str, case: Case, dtype: torch.dtype, compute: Callable[..., dict[str, Tensor]]) -> dict[str, Any]:
    arguments, measures, problems = case.call(dtype, dtype)[0], dict[str, dict[str, Any]](), list[str]()
    with torch.no_grad():
        refused = explain(**arguments).reasons[kernel]
    reasons = refused or explain(**arguments).reasons[kernel]
    try:
        exact, rounded = compute("reference", case, dtype, torch.float64), compute("reference", case, dtype, dtype)
        for name, x in ({} if refused else compute(kernel, case, dtype, dtype, not reasons)).items():
            error, limit = _error(x, exact[name]), TOLERANCES[dtype] or 2 * _error(rounded[name], exact[name])
            measures[name] = {"error": error, "limit": limit}
            problems += [] if error <= limit else [f"error of the {name} {error:.1e}, allowed {limit:.1e}"]
    except RuntimeError as error:
        problems = [str(error)]
    status, why = ("refused", refused) if refused else ("failed", tuple(problems)) if problems else ("ok", reasons)
    about = {"kernel": kernel, "case": case.name, "dtype": str(dtype).removeprefix("torch."), "status": status}
    output, gradient = measures.pop("output", None), _worst(measures.values())
    name = next((name.removeprefix("gradient of ") for name in measures if measures[name] is gradient), "")
    return about | {"output": output, "gradient": gradient, "worst_gradient": name, "reasons": why}


def _compute(kernel: str, case: Case, rounded_to: torch.dtype, dtype: torch.dtype, gradients: bool = True) -> Any:
    """The output and the gradients by name, or a `RuntimeError` that names the kernel."""
    arguments, output_gradient, learnt = case.call(rounded_to, dtype)
    try:
        with use_kernel(kernel), torch.set_grad_enabled(gradients):
            output = attention(**arguments)
            of_learnt = torch.autograd.grad(output, [*learnt.values()], output_gradient) if gradients else ()
    except Exception as error:
        raise RuntimeError(f"{kernel} raised {type(error).__name__}: {' '.join(str(error).split())}") from error
    return {"output": output.detach(), **dict(zip(learnt, of_learnt, strict=gradients))}


def _error(got: Tensor, exact: Tensor) -> float:
    """The largest difference, relative to the largest exact entry; NaN if there is one."""
    return float((got.double() - exact).abs().max()) / (float(exact.abs().max()) or 1)


def _worst(measures: Iterable[dict[str, Any]]) -> dict[str, Any] | None:
    """The largest error, before all others one beyond its limit."""
    return max(measures, key=lambda measure: (not measure["error"] <= measure["limit"], measure["error"]), default=None)


def text_of(report: dict[str, Any]) -> str:
    checks: list[dict[str, Any]] = report["checks"]
    table = [("kernel", "call", *dict.fromkeys(check["dtype"] for check in checks))]
    table += [(*place, *map(_cell, of_place)) for place, of_place in groupby(checks, itemgetter("kernel", "case"))]
    failed = [check for check in checks if check["status"] == "failed"]
    sections: dict[str, Collection[tuple[str, ...]]] = {
        "versions": report["versions"].items(),
        "machine": report["machine"].items(),
        "kernels": [(name, "; ".join(reasons) or "available") for name, reasons in report["kernels"].items()],
        "checks: largest error of outputs and gradients against the reference in float64, on the CPU": table,
        "statistics by Triton, compared with the reference": report["triton"].items(),
        "refused": [(line,) for line in _refusals(checks)],
        "failed": [("{kernel}, {case}, {dtype}: ".format(**check) + "; ".join(check["reasons"]),) for check in failed],
    }
    paragraphs: list[str] = []
    for title, rows in sections.items():
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        paragraphs += ["\n  ".join([title, *lines])] if lines else []
    paragraphs += [f"warning: {report['warning']}"] if report["warning"] else []
    words = [check["status"] for check in checks]
    counts = ", ".join(f"{words.count(word)} {word}" for word in ("ok", "refused", "failed"))
    advice = ". Avoid the failed kernels with clearhead.use_kernel(...), and please report this."
    paragraphs.append(f"all checks passed: {counts}" if report["passed"] else f"checks failed: {counts}{advice}")
    return "\n\n".join(paragraphs)


def _cell(check: dict[str, Any]) -> str:
    worst = _worst(filter(None, (check["output"], check["gradient"])))
    return (f"{worst['error']:.1e} " if worst else "") + check["status"].replace("failed", "FAIL")


def _refusals(checks: list[dict[str, Any]]) -> list[str]:
    """A line for each kernel and its reasons against calls, or against their gradients, in the same dtypes."""
    cases = dict[tuple[str, str], list[str]]()
    refused = [check for check in checks if check["reasons"] and check["status"] != "failed"]
    for (kernel, case, status, reasons), group in groupby(refused, itemgetter("kernel", "case", "status", "reasons")):
        what = f"{kernel} refuses {'' if status == 'refused' else 'gradients of '}"
        why = f"{' and '.join(check['dtype'] for check in group)}: {'; '.join(reasons)}"
        cases.setdefault((what, why), []).append(case)
    return [f"{what}{', '.join(of_cases)} in {why}" for (what, why), of_cases in cases.items()]


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False) -> None:
    """Print versions, threads and kernels, and check each kernel against the reference on this machine.

    Exits with 1 if a check fails.
    """
    with Console(stderr=True).status("checking every kernel"):
        report = examine()
    if as_json:
        # JSON has no number for NaN and infinity, which become strings.
        print(json.dumps(json.loads(json.dumps(report), parse_constant=lambda name: str(float(name))), indent=2))
    else:
        text = Text(text_of(report))
        text.highlight_regex(_STYLES)
        print_with(lambda console: console.print(text, soft_wrap=True))
    raise typer.Exit(not report["passed"])
