"""What users hang on the parts of an attention module: hooks, adapters and modules of their own see padded batches."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.modules.module as all_modules
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead._layer import layer, unpadding
from clearhead.positions import DynamicNTKScaling, Rotary
from tests.support.derivatives import derivatives
from tests.support.randomised import randomised

B, L, E, H, KV, D = 5, 13, 24, 6, 3, 4
LENGTHS = torch.tensor([13, 3, 1, 7, 2])
REAL = torch.arange(L) < LENGTHS[:, None]

#: The input of each part, as the documentation of the module promises it.
PARTS: dict[str, tuple[int, ...]] = {
    "q_proj": (B, L, E),
    "k_proj": (B, L, E),
    "v_proj": (B, L, E),
    "out_proj": (B, L, E),
    "q_norm": (B, H, L, D),
    "k_norm": (B, KV, L, D),
    "position": (B, H, L, D),
}


@pytest.fixture
def unpadded(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Remove padding however little it saves; whether each call did."""
    result: list[bool] = []
    unpad = unpadding.unpad

    def noted(*args: Any, **options: Any) -> unpadding.Unpadded | None:
        tokens = unpad(*args, **options)
        result.append(tokens is not None)
        return tokens

    monkeypatch.setattr(unpadding, "_WORTH_UNPADDING", -(1 << 40))
    monkeypatch.setattr(layer, "unpad", noted)
    return result


def made(**parts: Any) -> clearhead.MultiHeadAttention:
    parts = {"q_norm": nn.RMSNorm(D), "k_norm": nn.LayerNorm(D), "position": Rotary(D), **parts}
    return randomised(clearhead.MultiHeadAttention(E, H, num_kv_heads=KV, **parts))


def mask() -> masks.Mask:
    return masks.lengths(LENGTHS, LENGTHS) & masks.causal()


def numbers(module: nn.Module, x: Tensor) -> list[Tensor]:
    return derivatives(module(x, mask=mask()), [x, *module.parameters()])


def noting(part: nn.Module, seen: list[tuple[int, ...]]) -> Callable[..., None]:
    """A hook of any kind, which notes the shape of the first tensor that it receives for a part."""

    def hook(called: nn.Module, tensors: Any, *_: object) -> None:
        if called is part:
            seen.append(tuple(tensors[0].shape))

    return hook


class _Forward:
    """An attribute `forward` of an instance, as accelerate sets it."""

    def __init__(self, part: Any, hook: Callable[..., None]) -> None:
        self.part, inner = part, part.forward

        def forward(*args: Tensor) -> Any:
            hook(part, args)
            return inner(*args)

        part.forward = forward

    def remove(self) -> None:
        del self.part.forward


HOOKS: dict[str, Callable[[Any, Callable[..., None]], Any]] = {
    "before": lambda part, hook: part.register_forward_pre_hook(hook),
    "after": lambda part, hook: part.register_forward_hook(hook),
    "before the backward pass": lambda part, hook: part.register_full_backward_pre_hook(hook),
    "after the backward pass": lambda part, hook: part.register_full_backward_hook(hook),
    "before every module": lambda _, hook: all_modules.register_module_forward_pre_hook(hook),
    "after every module": lambda _, hook: all_modules.register_module_forward_hook(hook),
    "before every backward pass": lambda _, hook: all_modules.register_module_full_backward_pre_hook(hook),
    "after every backward pass": lambda _, hook: all_modules.register_module_full_backward_hook(hook),
    "instead of its forward": _Forward,
}


@pytest.mark.parametrize("kind", HOOKS)
@pytest.mark.parametrize("name", PARTS)
def test_hooks_see_whole_batches(name: str, kind: str, unpadded: list[bool]) -> None:
    module, seen = made(), []
    x = torch.randn(B, L, E, requires_grad=True)
    before = numbers(module, x)
    part = module.get_submodule(name)
    handle = HOOKS[kind](part, noting(part, seen))
    hooked = numbers(module, x)
    handle.remove()
    after = numbers(module, x)
    shape = PARTS[name]
    if "backward" in kind and "before" in kind and name in ("k_proj", "v_proj"):
        shape = (B, L, KV * D)  # gradients of the output
    assert seen == [shape]
    # The output projection receives the restored batch.
    kept = name == "out_proj" and "every" not in kind
    assert unpadded == [True, kept, True]
    for plain, watched, again in zip(before, hooked, after, strict=True):
        torch.testing.assert_close(watched, plain, rtol=1e-4, atol=1e-5)
        assert torch.equal(again, plain)


