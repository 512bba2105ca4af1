"""`clearhead.upgrade` of attention that other tools have wrapped, hooked, parametrized, sharded or compiled."""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

import clearhead

E, H, N, L = 12, 3, 2, 5


def attention() -> nn.MultiheadAttention:
    torch.manual_seed(3)
    module = nn.MultiheadAttention(E, H, batch_first=True).eval()
    nn.init.normal_(module.in_proj_bias)
    return module


def runs_clearhead(module: Any) -> bool:
    """PyTorch's forward returns NaN where every key is masked."""
    x = torch.randn(N, L, E)
    with torch.no_grad():
        return not bool(module(x, x, x, key_padding_mask=torch.ones(N, L, dtype=torch.bool))[0].isnan().any())


def by_accelerate(module: nn.Module) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    add_hook_to_module(module, ModelHook())
    add_hook_to_module(module, ModelHook(), append=True)


def dispatched(module: nn.Module) -> None:
    import accelerate

    accelerate.dispatch_model(nn.Sequential(module), device_map={"": "cpu"}, force_hooks=True)


def own_forward(make: Callable[[Any], Any]) -> Callable[[nn.Module], None]:
    def set_forward(module: nn.Module) -> None:
        module.forward = make(module)

    return set_forward


def wrapped(module: Any) -> Any:
    forward = module.forward
    return functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))


WRAPPED: dict[str, Callable[[Any], object]] = {
    "bound forward": own_forward(lambda module: module.forward),
    "bound by hand": own_forward(lambda module: types.MethodType(type(module).forward, module)),
    "partial": own_forward(lambda module: functools.partial(module.forward, average_attn_weights=False)),
    "accelerate's hooks": by_accelerate,
    "dispatched by accelerate": dispatched,
    "weight_norm": lambda module: parametrizations.weight_norm(module, "in_proj_weight"),
    "spectral_norm": lambda module: parametrizations.spectral_norm(module, "in_proj_weight"),
    "orthogonal": lambda module: parametrizations.orthogonal(module, "in_proj_weight"),
    "orthogonal out_proj": lambda module: parametrizations.orthogonal(module.out_proj, "weight"),
    "two parametrizations": lambda module: [
        parametrizations.weight_norm(module, "in_proj_weight"),
        parametrize.register_parametrization(module, "in_proj_bias", nn.Tanh()),
    ],
    "pruned": lambda module: prune.l1_unstructured(module, "in_proj_weight", 0.5),
    "compiled in place": lambda module: module.compile(backend="eager"),
}


@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.filterwarnings("ignore:Some parameters are on the meta device")
def test_clearheads_forward_runs_below_the_wrapper_and_pytorchs_afterwards(name: str, first: bool) -> None:
    module, x = attention(), torch.randn(N, L, E)
    holder = nn.ModuleDict({"attend": module})
    if first:
        WRAPPED[name](module)
        expected, kind = module(x, x, x), type(module).__name__
        keys = list(module.state_dict())
    report = clearhead.upgrade(holder, linears=False)
    if not first:
        plain = attention()
        for each in (plain, module):
            torch.manual_seed(5)  # a spectral norm begins with random vectors
            WRAPPED[name](each)
        expected, kind, keys = plain(x, x, x), type(plain).__name__, list(plain.state_dict())
    assert (report.changed, report.left) == (("attend",), {})
    assert isinstance(module, clearhead.nn.MultiheadAttention)
    assert type(module).__name__ == kind
    assert list(module.state_dict()) == keys
    assert runs_clearhead(module)
    for actual, right in zip(module(x, x, x), expected, strict=True):
        torch.testing.assert_close(actual, right, atol=1e-5, rtol=0)

    report = clearhead.downgrade(holder)
    assert (report.changed, report.left) == (("attend",), {})
    assert not isinstance(module, clearhead.nn.MultiheadAttention)
    assert not runs_clearhead(module)
    for actual, right in zip(module(x, x, x), expected, strict=True):
        torch.testing.assert_close(actual, right, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_an_upgraded_parametrization_learns_and_can_be_removed(name: str) -> None:
    module, x = attention(), torch.randn(N, L, E)
    WRAPPED[name](module)
    theirs = copy.deepcopy(module)
    clearhead.upgrade(module)
    assert not isinstance(theirs, clearhead.nn.MultiheadAttention), "copies share the class that PyTorch made"
    for each in (module, theirs):
        each(x, x, x)[0].square().sum().backward()
    gradients = {n: p.grad for n, p in theirs.named_parameters() if p.grad is not None}
    assert any("parametrizations" in n for n in gradients)
    for n, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(n).grad, gradient, atol=1e-5, rtol=1e-4)
    copied = copy.deepcopy(module)
    assert runs_clearhead(copied)
    expected = module(x, x, x)[0]
    parametrize.remove_parametrizations(module, "in_proj_weight")
    assert type(module) is clearhead.nn.MultiheadAttention
    torch.testing.assert_close(module(x, x, x)[0], expected, atol=1e-6, rtol=0)
    clearhead.downgrade(module)
    assert type(module) is nn.MultiheadAttention


