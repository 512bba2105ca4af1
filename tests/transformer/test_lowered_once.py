"""A stack lowers its masks once per forward, whatever its layers are, and holds nothing of them afterwards."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.errors import ClearheadError
from clearhead.masks import Mask
from clearhead.positions import RelativeBias, Rotary
from tests.support.allocations import CountOperations

B, L, E, H = 2, 6, 12, 3
LAYERS = 12


@pytest.fixture(autouse=True, params=["sdpa", "chunked"])
def _kernel(request: pytest.FixtureRequest) -> Iterator[None]:
    with clearhead.use_kernel(request.param):
        yield


class Counted:
    """A predicate that counts its calls; 1 for each evaluation of a whole mask or a block."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        self.calls += 1
        return q >= k - b


def attention(**options: object) -> clearhead.MultiHeadAttention:
    return clearhead.MultiHeadAttention(E, H, **options)  # pyright: ignore[reportArgumentType]


def encoder(count: int, **options: object) -> clearhead.transformer.Encoder:
    return clearhead.transformer.Encoder(
        clearhead.transformer.EncoderLayer(E, attention(**options), nn.Linear(E, E)) for _ in range(count)
    )


def evaluations(count: int, run: Callable[[int, Mask], object]) -> int:
    predicate = Counted()
    with torch.no_grad():
        run(count, masks.mask_mod(predicate))
    return predicate.calls


@pytest.mark.parametrize(
    "options",
    [{}, {"mask": masks.sliding_window(2, 2)}, {"position": Rotary(E // H)}],
    ids=["plain", "window", "rotary"],
)
@pytest.mark.parametrize("positions", [None, torch.arange(L), torch.arange(L).expand(B, L).contiguous()])
def test_an_encoders_mask(options: dict[str, object], positions: Tensor | None) -> None:
    def run(count: int, mask: Mask) -> object:
        return encoder(count, **options)(torch.randn(B, L, E), mask=mask, positions=positions)

    stack, x = encoder(3, **options), torch.randn(B, L, E)
    mask = masks.causal() & masks.lengths(torch.tensor([6, 3]))
    expected, single = stack(x, mask=mask, positions=positions), x
    for layer in stack.layers:
        single = layer(single, mask=mask, positions=positions)
    assert torch.allclose(expected, single, atol=1e-6)
    if clearhead.explain(*(torch.zeros(B, H, L, 4),) * 3).kernel == "sdpa":
        assert evaluations(LAYERS, run) == evaluations(1, run)


def test_from_the_second_layer_on_few_operations() -> None:
    if clearhead.explain(*(torch.zeros(B, H, L, 4),) * 3).kernel != "sdpa":
        pytest.skip("a bar for sdpa")

    def count(layers: int, mask: Mask | None) -> CountOperations:
        stack = encoder(layers).eval()
        with torch.no_grad(), CountOperations() as counted:
            stack(torch.zeros(B, L, E), mask=mask)
        return counted

    for mask, most in ((masks.bias(torch.randn(L, L)), 3), (masks.causal() & masks.lengths(torch.tensor([6, 0])), 5)):
        for layers in (1, LAYERS):  # plans are made once and kept
            count(layers, mask), count(layers, None)
        one, twelve = count(1, mask), count(LAYERS, mask)
        bare = (len(count(LAYERS, None).names) - len(count(1, None).names)) // (LAYERS - 1)
        item = (len(twelve.names) - len(one.names)) / (LAYERS - 1)
        # A layer without a mask issues one operation for its attention, and what surrounds it.
        assert item <= bare - 1 + most
        assert twelve.values_read == one.values_read


def test_nothing_outlives_a_forward() -> None:
    stack, x, lengths = encoder(2), torch.randn(B, L, E), torch.tensor([6, 2])
    mask = masks.lengths(lengths)
    before = stack(x, mask=mask)
    lengths.numpy()[1] = 5
    after = stack(x, mask=mask)
    assert not torch.allclose(before, after)
    assert torch.allclose(after, stack(x, mask=masks.lengths(torch.tensor([6, 5]))))


def test_a_bias_that_learns_gets_its_gradient() -> None:
    x, bias, lengths = torch.randn(B, L, E), RelativeBias(H), masks.lengths(torch.tensor([6, 2]))
    if clearhead.explain(*(torch.zeros(B, H, L, 4),) * 3).kernel == "sdpa":
        pytest.skip("sdpa gives no gradient for a bias")
    stack = encoder(3)
    stack(x, mask=bias & lengths).square().sum().backward()
    assert bias.weight.grad is not None
    result, single = bias.weight.grad.clone(), x
    bias.weight.grad = None
    for layer in stack.layers:
        single = layer(single, mask=bias & lengths)
    single.square().sum().backward()
    assert bias.weight.grad is not None
    assert torch.allclose(result, bias.weight.grad, atol=1e-5)


def test_a_bool_tensor_stays_one_for_layers_of_the_users_own() -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
            assert isinstance(mask, Tensor)
            return x

    x, visible = torch.randn(B, L, E), torch.ones(L, L, dtype=torch.bool).tril()
    stack = encoder(2)
    assert torch.allclose(stack(x, mask=visible), stack(x, mask=masks.causal()), atol=1e-6)
    clearhead.transformer.Encoder([Own()])(x, mask=visible)


def pytorchs() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(E, H, 2 * E, 0.0, batch_first=True)
    return nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)


def test_an_upgraded_encoder_of_pytorchs() -> None:
    stack = pytorchs().train()
    single, x = copy.deepcopy(stack), torch.randn(B, L, E)
    padding, future = torch.arange(L) >= torch.tensor([[6], [4]]), torch.ones(L, L, dtype=torch.bool).triu(1)
    expected = single(x, future, padding)
    clearhead.upgrade(stack)
    assert torch.allclose(stack(x, future, padding), expected, atol=1e-5)
    padding[:, 3] = True
    assert torch.allclose(stack(x, future, padding), single(x, future, padding), atol=1e-5)

    def count(layers: int) -> int:
        part = copy.deepcopy(stack).eval()
        part.layers = part.layers[:layers]
        with torch.no_grad(), CountOperations() as counted:
            part(x, future, padding)
        return len(counted.names)

    if clearhead.explain(*(torch.zeros(B, H, L, 4),) * 3).kernel == "sdpa":
        count(12)  # plans are made once and kept
        assert (count(12) - count(2)) / 10 == count(3) - count(2) < count(1)
    clearhead.downgrade(stack)
    assert not stack._forward_pre_hooks  # pyright: ignore[reportPrivateUsage]
    assert not stack._forward_hooks  # pyright: ignore[reportPrivateUsage]


def test_an_upgraded_encoder_that_raises_drops_its_masks() -> None:
    stack, x = pytorchs(), torch.randn(B, L, E)
    clearhead.upgrade(stack)
    padding = torch.zeros(B, L + 1, dtype=torch.bool)
    for _ in range(2):
        with pytest.raises((ClearheadError, RuntimeError, AssertionError)):
            stack(x, src_key_padding_mask=padding)
    assert stack(x, src_key_padding_mask=padding[:, 1:]).shape == x.shape
