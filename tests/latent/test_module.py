"""How latent attention lives as a module: replaced parts, precision, recording, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadLatentAttention, masks
from clearhead.errors import ArgumentError, DTypeError, MaskTypeError, ShapeError
from tests.support.closeness import require_near

from .by_hand import CAUSAL, FEW, NOPE, RANK, SIZES, VALUE, B, E, H, L, by_hand, fed, module, tokens


class LowRank(nn.Module):
    """A projection with a low-rank update beside it, as adapters have it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.update = nn.Parameter(
            torch.randn(base.out_features, 2).double() @ torch.randn(2, base.in_features).double()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.update.T


def adapted(attend: MultiHeadLatentAttention) -> None:
    attend.kv_up = LowRank(attend.kv_up)  # pyright: ignore[reportAttributeAccessIssue]


def hooked(attend: MultiHeadLatentAttention) -> None:
    attend.kv_up.register_forward_hook(lambda module, args, output: output * 3)


def reparametrised(attend: MultiHeadLatentAttention) -> None:
    torch.nn.utils.parametrizations.weight_norm(attend.kv_up)
    with torch.no_grad():
        attend.kv_up.parametrizations.weight.original0.mul_(2)


@pytest.mark.parametrize("change", [adapted, hooked, reparametrised])
def test_what_takes_the_place_of_a_projection_is_heard_in_both_forms(
    change: Callable[[MultiHeadLatentAttention], None],
) -> None:
    attend, x = module(), tokens()
    before = attend(x, mask=CAUSAL)
    change(attend)
    expected = attend(x, mask=CAUSAL)
    assert not torch.allclose(before, expected)
    found = fed(attend, x, attend.make_cache(B, L), [FEW + 1, 1, 4])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)  # of numbers above 10


@pytest.mark.parametrize("wrap", [False, True])
def test_a_bias_where_there_can_be_none(wrap: bool) -> None:
    attend, x = module(), tokens()
    biased = nn.Linear(RANK, H * (NOPE + VALUE), dtype=torch.float64)
    attend.kv_up = nn.Sequential(biased) if wrap else biased  # pyright: ignore[reportAttributeAccessIssue]
    attend(x)  # the expanded form takes it
    kind = "Sequential" if wrap else "Linear"
    expected = rf"kv_up: expected a projection without a bias, got a {kind} with one\. With a cache"
    with torch.no_grad(), pytest.raises(ArgumentError, match=expected):
        attend(x[:, :1], cache=attend.make_cache(B, L))


def test_other_norms() -> None:
    attend, x = module(q_norm=nn.Identity(), kv_norm=nn.LayerNorm(RANK, dtype=torch.float64)), tokens()
    require_near(fed(attend, x, attend.make_cache(B, L), [1] * L), attend(x, mask=CAUSAL), 1e-13)
    assert isinstance(attend.kv_norm, nn.LayerNorm)
    assert not torch.allclose(attend(x), module()(x))


def test_dropout_is_for_training() -> None:
    attend, x = module(dropout=0.5), tokens()
    assert torch.equal(attend(x), attend(x))
    attend.train()
    assert not torch.equal(attend(x), attend(x))
    weights = attend(x, need_weights=True)[1]
    require_near(weights.sum(-1), torch.ones(B, L).double(), 1e-13)  # those before dropout


@torch.no_grad()
def test_who_watches_sees_heads_with_a_cache_and_without() -> None:
    """Also where the absorbed form would run, whose heads would be mixtures of latents."""
    attend, x = module(), tokens()
    patch = torch.randn(B, 1, VALUE).double()
    changes: dict[tuple[str, int], Any] = {("", 0): 0.5, ("", 1): patch, ("", 2): lambda output: output.relu()}
    with clearhead.intervene(attend, changes):
        expected = attend(x, mask=CAUSAL)
        require_near(fed(attend, x, attend.make_cache(B, L), [1] * L), expected, 1e-13)
    assert not torch.allclose(expected, attend(x, mask=CAUSAL))
    cache = attend.make_cache(B, L)
    fed(attend, x[:, :-1], cache, [L - 1])
    with clearhead.record(attend, statistics=("rows", "output_norm")) as rec:
        attend(x[:, -1:], mask=CAUSAL, cache=cache)
        attend(x, mask=CAUSAL)
    step, whole = rec[""]
    require_near(step.rows, by_hand(attend, x, CAUSAL)[1][:, :, -1:], 1e-13)
    require_near(step.output_norm, whole.output_norm[:, :, -1:], 1e-13)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of PyTorch's norm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision(dtype: torch.dtype, autocast: bool) -> None:
    """Autocast rounds every product of the projections too."""
    attend, x = module(), tokens()
    attend, x = (attend.float(), x.float()) if autocast else (attend.to(dtype), x.to(dtype))
    expected = copy.deepcopy(attend).double()(x.double(), mask=CAUSAL)
    limit = (0.05 if autocast else 4 * torch.finfo(dtype).eps) * float(expected.detach().abs().max())
    with torch.autocast("cpu", dtype, enabled=autocast):
        for output in (attend(x, mask=CAUSAL), fed(attend, x, attend.make_cache(B, L), [FEW + 1, 1, 4])):
            assert output.dtype == dtype
            assert float((output - expected).detach().abs().max()) < limit