def test_a_forward_that_cannot_be_looked_into_is_left_with_the_reason() -> None:
    model = nn.ModuleDict({"wrapped": attention(), "plain": attention()})
    model["wrapped"].forward = wrapped(model["wrapped"])
    report = clearhead.upgrade(model)
    assert report.changed == ("plain",)
    assert report.left == {"wrapped": "its attribute forward replaces the forward of its class"}
    assert type(model["wrapped"]) is nn.MultiheadAttention
    assert not model["wrapped"]._forward_pre_hooks
    model["plain"].forward = wrapped(model["plain"])
    report = clearhead.downgrade(model)
    assert report.left == {"plain": "its attribute forward replaces the forward of its class"}
    assert runs_clearhead(model["plain"])


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning", "ignore:.*jit.*:FutureWarning")
def test_what_torch_jit_has_compiled_is_named() -> None:
    model = nn.ModuleDict({"script": torch.jit.script(attention())})
    assert clearhead.upgrade(model).left == {"script": "torch.jit has compiled it"}
    assert clearhead.downgrade(model).left == {}


def test_modules_in_wrappers_and_in_several_places_are_swapped_and_counted_once() -> None:
    module = attention()
    model = nn.ModuleDict({"first": module, "again": nn.ModuleList([module])})
    compiled: Any = torch.compile(nn.ModuleDict({"attend": attention()}), backend="eager")
    both = nn.ModuleDict({"shared": model, "parallel": nn.DataParallel(attention()), "compiled": compiled})
    report = clearhead.upgrade(both)
    assert report.changed == ("shared.first", "parallel.module", "compiled._orig_mod.attend")
    assert all(runs_clearhead(both.get_submodule(name)) for name in report.changed)
    assert len(module._forward_pre_hooks) == 1
    assert clearhead.downgrade(both).changed == report.changed


def test_lora_around_attention_before_the_upgrade() -> None:
    from peft import LoraConfig, get_peft_model

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attend = attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attend(x, x, x)[0]

    model: Any = get_peft_model(Block(), LoraConfig(r=2, target_modules=["attend"])).eval()
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            if "lora_B" in n:
                parameter.normal_()
    x = torch.randn(N, L, E)
    expected = model(x)
    report = clearhead.upgrade(model)
    assert report.changed == ("base_model.model.attend.base_layer",)
    torch.testing.assert_close(model(x), expected, atol=1e-5, rtol=0)
    assert runs_clearhead(model.base_model.model.attend)


@pytest.mark.filterwarnings("ignore")
def test_opacus_reports_and_replaces_upgraded_attention_as_pytorchs() -> None:
    """Its per-sample gradients support neither."""
    from opacus.layers import DPMultiheadAttention
    from opacus.validators import ModuleValidator

    model = nn.ModuleDict({"attend": attention()}).train()
    expected = [str(error) for error in ModuleValidator.validate(model)]
    clearhead.upgrade(model)
    assert [str(error) for error in ModuleValidator.validate(model)] == expected != []
    fixed: Any = ModuleValidator.fix(model)
    assert type(fixed["attend"]) is DPMultiheadAttention


@pytest.fixture
def process_group(tmp_path: Any) -> Iterator[None]:
    if not torch.distributed.is_available():
        pytest.skip("this build of PyTorch has no torch.distributed")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


# PyTorch's attention returns a view too.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor:UserWarning")
@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("first", [True, False], ids=["before", "after"])
def test_fully_sharded_attention(first: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    module, theirs, x = attention(), attention(), torch.randn(N, L, E)
    mesh = init_device_mesh("cpu", (1,))
    if not first:
        clearhead.upgrade(module)
    fully_shard(module, mesh=mesh)
    if first:
        assert clearhead.upgrade(module).changed == ("",)
    assert isinstance(module, FSDPModule)
    assert isinstance(module, clearhead.nn.MultiheadAttention)
    assert runs_clearhead(module)
    for each in (module, theirs):
        each(x, x, x)[0].square().sum().backward()
    for n, parameter in theirs.named_parameters():
        gradient: Any = module.get_parameter(n).grad
        torch.testing.assert_close(gradient.full_tensor(), parameter.grad, atol=1e-5, rtol=1e-4)
    assert clearhead.downgrade(module).changed == ("",)
    assert isinstance(module, FSDPModule)
    assert not runs_clearhead(module)
