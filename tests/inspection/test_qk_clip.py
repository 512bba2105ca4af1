"""`qk_clip_`: the scores of clipped heads shrink by threshold / largest, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import clearhead
from clearhead import masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.positions import Rotary
from tests.latent import by_hand

B, L, E, H, D = 2, 7, 12, 3, 4
THRESHOLD = 3.0


def inputs(features: int = E) -> Tensor:
    return torch.randn(B, L, features, dtype=torch.float64) * 4


Made = tuple[nn.Module, Callable[[nn.Module], object]]


def raw_logits(made: Made) -> Tensor:
    module, run = made
    with torch.no_grad(), clearhead.record(module, ("raw_max_logit",)) as rec:
        run(module)
    (calls,) = rec.values()
    return calls.raw_max_logit


def multi_head(**options: Any) -> Made:
    x = inputs()
    return clearhead.MultiHeadAttention(E, H, dtype=torch.float64, **options), lambda module: module(x)


def pytorchs(kind: type[nn.MultiheadAttention], **options: Any) -> Made:
    x, memory = inputs(), inputs(options.get("kdim", E))
    module = kind(E, H, batch_first=True, dtype=torch.float64, **options)
    for bias in (module.in_proj_bias, module.bias_k):
        if bias is not None:
            nn.init.normal_(bias)  # zero as it is made
    return module, lambda module: module(x, memory, memory)


MODULES: dict[str, Callable[[], Made]] = {
    "multi-head": multi_head,
    "no bias": lambda: multi_head(bias=False),
    "grouped, rotary": lambda: multi_head(num_kv_heads=1, position=Rotary(D)),
    "soft-cap": lambda: multi_head(softcap=2.0),
    "a mask that adds": lambda: multi_head(mask=masks.bias(torch.randn(1, H, L, L, dtype=torch.float64) * 9)),
    "clearhead.nn": lambda: pytorchs(clearhead.nn.MultiheadAttention),
    "clearhead.nn, no bias": lambda: pytorchs(clearhead.nn.MultiheadAttention, bias=False),
    "clearhead.nn, appended key": lambda: pytorchs(clearhead.nn.MultiheadAttention, add_bias_kv=True),
    "clearhead.nn, other key features": lambda: pytorchs(clearhead.nn.MultiheadAttention, kdim=5, vdim=5),
    "torch.nn": lambda: pytorchs(nn.MultiheadAttention),
    "latent": lambda: (by_hand.module(), lambda module: module(by_hand.tokens() * 3)),
    "latent, queries of no latent": lambda: (by_hand.module(None), lambda module: module(by_hand.tokens() * 3)),
}


@pytest.fixture(name="made", params=MODULES)
def _made(request: pytest.FixtureRequest) -> Made:
    module, run = MODULES[request.param]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return module, run


def test_logits_fall_to_the_threshold_and_others_stay(made: Made) -> None:
    before = raw_logits(made)
    threshold = float(before.amax(0).sort().values[-2:].mean())  # one head is above it
    factors = clearhead.qk_clip_(made[0], before, threshold)
    after = raw_logits(made)
    torch.testing.assert_close(after, before * factors, rtol=1e-10, atol=1e-10)
    assert float(after.max()) == pytest.approx(threshold, rel=1e-10)
    assert int((factors < 1).sum()) == 1


def test_only_rows_of_clipped_heads_change(made: Made) -> None:
    module, _ = made
    old = {name: parameter.detach().clone() for name, parameter in module.named_parameters()}
    clearhead.qk_clip_(module, torch.tensor([1.0, 12.0, -torch.inf]), THRESHOLD)
    rows: dict[str, list[int]] = {}
    for name, parameter in module.named_parameters():
        changed = (parameter != old[name]).reshape(len(parameter), -1).any(1)
        if changed.any():
            rows[name] = changed.nonzero().flatten().tolist()
    if isinstance(module, clearhead.MultiHeadLatentAttention):
        query, key = by_hand.NOPE + by_hand.ROPE, by_hand.NOPE + by_hand.VALUE
        up = "q_proj.weight" if module.q_lora_rank is None else "q_proj.up.weight"
        assert rows == {up: list(range(query, 2 * query)), "kv_up.weight": list(range(key, key + by_hand.NOPE))}
    else:
        assert all(name.startswith(("q_proj", "in_proj")) for name in rows)
        assert list(rows.values()) == [list(range(D, 2 * D))] * len(rows)
        assert len(rows) == sum(name.startswith(("q_proj.", "in_proj", "q_proj_")) for name in old)


def test_latent_attention_is_split_as_by_kimi() -> None:
    """√γ on both parts without positions, γ on the queries' rotary part, the shared rotary key untouched."""
    module = by_hand.module()
    old = copy.deepcopy(module)
    clearhead.qk_clip_(module, torch.tensor([1.0, 1.0, 12.0]), THRESHOLD)
    query, expected_query = (m.get_parameter("q_proj.up.weight").unflatten(0, (H, -1))[2] for m in (module, old))
    key, expected_key = (m.kv_up.weight.unflatten(0, (H, -1))[2] for m in (module, old))
    nope = by_hand.NOPE
    torch.testing.assert_close(query[:nope], expected_query[:nope] * 0.5, rtol=1e-12, atol=0)
    torch.testing.assert_close(query[nope:], expected_query[nope:] * 0.25, rtol=1e-12, atol=0)
    torch.testing.assert_close(key[:nope], expected_key[:nope] * 0.5, rtol=1e-12, atol=0)
    assert torch.equal(key[nope:], expected_key[nope:])
    assert torch.equal(module.kv_down.weight, old.kv_down.weight)


