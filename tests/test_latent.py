"""`MultiHeadLatentAttention`: what it computes, in both forms, with every cache, and how it lives as a module."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import clearhead.latent
from clearhead import masks
from clearhead.caches import (
    Cache,
    CrossKVCache,
    EvictingKVCache,
    EvictionPolicy,
    HeavyHitters,
    KVCache,
    SinksAndRecent,
    SlidingKVCache,
)
from clearhead.errors import ArgumentError, CacheError, DTypeError, MaskTypeError, ShapeError
from clearhead.latent import MultiHeadLatentAttention
from clearhead.masks import Mask
from clearhead.positions import Rotary

B, L, E, H = 2, 11, 17, 3
RANK, NOPE, ROPE, VALUE, LOW = 13, 5, 4, 3, 7
#: More query rows than this are cheaper expanded: 18 more products per row and key against 104 per key.
FEW = 5
CAUSAL = masks.causal()


def module(low: int | None = LOW, *, dtype: torch.dtype = torch.float64, **options: Any) -> MultiHeadLatentAttention:
    torch.manual_seed(3)
    options = {"position": Rotary(ROPE, base=50.0, interleaved=True)} | options
    built = MultiHeadLatentAttention(
        E,
        H,
        kv_lora_rank=RANK,
        qk_nope_head_dim=NOPE,
        qk_rope_head_dim=ROPE,
        v_head_dim=VALUE,
        q_lora_rank=low,
        dtype=dtype,
        **options,
    )
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)  # norms and biases are constants otherwise
    return built.eval()


def tokens(length: int = L, *, batch: int = B, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(batch, length, E, generator=torch.Generator().manual_seed(7), dtype=torch.float64).to(dtype)


def rms(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight


def by_hand(
    attend: MultiHeadLatentAttention, x: Tensor, mask: Mask | None = None, memory: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Head by head, as the paper has it: output (B, L, E) and weights (B, H, L, S)."""
    source = x if memory is None else memory
    if isinstance(attend.q_proj, nn.Linear):
        queries = attend.q_proj(x)
    else:
        down, norm, up = attend.q_proj
        queries = rms(down(x), norm.weight) @ up.weight.T
    latent, rotary = attend.kv_down(source).split((RANK, ROPE), -1)
    latent = rms(latent, attend.kv_norm.weight)
    visible = torch.ones(1, 1, 1, 1).bool() if mask is None else mask.dense(x.shape[1], source.shape[1], batch_size=B)
    outputs: list[Tensor] = []
    weights: list[Tensor] = []
    for h in range(H):
        query = queries[..., h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
        up = attend.kv_up.weight[h * (NOPE + VALUE) : (h + 1) * (NOPE + VALUE)]
        key, value = (latent @ up.T).split((NOPE, VALUE), -1)
        q_rope, k_rope = query[..., None, :, NOPE:], rotary[..., None, :, :]
        if attend.position is not None:
            q_rope, k_rope = attend.position(q_rope, k_rope, 0)
        scores = query[..., :NOPE] @ key.mT + (q_rope @ k_rope.mT)[..., 0, :, :]
        scores = (attend.scale * scores).masked_fill(~visible[:, h % visible.shape[1]], -torch.inf)
        weights.append(scores.softmax(-1).nan_to_num(0.0))
        outputs.append(weights[-1] @ value)
    return attend.out_proj(torch.cat(outputs, -1)), torch.stack(weights, -3)


def close(found: Tensor, expected: Tensor) -> None:
    """1e-12 in float64; in float32 1e-5 relative to the largest output."""
    atol = 1e-12 if found.dtype == torch.float64 else 1e-5 * float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=atol)


@torch.no_grad()
def fed(attend: MultiHeadLatentAttention, x: Tensor, cache: Cache, sizes: list[int]) -> Tensor:
    return torch.cat([attend(part, mask=CAUSAL, cache=cache) for part in x.split(sizes, 1)], 1)


MASKS = [None, CAUSAL, masks.window(2, 1), masks.lengths(torch.tensor([5, 0])), masks.causal() & masks.prefix(3)]


