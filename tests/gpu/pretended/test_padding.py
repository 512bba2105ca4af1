"""Modules on a CUDA device compute only the real tokens of a padded batch whose lengths lie on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._layer import unpadding
from clearhead.masks import Mask
from clearhead.positions import Rotary
from tests.support.pretended_cuda.mode import PretendedDevice

B, L, E, H = 3, 40, 128, 4
LENGTHS = torch.tensor([40, 17, 9])
FEWER = torch.tensor([40, 30, 0])
PADDING = torch.arange(L) >= LENGTHS[:, None]
VARLEN = ["flash, variable lengths"]


@pytest.fixture(autouse=True)
def small_batches_are_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out whatever can be left out, however little it saves."""
    monkeypatch.setattr(unpadding, "_WORTH_OF_A_MOVE", 1)


def module(**options: Any) -> clearhead.MultiHeadAttention:
    torch.manual_seed(0)
    attend = clearhead.MultiHeadAttention(E, H, **options)
    for name, parameter in attend.named_parameters():
        if name.endswith("bias"):  # so that the output of padding is not zero
            nn.init.normal_(parameter, std=0.3)
    return attend


def tokens(seed: int = 1) -> Tensor:
    """Numbers that bfloat16 has."""
    return torch.randn(B, L, E, generator=torch.Generator().manual_seed(seed)).bfloat16()


def results(attend: nn.Module, device: str, dtype: torch.dtype, mask: Mask, cross: bool = False) -> list[Tensor]:
    """The output, and the gradients of the inputs and of the parameters. On a device padding holds NaN."""
    attend = attend.bfloat16().to(dtype).to(device)
    padding = PADDING[..., None]
    memory = tokens().masked_fill(padding, 0 if device == "cpu" else torch.nan).to(dtype).to(device).requires_grad_()
    x = tokens(2).to(dtype).to(device).requires_grad_() if cross else memory
    output = attend(x, memory, mask=mask) if cross else attend(x, mask=mask)
    # A bias of the keys has no gradient but rounding.
    wanted = [x, memory, *(each for name, each in attend.named_parameters() if name != "k_proj.bias")]
    draw = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).bfloat16()
    return [output.detach(), *torch.autograd.grad(output, wanted, draw.to(dtype).to(device))]