def test_batches_are_reduced_to_their_largest() -> None:
    module, _ = multi_head()
    factors = clearhead.qk_clip_(module, torch.tensor([[1.0, 4.0, -torch.inf], [6.0, 2.0, 3.0]]), 3.0)
    assert factors.tolist() == [0.5, 0.75, 1.0]


@pytest.mark.parametrize("logits", [torch.ones(H), torch.empty(0, H), torch.full((2, H), -torch.inf)])
def test_parameters_within_the_threshold_keep_their_version(logits: Tensor) -> None:
    module, _ = multi_head()
    versions = [parameter._version for parameter in module.parameters()]
    assert clearhead.qk_clip_(module, logits, 1.0).tolist() == [1.0] * H
    assert [parameter._version for parameter in module.parameters()] == versions


def with_lora() -> nn.Module:
    peft = pytest.importorskip("peft")
    model = nn.ModuleDict({"attend": clearhead.MultiHeadAttention(E, H)})
    return peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"])).base_model.model["attend"]


def quantised() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization")
    module = clearhead.MultiHeadAttention(32, H, head_dim=32)
    quantization.quantize_(module, quantization.Int8WeightOnlyConfig())
    return module


def parametrized(kind: type[nn.Module], name: str, parameter: str) -> nn.Module:
    module = kind(E, H)
    parametrize.register_parametrization(module.get_submodule(name), parameter, nn.Identity())
    return module


def pruned() -> nn.Module:
    module = clearhead.MultiHeadAttention(E, H)
    prune.l1_unstructured(module.q_proj, "weight", 0.5)
    return module


CHANGED: list[Callable[[], nn.Module]] = [
    with_lora,
    quantised,
    pruned,
    lambda: parametrized(clearhead.MultiHeadAttention, "q_proj", "bias"),
    lambda: parametrized(clearhead.nn.MultiheadAttention, "", "in_proj_weight"),
]


def shared(module_too: bool) -> nn.Module:
    module, _ = multi_head()
    if module_too:
        module.k_proj = module.q_proj
    else:
        module.k_proj.weight = module.q_proj.weight
    return module


def with_norms() -> nn.Module:
    return clearhead.MultiHeadAttention(E, H, q_norm=nn.RMSNorm(D), k_norm=nn.RMSNorm(D))


def multi_head_alone() -> nn.Module:
    return multi_head()[0]


LARGE = torch.full((H,), 200.0)
OTHER = r"module: expected a MultiHeadAttention, .*Give the attention module itself"
CHANGED_TEXT = r"^module\.(q_proj|in_proj_weight).*Merge or remove LoRA, quantisation"
NORMS = r"module: expected projections without norms after them.*q_norm and k_norm"
SHARED = r"^module\.q_proj\.weight: expected .* one projection.* k_proj\.weight as well"
DIVERGED = "max_logits: expected finite logits.*diverged"
#: Module, logits, threshold, error and text. `tests/malformed` has others.
REFUSED: list[tuple[Callable[[], Any], Any, Any, type[Exception], str]] = [
    *((make, LARGE, 100.0, DTypeError, CHANGED_TEXT) for make in CHANGED),
    (with_norms, LARGE, 100.0, ArgumentError, NORMS),
    (lambda: shared(True), LARGE, 100.0, ArgumentError, SHARED),
    (lambda: shared(False), LARGE, 100.0, ArgumentError, SHARED),
    (lambda: nn.Linear(3, 3), LARGE, 1.0, DTypeError, OTHER),
    (multi_head_alone, torch.ones(H + 1), 1.0, ShapeError, r"max_logits: .* \(B, H\) with H = 3, got \(4,\)"),
    (multi_head_alone, torch.ones(2, 2, H), 1.0, ShapeError, "max_logits: expected"),
    (multi_head_alone, torch.tensor([1.0, torch.nan, 1.0]), 1.0, ArgumentError, DIVERGED),
    (multi_head_alone, torch.tensor([1.0, torch.inf, 1.0]), 1.0, ArgumentError, DIVERGED),
    (multi_head_alone, torch.ones(H), 0.0, ArgumentError, "threshold: expected a finite logit > 0, got 0"),
]


@pytest.mark.parametrize(("make", "logits", "threshold", "kind", "text"), REFUSED)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_refused(make: Callable[[], Any], logits: Any, threshold: Any, kind: type[Exception], text: str) -> None:
    module = make()
    parameters = list(module.parameters()) if isinstance(module, nn.Module) else []
    parameters = [parameter for parameter in parameters if type(parameter.data) is Tensor]
    old = [parameter.clone() for parameter in parameters]
    with pytest.raises(kind, match=text):
        clearhead.qk_clip_(module, logits, threshold)
    assert all(torch.equal(*pair) for pair in zip(old, parameters, strict=True))