@pytest.mark.parametrize("mask", MASKS, ids=["none", "causal", "window", "lengths", "combined"])
@pytest.mark.parametrize("low", [None, LOW])
def test_it_computes_the_formula(low: int | None, mask: Mask | None) -> None:
    attend, x = module(low, bias=True), tokens()
    output, weights = by_hand(attend, x, mask)
    close(attend(x, mask=mask), output)
    found, per_head = attend(x, mask=mask, need_weights=True, average_attn_weights=False)
    close(found, output)
    close(per_head, weights)
    close(attend(x, mask=mask, need_weights=True)[1], weights.mean(1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("low", [None, LOW])
@pytest.mark.parametrize("sizes", [[1] * L, [FEW, FEW, 1], [FEW + 1, 1, 4], [3, FEW + 3], [L]], ids=str)
def test_steps_and_chunks_are_the_whole(sizes: list[int], low: int | None, dtype: torch.dtype) -> None:
    attend, x = module(low, dtype=dtype), tokens(dtype=dtype)
    cache = attend.make_cache(B, L)
    close(fed(attend, x, cache, sizes), attend(x, mask=CAUSAL))


@given(st.lists(st.integers(1, FEW + 3), min_size=1, max_size=6))
def test_any_chunks_are_the_whole(sizes: list[int]) -> None:
    attend, x = module(), tokens(sum(sizes))
    close(fed(attend, x, attend.make_cache(B, sum(sizes)), sizes), attend(x, mask=CAUSAL))


@pytest.fixture(name="calls")
def _calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[int, ...], ...]]:
    """The shapes of query, key and value in every call of `attention`."""
    seen: list[tuple[tuple[int, ...], ...]] = []
    attention: Callable[..., Tensor] = clearhead.latent.attention

    def noting(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        seen.append((tuple(query.shape), tuple(key.shape), tuple(value.shape)))
        return attention(query, key, value, **options)

    monkeypatch.setattr(clearhead.latent, "attention", noting)
    return seen


def test_which_form_runs_when(calls: list[Any]) -> None:
    attend = module()
    cache = attend.make_cache(B, 40)
    with torch.no_grad():
        for x in (tokens(FEW + 1), tokens(FEW), tokens(1)):
            attend(x, cache=cache)
        attend(tokens(1))
    expanded, absorbed = NOPE + ROPE, RANK + ROPE
    assert calls == [
        ((B, H, FEW + 1, expanded), (B, H, FEW + 1, expanded), (B, H, FEW + 1, VALUE)),
        ((B, H, FEW, absorbed), (B, 1, 2 * FEW + 1, absorbed), (B, 1, 2 * FEW + 1, RANK)),
        ((B, H, 1, absorbed), (B, 1, 2 * FEW + 2, absorbed), (B, 1, 2 * FEW + 2, RANK)),
        ((B, H, 1, expanded), (B, H, 1, expanded), (B, H, 1, VALUE)),
    ]


def test_a_cache_holds_latents_alone_and_steps_copy_nothing() -> None:
    attend, x = module(dtype=torch.float32), tokens(dtype=torch.float32)
    cache = attend.make_cache(B, L)
    assert attend.cache_head_dim == RANK + ROPE
    places = set[int]()
    with torch.no_grad():
        for n in range(L):
            attend(x[:, [n]], mask=CAUSAL, cache=cache)
            places.add(cache.key.data_ptr())
    assert (cache.key.shape, cache.key.dtype) == ((B, 1, L, RANK + ROPE), torch.float32)
    assert cache.value.numel() == 0
    assert len(places) == 1


def test_weights_with_a_cache() -> None:
    attend, x = module(), tokens()
    _, expected = by_hand(attend, x, CAUSAL)
    for size in (1, FEW + 1):
        cache = attend.make_cache(B, L)
        with torch.no_grad():
            attend(x[:, :-size], mask=CAUSAL, cache=cache)
            _, found = attend(x[:, -size:], mask=CAUSAL, cache=cache, need_weights=True, average_attn_weights=False)
        close(found, expected[:, :, -size:])


def sliding(window: int) -> Cache:
    return SlidingKVCache(B, 1, window, RANK + ROPE, value_head_dim=0, max_crop=2, dtype=torch.float64)


def evicting(budget: int, policy: EvictionPolicy) -> EvictingKVCache:
    return EvictingKVCache(B, 1, budget, RANK + ROPE, value_head_dim=0, policy=policy, dtype=torch.float64)


@pytest.mark.parametrize("sizes", [[1] * L, [FEW + 2, 1, 3], [2, FEW + 4]], ids=str)
@pytest.mark.parametrize(
    ("cache", "rule"),
    [
        (lambda: sliding(4), CAUSAL & masks.window(3, 0)),
        (lambda: evicting(L, HeavyHitters()), CAUSAL),
        (lambda: evicting(L, SinksAndRecent(1)), CAUSAL),
    ],
    ids=["sliding", "heavy hitters", "streaming"],
)
def test_other_caches(cache: Callable[[], Cache], rule: Mask, sizes: list[int]) -> None:
    attend, x = module(), tokens()
    close(fed(attend, x, cache(), sizes), attend(x, mask=rule))


class Noting(EvictionPolicy):
    """Keep the latest, and note what every key received."""

    needs_received = True

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def rank(self, held: Any) -> Tensor:
        self.seen.append(held.received.clone())
        return held.positions.double()


@pytest.mark.parametrize("sizes", [[L], [1] * L, [4, FEW + 2]], ids=str)
def test_policies_hear_what_every_key_received(sizes: list[int]) -> None:
    attend, x, policy = module(), tokens(), Noting()
    fed(attend, x, evicting(L - 1, policy), sizes)
    _, weights = by_hand(attend, x, CAUSAL)
    torch.testing.assert_close(policy.seen[-1].double(), weights.sum((1, 2))[:, None], rtol=0, atol=1e-5)


def test_fewer_keys_than_tokens() -> None:
    attend, x = module(), tokens()
    cache = evicting(4, SinksAndRecent(1))
    with torch.no_grad():
        *_, last = [attend(x[:, [n]], mask=CAUSAL, cache=cache) for n in range(L)]
    kept = masks.keep(torch.isin(torch.arange(L), torch.tensor([0, L - 4, L - 3, L - 2, L - 1])).expand(1, 1, 1, L))
    close(last[:, 0], attend(x, mask=CAUSAL & kept)[:, -1])


def test_beams_and_rejected_tokens() -> None:
    attend, x = module(), tokens()
    cache = attend.make_cache(B, L)
    fed(attend, x[:, :8], cache, [FEW + 1, 2])
    cache.crop(6)
    cache.reorder(torch.tensor([1, 1]))
    swapped = torch.cat((x[[1, 1], :6], x[:, 6:]), 1)
    close(fed(attend, x[:, 6:], cache, [1, 4]), attend(swapped, mask=CAUSAL)[:, 6:])


LENGTHS = [L, 6]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("prompt", [FEW, FEW + 2])
def test_padded_prompts_and_steps(side: str, prompt: int) -> None:
    """Rows of different lengths, whatever stands in padding: each as if it were alone."""
    attend, x = module(), tokens()
    lengths = [prompt, prompt - 3]
    alone = [attend(x[row, : n + 4], mask=CAUSAL) for row, n in enumerate(lengths)]
    padded, positions = torch.full((B, prompt, E), torch.nan).double(), torch.full((B, prompt), -1)
    for row, n in enumerate(lengths):
        place = slice(0, n) if side == "right" else slice(prompt - n, prompt)
        padded[row, place], positions[row, place] = x[row, :n], torch.arange(n)
    cache = attend.make_cache(B, prompt + 4)
    with torch.no_grad():
        first = attend(padded, mask=CAUSAL, positions=positions, cache=cache)
        close(first[positions >= 0], torch.cat([row[:n] for row, n in zip(alone, lengths, strict=True)]))
        close(attend(padded, mask=CAUSAL, positions=positions)[positions >= 0], first[positions >= 0])
        for step in range(4):
            token = torch.stack([x[row, n + step] for row, n in enumerate(lengths)])[:, None]
            expected = torch.stack([row[n + step] for row, n in zip(alone, lengths, strict=True)])[:, None]
            close(attend(token, mask=CAUSAL, cache=cache), expected)


def test_positions_may_start_anywhere() -> None:
    attend, x = module(), tokens()
    far = attend(x, mask=CAUSAL, positions=1000)
    torch.testing.assert_close(far, attend(x, mask=CAUSAL), rtol=0, atol=1e-10)  # only differences count
    cache = attend.make_cache(B, L)
    with torch.no_grad():
        attend(x[:, :3], mask=CAUSAL, positions=torch.arange(1000, 1003), cache=cache)
        close(attend(x[:, 3:], mask=CAUSAL, cache=cache), far[:, 3:])


def test_a_layers_own_mask() -> None:
    attend, x = module(mask=masks.window(2, 0)), tokens()
    close(attend(x, mask=CAUSAL), by_hand(attend, x, CAUSAL & masks.window(2, 0))[0])
    close(fed(attend, x, attend.make_cache(B, L), [FEW + 1, 1, 4]), attend(x, mask=CAUSAL))


def test_another_source_of_keys() -> None:
    attend, x, memory = module(position=None), tokens(), torch.randn(B, 19, E).double()
    expected, _ = by_hand(attend, x, memory=memory)
    close(attend(x, memory), expected)
    close(attend(x, memory, memory), expected)
    cache = CrossKVCache()
    with torch.no_grad():
        close(attend(x[:, :8], memory, cache=cache), expected[:, :8])
        close(attend(x[:, 8:], cache=cache), expected[:, 8:])
        close(attend(x[:, 8:], x, cache=cache), expected[:, 8:])  # what later calls bring is not looked at


def test_without_a_batch() -> None:
    attend, x = module(), tokens()
    output, weights = attend(x[0], mask=CAUSAL, need_weights=True, average_attn_weights=False)
    expected, theirs = by_hand(attend, x, CAUSAL)
    close(output, expected[0])
    close(weights, theirs[0])


@pytest.mark.parametrize("low", [None, LOW])
def test_gradients(low: int | None) -> None:
    attend, x = module(low), tokens(5).requires_grad_()
    direction = torch.randn(B, 5, E, dtype=torch.float64)
    wanted = [x, *attend.parameters()]
    ours = torch.autograd.grad((attend(x, mask=CAUSAL) * direction).sum(), wanted)
    theirs = torch.autograd.grad((by_hand(attend, x, CAUSAL)[0] * direction).sum(), wanted)
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-10)
    assert torch.autograd.gradcheck(lambda y: attend(y, mask=CAUSAL), (tokens(3).requires_grad_(),))


