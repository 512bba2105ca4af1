"""`clearhead doctor` finds kernels with wrong results, says why a kernel was not checked, and exits with 0 or 1."""

from __future__ import annotations

import json
import platform
import tomllib
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import clearhead
from clearhead._versions import TESTED
from clearhead.cli import _doctor as doctor
from clearhead.kernels import Kernel
from tests.support.forgetting import forget

from .looking import run

Report = dict[str, Any]
CASES = doctor.CASES


def failures(report: Report) -> list[tuple[str, str, str]]:
    failed = [check for check in report["checks"] if check["status"] == "failed"]
    return [(check["kernel"], check["case"], check["dtype"]) for check in failed]


def check_of(report: Report, *place: str) -> Report:
    return next(check for check in report["checks"] if (check["kernel"], check["case"], check["dtype"]) == place)


@pytest.fixture(scope="module")
def report() -> Report:
    forget()  # plans of kernels that another test broke
    return doctor.examine()


@pytest.fixture(autouse=True)
def _few_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer calls than in `report`, for tests that look for one broken kernel."""
    names = ("plain", "padding", "soft-cap + sinks")
    monkeypatch.setattr(doctor, "CASES", [case for case in CASES if case.name in names])
    monkeypatch.setattr(doctor, "TOLERANCES", {torch.float32: 1e-5, torch.bfloat16: None})


def break_kernel(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[Tensor], Tensor]) -> None:
    (kernel,) = (each for each in Kernel.__subclasses__() if each.name == name)
    healthy = kernel.plan

    def broken(self: object, *about: object) -> Callable[[object], object]:
        compute = healthy(self, *about)

        def computed(call: object) -> object:
            results = compute(call)
            return results._replace(output=change(results.output))

        return computed

    monkeypatch.setattr(kernel, "plan", broken)


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 1.05


def raise_an_error(output: Tensor) -> Tensor:
    raise ZeroDivisionError("the tile has no rows")


def test_every_kernel_is_checked_with_every_call_in_every_dtype(report: Report) -> None:
    checked = [(check["kernel"], check["case"], check["dtype"]) for check in report["checks"]]
    kernels = ("native", "sdpa", "chunked", "reference")
    dtypes = ("float64", "float32", "bfloat16", "float16")
    assert checked == [(kernel, case.name, dtype) for kernel in kernels for case in CASES for dtype in dtypes]


def test_only_sdpa_and_native_refuse_calls_or_their_gradients(report: Report) -> None:
    assert failures(report) == []
    assert report["passed"]
    assert {check["kernel"] for check in report["checks"] if check["reasons"]} == {"sdpa", "native"}
    refused = check_of(report, "sdpa", "soft-cap + sinks", "float32")
    assert refused["reasons"] == ("it has no soft-cap",)
    of_gradients = check_of(report, "sdpa", "bias + gradient", "float64")
    assert (of_gradients["status"], of_gradients["gradient"]) == ("ok", None)
    assert of_gradients["output"] is not None
    assert of_gradients["reasons"] == ("its fused kernels give no gradient for a bias",)
    text = doctor.text_of(report)
    assert "it has no soft-cap" in text
    said = "sdpa refuses gradients of bias + gradient in float64 and float32: its fused kernels give no"
    assert said in text


def test_a_check_is_ok_exactly_if_its_errors_are_within_the_fixed_limits(report: Report) -> None:
    for check in report["checks"]:
        measures = [measure for measure in (check["output"], check["gradient"]) if measure is not None]
        if check["status"] == "refused":
            assert measures == []
            continue
        assert check["output"] is not None
        assert (check["gradient"] is None) == bool(check["reasons"])
        assert (check["status"] == "ok") == all(measure["error"] <= measure["limit"] for measure in measures)
        if check["dtype"] in ("float64", "float32"):
            assert {measure["limit"] for measure in measures} == {{"float64": 1e-10, "float32": 1e-5}[check["dtype"]]}
        else:
            reference = check_of(report, "reference", check["case"], check["dtype"])
            assert check["output"]["limit"] == 2 * reference["output"]["error"] > 0


def test_the_errors_are_the_distance_from_float64(report: Report) -> None:
    """The plain call again, by hand."""
    arguments, *_ = doctor.CASES[0].call(torch.float32, torch.float32)
    query, key, value = (arguments[name].detach() for name in ("query", "key", "value"))
    exact = torch.softmax(query.double() @ key.double().mT / 4, -1) @ value.double()
    with clearhead.use_kernel("chunked"):
        output = clearhead.attention(query, key, value)
    error = float((output.double() - exact).abs().max() / exact.abs().max())
    assert check_of(report, "chunked", "plain", "float32")["output"]["error"] == pytest.approx(error, rel=0.01)


def test_text_and_json_say_the_same_and_exit_with_0() -> None:
    result, read = run("doctor"), json.loads(run("doctor", "--json").stdout)
    assert (result.exit_code, result.stderr, read["passed"]) == (0, "", True)
    counts = Counter(check["status"] for check in read["checks"])
    assert set(counts) == {"ok", "refused"}
    last = f"all checks passed: {counts['ok']} ok, {counts['refused']} refused, 0 failed"
    assert result.stdout.splitlines()[-1] == last
    lines = [line.split() for line in result.stdout.splitlines()]
    versions = {"clearhead": clearhead.__version__, "torch": torch.__version__}
    for name, value in {**versions, "threads": str(torch.get_num_threads()), "chunked": "available"}.items():
        assert [name, value] in lines
    assert versions.items() <= read["versions"].items()
    assert torch.backends.cpu.get_cpu_capability() in result.stdout
    assert result.stdout.isascii()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda output: output * 1.05, "chunked, plain, float32: error of the output 5.0e-02, allowed 1.0e-05"),
        (lambda output: output * torch.nan, "chunked, plain, float32: error of the output nan, allowed 1.0e-05"),
        (WrongGradient.apply, "allowed 1.0e-05"),
        (raise_an_error, "chunked, plain, float32: chunked raised ZeroDivisionError: the tile has no rows"),
    ],
    ids=["wrong value", "nan", "wrong gradient", "raises"],
)
def test_a_broken_kernel_is_found_and_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, change: Callable, words: str
) -> None:
    break_kernel(monkeypatch, "chunked", change)
    result = run("doctor", "--json")
    findings = json.loads(result.stdout, parse_constant=pytest.fail)
    assert (result.exit_code, findings["passed"]) == (1, False)
    places = [(case.name, dtype) for case in doctor.CASES for dtype in ("float32", "bfloat16")]
    failed, chunked = failures(findings), [("chunked", *place) for place in places]
    assert [check for check in failed if check[0] == "chunked"] == chunked
    assert [check for check in failed if check[2] == "float32"] == chunked[::2]
    text, counts = run("doctor").stdout, Counter(check["status"] for check in findings["checks"])
    assert words in text
    last = f"checks failed: {counts['ok']} ok, {counts['refused']} refused, {counts['failed']} failed. Avoid the"
    assert text.splitlines()[-1].startswith(last)
    check = check_of(findings, "chunked", "plain", "float32")
    if change is WrongGradient.apply:
        assert check["output"]["error"] <= check["output"]["limit"]
        assert check["gradient"]["error"] == pytest.approx(0.05, rel=1e-3)
    if "nan" in words:
        assert check["output"] == {"error": "nan", "limit": 1e-5}


def test_a_kernel_that_leaks_hidden_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, "chunked", lambda output: output + (output == 0).to(output.dtype))
    failed = {place[:2] for place in failures(doctor.examine()) if place[2] == "float32"}
    assert failed == {("chunked", "padding")}


@pytest.mark.parametrize("change", [lambda output: output * 1.05, raise_an_error], ids=["wrong", "raises"])
def test_a_broken_reference_is_found(monkeypatch: pytest.MonkeyPatch, change: Callable) -> None:
    break_kernel(monkeypatch, "reference", change)
    findings = doctor.examine()
    refused, passed = (
        {check["kernel"] for check in findings["checks"] if check["status"] == status} for status in ("refused", "ok")
    )
    assert refused <= {"sdpa", "native"}
    assert {"sdpa", "chunked"} <= {kernel for kernel, *_ in failures(findings)}
    assert change is not raise_an_error or not passed


def test_generator_and_threads_do_not_change_and_no_grad_has_no_effect() -> None:
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    with torch.no_grad():
        findings = doctor.examine()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert {check["status"] for check in findings["checks"] if check["kernel"] in ("chunked", "reference")} == {"ok"}
    assert all(check["gradient"] is not None for check in findings["checks"] if check["kernel"] == "chunked")


def test_a_terminal_gets_the_same_findings_untruncated_at_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, "chunked", lambda output: output + 1)
    narrow = partial(Console, force_terminal=True, color_system=None, width=80)
    monkeypatch.setattr("clearhead.cli._output.Console", narrow)
    result = run("doctor")
    assert result.exit_code == 1
    assert "versions" in result.stdout
    assert "…" not in result.stdout
    said = " ".join(result.stdout.split())
    for text in ("reference soft-cap + sinks", "refused", "FAIL", "sdpa refuses soft-cap + sinks"):
        assert text in said


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "instruction_set", lambda: None)
    monkeypatch.setattr(doctor, "why_missing", "it was not built")
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("no-such-package-clearhead",))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)  # of which none can be used
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    findings = doctor.examine()
    command = "pip install --force-reinstall --no-deps --no-binary clearhead clearhead"
    assert f"not available: it was not built. To build it: {command}" in doctor.text_of(findings)
    assert findings["versions"]["no-such-package-clearhead"] == "not installed"
    assert findings["triton"] == {}


@pytest.mark.parametrize(
    ("torch_version", "python_version", "said"),
    [
        ("2.11.0+cu128", "3.11.7", "torch 2.11.0+cu128 (tested: 2.12 to 2.15)"),
        ("3.0.0a0", "3.12.0", "torch 3.0.0a0 (tested: 2.12 to 2.15)"),
        ("2.13.0", "3.10.2", "python 3.10.2 (tested: 3.11 to 3.14)"),
        ("2.16.0", "3.15.0rc1", "torch 2.16.0 (tested: 2.12 to 2.15) and python 3.15.0rc1 (tested: 3.11 to 3.14)"),
        ("2.12.1", "3.14.9", ""),
        ("2.15.0+cpu", "3.11.0", ""),
    ],
)
def test_versions_outside_the_tested_range_give_one_warning(
    torch_version: str, python_version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(platform, "python_version", lambda: python_version)
    findings, warning = doctor.examine(), f"not tested with {said}" if said else ""
    assert findings["passed"]
    assert findings["warning"] == warning
    lines = [line for line in doctor.text_of(findings).splitlines() if "warning" in line]
    assert lines == ([f"warning: {warning}"] if said else [])


def test_the_project_declares_the_tested_versions() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (first_torch, _), (first_python, last_python) = TESTED["torch"], TESTED["python"]
    assert project["dependencies"] == ["torch>=" + ".".join(map(str, first_torch))]
    assert project["requires-python"] == ">=" + ".".join(map(str, first_python))
    named = [text for text in project["classifiers"] if text.startswith("Programming Language :: Python :: 3.")]
    versions = [f"3.{minor}" for minor in range(first_python[1], last_python[1] + 1)]
    assert named == [f"Programming Language :: Python :: {version}" for version in versions]
