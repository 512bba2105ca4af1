"""The doctor finds kernels that compute something wrong, and says why a kernel was not asked."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead._versions import TESTED
from clearhead.inspection import _doctor as doctor
from clearhead.inspection._doctor import CASES, examine, text_of
from clearhead.kernels._chunked import ChunkedKernel
from clearhead.kernels._reference import ReferenceKernel

Report = dict[str, Any]


def failures(report: Report) -> list[Report]:
    return [check for check in report["checks"] if check["status"] == "failed"]


@pytest.fixture(scope="module")
def report() -> Report:
    return examine()


@pytest.fixture
def two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fewer calls, for tests that look for one broken kernel."""
    few = [case for case in CASES if case.name in ("plain", "padding")]
    monkeypatch.setattr(doctor, "CASES", [replace(case, dtypes=(torch.float32, torch.bfloat16)) for case in few])


def break_kernel(monkeypatch: pytest.MonkeyPatch, kernel: type, change: Callable[[Tensor], Tensor]) -> None:
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


def test_every_kernel_meets_every_call_in_every_dtype(report: Report) -> None:
    asked = {(check["kernel"], check["case"], check["dtype"]) for check in report["checks"]}
    assert asked == {
        (kernel, case.name, str(dtype).removeprefix("torch."))
        for kernel in ("native", "sdpa", "chunked", "reference")
        for case in CASES
        for dtype in case.dtypes
    }
    assert len(report["checks"]) == len(asked)
    assert {check["dtype"] for check in report["checks"]} == {"float64", "float32", "bfloat16", "float16"}


def test_a_healthy_machine_is_well(report: Report) -> None:
    assert failures(report) == []
    assert report["passed"]


def test_none_but_sdpa_and_native_refuse_and_they_say_why(report: Report) -> None:
    said = [c for c in report["checks"] if c["kernel"] == "sdpa" and c["status"] == "refused"]
    refused = {check["case"]: check["reasons"] for check in said if check["dtype"] == "float32"}
    assert {check["kernel"] for check in report["checks"] if check["reasons"]} == {"sdpa", "native"}
    assert refused["soft-cap + sinks"] == ("it has no soft-cap", "it has no sinks")
    assert "it has no soft-cap; it has no sinks" in text_of(report)


def test_where_a_kernel_refuses_only_gradients_its_output_is_checked(report: Report) -> None:
    check = next(
        c for c in report["checks"] if (c["kernel"], c["case"], c["dtype"]) == ("sdpa", "bias + gradient", "float64")
    )
    assert check["status"] == "ok"
    assert check["output"] is not None
    assert check["gradient"] is None
    assert check["reasons"] == ("its fused kernels give no gradient for a bias",)
    assert "sdpa refuses gradients of bias + gradient in float64 and float32: its fused kernels give no" in text_of(
        report
    )


def test_a_check_is_ok_exactly_if_its_errors_are_within_the_limits(report: Report) -> None:
    for check in report["checks"]:
        measures = [measure for measure in (check["output"], check["gradient"]) if measure is not None]
        if check["status"] == "refused":
            assert measures == []
            continue
        assert check["output"] is not None
        assert (check["gradient"] is None) == bool(check["reasons"])
        assert (check["status"] == "ok") == all(measure["error"] <= measure["limit"] for measure in measures)


def test_the_limits_are_the_fixed_ones(report: Report) -> None:
    found = {
        (check["kernel"], check["case"], check["dtype"]): check
        for check in report["checks"]
        if check["output"] is not None
    }
    for (_, case, dtype), check in found.items():
        if dtype in ("float64", "float32"):
            limits = {measure["limit"] for measure in (check["output"], check["gradient"]) if measure is not None}
            assert limits == {{"float64": 1e-10, "float32": 1e-5}[dtype]}
        else:
            assert check["output"]["limit"] == 2 * found["reference", case, dtype]["output"]["error"] > 0


def test_the_errors_are_the_distance_to_float64(report: Report) -> None:
    """The plain call once more, by hand."""
    inputs = CASES[0].inputs(torch.float32, torch.float32)
    query, key, value = (inputs[name].detach() for name in ("query", "key", "value"))
    exact = torch.softmax(query.double() @ key.double().mT / 4, -1) @ value.double()
    with clearhead.use_kernel("chunked"):
        got = clearhead.attention(query, key, value)
    check = next(c for c in report["checks"] if (c["kernel"], c["case"], c["dtype"]) == ("chunked", "plain", "float32"))
    assert check["output"] is not None
    assert check["output"]["error"] == pytest.approx(
        float((got.double() - exact).abs().max() / exact.abs().max()), rel=0.01
    )


def test_padding_really_holds_nan_and_really_hides_an_item() -> None:
    case = next(case for case in CASES if case.name == "padding")
    assert case.inputs(torch.float32, torch.float32)["key"][case.hidden_item].isnan().all()
    computed = doctor._compute("reference", case, torch.float32, torch.float32)
    assert not isinstance(computed, str)
    assert all(tensor.isfinite().all() for tensor in computed.values())
    assert torch.count_nonzero(computed["output"][case.hidden_item]) == 0