def test_gradients_and_a_cache_do_not_go_together() -> None:
    attend = module()
    with pytest.raises(CacheError, match=r"key: expected no gradients asked for.*torch\.no_grad\(\)"):
        attend(tokens(), cache=attend.make_cache(B, L))


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
    close(fed(attend, x, attend.make_cache(B, L), [FEW + 1, 1, 4]), expected)


@pytest.mark.parametrize("wrap", [False, True])
def test_a_bias_where_there_can_be_none(wrap: bool) -> None:
    attend, x = module(), tokens()
    biased = nn.Linear(RANK, H * (NOPE + VALUE), dtype=torch.float64)
    attend.kv_up = nn.Sequential(biased) if wrap else biased  # pyright: ignore[reportAttributeAccessIssue]
    attend(x)  # the expanded form takes it
    kind = "Sequential" if wrap else "Linear"
    expected = rf"kv_up: expected a projection without a bias, got a {kind} with one\. The absorbed form"
    with torch.no_grad(), pytest.raises(ArgumentError, match=expected):
        attend(x[:, :1], cache=attend.make_cache(B, L))


def test_projections_are_called_as_modules() -> None:
    attend = module()
    called: list[str] = []
    for name, part in attend.named_modules():
        part.register_forward_hook(lambda module, args, output, name=name: called.append(name))
    attend(tokens())
    assert {"q_proj", "q_proj.down", "q_proj.norm", "q_proj.up", "kv_down", "kv_norm", "kv_up", "out_proj"} < set(
        called
    )