@pytest.mark.parametrize("name", PARTS)
def test_copies_keep_the_hooks_and_the_results(name: str, unpadded: list[bool]) -> None:
    module, x = made(), torch.randn(B, L, E)
    plain = module(x, mask=mask())
    module.get_submodule(name).register_forward_hook(_do_nothing)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(copied(x, mask=mask()), plain)
        assert unpadded.pop() == (name == "out_proj")


@pytest.mark.parametrize("name", ["q_proj", "k_norm", "position"])
def test_compiled_parts_see_whole_batches(name: str, unpadded: list[bool]) -> None:
    module, x = made().requires_grad_(False), torch.randn(B, L, E)
    plain = module(x, mask=mask())
    module.get_submodule(name).compile(backend="eager")
    torch.testing.assert_close(module(x, mask=mask()), plain)
    assert unpadded == [True, False]


def _do_nothing(*_: object) -> None:
    pass


class Noting(nn.Module):
    """A user's norm, or a projection of their own, which notes what it receives."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.seen = inner, []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(tuple(x.shape))
        return self.inner(x)


class NotingLinear(clearhead.nn.Linear):
    seen: list[tuple[int, ...]]

    def forward(self, input: Tensor) -> Tensor:
        self.seen = [*getattr(self, "seen", []), tuple(input.shape)]
        return super().forward(input)


def subclassed(part: nn.Module) -> nn.Module:
    return NotingLinear(part.in_features, part.out_features) if isinstance(part, nn.Linear) else Noting(part)


OWN_PARTS: dict[str, Callable[[nn.Module], nn.Module]] = {"wrapped": Noting, "a subclass": subclassed}


@pytest.mark.parametrize("kind", OWN_PARTS)
@pytest.mark.parametrize("name", [name for name in PARTS if name != "position"])
def test_parts_of_a_user_see_whole_batches(name: str, kind: str, unpadded: list[bool]) -> None:
    module, x = made(), torch.randn(B, L, E)
    part: Any = OWN_PARTS[kind](module.get_submodule(name))
    setattr(module, name, part)
    module(x, mask=mask())
    assert part.seen == [PARTS[name]]
    assert unpadded == [name == "out_proj"]


def test_a_position_part_of_a_user_sees_whole_batches(unpadded: list[bool]) -> None:
    rotary, seen = Rotary(D), []

    def position(q: Tensor, k: Tensor, positions: Any) -> tuple[Tensor, Tensor]:
        seen.append((tuple(q.shape), tuple(k.shape), positions))
        return rotary(q, k, positions)

    x, module, theirs = torch.randn(B, L, E), made(), made(position=position)
    theirs.load_state_dict(module.state_dict())
    torch.testing.assert_close(theirs(x, mask=mask()), module(x, mask=mask()))
    assert seen == [((B, H, L, D), (B, KV, L, D), 0)]
    assert unpadded == [False, True]


class FirstTokens(nn.Module):
    """A norm over the tokens of a batch."""

    def forward(self, x: Tensor) -> Tensor:
        return x / (1 + x.square().mean((0, 2), keepdim=True))


MIXING: dict[str, Callable[[], dict[str, Any]]] = {
    "a norm over tokens": lambda: {"q_norm": nn.LayerNorm([L, D]), "k_norm": nn.RMSNorm([L, D])},
    "a norm over the batch": lambda: {"q_norm": nn.BatchNorm2d(H), "k_norm": nn.BatchNorm2d(KV)},
    "a norm of a user": lambda: {"q_norm": FirstTokens(), "k_norm": FirstTokens()},
    "a scaling by the longest position": lambda: {
        "position": Rotary(D, scaling=DynamicNTKScaling(factor=2.0, original_length=3))
    },
}


@pytest.mark.parametrize("name", MIXING)
def test_parts_that_mix_tokens_compute_what_they_compute_of_the_batch(name: str, unpadded: list[bool]) -> None:
    module = made(**MIXING[name]()).double().train()
    x = torch.randn(B, L, E, dtype=torch.float64)
    lengths = LENGTHS.clamp(max=L - 2)
    output = module(x, mask=masks.lengths(lengths, lengths))
    assert unpadded == [False]
    # Given weights keep the padding in any case.
    expected, _ = module(x, mask=masks.lengths(lengths, lengths), need_weights=True)
    torch.testing.assert_close(output, expected, rtol=1e-10, atol=1e-10)


def test_adapters_of_single_items(unpadded: list[bool]) -> None:
    """peft gives each item of a batch its own adapter."""
    peft = pytest.importorskip("peft")
    x = torch.randn(B, L, E)

    def config() -> Any:
        return peft.LoraConfig(target_modules=["q_proj", "v_proj", "out_proj"], init_lora_weights=False)

    adapted: Any = peft.get_peft_model(Calling(made()), config(), adapter_name="one")
    adapted.add_adapter("two", config())
    adapted.eval()
    names = ["one", "two", "two", "one", "two"]
    together = adapted(x, LENGTHS, adapter_names=names)
    for i, name in enumerate(names):
        adapted.set_adapter(name)
        torch.testing.assert_close(together[[i]], adapted(x[[i]], LENGTHS[[i]]))


class Calling(nn.Module):
    """A model around an attention module, without keyword arguments."""

    def __init__(self, attend: nn.Module) -> None:
        super().__init__()
        self.attend = attend

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        return self.attend(x, mask=masks.lengths(lengths, lengths))


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
def test_gradients_of_single_items(unpadded: list[bool]) -> None:
    """Opacus records the inputs of every projection, item by item."""
    opacus = pytest.importorskip("opacus")
    model = Calling(made(q_norm=None, k_norm=None)).train()
    x = torch.randn(B, L, E)
    expected: list[list[Tensor]] = []
    for i in range(B):
        loss = model(x[[i]], LENGTHS[[i]]).square().sum()
        expected.append([*torch.autograd.grad(loss, [*model.parameters()])])
    unpadded.clear()
    watched = opacus.GradSampleModule(model, loss_reduction="sum")
    watched(x, LENGTHS).square().sum().backward()
    watched_parameters: list[Any] = [*model.parameters()]
    for parameter, of_items in zip(watched_parameters, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(parameter.grad_sample, torch.stack(of_items), rtol=1e-4, atol=1e-5)
    assert unpadded == [False]


def test_quantised_weights_receive_whole_batches(unpadded: list[bool]) -> None:
    """One scale for all activations would depend on the padding."""
    quantization = pytest.importorskip("torchao.quantization")
    module, x = made(), torch.randn(B, L, E)
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig(version=2))
    module(x, mask=mask())
    assert unpadded == [False]


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
def test_hooks_see_jagged_batches(name: str) -> None:
    module, seen = made(), []
    sequences = [torch.randn(length, E) for length in (3, 7, 2)]
    x = torch.nested.as_nested_tensor(sequences, layout=torch.jagged).requires_grad_()
    expected = module(x, mask=masks.causal())
    handle = module.get_submodule(name).register_forward_hook(lambda _, args, output: seen.append((args[0], output)))
    hooked = module(x, mask=masks.causal())
    handle.remove()
    ((received, returned),) = seen
    assert received.is_nested
    assert returned.is_nested
    assert received.shape[0] == len(sequences)
    torch.testing.assert_close(hooked.values(), expected.values())
    gradients = [
        torch.autograd.grad(output.values().square().sum(), [*module.parameters()]) for output in (hooked, expected)
    ]
    for mine, plain in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, plain)
    assert torch.equal(module(x, mask=masks.causal()).values(), expected.values())
