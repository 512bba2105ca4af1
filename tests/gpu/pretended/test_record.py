"""Records, statistics and weights on a CUDA device: their operators, that none waits, and their values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.cli._doctor import text_of
from clearhead.errors import KernelError
from clearhead.kernels import _triton_check
from clearhead.masks import Mask
from tests.support.pretended_cuda.mode import PretendedDevice

FOUR = ("entropy", "received", "max_logit", "top_k")
ALL = (
    *FOUR,
    "raw_max_logit",
    "confidence",
    "sink",
    "distance",
    "offset",
    "map",
    "head_average",
    "output",
    "output_norm",
)
MASKS: dict[str, Callable[[str], Mask | None]] = {
    "none": lambda device: None,
    "causal": lambda device: masks.causal(),
    "window": lambda device: masks.sliding_window(7, 3),
    "lengths": lambda device: masks.lengths(torch.tensor([29, 0])),
    "causal and lengths": lambda device: masks.causal() & masks.lengths(torch.tensor([29, 11])),
    "keep": lambda device: masks.keep(torch.arange(37 * 41, device=device).view(37, 41) % 3 == 0),
    "bias": lambda device: masks.bias(torch.linspace(-2, 2, 37 * 41, device=device).view(37, 41)),
}


class Stack(nn.Module):
    """Layers of attention, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(clearhead.MultiHeadAttention(256, 4) for _ in range(count))

    def forward(self, x: Tensor, mask: Mask | None = None, attention_mask: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=mask)
        return x


def stack(count: int = 2) -> Stack:
    torch.manual_seed(0)
    return Stack(count)


def inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value; NaN in the last keys of the first batch item, which `lengths` hides."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 6, 37, 16, dtype=dtype), torch.randn(2, 2, 41, 16, dtype=dtype)
    return query, key, torch.randn(2, 2, 41, 8, dtype=dtype)