def test_other_norms() -> None:
    attend, x = module(query_norm=nn.Identity(), kv_norm=nn.LayerNorm(RANK, dtype=torch.float64)), tokens()
    assert isinstance(attend.kv_norm, nn.LayerNorm)
    close(fed(attend, x, attend.make_cache(B, L), [1] * L), attend(x, mask=CAUSAL))
    assert not torch.allclose(attend(x), module()(x))


def test_dropout_is_for_training() -> None:
    attend, x = module(dropout=0.5), tokens()
    assert torch.equal(attend(x), attend(x))
    attend.train()
    assert not torch.equal(attend(x), attend(x))
    weights = attend(x, need_weights=True)[1]
    close(weights.sum(-1), torch.ones(B, L).double())  # those before dropout


def test_scale() -> None:
    assert module().scale == (NOPE + ROPE) ** -0.5
    attend, x = module(scale=0.7), tokens()
    close(attend(x), by_hand(attend, x)[0])
    close(fed(attend, x, attend.make_cache(B, L), [1] * L), attend(x, mask=CAUSAL))


def test_nothing_seen_gives_the_output_of_zero() -> None:
    attend, x = module(out_bias=True), tokens()
    nothing = attend.out_proj(torch.zeros(H * VALUE).double())
    hidden = masks.keep(torch.zeros(1, 1, 1, 1).bool())
    close(attend(x, mask=hidden)[0, 0], nothing)
    with torch.no_grad():
        close(attend(x[:, :1], mask=hidden, cache=attend.make_cache(B, 1))[0, 0], nothing)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")  # of PyTorch's norm
