"""The walkthrough shows the numbers that the module computes, with their real shapes."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources

import pytest
import torch
from torch import Tensor, nn

from clearhead import MultiHeadAttention, Walkthrough, masks, walkthrough
from clearhead.errors import ShapeError
from clearhead.positions import ALiBi, LogScale, RelativeBias, Rotary, Temperature
from tests.support.randomised import randomised

#: The words of the walkthrough in each language.
WORDS = {
    language: tomllib.loads(
        (resources.files("clearhead.inspection") / f"walkthrough_{language}.toml").read_text("utf-8")
    )
    for language in ("en", "zh")
}
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
        module = randomised(self.module().to(dtype), 0.3)
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
    own_mask = masks.sliding_window(3, 1) & ALiBi(H)
    parts = {"position": Rotary(D), "q_norm": nn.RMSNorm(D, eps=1e-6), "k_norm": nn.LayerNorm(D), "mask": own_mask}
    return MultiHeadAttention(E, H, num_kv_heads=2, softcap=0.7, sinks=True, gate="head", scale=0.9, **parts)


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
    "bias": Setting(lambda: MultiHeadAttention(E, H), SELF, lambda: masks.causal() & bias_with_minus_infinity()),
    "blocks and a tree": Setting(
        lambda: MultiHeadAttention(E, H, gate="elementwise", position=Temperature(0.5, 2, rotary=Rotary(D))),
        SELF,
        lambda: masks.block_causal(3) & masks.tree(torch.tensor([-1, 0, 0])),
    ),
    "scale of the logarithm": Setting(lambda: MultiHeadAttention(E, H, position=LogScale(H)), SELF, masks.causal),
    "axes": Setting(lambda: MultiHeadAttention(E, H, position=Rotary(D, axes=range(D // 2))), SELF),
    "bool tensor": Setting(lambda: MultiHeadAttention(E, H), SELF, lambda: torch.eye(L, dtype=torch.bool)),
    "norm of keys": Setting(lambda: MultiHeadAttention(E, H, kdim=11, vdim=13, k_norm=nn.RMSNorm(D, 1e-6)), CROSS),
    "soft-cap": Setting(lambda: MultiHeadAttention(E, H, softcap=0.3), SELF, bias_with_minus_infinity),
    "sinks": Setting(lambda: MultiHeadAttention(E, H, sinks=True), SELF, lambda: masks.lengths(torch.tensor([0, 4]))),
    "own mask": Setting(lambda: MultiHeadAttention(E, H, mask=masks.sliding_window(2, 0)), SELF),
    "own bias": Setting(lambda: MultiHeadAttention(E, H, mask=RelativeBias(H).double()), SELF, masks.causal),
    "every part": Setting(with_every_part, SELF, every_kind_of_mask),
    "every part, no batch": Setting(with_every_part, ((L, E),)),
}


def size_of(symbol: str, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[letter] for letter in symbol.split("·"))


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS.keys())
def test_steps_and_page_in_both_languages(setting: Setting) -> None:
    walk, (output, weights) = setting.run()
    torch.testing.assert_close(walk.output.reshape(output.shape), output, rtol=0, atol=1e-10)
    torch.testing.assert_close(walk["softmax"].tensor.reshape(weights.shape), weights, rtol=0, atol=1e-10)
    assert walk.steps[-1].tensor is walk.output
    assert walk.difference <= 1e-10
    assert walk.agrees
    chinese, _ = setting.run(language="zh")
    page = str(walk)
    for step, translated in zip(walk.steps, chinese.steps, strict=True):
        symbols = step.symbols.strip("(),").split(", ")
        assert step.shape == tuple(step.tensor.shape) == tuple(size_of(symbol, walk.sizes) for symbol in symbols)
        assert not step.tensor.requires_grad
        assert (step.name, step.symbols, step.shape) == (translated.name, translated.symbols, translated.shape)
        assert torch.equal(step.tensor, translated.tensor)
        assert re.search(r"[一-鿿]", translated.meaning)
        assert not re.search(r"[一-鿿]", step.meaning + step.title)
        letters = dict.fromkeys(re.findall(r"[A-Za-z]+", step.symbols))
        legend = ", ".join(f"{letter} {WORDS['en']['letters'][letter]}" for letter in letters)
        assert re.search(rf"{re.escape(str(step.shape))}\n +{legend}\n", page), step.name
    for text, steps in ((page, walk.steps), (str(chinese), chinese.steps)):
        for number, step in enumerate(steps, 1):
            assert f"\n{number}. {step.title}\n" in text
            assert f"{step.symbols} = {tuple(step.shape)}" in text
            assert step.formula in text
        assert not re.search(r"[{}]", text)
        assert max(map(len, text.splitlines())) <= 96
    str(chinese).encode("gbk")


def turned(x: Tensor) -> Tensor:
    """(B, H, L, D) as complex numbers of features i and D/2 + i, times exp(i · position · frequency)."""
    angles = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(0, D, 2, dtype=torch.float64) / D)
    pairs = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([pairs.real, pairs.imag], -1)


def formulas(module: MultiHeadAttention, x: Tensor) -> dict[str, Tensor]:
    """Every step of `with_every_part` under `every_kind_of_mask`, from parameters and sizes alone."""
    p = dict(module.named_parameters())
    tensors = {"input": x}
    for name, letter, heads in (("query", "q", H), ("key", "k", 2), ("value", "v", 2)):
        projection = torch.einsum("blf,gf->blg", x, p[f"{letter}_proj.weight"]) + p[f"{letter}_proj.bias"]
        tensors[f"{name}_projection"] = projection
        tensors[f"{name}_heads"] = torch.stack(projection.split(D, -1), 1)
        assert tensors[f"{name}_heads"].shape[1] == heads
    q, k = tensors["query_heads"], tensors["key_heads"]
    tensors["query_norm"] = q / (q.square().mean(-1, keepdim=True) + 1e-6).sqrt() * p["q_norm.weight"]
    k = (k - k.mean(-1, keepdim=True)) / (k.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    tensors["key_norm"] = k * p["k_norm.weight"] + p["k_norm.bias"]
    tensors["query_position"], tensors["key_position"] = turned(tensors["query_norm"]), turned(tensors["key_norm"])
    key_head = torch.tensor([0, 0, 0, 1, 1, 1])
    tensors["shared_heads"] = tensors["key_position"][:, key_head]
    tensors["scores"] = 0.9 * torch.einsum("bhid,bhjd->bhij", tensors["query_position"], tensors["shared_heads"])
    tensors["softcap"] = 0.7 * torch.tanh(tensors["scores"] / 0.7)

    i, j = torch.arange(L)[:, None], torch.arange(L)
    slopes = ALiBi(H).slopes.double()[:, None, None]
    hidden = (j < i - 3) | (j > i + 1)
    tensors["own_mask"] = (tensors["softcap"] - slopes * (i - j).abs()).masked_fill(hidden, float("-inf"))
    bias = torch.linspace(-2, 2, H * L * L, dtype=torch.float64).reshape(H, L, L)
    hidden = torch.stack([j > i, (j > i) | (j > 1)])[:, None].expand(B, H, L, L).clone()
    hidden[:, 2, 3] = True
    tensors["mask"] = (tensors["own_mask"] + bias).masked_fill(hidden, float("-inf"))

    tensors["sinks"] = p["sinks"]
    exp = tensors["mask"].exp()
    tensors["softmax"] = exp / (exp.sum(-1, keepdim=True) + p["sinks"].exp()[:, None, None])
    tensors["weighted_sum"] = torch.einsum("bhij,bhjd->bhid", tensors["softmax"], tensors["value_heads"][:, key_head])
    tensors["merge"] = torch.cat(tensors["weighted_sum"].unbind(1), -1)
    factors = torch.sigmoid(x @ p["gate_proj.weight"].T + p["gate_proj.bias"])
    tensors["gate"] = tensors["merge"] * factors.repeat_interleave(D, -1)
    tensors["output_projection"] = tensors["gate"] @ p["out_proj.weight"].T + p["out_proj.bias"]
    return tensors


def test_every_step_is_its_formula() -> None:
    torch.manual_seed(11)
    module = randomised(with_every_part().double(), 1.0)
    x = torch.randn(B, L, E, dtype=torch.float64)
    walk = walkthrough(module, x, mask=every_kind_of_mask())
    with torch.no_grad():
        expected = formulas(module, x)
    assert [step.name for step in walk.steps] == [
        *("input", "query_projection", "key_projection", "value_projection", "query_heads", "key_heads", "value_heads"),
        *("query_norm", "key_norm", "query_position", "key_position", "shared_heads", "scores", "softcap", "own_mask"),
        *("mask", "sinks", "softmax", "weighted_sum", "merge", "gate", "output_projection"),
    ]
    for step in walk.steps:
        torch.testing.assert_close(step.tensor, expected[step.name], rtol=0, atol=1e-10, msg=step.name)
    assert torch.equal(walk.hidden_rows, expected["mask"].isneginf().all(-1))
    assert walk.hidden_rows.any()
    assert walk.agrees


#: Setting, step and a text of the step's meaning.
MEANINGS = [
    ("own mask", "own_mask", "sliding_window(2, 0)"),
    ("own mask", "own_mask", f"hides {B * H * 13} of {B * H * L * L} scores"),
    ("own mask", "mask", "The call has no mask"),
    ("own bias", "own_mask", "hides 0 of"),
    ("own bias", "mask", f"hides {B * H * L * (L - 1) // 2} of"),
    ("causal", "mask", f"hides {B * H * L * (L - 1) // 2} of {B * H * L * L} scores"),
    ("self", "mask", "No mask was given"),
    ("sinks", "softmax", "add up to less than 1"),
    ("grouped", "shared_heads", "query heads 0–2 use key/value head 0, query heads 3–5 use key/value head 1"),
]


@pytest.mark.parametrize(("setting", "step", "text"), MEANINGS)
def test_meanings(setting: str, step: str, text: str) -> None:
    assert text in SETTINGS[setting].run()[0][step].meaning


def test_steps_and_formulas_follow_the_module() -> None:
    names = [step.name for step in SETTINGS["norm of keys"].run()[0].steps]
    assert "key_norm" in names
    assert {"query_norm", "query_position", "softcap", "own_mask", "sinks", "shared_heads"}.isdisjoint(names)
    assert SETTINGS["own bias"].run()[0]["own_mask"].formula.startswith(WORDS["en"]["phrases"]["biased"])
    assert "exp(sink_h)" in SETTINGS["sinks"].run()[0]["softmax"].formula


@pytest.mark.parametrize("head_dim", [4, 9])
def test_only_the_root_of_the_head_dim_is_named_as_the_scale(head_dim: int) -> None:
    """In heads that are not E / H wide, too, and not for a scale that would be the default of E / H."""
    x, default = torch.randn(1, 3, 18), 1 / math.sqrt(head_dim)
    for scale, formula in ((None, f"1/√D = {default:.4g}"), (default, f"1/√D = {default:.4g}"), (6**-0.5, "0.4082")):
        walk = walkthrough(MultiHeadAttention(18, 3, head_dim=head_dim, scale=scale), x)
        (shown,) = (step.formula for step in walk.steps if step.name == "scores")
        assert shown == f"s_ij = scale · q_i·k_j, scale = {formula}"


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


def test_languages() -> None:
    page = str(SETTINGS["grouped"].run(language="zh")[0])
    terms = ["查询", "键", "值", "多头注意力", "缩放点积", "掩码", "加权求和", "输出投影", "线性投影", "分组查询注意力"]
    assert [term for term in terms if term not in page] == []
    assert "Ek  = 11   key input dim" in str(SETTINGS["cross"].run()[0])
    english, chinese = ({section: {*each} for section, each in WORDS[language].items()} for language in ("en", "zh"))
    assert english == chinese


def test_fully_masked_queries_are_listed() -> None:
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
    page = " ".join(str(SETTINGS["bias"].run()[0]).split())
    assert "(batch 0, head 2, query 3; batch 1, head 2, query 3)" in page
    assert "no key at all" not in str(SETTINGS["causal"].run()[0])


def test_training_mode_is_named_ignored_and_restored() -> None:
    module = MultiHeadAttention(E, H, dropout=0.5).double()
    module.out_proj.eval()
    inputs = torch.randn(B, L, E).double()
    walk = walkthrough(module, inputs)
    with pytest.raises(ShapeError):
        walkthrough(module, torch.randn(B, L, E + 1))
    assert module.training
    assert not module.out_proj.training
    torch.testing.assert_close(walk.output, module.eval()(inputs), rtol=0, atol=1e-10)
    assert walk.training
    assert "training mode" in str(walk)
    assert "训练模式" in str(walkthrough(module.train(), inputs, language="zh"))
    assert "training mode" not in str(walkthrough(module.eval(), inputs))


def test_replaced_projections_are_called_and_named() -> None:
    module, x = MultiHeadAttention(E, H).eval(), torch.randn(B, L, E)
    module.v_proj = nn.Sequential(module.v_proj, nn.Tanh())
    walk = walkthrough(module, x)
    torch.testing.assert_close(walk.output, module(x))
    assert walk["value_projection"].formula == "v = Sequential(query)"


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


def test_autocast() -> None:
    module = MultiHeadAttention(E, H, q_norm=nn.LayerNorm(D), position=Rotary(D), softcap=0.7, sinks=True)
    with torch.autocast("cpu", torch.bfloat16):
        walk = walkthrough(module, torch.randn(B, L, E), mask=masks.causal())
    assert walk["query_projection"].tensor.dtype == walk["weighted_sum"].tensor.dtype == torch.bfloat16
    assert walk["softmax"].tensor.dtype == torch.float32
    assert walk.agrees


def test_only_small_calls_have_a_table_of_the_first_heads_weights() -> None:
    walk, _ = SETTINGS["causal"].run()
    rows = [line.split()[1:] for line in str(walk).splitlines() if re.match(r" +q\d ", line)]
    table = torch.tensor([[float(number) for number in row] for row in rows])
    torch.testing.assert_close(table, walk["softmax"].tensor[0, 0].float(), rtol=0, atol=5.1e-4)
    assert "weights of batch item 0" not in str(walkthrough(MultiHeadAttention(E, H), torch.randn(1, 7, E)))
