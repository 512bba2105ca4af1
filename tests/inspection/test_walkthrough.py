"""The walkthrough shows the numbers the module really computes, with shapes that are really there."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import MultiHeadAttention, masks
from clearhead.errors import ArgumentError, DTypeError, ShapeError
from clearhead.inspection._walkthrough import walkthrough
from clearhead.inspection._walkthrough_result import Walkthrough
from clearhead.inspection._walkthrough_text import words_in
from clearhead.positions import ALiBi, RelativeBias, Rotary

B, H, L, S, D = 2, 6, 5, 7, 4
E = H * D


@dataclass(frozen=True)
class Setting:
    module: Callable[[], MultiHeadAttention]
    shapes: tuple[tuple[int, ...], ...]
    mask: Callable[[], object] = lambda: None

    def run(self, dtype: torch.dtype = torch.float64, language: str = "en") -> tuple[Walkthrough, tuple[Tensor, ...]]:
        """Returns the walkthrough, and the module's own output and weights (per head) in evaluation mode."""
        torch.manual_seed(3)
        module = self.module().to(dtype).eval()
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.3)
        inputs = [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in self.shapes]
        mask = self.mask()
        walk = walkthrough(module, *inputs, mask=mask, language=language)
        with torch.no_grad():
            answer = module(*inputs, mask=mask, need_weights=True, average_attn_weights=False)
        return walk, answer


def bias_with_minus_infinity() -> masks.Mask:
    bias = torch.linspace(-2, 2, H * L * L, dtype=torch.float64).reshape(1, H, L, L).clone()
    bias[0, 2, 3] = float("-inf")
    return masks.bias(bias)


def with_every_part() -> MultiHeadAttention:
    own = masks.sliding_window(3, 1) & ALiBi(H)
    parts = {"position": Rotary(D), "q_norm": nn.RMSNorm(D, eps=1e-6), "k_norm": nn.LayerNorm(D), "mask": own}
    return MultiHeadAttention(E, H, num_kv_heads=2, softcap=0.7, sinks=True, scale=0.9, **parts)


def every_kind_of_mask() -> masks.Mask:
    """Hides every key from query 3 in head 2, and from every query of item 1 those after the second."""
    return masks.causal() & bias_with_minus_infinity() & masks.lengths(torch.tensor([L, 2]))


SELF = ((B, L, E),)
CROSS = ((B, L, E), (B, S, 11), (B, S, 13))
SETTINGS = {
    "self": Setting(lambda: MultiHeadAttention(E, H), SELF),
    "causal": Setting(lambda: MultiHeadAttention(E, H), SELF, masks.causal),
    "no bias, own scale": Setting(lambda: MultiHeadAttention(E, H, bias=False, scale=0.3), SELF),
    "wide heads": Setting(lambda: MultiHeadAttention(E, H, head_dim=3), SELF, lambda: masks.sliding_window(1, 2)),
    "cross": Setting(
        lambda: MultiHeadAttention(E, H, kdim=11, vdim=13), CROSS, lambda: masks.lengths(torch.tensor([7, 3]))
    ),
    "key is value": Setting(lambda: MultiHeadAttention(E, H), ((B, L, E), (B, S, E))),
    "query dim": Setting(lambda: MultiHeadAttention(E, H, qdim=19), ((B, L, 19), (B, S, E))),
    "grouped": Setting(lambda: MultiHeadAttention(E, H, num_kv_heads=2), SELF, masks.causal),
    "one key head": Setting(lambda: MultiHeadAttention(E, H, num_kv_heads=1, kdim=11, vdim=13), CROSS),
    "hidden item": Setting(lambda: MultiHeadAttention(E, H), SELF, lambda: masks.lengths(torch.tensor([0, 4]))),
    "bias": Setting(lambda: MultiHeadAttention(E, H), SELF, lambda: masks.causal() & bias_with_minus_infinity()),
    "bool tensor": Setting(lambda: MultiHeadAttention(E, H), SELF, lambda: torch.eye(L, dtype=torch.bool)),
    "per head": Setting(
        lambda: MultiHeadAttention(E, H), SELF, lambda: masks.mask_mod(lambda b, h, q, k: (q + k) % (h + 1) == 1)
    ),
    "no batch": Setting(lambda: MultiHeadAttention(E, H), ((L, E),), masks.causal),
    "one token": Setting(lambda: MultiHeadAttention(E, H), ((1, 1, E),)),
    "positions": Setting(lambda: MultiHeadAttention(E, H, position=Rotary(D)), SELF, masks.causal),
    "norm of keys": Setting(lambda: MultiHeadAttention(E, H, kdim=11, vdim=13, k_norm=nn.RMSNorm(D, 1e-6)), CROSS),
    "soft-cap": Setting(lambda: MultiHeadAttention(E, H, softcap=0.3), SELF, bias_with_minus_infinity),
    "sinks": Setting(lambda: MultiHeadAttention(E, H, sinks=True), SELF, lambda: masks.lengths(torch.tensor([0, 4]))),
    "own mask": Setting(lambda: MultiHeadAttention(E, H, mask=masks.sliding_window(2, 0)), SELF),
    "own bias": Setting(lambda: MultiHeadAttention(E, H, mask=RelativeBias(H).double()), SELF, masks.causal),
    "every part": Setting(with_every_part, SELF, every_kind_of_mask),
    "every part, no batch": Setting(with_every_part, ((L, E),)),
}
every_setting = pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())