@pytest.mark.usefixtures("two_calls")
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
def test_a_broken_kernel_is_found(monkeypatch: pytest.MonkeyPatch, change: Callable, words: str) -> None:
    break_kernel(monkeypatch, ChunkedKernel, change)
    found = examine()
    assert not found["passed"]
    failed = {(check["kernel"], check["case"], check["dtype"]) for check in failures(found)}
    dtypes = ("float32", "bfloat16")
    assert {place for place in failed if place[0] == "chunked"} == {
        ("chunked", case, dtype) for case in ("plain", "padding") for dtype in dtypes
    }
    assert {place for place in failed if place[2] == "float32"} == {
        ("chunked", "plain", "float32"),
        ("chunked", "padding", "float32"),
    }
    assert words in text_of(found)
    assert text_of(found).splitlines()[-1].startswith("checks failed: ")


@pytest.mark.usefixtures("two_calls")
def test_a_wrong_gradient_is_told_from_a_wrong_output(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, ChunkedKernel, WrongGradient.apply)
    check = next(check for check in failures(examine()) if check["dtype"] == "float32" and check["case"] == "plain")
    assert check["output"] is not None
    assert check["output"]["error"] <= check["output"]["limit"]
    assert check["gradient"] is not None
    assert check["gradient"]["error"] == pytest.approx(0.05, rel=1e-3)


@pytest.mark.usefixtures("two_calls")
def test_a_kernel_that_leaks_hidden_rows_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def leak(output: Tensor) -> Tensor:
        return output + (output == 0).to(output.dtype)

    break_kernel(monkeypatch, ChunkedKernel, leak)
    failed = {(check["kernel"], check["case"]) for check in failures(examine()) if check["dtype"] == "float32"}
    assert failed == {("chunked", "padding")}


@pytest.mark.usefixtures("two_calls")
def test_a_broken_reference_does_not_go_unnoticed(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, ReferenceKernel, lambda output: output * 1.05)
    assert {"sdpa", "chunked"} <= {check["kernel"] for check in failures(examine())}


@pytest.mark.usefixtures("two_calls")
def test_a_reference_that_raises_fails_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, ReferenceKernel, raise_an_error)
    found = examine()
    refused = [check for check in found["checks"] if check["status"] == "refused"]
    assert len(failures(found)) == len(found["checks"]) - len(refused) > 0
    assert {check["kernel"] for check in refused} <= {"sdpa", "native"}


@pytest.mark.usefixtures("two_calls")
def test_it_leaves_generator_and_threads_alone_and_works_without_gradients() -> None:
    state = torch.get_rng_state()
    threads = torch.get_num_threads()
    with torch.no_grad():
        found = examine()
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)
    assert {check["status"] for check in found["checks"] if check["kernel"] in ("chunked", "reference")} == {"ok"}
    assert all(check["gradient"] is not None for check in found["checks"] if check["kernel"] == "chunked")


def test_the_text_names_versions_threads_and_kernels(report: Report) -> None:
    text = text_of(report)
    lines = [line.split() for line in text.splitlines()]
    assert ["clearhead", clearhead.__version__] in lines
    assert ["torch", torch.__version__] in lines
    assert ["threads", str(torch.get_num_threads())] in lines
    assert ["chunked", "available"] in lines
    assert torch.backends.cpu.get_cpu_capability() in text
    assert text.isascii()


def test_a_package_that_is_missing_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "OPTIONAL_PACKAGES", ("no-such-package-clearhead",))
    monkeypatch.setattr(doctor, "CASES", CASES[:1])
    assert examine()["versions"]["no-such-package-clearhead"] == "not installed"


@pytest.mark.parametrize(
    ("torch_version", "python_version", "said"),
    [
        ("2.11.0+cu128", "3.11.7", "not tested with torch 2.11.0+cu128 (tested: 2.12 to 2.15)"),
        ("3.0.0a0", "3.12.0", "not tested with torch 3.0.0a0 (tested: 2.12 to 2.15)"),
        ("2.13.0", "3.10.2", "not tested with python 3.10.2 (tested: 3.11 to 3.12)"),
        (
            "2.16.0",
            "3.14.0rc1",
            "not tested with torch 2.16.0 (tested: 2.12 to 2.15) and python 3.14.0rc1 (tested: 3.11 to 3.12)",
        ),
        ("2.12.1", "3.12.9", ""),
        ("2.15.0+cpu", "3.11.0", ""),
    ],
)
@pytest.mark.usefixtures("two_calls")
def test_versions_outside_the_tested_range_give_one_warning(
    torch_version: str, python_version: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", torch_version)
    monkeypatch.setattr(platform, "python_version", lambda: python_version)
    found = examine()
    assert found["passed"]
    assert found["warning"] == said
    assert [line for line in text_of(found).splitlines() if "warning" in line] == ([f"warning: {said}"] if said else [])


def test_what_is_declared_begins_where_what_is_tested_does() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (first_torch, _), (first_python, last_python) = TESTED["torch"], TESTED["python"]
    assert project["dependencies"] == ["torch>=" + ".".join(map(str, first_torch))]
    assert project["requires-python"] == ">=" + ".".join(map(str, first_python))
    named = [text for text in project["classifiers"] if text.startswith("Programming Language :: Python :: 3.")]
    versions = [f"3.{minor}" for minor in range(first_python[1], last_python[1] + 1)]
    assert named == [f"Programming Language :: Python :: {version}" for version in versions]
