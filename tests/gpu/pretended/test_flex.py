"""Long masks that rule out keys run on FlexAttention, which skips the blocks without a visible key."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from clearhead._call.call import Call, valid_call
from clearhead.kernels import _flex_blocks, _flex_choice
from clearhead.kernels._merging import gradients_of_some_keys, merge_some_keys
from clearhead.masks import Mask
from clearhead.masks._bound import bind
from clearhead.masks._grid import Grid, Offset
from clearhead.masks._part import part_of
from clearhead.positions import ALiBi
from tests.support.pretended_cuda.comparing import require_half_as_good, with_gradients
from tests.support.pretended_cuda.mode import PretendedDevice

L, SHORT = 4096, 300
CUDA = torch.device("cuda:0")
REASON = "`flex` skips the keys that the mask rules out"


def documents(length: int) -> Mask:
    return masks.documents(torch.arange(length) // (length // 7))


MASKS: dict[str, Any] = {
    "window": lambda length: masks.sliding_window(length // 5, length // 9),
    "causal window": lambda length: masks.causal() & masks.sliding_window(length // 5, 0),
    "documents": documents,
    "causal documents": lambda length: documents(length) & masks.causal(),
    "prefix": lambda length: masks.causal() | masks.prefix(length // 8),
    "window or prefix": lambda length: masks.sliding_window(length // 5, 0) | masks.prefix(4),
    "prefix of each item": lambda length: masks.causal() | masks.prefix(torch.tensor([length // 8, 3])),
    "causal lengths": lambda length: masks.causal() & masks.lengths(torch.tensor([length, length * 2 // 3])),
    "lengths": lambda length: masks.lengths(torch.tensor([length, length // 3])),
    "prefix without causal": lambda length: masks.prefix(length // 3),
    "window and lengths": lambda length: masks.sliding_window(50, 7) & masks.lengths(torch.tensor([length, 77])),
    "prefix and lengths": lambda length: (
        (masks.causal() | masks.prefix(length // 8)) & masks.lengths(torch.tensor([length, length // 2]))
    ),
}


@pytest.fixture(name="short")
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short calls stand for long ones."""
    monkeypatch.setattr(_flex_choice, "FEWEST", SHORT)


@pytest.fixture(autouse=True)
def _unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """No check of the device is remembered from another test."""
    monkeypatch.setattr(_flex_choice.CHECK, "_passed", {})


def operands(length: int, heads: int = 2, dtype: torch.dtype = torch.bfloat16, dim: int = 16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, count, length, dim, generator=generator).to(dtype) for count in (2, heads, heads)]


@pytest.mark.parametrize(
    ("name", "length"), [("window", L), ("causal lengths", L), ("documents", SHORT), ("prefix", SHORT)]
)
def test_a_long_call_runs_on_flex_without_a_wait(
    cuda: PretendedDevice, name: str, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if length == SHORT:
        monkeypatch.setattr(_flex_choice, "FEWEST", SHORT)
    query, key, value = (x[:1, :1].to(CUDA) for x in operands(length))
    mask = masks.causal() & masks.lengths(torch.tensor([3000])) if name == "causal lengths" else MASKS[name](length)
    mask = mask.prepare(length, length, batch_size=1, num_heads=1, device=CUDA)
    explanation = clearhead.explain(query, key, value, mask)
    assert explanation.kernel == "flex"
    assert explanation.reasons["flex"] == ()
    assert REASON in explanation.reasons["sdpa"]
    with torch.no_grad():
        first = cuda.count(lambda: clearhead.attention(query, key, value, mask))
        seen = cuda.count(lambda: clearhead.attention(query, key, value, mask))
    assert first.backends == seen.backends == ["flex"]
    assert first.waits == seen.waits == []
    assert first.largest <= query.nbytes
    assert seen.count <= 4
    assert seen.largest <= query.nbytes


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", MASKS)
def test_values_and_gradients_are_those_of_the_cpu(
    cuda: PretendedDevice, short: None, name: str, heads: int, prepared: bool
) -> None:
    inputs, mask = operands(SHORT, heads), MASKS[name](SHORT)
    if "lengths" in name:  # what no query sees holds NaN
        lengths = {"causal lengths": 200, "lengths": 100, "window and lengths": 77, "prefix and lengths": 150}
        for x in inputs[1:]:
            x[1, :, lengths[name] :] = torch.nan
    exact = with_gradients(inputs, mask, torch.float64, "reference")
    same = with_gradients(inputs, mask, torch.bfloat16, "reference")
    on_device = [x.to(CUDA) for x in inputs]
    if prepared:
        mask = mask.prepare(SHORT, SHORT, batch_size=2, num_heads=2, device=CUDA)
    clearhead.explain(on_device[0], on_device[1], on_device[2], mask)  # the check of the device
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, torch.bfloat16)))
    assert seen.backends == ["flex"]
    assert not seen.values
    assert not seen.shapes
    require_half_as_good(got, same, exact)