def size_of(symbol: str, sizes: dict[str, int]) -> int:
    return math.prod(sizes[letter] for letter in symbol.split("·"))


@every_setting
def test_the_numbers_are_those_of_the_module(setting: Setting) -> None:
    walk, (output, weights) = setting.run()
    torch.testing.assert_close(walk.output.reshape(output.shape), output, rtol=0, atol=1e-10)
    torch.testing.assert_close(walk["softmax"].tensor.reshape(weights.shape), weights, rtol=0, atol=1e-10)
    assert walk.steps[-1].tensor is walk.output
    assert walk.difference <= 1e-10
    assert walk.agrees


@every_setting
def test_every_shape_is_the_one_that_is_named(setting: Setting) -> None:
    walk, _ = setting.run()
    for step in walk.steps:
        symbols = step.symbols.strip("(),").split(", ")
        assert step.shape == tuple(step.tensor.shape), step.name
        assert step.shape == tuple(size_of(symbol, dict(walk.sizes)) for symbol in symbols), step.name


@every_setting
def test_both_languages_tell_the_same_steps(setting: Setting) -> None:
    english, _ = setting.run(language="en")
    chinese, _ = setting.run(language="zh")
    assert [(step.name, step.symbols, step.shape) for step in english.steps] == [
        (step.name, step.symbols, step.shape) for step in chinese.steps
    ]
    for ours, theirs in zip(english.steps, chinese.steps, strict=True):
        assert torch.equal(ours.tensor, theirs.tensor)
        assert re.search(r"[一-鿿]", theirs.meaning)
        assert not re.search(r"[一-鿿]", ours.meaning + ours.title)


@every_setting
@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_has_every_step_and_no_gaps(setting: Setting, language: str) -> None:
    walk, _ = setting.run(language=language)
    page = str(walk)
    for number, step in enumerate(walk.steps, 1):
        assert f"\n{number}. {step.title}\n" in page
        assert f"{step.symbols} = {tuple(step.shape)}" in page
        assert step.formula in page
    assert not re.search(r"[{}]", page)
    assert max(map(len, page.splitlines())) <= 96


def test_the_steps_come_in_the_order_of_the_computation() -> None:
    walk, _ = SETTINGS["grouped"].run()
    assert [step.name for step in walk.steps] == [
        "input",
        "query_projection",
        "key_projection",
        "value_projection",
        "query_heads",
        "key_heads",
        "value_heads",
        "shared_heads",
        "scores",
        "mask",
        "softmax",
        "weighted_sum",
        "merge",
        "output_projection",
    ]


