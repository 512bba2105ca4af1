"""Parameters that hooks of other libraries load, convert or gather just before a module runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadAttention, MultiHeadLatentAttention, masks
from clearhead.caches import KVCache
from clearhead.errors import DeviceError, DTypeError
from clearhead.positions import RelativeBias, Rotary
from clearhead.transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from tests.support.randomised import randomised

B, L, E, H = 3, 5, 24, 6
PADDING = torch.arange(L) >= torch.tensor([5, 2, 4])[:, None]


def ours(**settings: Any) -> MultiHeadAttention:
    return MultiHeadAttention(E, H, **settings)


def latent() -> MultiHeadLatentAttention:
    sizes: dict[str, Any] = {
        "kv_lora_rank": 7,
        "q_lora_rank": 5,
        "qk_nope_head_dim": 3,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    return MultiHeadLatentAttention(E, H, **sizes, position=Rotary(2))


def upgraded_encoder() -> nn.Module:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(E, H, 2 * E, batch_first=True), 2)
    clearhead.upgrade(encoder)
    return encoder


def alone(module: Any, x: Tensor) -> Tensor:
    return module(x, mask=masks.causal())


def twice(module: Any, x: Tensor) -> Tensor:
    return module(x, x, mask=masks.causal())


def drop_in(module: Any, x: Tensor) -> Tensor:
    return module(x, x, x, key_padding_mask=PADDING)[0]


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor]]] = {
    "projections": (ours, alone),
    "sinks": (lambda: ours(sinks=True), alone),
    "norms": (lambda: ours(q_norm=nn.RMSNorm(4), k_norm=nn.LayerNorm(4), position=Rotary(4)), alone),
    "a learned bias of the module": (lambda: ours(mask=RelativeBias(H)), alone),
    "latents": (latent, alone),
    "latents in a cache": (latent, lambda module, x: module(x, cache=KVCache(B, 1, L, 9, value_head_dim=0))),
    "a cache": (ours, lambda module, x: module(x, cache=KVCache(B, H, L, E // H), mask=masks.causal())),
    "the drop-in": (lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True), drop_in),
    "the drop-in's other parameters": (
        lambda: clearhead.nn.MultiheadAttention(E, H, batch_first=True, kdim=E, add_bias_kv=True),
        drop_in,
    ),
    "a linear layer": (lambda: clearhead.nn.Linear(E, 7), lambda module, x: module(x)),
    "an encoder": (
        lambda: Encoder([EncoderLayer(E, ours(), FeedForward(E, 31)) for _ in range(2)], norm=nn.LayerNorm(E)),
        alone,
    ),
    "a decoder": (lambda: Decoder([DecoderLayer(E, ours(), ours(), SwiGLU(E, 31))]), twice),
    "an upgraded encoder": (upgraded_encoder, lambda module, x: module(x, src_key_padding_mask=PADDING)),
}


def offload(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate").cpu_offload(model, execution_device="cpu", offload_buffers=True)


def offload_to_disk(model: nn.Module, folder: Path) -> None:
    pytest.importorskip("accelerate").disk_offload(model, folder, execution_device="cpu")


def dispatch(model: nn.Module, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.utils.offload_state_dict(folder, model.state_dict())
    accelerate.dispatch_model(model, {"": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True)


class _Kept:
    """Parameters that lie elsewhere, as empty ones on meta, except while their module runs."""

    def __init__(self, module: nn.Module) -> None:
        self.values = {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}
        self.unload(module)
        module.register_forward_pre_hook(self.load)
        module.register_forward_hook(self.unload)

    def load(self, module: nn.Module, *_: object) -> None:
        for name, value in self.values.items():
            setattr(module, name, nn.Parameter(value))

    def unload(self, module: nn.Module, *_: object) -> None:
        for name, value in self.values.items():
            setattr(module, name, nn.Parameter(value.to("meta")))


def load_in_hooks(model: nn.Module, folder: Path) -> None:
    for module in model.modules():
        _Kept(module)


TOOLS = [offload, offload_to_disk, dispatch, load_in_hooks]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool.__name__)
@pytest.mark.parametrize("name", MODULES)
def test_parameters_are_read_after_hooks_have_loaded_them(name: str, tool: Any, tmp_path: Path) -> None:
    make, call = MODULES[name]
    module, x = randomised(make()), torch.randn(B, L, E)
    with torch.no_grad():
        expected = call(module, x)
        tool(nn.Sequential(module), tmp_path)
        assert all(parameter.is_meta for parameter in module.parameters())
        for _ in range(2):
            torch.testing.assert_close(call(module, x), expected)


@pytest.mark.parametrize("make", [ours, latent])
def test_a_cache_of_an_offloaded_module_is_refused(make: Callable[[], Any]) -> None:
    module = make()
    load_in_hooks(module, Path())
    expected = "expected a weight in memory, which tells the cache's device, got a weight on meta, and hooks that load"
    with pytest.raises(DeviceError, match=expected):
        module.make_cache(B, L)
    assert make().to("meta").make_cache(B, L).key.is_meta


def test_a_module_without_values_is_refused_with_advice_that_works() -> None:
    module, x = ours(device="meta"), torch.randn(B, L, E)
    text = "query: expected parameters on the input's device cpu, got a module on meta, without values. Load them first"
    with pytest.raises(DeviceError, match=re.escape(text)):
        module(x)
    assert module.to_empty(device="cpu")(x).shape == x.shape


def test_a_learned_bias_of_a_call_is_called_where_it_has_hooks() -> None:
    module, bias, x = randomised(ours()), randomised(RelativeBias(H)), torch.randn(B, L, E)
    expected = module(x, mask=bias & masks.causal())
    q, k, v = torch.randn(3, B, H, L, 4)
    by_function = clearhead.attention(q, k, v, bias)
    _Kept(bias)
    assert torch.equal(module(x, mask=bias & masks.causal()), expected)
    with pytest.raises(DeviceError, match="pass bias\\(\\) instead of bias"):
        clearhead.attention(q, k, v, bias)
    assert torch.equal(clearhead.attention(q, k, v, bias()), by_function)


@pytest.mark.parametrize("kind", [clearhead.nn.Linear, nn.Linear])
def test_hooks_may_convert_parameters(kind: type[nn.Linear]) -> None:
    """Weights stored in half precision, and computed with in float32."""
    module, x = randomised(ours()), torch.randn(B, L, E)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        stored = kind(E, E)
        stored.load_state_dict(module.get_submodule(name).state_dict())
        setattr(module, name, stored.bfloat16())
        stored.register_forward_pre_hook(lambda part, _: part.float() and None)
        stored.register_forward_hook(lambda part, *_: part.bfloat16() and None)
    computed = module(x)
    assert module.q_proj.weight.dtype == torch.bfloat16
    torch.testing.assert_close(computed, module.float()(x))


def test_inputs_of_hooked_projections_are_still_checked() -> None:
    module = ours()
    module.q_proj.register_forward_hook(lambda *_: None)
    with pytest.raises(DTypeError, match="expected the module's dtype"):
        module(torch.randn(B, L, E, dtype=torch.float64))


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module:UserWarning")
@pytest.mark.parametrize("name", ["projections", "sinks", "a learned bias of the module", "the drop-in", "an encoder"])
def test_sharded_parts(name: str, mesh: Any) -> None:
    """FSDP gathers parameters in hooks of every part that it was applied to."""
    from torch.distributed.fsdp import fully_shard

    make, call = MODULES[name]
    module, x = randomised(make()), torch.randn(B, L, E)
    expected = call(module, x)
    for part in [*module.modules()][::-1]:
        if [*part.parameters(recurse=False)]:
            fully_shard(part, mesh=mesh)
    torch.testing.assert_close(call(module, x), expected)