@pytest.mark.parametrize("length", [384, SHORT])
def test_windows_are_constants_of_the_compiled_kernel(
    cuda: PretendedDevice, length: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a few windows, and only where they do not depend on sizes and positions."""
    monkeypatch.setattr(_flex_blocks, "_constants", set())
    window = masks.causal() & masks.sliding_window(99, 0)
    assert _rule(window, length) == (set(), (-99, 0))
    assert _rule(window, length, 0, 0) == (set(), (-99, 0))
    assert _rule(masks.causal() & masks.sliding_window(length, 0), length) == (set(), (None, 0))
    assert _rule(window & masks.lengths(torch.tensor([7])), length) == ({"last"}, (-99, 0))
    assert _rule(window, length, 5) == ({"ends"}, (None, None))
    assert _rule(window & masks.prefix(7), length) == ({"ends"}, (None, None))
    found = [_rule(masks.sliding_window(left, 3), length)[0] for left in range(20)]
    assert found == [set()] * 14 + [{"ends"}] * 6
    assert _rule(window, length)[0] == set()


def _rule(
    mask: Mask, length: int, query: int | None = None, key: int | None = None
) -> tuple[set[str], tuple[int | None, int | None]]:
    """The tensors and the constants of a mask's rule, where positions count up from these."""
    blocks = _flex_blocks.lower_blocks(bind(mask, Grid(1, 2, length, length, CUDA, query, key)))
    return set(blocks.rule), blocks.limits


def _calls(device: str = "cpu") -> dict[str, tuple[dict[str, Any], Mask, dict[str, Any]]]:
    window = masks.sliding_window(20, 0)
    return {
        "short": ({"length": SHORT - 1}, window, {}),
        "float32": ({"dtype": torch.float32}, window, {}),
        "a large head": ({"dim": 256}, window, {}),
        "causal": ({}, masks.causal(), {}),
        "a tensor": ({}, masks.keep(torch.ones(SHORT, SHORT, dtype=torch.bool, device=device)), {}),
        "a predicate": ({}, masks.mask_mod(lambda b, h, q, k: q >= k), {}),
        "a bias": ({}, window & masks.bias(torch.zeros(SHORT, SHORT, device=device)), {}),
        "a window over everything": ({}, masks.sliding_window(SHORT, SHORT), {}),
        "dropout": ({}, window, {"dropout_p": 0.5}),
    }


@pytest.mark.parametrize("name", _calls())
def test_other_calls_stay_where_they_were(cuda: PretendedDevice, short: None, name: str) -> None:
    sizes, mask, options = _calls("cuda")[name]
    arguments: dict[str, Any] = {"length": SHORT} | sizes
    query, key, value = (x.to(CUDA) for x in operands(**arguments))
    explanation = clearhead.explain(query, key, value, mask, **options)
    assert explanation.kernel == "sdpa"
    assert REASON not in explanation.reasons["sdpa"]


def test_a_device_that_fails_the_check_stays_on_sdpa(
    cuda: PretendedDevice, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("no compiler was found")

    query, key, value = (x.to(CUDA) for x in operands(SHORT))
    monkeypatch.setattr("clearhead.kernels._flex._compiled", fail)
    with pytest.warns(RuntimeWarning, match="FlexAttention failed the check on cuda:0 .* no compiler was found"):
        assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "sdpa"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "sdpa"


def test_a_wrong_kernel_is_found_by_the_check(
    cuda: PretendedDevice, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (x.to(CUDA) for x in operands(SHORT))
    monkeypatch.setattr("clearhead.kernels._flex._compiled", lambda _: lambda q, k, v, *others: (q + k + v, q[..., 0]))
    with pytest.warns(RuntimeWarning, match="its numbers are wrong by"):
        assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "sdpa"


@pytest.mark.parametrize("missing", ["triton", "switched off"])
def test_without_triton_the_call_stays_on_sdpa(
    cuda: PretendedDevice, short: None, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    query, key, value = (x.to(CUDA) for x in operands(SHORT))
    if missing == "triton":
        monkeypatch.setattr("clearhead.kernels._triton._available._is_installed", lambda: False)
    else:
        monkeypatch.setenv("CLEARHEAD_TRITON", "0")
    assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "sdpa"


def test_nothing_is_compiled_while_a_graph_is_captured(
    cuda: PretendedDevice, short: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = (x.to(CUDA) for x in operands(SHORT))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "sdpa"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert clearhead.explain(query, key, value, MASKS["window"](SHORT)).kernel == "flex"


WITH_LSE: dict[str, Any] = {
    "none": lambda length: None,
    "window": MASKS["window"],
    "causal documents": MASKS["causal documents"],
    "prefix of each item": MASKS["prefix of each item"],
    "an empty item": lambda length: masks.causal() & masks.lengths(torch.tensor([length, 0])),
}


@pytest.fixture(name="small")
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small calls that ask for the log-sum-exp stand for large ones."""
    monkeypatch.setattr(_flex_choice, "FEWEST_SCORES", 1)


@pytest.mark.parametrize("name", WITH_LSE)
def test_the_log_sum_exp_and_its_gradient_are_those_of_the_cpu(cuda: PretendedDevice, small: None, name: str) -> None:
    inputs, mask = operands(SHORT), WITH_LSE[name](SHORT)
    exact = with_gradients(inputs, mask, torch.float64, "reference", lse=True)
    same = with_gradients(inputs, mask, torch.bfloat16, "reference", lse=True)
    on_device = [x.to(CUDA) for x in inputs]
    clearhead.explain(on_device[0], on_device[1], on_device[2], mask, return_lse=True)  # the check of the device
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, torch.bfloat16, lse=True)))
    assert seen.backends == ["flex"]
    assert not seen.values
    assert not seen.shapes
    require_half_as_good(got, same, exact, 1e-6)


@pytest.mark.parametrize(
    ("name", "gradients", "kernel"),
    [
        ("none", False, "sdpa"),
        ("none", True, "flex"),
        ("window", False, "sdpa"),
        ("window", True, "flex"),
        ("causal documents", False, "flex"),
        ("a tensor", False, "chunked"),
        ("a predicate", True, "chunked"),
    ],
)
def test_which_kernel_returns_the_log_sum_exp(
    cuda: PretendedDevice, small: None, name: str, gradients: bool, kernel: str
) -> None:
    mask = WITH_LSE[name](SHORT) if name in WITH_LSE else _calls("cuda")[name][1]
    query, key, value = (x.to(CUDA).requires_grad_(gradients) for x in operands(SHORT))
    explanation = clearhead.explain(query, key, value, mask, return_lse=True)
    assert explanation.kernel == kernel
    if kernel == "flex":
        assert explanation.reasons["chunked"] == ("`flex` computes the log-sum-exp in one kernel",)
    few = [x[:, :, :100] for x in (query, key, value)]
    if name not in ("a tensor", "causal documents", "prefix of each item"):
        assert clearhead.explain(few[0], few[1], few[2], mask, return_lse=True).kernel != "flex"


def test_few_scores_stay_on_chunked(cuda: PretendedDevice) -> None:
    query, key, value = (x.to(CUDA).requires_grad_() for x in operands(SHORT))
    assert clearhead.explain(query, key, value, return_lse=True).kernel == "chunked"


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize("name", ["none", "window", "prefix of each item", "an empty item"])
def test_gradients_of_some_keys_are_those_of_the_cpu(cuda: PretendedDevice, small: None, name: str, heads: int) -> None:
    """In two parts, as a ring computes them."""
    inputs, mask = operands(SHORT, heads), WITH_LSE[name](SHORT)
    on_device = [x.to(CUDA).requires_grad_() for x in inputs]
    clearhead.explain(on_device[0], on_device[1], on_device[2], mask, return_lse=True)  # the check of the device
    exact = with_gradients(inputs, mask, torch.float64, "reference")
    same = with_gradients(inputs, mask, torch.bfloat16, "reference")
    generator = torch.Generator().manual_seed(2)
    gradient = torch.randn(exact[0].shape, generator=generator).to(torch.bfloat16).to(CUDA)
    query, key, value = (x.to(CUDA) for x in inputs)
    grid = Grid(2, 2, SHORT, SHORT, CUDA)
    output, lse = torch.zeros(2, 2, SHORT, 16, device=CUDA), torch.full((2, 2, SHORT), -torch.inf, device=CUDA)
    calls = []
    for columns in (slice(0, 170), slice(170, SHORT)):
        part = part_of(bind(mask, grid), Offset(2, column=columns.start))
        part_key, part_value = key[:, :, columns], value[:, :, columns]
        results = clearhead.attention(query, part_key, part_value, part, return_lse=True)
        merge_some_keys(output, lse, *results)
        calls.append(valid_call(Call(query, part_key, part_value, part)))
    correction = (gradient.float() * output).sum(-1)
    parts: list[tuple[Tensor, ...]] = []
    for call in calls:
        rows = output, lse, correction, gradient
        seen = cuda.count(lambda call=call, rows=rows: parts.append(gradients_of_some_keys(call, *rows, learns=False)))
        assert seen.backends == ["flex"]
        assert not seen.waits
    (of_query, of_key, of_value), (of_query_too, *of_others) = parts
    of_keys = (torch.cat(pair, 2) for pair in zip((of_key, of_value), of_others, strict=True))
    got = output, of_query + of_query_too, *of_keys
    require_half_as_good(got, same, exact)


#: A mask, options, and what else a large call of them has: they change scores, and do not leave out keys alone.
SCORED: dict[str, tuple[Any, dict[str, Any]]] = {
    "soft-cap": (lambda: None, {"softcap": 3.0}),
    "soft-cap, causal": (masks.causal, {"softcap": 3.0}),
    "soft-cap, lengths": (lambda: masks.lengths(torch.tensor([SHORT, 130])) & masks.causal(), {"softcap": 3.0}),
    "ALiBi": (lambda: ALiBi(2), {}),
    "ALiBi, causal": (lambda: ALiBi(2) & masks.causal(), {}),
    "ALiBi, window, soft-cap": (lambda: ALiBi(2) & masks.sliding_window(50, 0), {"softcap": 3.0}),
    "ALiBi, lengths": (lambda: masks.lengths(torch.tensor([SHORT, 130])) & ALiBi(2), {}),
}


@pytest.mark.parametrize("name", SCORED)
def test_scores_are_changed_in_one_kernel(cuda: PretendedDevice, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_flex_choice, "FEWEST_SCORES", SHORT)
    make, options = SCORED[name]
    mask = make()
    inputs = operands(SHORT)
    exact = with_gradients(inputs, mask, torch.float64, "reference", **options)
    same = with_gradients(inputs, mask, torch.bfloat16, "reference", **options)
    on_device = query, key, value = [x.to(CUDA) for x in inputs]
    if mask is not None:
        mask = mask.prepare(SHORT, SHORT, batch_size=2, num_heads=2, device=CUDA)
    assert clearhead.explain(query, key, value, mask, **options).kernel == "flex"
    with torch.no_grad():
        clearhead.attention(query, key, value, mask, **options)
        forward = cuda.count(lambda: clearhead.attention(query, key, value, mask, **options))
    assert forward.count <= 8
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(with_gradients(on_device, mask, torch.bfloat16, **options)))
    assert forward.backends == seen.backends == ["flex"]
    assert forward.waits == []
    assert not seen.values
    assert max(forward.largest, seen.largest) <= 4 * query.numel()  # nothing of size (L, S)
    require_half_as_good(got, same, exact)


@pytest.mark.parametrize("name", ["soft-cap, causal", "ALiBi, causal"])
def test_smaller_calls_change_scores_in_blocks(cuda: PretendedDevice, name: str) -> None:
    make, options = SCORED[name]
    query, key, value = (x.to(CUDA) for x in operands(SHORT))
    assert clearhead.explain(query, key, value, make(), **options).kernel == "chunked"