def turned(x: Tensor) -> Tensor:
    """(B, H, L, D) as complex numbers of features i and D/2 + i, times exp(i · position · frequency)."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def formulas(module: MultiHeadAttention, x: Tensor) -> dict[str, Tensor]:
    """Every step of `with_every_part` under `every_kind_of_mask`, from parameters and sizes alone."""
    p = dict(module.named_parameters())
    found = {"input": x}
    for name, letter, heads in (("query", "q", H), ("key", "k", 2), ("value", "v", 2)):
        projection = torch.einsum("blf,gf->blg", x, p[f"{letter}_proj.weight"]) + p[f"{letter}_proj.bias"]
        found[f"{name}_projection"] = projection
        found[f"{name}_heads"] = torch.stack(projection.split(D, -1), 1)
        assert found[f"{name}_heads"].shape[1] == heads
    q, k = found["query_heads"], found["key_heads"]
    found["query_norm"] = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["q_norm.weight"]
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    found["key_norm"] = k * p["k_norm.weight"] + p["k_norm.bias"]
    found["query_position"], found["key_position"] = turned(found["query_norm"]), turned(found["key_norm"])
    key_head = torch.tensor([0, 0, 0, 1, 1, 1])
    found["shared_heads"] = found["key_position"][:, key_head]
    found["scores"] = 0.9 * torch.einsum("bhid,bhjd->bhij", found["query_position"], found["shared_heads"])
    found["softcap"] = 0.7 * torch.tanh(found["scores"] / 0.7)

    i, j = torch.arange(L)[:, None], torch.arange(L)
    slopes = ALiBi(H).slopes.double()[:, None, None]
    hidden = (j < i - 3) | (j > i + 1)
    found["own_mask"] = (found["softcap"] - slopes * (i - j).abs()).masked_fill(hidden, float("-inf"))
    bias = torch.linspace(-2, 2, H * L * L, dtype=torch.float64).reshape(H, L, L)
    hidden = torch.stack([j > i, (j > i) | (j > 1)])[:, None].expand(B, H, L, L).clone()
    hidden[:, 2, 3] = True
    found["mask"] = (found["own_mask"] + bias).masked_fill(hidden, float("-inf"))

    found["sinks"] = p["sinks"]
    exp = found["mask"].exp()
    found["softmax"] = exp / (exp.sum(-1, keepdim=True) + p["sinks"].exp()[:, None, None])
    found["weighted_sum"] = torch.einsum("bhij,bhjd->bhid", found["softmax"], found["value_heads"][:, key_head])
    found["merge"] = torch.cat(found["weighted_sum"].unbind(1), -1)
    found["output_projection"] = found["merge"] @ p["out_proj.weight"].T + p["out_proj.bias"]
    return found


def test_every_step_is_its_formula() -> None:
    torch.manual_seed(11)
    module = with_every_part().double()
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(B, L, E, dtype=torch.float64)
    walk = walkthrough(module, x, mask=every_kind_of_mask())
    with torch.no_grad():
        expected = formulas(module, x)
    assert [step.name for step in walk.steps] == [
        "input",
        *("query_projection", "key_projection", "value_projection"),
        *("query_heads", "key_heads", "value_heads"),
        *("query_norm", "key_norm", "query_position", "key_position"),
        *("shared_heads", "scores", "softcap", "own_mask", "mask", "sinks", "softmax"),
        *("weighted_sum", "merge", "output_projection"),
    ]
    for step in walk.steps:
        torch.testing.assert_close(step.tensor, expected[step.name], rtol=0, atol=1e-10, msg=step.name)
    assert torch.equal(walk.hidden_rows, expected["mask"].isneginf().all(-1))
    assert walk.hidden_rows.any()
    assert walk.agrees


def test_a_part_is_a_step_only_where_the_module_has_it() -> None:
    names = [step.name for step in SETTINGS["norm of keys"].run()[0].steps]
    assert "key_norm" in names
    assert {"query_norm", "query_position", "softcap", "own_mask", "sinks"}.isdisjoint(names)


def test_the_mask_of_the_module_is_told_from_that_of_the_call() -> None:
    walk, _ = SETTINGS["own mask"].run()
    assert "sliding_window(2, 0)" in walk["own_mask"].meaning
    assert f"hides {B * H * 13} of {B * H * L * L} scores" in walk["own_mask"].meaning
    assert "The call has no mask" in walk["mask"].meaning
    assert torch.equal(walk["mask"].tensor, walk["own_mask"].tensor)
    walk, _ = SETTINGS["own bias"].run()
    assert walk["own_mask"].formula.startswith(words_in("en")["phrases"]["biased"])
    assert "hides 0 of" in walk["own_mask"].meaning
    assert f"hides {B * H * L * (L - 1) // 2} of" in walk["mask"].meaning


def test_with_sinks_the_weights_are_not_said_to_add_up_to_1() -> None:
    walk, _ = SETTINGS["sinks"].run()
    assert "add up to less than 1" in walk["softmax"].meaning
    assert "exp(sink_h)" in walk["softmax"].formula


def test_parts_that_write_in_place_are_shown_before_and_after() -> None:
    class Halved(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.mul_(0.5)

    def negated(q: Tensor, k: Tensor, positions: object) -> tuple[Tensor, Tensor]:
        return q.neg_(), k.neg_()

    module = MultiHeadAttention(E, H, q_norm=Halved(), position=negated).double()
    walk = walkthrough(module, torch.randn(B, L, E).double())
    heads = walk["query_heads"].tensor
    assert torch.equal(heads, torch.stack(walk["query_projection"].tensor.split(D, -1), 1))
    assert torch.equal(walk["query_norm"].tensor, heads / 2)
    assert torch.equal(walk["query_position"].tensor, -heads / 2)
    assert walk["query_position"].formula == "q, k = negated(q, k, 0 … L-1)"
    assert walk.agrees


def test_every_step_explains_the_letters_of_its_shape() -> None:
    walk, _ = SETTINGS["cross"].run()
    page = str(walk)
    assert "Ek  = 11   key input dim" in page
    for step in walk.steps:
        letters = dict.fromkeys(re.findall(r"[A-Za-z]+", step.symbols))
        legend = ", ".join(f"{letter} {words_in('en')['letters'][letter]}" for letter in letters)
        assert re.search(rf"{re.escape(str(step.shape))}\n +{legend}\n", page), step.name


def test_chinese_uses_the_terms_of_chinese_textbooks() -> None:
    page = str(SETTINGS["grouped"].run(language="zh")[0])
    terms = ["查询", "键", "值", "多头注意力", "缩放点积", "掩码", "加权求和", "输出投影", "线性投影", "分组查询注意力"]
    assert [term for term in terms if term not in page] == []


def test_both_languages_have_the_same_entries() -> None:
    english, chinese = words_in("en"), words_in("zh")
    assert english.keys() == chinese.keys()
    for section, entries in english.items():
        assert entries.keys() == chinese[section].keys()


def test_the_chinese_page_can_be_written_in_gbk() -> None:
    for setting in SETTINGS.values():
        str(setting.run(language="zh")[0]).encode("gbk")


def test_the_mask_step_counts_what_is_hidden() -> None:
    walk, _ = SETTINGS["causal"].run()
    assert f"hides {B * H * L * (L - 1) // 2} of {B * H * L * L} scores" in walk["mask"].meaning
    assert torch.equal(walk["mask"].tensor.isneginf(), torch.ones(L, L).triu(1).bool().expand(B, H, L, L))


def test_without_a_mask_the_mask_step_says_so() -> None:
    walk, _ = SETTINGS["self"].run()
    assert "No mask was given" in walk["mask"].meaning
    assert torch.equal(walk["mask"].tensor, walk["scores"].tensor)


def test_grouped_heads_are_explained() -> None:
    walk, _ = SETTINGS["grouped"].run()
    step = walk["shared_heads"]
    assert "query heads 0–2 use key/value head 0, query heads 3–5 use key/value head 1" in step.meaning
    assert torch.equal(step.tensor[:, 4], walk["key_heads"].tensor[:, 1])
    assert "shared_heads" not in [step.name for step in SETTINGS["self"].run()[0].steps]


def test_queries_that_see_nothing_are_pointed_out() -> None:
    torch.manual_seed(5)
    module = MultiHeadAttention(E, H).double().eval()
    nn.init.normal_(module.out_proj.bias)
    walk = walkthrough(module, torch.randn(B, L, E).double(), mask=masks.lengths(torch.tensor([3, 0])))
    assert torch.equal(walk.hidden_rows, torch.tensor([False, True])[:, None, None].expand(B, H, L))
    assert torch.count_nonzero(walk["softmax"].tensor[1]) == 0
    assert torch.equal(walk.output[1], module.out_proj.bias.expand(L, E))
    page = " ".join(str(walk).split())
    assert f"in {H * L} of the {B * H * L} rows of scores the query sees no key at all" in page
    assert "batch 1, query 0, every head" in page
    assert "out_proj(0)" in page


def test_a_query_hidden_in_one_head_only_is_named_with_its_head() -> None:
    page = " ".join(str(SETTINGS["bias"].run()[0]).split())
    assert "(batch 0, head 2, query 3; batch 1, head 2, query 3)" in page


def test_nothing_is_said_about_hidden_queries_when_there_are_none() -> None:
    walk, _ = SETTINGS["causal"].run()
    assert not walk.hidden_rows.any()
    assert "no key at all" not in str(walk)


def test_training_mode_is_named_left_out_and_put_back() -> None:
    module = MultiHeadAttention(E, H, dropout=0.5).double()
    module.out_proj.eval()
    inputs = torch.randn(B, L, E).double()
    walk = walkthrough(module, inputs)
    assert module.training
    assert not module.out_proj.training
    torch.testing.assert_close(walk.output, module.eval()(inputs), rtol=0, atol=1e-10)
    assert walk.training
    assert "training mode" in str(walk)
    assert "训练模式" in str(walkthrough(module.train(), inputs, language="zh"))
    assert "training mode" not in str(walkthrough(module.eval(), inputs))


def test_the_mode_is_put_back_after_an_error() -> None:
    module = MultiHeadAttention(E, H, dropout=0.5)
    with pytest.raises(ShapeError):
        walkthrough(module, torch.randn(B, L, E + 1))
    assert module.training


def test_replaced_projections_are_called_and_named() -> None:
    class Doubled(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    module = MultiHeadAttention(E, H).double().eval()
    module.v_proj = Doubled(module.v_proj)
    inputs = torch.randn(B, L, E).double()
    walk = walkthrough(module, inputs)
    torch.testing.assert_close(walk.output, module(inputs), rtol=0, atol=1e-10)
    assert walk["value_projection"].formula == "v = Doubled(query)"


def test_a_module_that_does_more_is_noticed() -> None:
    class Shifted(MultiHeadAttention):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs) + 0.25

    walk = walkthrough(Shifted(E, H).eval(), torch.randn(B, L, E))
    assert walk.difference == pytest.approx(0.25, abs=1e-5)
    assert not walk.agrees
    assert "these steps do not show" in " ".join(str(walk).split())


def test_nan_in_padding_stays_out() -> None:
    module = MultiHeadAttention(E, H).double().eval()
    memory = torch.randn(B, S, E).double()
    memory[0, 3:] = float("nan")
    walk = walkthrough(module, torch.randn(B, L, E).double(), memory, mask=masks.lengths(torch.tensor([3, S])))
    assert walk.output.isfinite().all()
    assert walk.agrees


@pytest.mark.parametrize("setting", ["causal", "every part"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes_agree_with_the_module(dtype: torch.dtype, setting: str) -> None:
    walk, (output, _) = SETTINGS[setting].run(dtype)
    assert walk.output.dtype == output.dtype == dtype
    assert walk["softmax"].tensor.dtype == torch.float32
    assert walk.agrees


@pytest.mark.parametrize("setting", ["self", "own bias", "every part"])
def test_no_gradients_are_recorded(setting: str) -> None:
    walk, _ = SETTINGS[setting].run()
    assert not any(step.tensor.requires_grad for step in walk.steps)


def test_small_calls_show_the_weights_of_the_first_head() -> None:
    walk, _ = SETTINGS["causal"].run()
    rows = [line.split()[1:] for line in str(walk).splitlines() if re.match(r" +q\d ", line)]
    shown = torch.tensor([[float(number) for number in row] for row in rows])
    torch.testing.assert_close(shown, walk["softmax"].tensor[0, 0].float(), rtol=0, atol=5.1e-4)


def test_larger_calls_show_no_table() -> None:
    walk = walkthrough(MultiHeadAttention(E, H), torch.randn(1, 7, E))
    assert "weights of batch item 0" not in str(walk)


def test_the_public_name_is_this_function() -> None:
    assert clearhead.walkthrough is walkthrough


def test_another_language_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r'language: expected "en" or "zh", got \'fr\'\.'):
        walkthrough(MultiHeadAttention(E, H), torch.randn(B, L, E), language="fr")


def test_another_module_is_refused_with_what_it_takes() -> None:
    module = nn.MultiheadAttention(E, H)
    with pytest.raises(DTypeError, match=r"module: expected a clearhead\.MultiHeadAttention, got torch\.nn.*Multihead"):
        walkthrough(module, torch.randn(B, L, E))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("split", ["head_shard", "sequence_shard"])
def test_a_module_that_is_split_over_processes_is_refused(split: str) -> None:
    module = MultiHeadAttention(E, H)
    setattr(module, split, object())
    expected = (
        "module: expected a module that one process computes, got a module after clearhead.distributed.tensor_parallel "
        "or context_parallel. Walk through the module before it is split."
    )
    with pytest.raises(ArgumentError, match=re.escape(expected)):
        walkthrough(module, torch.randn(B, L, E))


def test_under_autocast_the_steps_are_those_of_the_module() -> None:
    module = MultiHeadAttention(E, H, q_norm=nn.LayerNorm(D), position=Rotary(D), softcap=0.7, sinks=True)
    with torch.autocast("cpu", torch.bfloat16):
        walk = walkthrough(module, torch.randn(B, L, E), mask=masks.causal())
    assert walk["query_projection"].tensor.dtype == walk["weighted_sum"].tensor.dtype == torch.bfloat16
    assert walk["softmax"].tensor.dtype == torch.float32
    assert walk.agrees


def test_an_unknown_step_is_a_key_error() -> None:
    walk, _ = SETTINGS["self"].run()
    with pytest.raises(KeyError, match="rotary"):
        walk["rotary"]