CASES: dict[str, tuple[Callable[[], Mask], dict[str, Any]]] = {
    "both": (lambda: masks.lengths(LENGTHS, LENGTHS), {}),
    "causal": (lambda: masks.lengths(LENGTHS, LENGTHS) & masks.causal(), {}),
    "window": (lambda: masks.sliding_window(5, 2) & masks.lengths(LENGTHS, LENGTHS), {}),
    "rotary, grouped": (
        lambda: masks.lengths(LENGTHS, LENGTHS) & masks.causal(),
        {"position": Rotary(E // H), "num_kv_heads": 2},
    ),
    "own mask": (lambda: masks.lengths(LENGTHS, LENGTHS), {"mask": masks.causal()}),
    "norms, wide heads": (
        lambda: masks.lengths(LENGTHS, LENGTHS),
        {"q_norm": nn.RMSNorm(64), "k_norm": nn.RMSNorm(64), "head_dim": 64},
    ),
    "prepared": (lambda: masks.lengths(LENGTHS, LENGTHS), {}),
    "twice": (lambda: masks.lengths(LENGTHS, LENGTHS) & masks.lengths(FEWER), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_computes_what_it_computes_on_the_cpu(cuda: PretendedDevice, name: str) -> None:
    make, options = CASES[name]
    compare(cuda, make(), lambda: module(**options), prepared=name == "prepared")


@pytest.mark.parametrize("name", ["keys", "fewer queries", "an empty item"])
def test_attention_to_a_padded_memory(cuda: PretendedDevice, name: str) -> None:
    lengths = torch.tensor([17, 40, 0]) if name == "an empty item" else LENGTHS
    mask = masks.lengths(LENGTHS.minimum(lengths), FEWER if name == "fewer queries" else None)
    compare(cuda, mask, module, cross=True)


def compare(
    cuda: PretendedDevice, mask: Mask, make: Callable[[], nn.Module], cross: bool = False, prepared: bool = False
) -> None:
    with clearhead.use_kernel("reference"):
        exact = results(make(), "cpu", torch.float64, mask, cross)
        same = results(make(), "cpu", torch.bfloat16, mask, cross)
    on_device = mask.prepare(L, L, batch_size=B, device="cuda") if prepared else mask
    got: list[Tensor] = []
    seen = cuda.count(lambda: got.extend(results(make(), "cuda", torch.bfloat16, on_device, cross)))
    assert seen.backends == VARLEN
    assert seen.values == seen.shapes == []
    for ours, reference, judge in zip(got, same, exact, strict=True):
        bound = 2 * float((reference.double() - judge).abs().max())
        assert float((ours.cpu().double() - judge).abs().max()) <= bound


def encoder(layers: int) -> nn.Module:
    torch.manual_seed(0)
    feed_forward = partial(clearhead.transformer.FeedForward, E, 2 * E)
    built = [clearhead.transformer.EncoderLayer(E, module(), feed_forward()) for _ in range(layers)]
    return clearhead.transformer.Encoder(built).eval().to("cuda").bfloat16()


def test_the_layers_of_a_stack_share_the_boundaries(cuda: PretendedDevice) -> None:
    x, mask = tokens().cuda(), masks.lengths(LENGTHS, LENGTHS)
    with torch.no_grad():
        seen = [cuda.count(partial(encoder(layers), x, mask=mask)) for layers in (1, 1, 2, 3)]
    # The mask copies its lengths in its first call.
    assert [len(each.waits) for each in seen] == [1, 0, 0, 0]
    assert [len(each.backends) for each in seen] == [1, 1, 2, 3]
    assert [each.operators["nonzero_static"] for each in seen] == [1, 1, 1, 1]
    assert seen[3].count - seen[2].count == seen[2].count - seen[1].count


def test_forward_and_backward(cuda: PretendedDevice) -> None:
    attend, x = module().to("cuda").bfloat16(), tokens().cuda().requires_grad_()
    gradient, mask = torch.ones_like(x), masks.lengths(LENGTHS, LENGTHS)

    def step() -> None:
        torch.autograd.grad(attend(x, mask=mask), (x, *attend.parameters()), gradient)

    step()
    seen = cuda.count(step)
    assert seen.waits == []
    assert seen.backends == VARLEN
    assert seen.count <= 50


PADDED: dict[str, tuple[Callable[[], Mask], dict[str, Any]]] = {
    "lengths on the device": (lambda: masks.lengths(LENGTHS.cuda(), LENGTHS.cuda()), {}),
    "one of two on the device": (lambda: masks.lengths(LENGTHS, LENGTHS.cuda()), {}),
    "marks": (lambda: masks.drop(keys=PADDING.cuda()), {}),
    "lengths per query": (lambda: masks.lengths(LENGTHS[:, None].expand(B, L)), {}),
    "causal keys without queries": (lambda: masks.lengths(LENGTHS) & masks.causal(), {}),
    "rotary keys without queries": (lambda: masks.lengths(LENGTHS), {"position": Rotary(E // H)}),
    "no padding": (lambda: masks.lengths(torch.full((B,), L), torch.full((B,), L)), {}),
    "nothing but padding": (lambda: masks.lengths(torch.zeros(B, dtype=torch.int64)), {}),
    "another part": (lambda: masks.lengths(LENGTHS) & masks.keep(torch.ones(L, L, dtype=torch.bool).cuda()), {}),
    "softcap": (lambda: masks.lengths(LENGTHS), {"softcap": 2.0}),
    "sinks": (lambda: masks.lengths(LENGTHS), {"sinks": True}),
    "dropout": (lambda: masks.lengths(LENGTHS), {"dropout": 0.1}),
    "a head size": (lambda: masks.lengths(LENGTHS), {"head_dim": 20}),
    "float32": (lambda: masks.lengths(LENGTHS), {"dtype": torch.float32}),
}


@pytest.mark.parametrize("name", PADDED)
def test_other_calls_keep_the_padding(cuda: PretendedDevice, name: str) -> None:
    make, options = PADDED[name]
    attend = module(**{"dtype": torch.bfloat16, **options}).to("cuda")
    x, mask = tokens().to(attend.q_proj.weight.dtype).cuda(), make()
    with torch.no_grad():
        attend(x, mask=mask)
        seen = cuda.count(lambda: attend(x, mask=mask))
    assert "_varlen_attn" not in seen.operators
    assert seen.waits == []


def test_a_small_batch_keeps_its_padding(cuda: PretendedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    attend, x, mask = module().to("cuda").bfloat16(), tokens().cuda(), masks.lengths(LENGTHS, LENGTHS)
    assert cuda.count(lambda: attend(x, mask=mask)).backends == VARLEN
    monkeypatch.undo()
    assert cuda.count(lambda: attend(x, mask=mask)).backends != VARLEN


def test_autocast_decides_the_dtype(cuda: PretendedDevice) -> None:
    attend, x, mask = module().to("cuda"), tokens().float().cuda(), masks.lengths(LENGTHS, LENGTHS)
    assert cuda.count(lambda: attend(x, mask=mask)).backends == ["efficient"]
    with torch.autocast("cuda", torch.bfloat16):
        assert cuda.count(lambda: attend(x, mask=mask)).backends == VARLEN


def test_recorders_see_the_padded_batch(cuda: PretendedDevice) -> None:
    attend, x, mask = module().to("cuda").bfloat16(), tokens().cuda(), masks.lengths(LENGTHS, LENGTHS)
    exact = module().bfloat16().double()
    statistics = ("entropy", "received")
    with torch.no_grad():
        with clearhead.record(attend, statistics):  # the first call checks the kernels of the statistics
            attend(x, mask=mask)
        with clearhead.record(attend, statistics) as record:
            seen = cuda.count(lambda: attend(x, mask=mask))
        with clearhead.record(exact, statistics) as expected:
            exact(tokens().masked_fill(PADDING[..., None], 0).double(), mask=mask)
    assert seen.waits == []
    assert seen.backends == VARLEN
    for name in statistics:
        ours, judge = (getattr(each[""][0], name).cpu().double() for each in (record, expected))
        torch.testing.assert_close(ours, judge, rtol=0, atol=0.02)


def test_lengths_that_were_changed_behind_pytorch_stay_within_the_tensors(cuda: PretendedDevice) -> None:
    attend, x, lengths = module().to("cuda").bfloat16(), tokens().cuda(), LENGTHS.clone()
    mask = masks.lengths(lengths, lengths)
    attend(x, mask=mask)
    for numbers in ([40, 40, 9], [40, 1, 1]):  # PyTorch does not notice it, so the copy on the device stays
        lengths.numpy()[:] = numbers
        assert attend(x, mask=mask).shape == x.shape