def test_it_lives_as_a_module() -> None:
    attend, x = module(bias=True), tokens()
    for other in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        assert torch.equal(other(x), attend(x))
    blank = module(bias=True)
    blank.reset_parameters()
    assert not torch.allclose(blank(x), attend(x))
    blank.load_state_dict(attend.state_dict())
    assert torch.equal(blank(x), attend(x))
    text = repr(module(mask=masks.sliding_window(2, 0), dropout=0.25))
    assert "kv_lora_rank=13, q_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3" in text
    assert "mask=sliding_window(2, 0), dropout=0.25" in text


# What latent attention refuses, and in which words.


@pytest.mark.parametrize("name", [*SIZES, "q_lora_rank"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected an int ≥ 1, got 0."):
        MultiHeadLatentAttention(**(SIZES | {name: 0}))
    with pytest.raises(DTypeError, match=f"{name}: expected an int ≥ 1, got 2.0."):
        MultiHeadLatentAttention(**(SIZES | {name: 2.0}))


X = tokens()
NESTED = torch.nested.nested_tensor([torch.randn(n, E) for n in (3, 2)], layout=torch.jagged)
SHAPE = "expected (B, length, 17), or (length, 17) without"
#: Options of the constructor, or inputs of a call.
REFUSED: list[tuple[dict[str, Any] | tuple[Any, ...], type[Exception], str]] = [
    ({"q_norm": nn.Identity()}, ArgumentError, "q_norm: expected None without q_lora_rank, got Identity."),
    ({"kv_norm": 3}, DTypeError, "kv_norm: expected a torch.nn.Module, got int."),
    ({"dropout": 1.5}, ArgumentError, "dropout: expected a probability in [0, 1], got 1.5"),
    ({"scale": float("nan")}, ArgumentError, "scale: expected a finite number, got nan"),
    ({"position": masks.causal()}, MaskTypeError, "position: expected what rotates q and k, got causal()."),
    ({"mask": torch.ones(3, 3).bool()}, MaskTypeError, "mask: expected a clearhead Mask, got Tensor."),
    ((torch.randn(2, 3, 5),), ShapeError, f"query: {SHAPE} a batch, got "),
    ((X, torch.randn(B, 3, 5)), ShapeError, f"key: {SHAPE}"),
    ((X, X[:1]), ShapeError, "query, key: expected equal batch sizes B, or no batch, got query (2, "),
    ((X, tokens(), tokens()), ArgumentError, "value: expected the same tensor as key, or None, got another"),
    ((X, None, tokens()), ArgumentError, "value: expected the same tensor as key, or None, got a tensor, "),
    ((X, tokens(4)), ShapeError, "key: expected the query's length 11: a position part rotates both"),
    ((X.float(),), DTypeError, "query: expected the module's dtype torch.float64, got torch.float32."),
    ((NESTED,), ShapeError, "query: expected a padded tensor (B, length, 17), got a nested one. Use torch.nested.to_"),
    (("words",), DTypeError, "query: expected a torch.Tensor, got str."),
]


@pytest.mark.parametrize(("given", "error", "problem"), REFUSED)
def test_what_does_not_fit(given: dict[str, Any] | tuple[Any, ...], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        MultiHeadLatentAttention(**SIZES, **given) if isinstance(given, dict) else module()(*given)
    assert str(raised.value).startswith(problem)