@pytest.fixture(params=["Triton", "blocks"])
def most(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """The operators of a layer's four statistics, by the Triton kernels and by blocks of PyTorch's operators."""
    if request.param == "Triton":
        return 12
    monkeypatch.setenv("CLEARHEAD_TRITON", "0")
    return 100


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("name", ["none", "causal", "lengths"])
def test_a_record_takes_few_operators_and_reads_nothing(
    cuda: PretendedDevice, most: int, name: str, prepared: bool
) -> None:
    model, x = stack().to("cuda").bfloat16().eval(), torch.randn(2, 256, 256).bfloat16().cuda()
    mask = {"none": None, "causal": masks.causal(), "lengths": masks.lengths(torch.tensor([256, 100]))}[name]
    if prepared and mask is not None:
        mask = mask.prepare(256, 256, batch_size=2, num_heads=4, device=x.device)

    def run() -> None:
        model(x, mask)

    def recorded() -> None:
        with clearhead.record(model, statistics=FOUR):
            run()

    with torch.no_grad():
        recorded()
        plain, seen = cuda.count(run), cuda.count(recorded)
    # Padded queries do not count, so the keys that the mask hides from all queries are found, and masked out of sums.
    padding = 5 if name == "lengths" else 0
    assert seen.count - plain.count <= 2 * (most + padding)
    assert plain.waits == seen.waits == []


def test_a_record_with_every_option_reads_nothing(cuda: PretendedDevice, most: int) -> None:
    model, x = stack().to("cuda").eval(), torch.randn(2, 64, 256).cuda()
    real = (torch.arange(64) < torch.tensor([[64], [40]])).cuda()
    chosen = torch.tensor([3, -1])

    def recorded() -> None:
        options: dict[str, Any] = {"keep": "queries_keys", "sink_keys": 2, "map_size": 8, "offsets": (-1, 2)}
        with clearhead.record(model, statistics=ALL, heads=[0, 2], queries=slice(3, 5), **options) as rec:
            model(x, attention_mask=real)
        rec.summary()
        rec.reduce()
        rec.weights(0, queries=slice(0, 5))

    with torch.no_grad():
        recorded()
        seen = cuda.count(recorded)
        rows = cuda.count(lambda: clearhead.attention_weights(x[:, None], x[:, None], queries=chosen))
    assert seen.values == seen.shapes == rows.values == rows.shapes == []
    assert [copy for copy in seen.copies if copy[0] != "cpu"] == []


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_statistics_are_those_of_the_cpu(cuda: PretendedDevice, most: int, name: str, sinks: bool) -> None:
    query, key, value = inputs()
    counted = torch.arange(37) < torch.tensor([[37], [20]])
    if "lengths" in name:
        key[1, :, 11:] = value[1, :, 11:] = torch.nan

    def statistics(query: Tensor, key: Tensor, value: Tensor) -> Any:
        device = query.device.type
        extra: dict[str, Any] = (
            {"softcap": 3.0, "sinks": torch.linspace(-1, 2, 6, device=device).to(query.dtype)} if sinks else {}
        )
        return clearhead.attention_statistics(
            query, key, MASKS[name](device), value=value, statistics=ALL, query_mask=counted.to(device), **extra
        )

    expected, got = (
        statistics(query.double(), key.double(), value.double()),
        statistics(*(x.cuda() for x in (query, key, value))),
    )
    assert torch.equal(got.hidden_queries.cpu(), expected.hidden_queries)
    for result in expected.names:
        ours, judge = getattr(got, result), getattr(expected, result)
        if result == "top_k":
            assert torch.equal(ours.indices.cpu(), judge.indices)
            ours, judge = ours.weights, judge.weights
        torch.testing.assert_close(ours.cpu().double(), judge.double(), rtol=1e-5, atol=1e-5, msg=result)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("pooling", ["mass", "max"])
def test_a_map_runs_in_one_kernel_after_the_log_sum_exp(cuda: PretendedDevice, name: str, pooling: Any) -> None:
    query, key, _ = inputs()
    counted = torch.arange(37) < torch.tensor([[37], [20]])
    options: dict[str, Any] = {"statistics": ("map",), "map_size": 5, "map_pooling": pooling}

    def pooled(query: Tensor, key: Tensor) -> Tensor:
        device = query.device.type
        marks = counted.to(device)
        return clearhead.attention_statistics(query, key, MASKS[name](device), query_mask=marks, **options).map

    expected, found = pooled(query.double(), key.double()), pooled(query.cuda(), key.cuda())  # checks the kernels
    torch.testing.assert_close(found.cpu().double(), expected, rtol=1e-5, atol=1e-5)
    operands = query.cuda(), key.cuda()
    seen = cuda.count(lambda: pooled(*operands))
    assert [each for each in seen.operators if "triton" in each] == ["triton_rows", "triton_pooled"]
    assert not [each for each in seen.operators if "mm" in each or "softmax" in each]
    assert seen.values == seen.shapes == []


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("average", [False, True])
@pytest.mark.parametrize("chosen", [None, [3, 36, 3]], ids=["all", "chosen"])
def test_weights_and_their_gradients_are_those_of_the_cpu(
    cuda: PretendedDevice, name: str, average: bool, chosen: list[int] | None
) -> None:
    query, key, _ = inputs()
    sinks = torch.linspace(-1, 2, 6) if average else None
    if "lengths" in name:
        key[1, :, 11:] = torch.nan
    options: dict[str, Any] = {"average_attn_weights": average, "queries": chosen, "softcap": 3.0 if average else None}

    def results(query: Tensor, key: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
        leaves = [each.requires_grad_() for each in (query, key, sinks) if each is not None]
        weights = clearhead.attention_weights(query, key, MASKS[name](query.device.type), sinks=sinks, **options)
        slope = torch.linspace(-1, 1, 41, device=weights.device, dtype=weights.dtype)
        return weights.detach(), *torch.autograd.grad((weights * slope).sum(), leaves)

    expected = results(query.double(), key.double(), None if sinks is None else sinks.double())
    on_device = query.cuda(), key.cuda(), None if sinks is None else sinks.cuda()
    got = results(*on_device)  # checks the kernels
    for ours, judge in zip(got, expected, strict=True):
        assert float((ours.cpu() - judge).abs().max()) <= 1e-5 * max(1.0, float(judge.abs().max()))
    seen = cuda.count(lambda: results(*on_device))
    triton = ["triton_rows", "triton_weights", "triton_weights_gradients"]
    assert [each for each in seen.operators if "triton" in each] == triton
    assert seen.operators["triton_rows"] == 2
    assert not [each for each in seen.operators if "mm" in each or "softmax" in each]
    assert seen.values == seen.shapes == []


@pytest.mark.parametrize("average", [False, True])
def test_a_module_with_weights_has_the_gradients_of_the_cpu(cuda: PretendedDevice, average: bool) -> None:
    torch.manual_seed(0)
    module, x = clearhead.nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 21, 32)
    padding = torch.arange(21) >= torch.tensor([[21], [13]])

    def gradients(x: Tensor) -> list[Tensor]:
        options: dict[str, Any] = {"need_weights": True, "average_attn_weights": average}
        output, weights = module(x, x, x, key_padding_mask=padding.to(x.device), **options)
        assert weights is not None
        return list(torch.autograd.grad(output.sum() + weights.square().sum(), list(module.parameters())))

    module.double()
    expected = gradients(x.double())
    module.float().to("cuda")
    got: list[Tensor] = []
    on_device = x.cuda()
    gradients(on_device)  # checks the kernels
    seen = cuda.count(lambda: got.extend(gradients(on_device)))
    assert seen.operators["triton_weights_gradients"] == 2
    assert seen.values == seen.shapes == []
    for ours, judge in zip(got, expected, strict=True):
        assert float((ours.cpu() - judge).abs().max()) <= 1e-5 * max(1.0, float(judge.abs().max()))


def test_gradients_of_a_bias_and_second_gradients_are_those_of_the_cpu(cuda: PretendedDevice) -> None:
    query, key, _ = inputs()
    numbers = torch.linspace(-2, 2, 37 * 41).view(37, 41)

    def results(query: Tensor, key: Tensor, numbers: Tensor, *, twice: bool) -> tuple[Tensor, ...]:
        leaves = [each.requires_grad_() for each in (query, key, numbers)]
        mask = masks.bias(numbers if not twice else numbers.detach())
        weights = clearhead.attention_weights(query, key, mask)
        slope = torch.linspace(-1, 1, 41, device=weights.device, dtype=weights.dtype)
        if not twice:
            return torch.autograd.grad((weights * slope).sum(), leaves)
        first = torch.autograd.grad((weights * slope).sum(), leaves[:2], create_graph=True)
        return torch.autograd.grad(first[0].square().sum() + first[1].square().sum(), leaves[:2])

    for twice in (False, True):
        expected = results(query.double(), key.double(), numbers.double(), twice=twice)
        on_device = query.cuda(), key.cuda(), numbers.cuda()
        got: list[Tensor] = []
        seen = cuda.count(lambda twice=twice, got=got, on=on_device: got.extend(results(*on, twice=twice)))
        assert "triton_weights" in seen.operators
        assert "triton_weights_gradients" not in seen.operators
        for ours, judge in zip(got, expected, strict=True):
            assert float((ours.cpu() - judge).abs().max()) <= 1e-5 * max(1.0, float(judge.abs().max()))


def test_the_kernels_pass_their_check_on_every_device(cuda: PretendedDevice) -> None:
    table = _triton_check.table()
    assert set(table) == {f"cuda:{n} {dtype}" for n in (0, 1) for dtype in ("float32", "bfloat16", "float16")}
    assert set(table.values()) == {"ok"}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert max(_triton_check.errors(torch.device("cuda:1"), dtype).values()) <= 1e-5


def test_doctor_prints_the_checks_of_every_device(cuda: PretendedDevice) -> None:
    report = {name: [] for name in ("checks",)} | {name: {} for name in ("kernels", "versions", "machine")}
    text = text_of(report | {"triton": _triton_check.table(), "passed": True, "warning": None})
    assert "statistics by Triton, compared with the reference\n  cuda:0 float32   ok\n  cuda:0 bfloat16  ok" in text


@pytest.mark.parametrize("forced", [False, True])
def test_wrong_kernels_are_not_used(cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch, forced: bool) -> None:
    query, key, _ = (x.cuda() for x in inputs())
    expected = clearhead.attention_statistics(query, key, statistics=FOUR)
    kernels: Any = sys.modules["clearhead.kernels._triton._calls"]
    rows = kernels.rows

    def wrong(*args: Any, **options: Any) -> dict[str, Tensor]:
        found = rows(*args, **options)
        return found | {"entropy": found["entropy"] * torch.nan}

    monkeypatch.setattr(kernels, "rows", wrong)
    monkeypatch.setattr(_triton_check.CHECK, "_passed", {})
    if forced:
        monkeypatch.setenv("CLEARHEAD_TRITON", "1")
        with pytest.raises(KernelError, match=r"failed the check on cuda:0 in torch\.float32: entropy is wrong by"):
            clearhead.attention_statistics(query, key, statistics=FOUR)
        return
    with pytest.warns(RuntimeWarning, match=r"entropy is wrong by .* CLEARHEAD_TRITON=0 switches the kernels"):
        clearhead.attention_statistics(query, key, statistics=FOUR)
    # It warns once.
    seen = cuda.count(lambda: clearhead.attention_statistics(query, key, statistics=FOUR))
    assert not [name for name in seen.operators if "triton" in name]
    assert torch.isfinite(expected.entropy.cpu()).all()


def test_unchecked_kernels_do_not_run_while_a_graph_is_captured(
    cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, _ = (x.cuda() for x in inputs())
    monkeypatch.setattr(_triton_check.CHECK, "_passed", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen = cuda.count(lambda: clearhead.attention_statistics(query, key, statistics=FOUR))
    assert seen.waits == []
    assert not [name for name in seen.operators if "triton" in name]


def test_a_monitor_copies_one_tensor_for_each_step_and_passes_it_on_at_the_next(cuda: PretendedDevice) -> None:
    model, x = stack(), torch.randn(2, 64, 256)
    on_cpu: dict[int, dict[str, float]] = {}
    with clearhead.monitor(model, every=2, to=on_cpu.__setitem__):
        for _ in range(3):
            model(x)
    model, x = model.to("cuda"), x.cuda()
    with clearhead.record(model):  # checks the kernels
        model(x)
    found: dict[int, dict[str, float]] = {}
    steps: list[tuple[int, ...]] = []
    with clearhead.monitor(model, every=2, to=found.__setitem__):
        for _ in range(3):
            seen = cuda.count(lambda: model(x))
            steps.append((*found, len(seen.copies)))
            assert seen.values == seen.shapes == []
    # The numbers of step 0 come at step 1, and those of step 2 at the end.
    assert steps == [(1,), (0, 0), (0, 1)]
    assert found.keys() == on_cpu.keys()
    assert all(found[step] == pytest.approx(on_cpu[step], rel=1e-5, abs=1e-5) for step in found)