def test_autocast() -> None:
    attend, x = module(dtype=torch.float32), tokens(dtype=torch.float32)
    whole = attend(x, mask=CAUSAL)
    cache = KVCache(B, 1, L, RANK + ROPE, value_head_dim=0, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        half = attend(x, mask=CAUSAL)
        steps = fed(attend, x, cache, [FEW + 1, 1, 4])
    for found in (half, steps):
        assert found.dtype == torch.bfloat16
        torch.testing.assert_close(found.float(), whole, rtol=0, atol=0.05 * float(whole.detach().abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    attend, x = module().to(dtype), tokens(dtype=dtype)
    whole = copy.deepcopy(attend).double()(x.double(), mask=CAUSAL)
    largest = float(whole.detach().abs().max())
    for found in (attend(x, mask=CAUSAL), fed(attend, x, attend.make_cache(B, L), [1] * L)):
        assert found.dtype == dtype
        assert float((found - whole).detach().abs().max()) < 4 * torch.finfo(dtype).eps * largest


def test_a_step_is_compiled_twice_at_most() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    attend, x = module(), tokens()
    cache = attend.make_cache(B, L + 1)

    @torch.compile(backend=counter, fullgraph=True)
    def step(token: Tensor) -> Tensor:
        return attend(token, mask=CAUSAL, cache=cache)

    with torch.no_grad():
        found = [attend(x[:, :3], mask=CAUSAL, cache=cache)]
        counts: list[int] = []
        for n in range(3, L):
            found.append(step(x[:, [n]]))
            counts.append(counter.frame_count)
    close(torch.cat(found, 1), attend(x, mask=CAUSAL))
    assert counts[1] <= 2
    assert counts[-1] == counts[1]


def test_it_lives_as_a_module() -> None:
    attend, x = module(bias=True), tokens()
    for other in (copy.deepcopy(attend), pickle.loads(pickle.dumps(attend))):
        assert torch.equal(other(x), attend(x))
    blank = module(bias=True)
    blank.reset_parameters()
    assert not torch.allclose(blank(x), attend(x))
    blank.load_state_dict(attend.state_dict())
    assert torch.equal(blank(x), attend(x))
    shapes = {name: tuple(tensor.shape) for name, tensor in module(None).state_dict().items()}
    assert shapes == {
        "q_proj.weight": (H * (NOPE + ROPE), E),
        "kv_down.weight": (RANK + ROPE, E),
        "kv_norm.weight": (RANK,),
        "kv_up.weight": (H * (NOPE + VALUE), RANK),
        "out_proj.weight": (E, H * VALUE),
    }
    assert {name for name in attend.state_dict() if "bias" in name} == {
        "q_proj.down.bias",
        "kv_down.bias",
        "out_proj.bias",
    }
    text = repr(module(mask=masks.window(2, 0), dropout=0.25))
    assert "kv_lora_rank=13, q_lora_rank=7, qk_nope_head_dim=5, qk_rope_head_dim=4, v_head_dim=3" in text
    assert "mask=window(2, 0), dropout=0.25" in text


SIZES: dict[str, Any] = {
    "embed_dim": E,
    "num_heads": H,
    "kv_lora_rank": RANK,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": VALUE,
}


@pytest.mark.parametrize("name", [*SIZES, "q_lora_rank"])
def test_sizes_that_are_none(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"{name}: expected an int ≥ 1, got 0."):
        MultiHeadLatentAttention(**(SIZES | {name: 0}))
    with pytest.raises(DTypeError, match=f"{name}: expected an int ≥ 1, got 2.0."):
        MultiHeadLatentAttention(**(SIZES | {name: 2.0}))


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"query_norm": nn.Identity()}, ArgumentError, "query_norm: expected None without q_lora_rank, got Identity."),
        ({"kv_norm": 3}, DTypeError, "kv_norm: expected a torch.nn.Module, got int."),
        ({"dropout": 1.5}, ArgumentError, "dropout: expected a probability in [0, 1], got 1.5"),
        ({"scale": float("nan")}, ArgumentError, "scale: expected a finite number, got nan"),
        ({"position": masks.causal()}, MaskTypeError, "position: expected what turns q and k, got causal()."),
        ({"mask": torch.ones(3, 3).bool()}, MaskTypeError, "mask: expected a clearhead Mask, got Tensor."),
    ],
)
def test_parts_that_do_not_fit(options: dict[str, Any], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        MultiHeadLatentAttention(**SIZES, **options)
    assert str(raised.value).startswith(problem)


@pytest.mark.parametrize(
    ("inputs", "error", "problem"),
    [
        ((torch.randn(2, 3, 5),), ShapeError, "query: expected (B, length, 17), or (length, 17) without a batch, got "),
        ((tokens(), torch.randn(B, 3, 5)), ShapeError, "key: expected (B, length, 17), or (length, 17) without"),
        ((tokens(), tokens()[:1]), ShapeError, "query, key: expected equal batch sizes B, or no batch, got query (2, "),
        ((tokens(), tokens(), tokens()), ArgumentError, "value: expected the same tensor as key, or None, got another"),
        ((tokens(), None, tokens()), ArgumentError, "value: expected the same tensor as key, or None, got a tensor, "),
        ((tokens(), tokens(4)), ShapeError, "key: expected the query's length 11: a position part turns both"),
        ((tokens().float(),), DTypeError, "query: expected the module's dtype torch.float64, got torch.float32."),
        (("words",), DTypeError, "query: expected a torch.Tensor, got str."),
    ],
)
def test_inputs_that_do_not_fit(inputs: tuple[Any, ...], error: type[Exception], problem: str) -> None:
    with pytest.raises(error) as raised:
        module()(*inputs)
    assert str(raised.value).startswith(problem)


def test_caches_that_do_not_fit() -> None:
    attend, x = module(), tokens()
    with torch.no_grad():
        with pytest.raises(
            ShapeError, match=r"key: expected the cache's .*\(3, 1, L, 17\), got \(2, 1, 11, 17\)\. Make"
        ):
            attend(x, cache=attend.make_cache(3, L))
        with pytest.raises(
            ShapeError, match=r"value: expected the cache's .*\(2, 1, L, 17\), got \(2, 1, 11, 0\)\. Make"
        ):
            attend(x, cache=KVCache(B, 1, L, RANK + ROPE, dtype=torch.float64))
        with pytest.raises(CacheError, match="at most max_length = 4 tokens"):
            attend(x, cache=attend.make_cache(B, 4))
