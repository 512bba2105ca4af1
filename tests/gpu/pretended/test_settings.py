"""Settings of a process and a device: autocast, loss scaling, two devices, the default device, determinism, capture."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead import masks
from tests.support.pretended_cuda.mode import PretendedDevice

CAPABILITY = os.environ.get("PRETENDED_CAPABILITY", "9")
E, H = 128, 4
MASK = masks.causal() & masks.lengths(torch.tensor([24, 15]))


def module(device: str) -> clearhead.MultiHeadAttention:
    torch.manual_seed(0)
    return clearhead.MultiHeadAttention(E, H, position=clearhead.positions.Rotary(E // H)).to(device)


def tokens(device: str) -> Tensor:
    return torch.randn(2, 24, E, generator=torch.Generator().manual_seed(1)).to(device)


def nearly(got: Tensor, expected: Tensor, bound: float) -> bool:
    judge = expected.detach()
    return float((got.detach().cpu().float() - judge).abs().max()) <= bound * float(judge.abs().max())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast(cuda: PretendedDevice, dtype: torch.dtype) -> None:
    attend, x = module("cuda"), tokens("cuda")
    with torch.autocast("cuda", dtype):
        output = attend(x, mask=MASK)
        seen = cuda.count(lambda: attend(x, mask=MASK))
        found = clearhead.explain(*[torch.zeros(1, H, 5, 32, device="cuda")] * 3)
    assert output.dtype == dtype
    assert seen.waits == []
    assert seen.backends == ["cuDNN" if CAPABILITY == "9" else "efficient"]
    assert found.backend == ("cuDNN" if CAPABILITY == "9" else "flash")
    assert nearly(output, module("cpu")(tokens("cpu"), mask=MASK), 0.02)


def test_a_scaled_loss_gives_the_gradients_of_the_cpu(cuda: PretendedDevice) -> None:
    attend, expected, scale = module("cuda"), module("cpu"), 2.0**10
    with torch.autocast("cuda", torch.float16):
        loss = attend(tokens("cuda"), mask=MASK).float().square().mean()
    (loss * scale).backward()  # what GradScaler does before a step, and undoes in it
    expected(tokens("cpu"), mask=MASK).square().mean().backward()
    for ours, judge in zip(attend.parameters(), expected.parameters(), strict=True):
        assert ours.grad is not None
        assert judge.grad is not None
        assert bool(ours.grad.isfinite().all())
        assert float((ours.grad.cpu() / scale - judge.grad).abs().max()) <= 0.02 * float(loss.detach().cpu())


def test_grad_scaler_takes_a_step(cuda: PretendedDevice) -> None:
    attend = module("cuda")
    before = [parameter.detach().cpu().clone() for parameter in attend.parameters()]
    optimizer = torch.optim.SGD(attend.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**8)
    with torch.autocast("cuda", torch.float16):
        loss = attend(tokens("cuda"), mask=MASK).float().square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    after = [parameter.detach().cpu() for parameter in attend.parameters()]
    assert all(bool(each.isfinite().all()) for each in after)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_two_devices_in_one_process(cuda: PretendedDevice) -> None:
    mask = masks.documents(torch.arange(24) // 9) & masks.lengths(torch.tensor([24, 15]))
    expected = module("cpu")(tokens("cpu"), mask=mask)
    for device in ("cuda:0", "cuda:1", "cuda:0"):
        attend, x = module(device), tokens(device)
        output = attend(x, mask=mask)
        assert str(output.device) == device
        assert nearly(output, expected, 1e-5)
        # The mask keeps one copy of its tensors for each device.
        seen = cuda.count(lambda attend=attend, x=x: attend(x, mask=mask))
        assert seen.waits == []
        assert len(seen.backends) == 1


@pytest.fixture
def default_device() -> Iterator[None]:
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


def test_a_default_device(cuda: PretendedDevice, default_device: None) -> None:
    attend = clearhead.MultiHeadAttention(E, H, position=clearhead.positions.Rotary(E // H)).eval()
    x = torch.randn(2, 24, E)
    assert {str(each.device) for each in (x, *attend.parameters(), *attend.buffers())} == {"cuda:0"}
    with torch.no_grad():
        whole = attend(x, mask=masks.causal())
        cache = attend.make_cache(2, 32)
        steps = [attend(x[:, i : i + 1], mask=masks.causal(), cache=cache) for i in range(3)]
    padded = attend(x, mask=masks.lengths(torch.tensor([24, 15], device="cpu")))
    assert {str(each.device) for each in (whole, padded, *steps)} == {"cuda:0"}
    assert nearly(torch.cat(steps, 1), whole[:, :3].cpu(), 1e-5)


def test_the_first_check_of_triton_kernels_saves_nothing(
    cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may run inside a checkpoint, whose hooks would compute the layer again."""
    monkeypatch.setattr("clearhead.kernels._triton_check.CHECK._passed", {})
    query, saved = torch.randn(1, 1, 4, 8).cuda(), []
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda x: x):
        seen = cuda.count(lambda: clearhead.attention_statistics(query, query))
    assert "triton_weights_gradients" in seen.operators, "the check compares gradients, and no statistic needs them"
    assert saved == []


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def test_deterministic_algorithms(cuda: PretendedDevice, deterministic: None) -> None:
    attend, x = module("cuda").bfloat16(), tokens("cuda").bfloat16()
    seen = cuda.count(lambda: attend(x, mask=masks.causal()).square().sum().backward())
    assert seen.backends == ["flash"]  # cuDNN attention is not deterministic, and PyTorch leaves it
    query = torch.zeros(1, H, 5, 32, device="cuda", dtype=torch.bfloat16)
    found = clearhead.explain(query, query, query)
    assert found.backend == "flash"
    assert "cuDNN is off under torch.use_deterministic_algorithms" in found.faster


def test_a_captured_call_copies_nothing(cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    # A capture refuses what waits for the host. A mask that was used before has its tensors on the device.
    attend, x = module("cuda"), tokens("cuda")
    attend(x, mask=MASK)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    seen = cuda.count(lambda: torch.autograd.grad(attend(x, mask=MASK).sum(), tuple(attend.parameters())))
    assert seen.waits == []


def test_memory_of_a_call_is_used_on_the_stream_of_the_call_alone(cuda: PretendedDevice) -> None:
    attend, x = module("cuda"), tokens("cuda")
    # No stream but the current one is used, so that no tensor has to be recorded on another.
    seen = cuda.count(lambda: attend(x, mask=MASK).sum().backward())
    assert "record_stream" not in seen.operators
    assert seen.waits == []
