"""Generated calls over the whole signature against `torch.nn.MultiheadAttention` in float64.

Each call is compared with PyTorch given the explicit mask that its arguments mean; where PyTorch itself reads the
arguments rightly, also with PyTorch given the very same arguments, in the same mode, its fast path included.
"""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import clearhead
import clearhead.nn
from tests.support.closeness import require_near
from tests.support.derivatives import derivatives
from tests.support.torch_oracle import Meant, assert_equal, explicit_bias, gradients, hidden_rows

ATTN_MASKS = ("none", "(L, S)", "(N·H, L, S)", "(N, L, S)", "(N, H, L, S)", "the causal one")
CELLS = list(itertools.product(ATTN_MASKS, (False, True), (False, True), (False, True)))
#: 15 calls in each of 48 cells: 720 in the ordinary run.
PER_CELL = max(1, settings.default.max_examples * 3 // 8)


#: Choices inside a cell.
DRAWN = st.fixed_dictionaries(
    {
        "batch": st.sampled_from((None, 1, 2, 3)),
        "length": st.sampled_from((1, 2, 3, 5)),
        "keys": st.sampled_from((1, 2, 3, 7)),
        "heads": st.sampled_from((1, 2, 3, 4)),
        "head_dim": st.sampled_from((1, 2, 3)),
        "kdim": st.sampled_from((None, 5)),
        "vdim": st.sampled_from((None, 7)),
        "same": st.sampled_from(("all one tensor", "key is value", "all different")),
        "key_padding": st.sampled_from(("none", "bool", "float")),
        "hide": st.sampled_from((0.0, 0.2, 0.6)),
        "seed": st.integers(0, 2**32),
        **dict.fromkeys(("bias", "batch_first", "float_attn_mask", "need_weights", "average"), st.booleans()),
        **dict.fromkeys(("training", "with_gradients"), st.booleans()),
    }
).map(lambda choices: SimpleNamespace(**choices))


class Call:
    """One call, with the same tensors and parameters for both modules."""

    def __init__(self, drawn: Any, attn_mask: str, is_causal: bool, add_bias_kv: bool, add_zero_attn: bool) -> None:
        self.drawn, self.attn_kind, self.is_causal = drawn, attn_mask, is_causal
        self.appended = add_bias_kv or add_zero_attn
        self.random = torch.Generator().manual_seed(drawn.seed)
        embed_dim = drawn.heads * drawn.head_dim
        options = {
            "bias": drawn.bias,
            "add_bias_kv": add_bias_kv,
            "add_zero_attn": add_zero_attn,
            "kdim": drawn.kdim,
            "vdim": drawn.vdim,
            "batch_first": drawn.batch_first,
            "dtype": torch.float64,
        }
        self.ours = clearhead.nn.MultiheadAttention(embed_dim, drawn.heads, **options).train(drawn.training)
        self.theirs = nn.MultiheadAttention(embed_dim, drawn.heads, **options).train(drawn.training)
        for parameter in self.ours.parameters():
            with torch.no_grad():
                parameter.copy_(self.normal(*parameter.shape))  # biases are not left at zero
        self.theirs.load_state_dict(self.ours.state_dict())
        self.query, self.key, self.value = self._inputs(embed_dim)
        self.attn_mask = self._attn_mask()
        self.key_padding_mask = self._key_padding_mask()
        self.bias = explicit_bias(self.sizes, self.attn_mask, self.key_padding_mask, is_causal)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        length = self.drawn.length
        keys = length if self.query is self.key else self.drawn.keys
        return self.drawn.batch or 1, self.drawn.heads, length, keys

    def _inputs(self, embed_dim: int) -> tuple[Tensor, Tensor, Tensor]:
        drawn = self.drawn
        kdim, vdim = drawn.kdim or embed_dim, drawn.vdim or embed_dim
        query = self._input(drawn.length, embed_dim)
        if drawn.same == "all one tensor" and kdim == vdim == embed_dim:
            return query, query, query
        key = self._input(drawn.keys, kdim)
        if drawn.same == "key is value" and kdim == vdim:
            return query, key, key
        return query, key, self._input(drawn.keys, vdim)

    def _input(self, length: int, features: int) -> Tensor:
        batch = self.drawn.batch
        if batch is None:
            shape = (length, features)
        else:
            shape = (batch, length, features) if self.drawn.batch_first else (length, batch, features)
        return self.normal(*shape).requires_grad_(self.drawn.with_gradients)

    def _attn_mask(self) -> Tensor | None:
        batch, heads, length, keys = self.sizes
        if self.attn_kind == "none":
            return None
        if self.attn_kind == "the causal one":
            hidden = torch.ones(length, keys, dtype=torch.bool).triu(1)
            return self._numbers(hidden, noise=False) if self.drawn.float_attn_mask else hidden
        shapes = {"(L, S)": (), "(N·H, L, S)": (batch * heads,), "(N, L, S)": (batch,), "(N, H, L, S)": (batch, heads)}
        hidden = self._marks(*shapes[self.attn_kind], length, keys)
        return self._numbers(hidden) if self.drawn.float_attn_mask else hidden

    def _key_padding_mask(self) -> Tensor | None:
        batch, _, _, keys = self.sizes
        if self.drawn.key_padding == "none":
            return None
        hidden = self._marks(*(() if self.drawn.batch is None else (batch,)), keys)
        return self._numbers(hidden) if self.drawn.key_padding == "float" else hidden

    def _marks(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.random) < self.drawn.hide

    def _numbers(self, hidden: Tensor, noise: bool = True) -> Tensor:
        numbers = self.normal(*hidden.shape) if noise else torch.zeros(hidden.shape, dtype=torch.float64)
        return numbers.masked_fill(hidden, float("-inf")).requires_grad_(self.drawn.with_gradients)

    def as_given(self, module: nn.MultiheadAttention) -> tuple[Tensor, Tensor | None]:
        return module(
            self.query,
            self.key,
            self.value,
            key_padding_mask=self.key_padding_mask,
            need_weights=self.drawn.need_weights,
            attn_mask=self.attn_mask,
            average_attn_weights=self.drawn.average,
            is_causal=self.is_causal,
        )

    def as_meant(self) -> tuple[Tensor, Tensor | None]:
        meant = Meant(self.theirs.train())
        return meant(self.query, self.key, self.value, self.bias, self.drawn.need_weights, self.drawn.average)

    def pytorch_reads_it_rightly(self) -> bool:
        """No hidden rows, a mask shape PyTorch has, and `is_causal` only beside the causal mask itself."""
        if hidden_rows(self.theirs, self.bias).any():
            return False
        batch, heads, length, keys = self.sizes
        shapes = ((length, keys), (batch * heads, length, keys))
        if self.attn_mask is not None and tuple(self.attn_mask.shape) not in shapes:
            return False
        return not self.is_causal or (self.attn_kind == "the causal one" and not self.appended)

    def pytorch_leaves_out(self, tensor: Tensor) -> bool:
        """Whether it computes by `is_causal` alone, without the mask, which then gets no gradient."""
        alone = self.is_causal and not self.drawn.need_weights and self.key_padding_mask is None
        return alone and tensor is self.attn_mask

    def differentiable(self, module: nn.MultiheadAttention) -> list[Tensor]:
        tensors = {id(x): x for x in (self.query, self.key, self.value, self.attn_mask, self.key_padding_mask)}
        leaves = [x for x in tensors.values() if x is not None and x.requires_grad]
        return [*leaves, *module.parameters()]


@pytest.mark.parametrize(("attn_mask", "is_causal", "add_bias_kv", "add_zero_attn"), CELLS)
def test_the_answer_is_pytorchs(attn_mask: str, is_causal: bool, add_bias_kv: bool, add_zero_attn: bool) -> None:
    @settings(max_examples=PER_CELL)
    @given(DRAWN)
    def check(drawn: Any) -> None:
        call = Call(drawn, attn_mask, is_causal, add_bias_kv, add_zero_attn)
        with torch.set_grad_enabled(drawn.with_gradients):
            ours = call.as_given(call.ours)
            answers = {"the meaning": call.as_meant()}
            if call.pytorch_reads_it_rightly():
                call.theirs.train(drawn.training)
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", "Support for mismatched")
                    warnings.filterwarnings("ignore", "Converting mask without torch.bool")
                    answers["the same arguments"] = call.as_given(call.theirs)
        wanting = call.differentiable(call.ours)
        result = gradients(ours, wanting) if drawn.with_gradients else []
        for name, theirs in answers.items():
            assert_equal(ours[0], theirs[0], f"output, PyTorch given {name}")
            assert_equal(ours[1], theirs[1], f"weights, PyTorch given {name}")
            expected = gradients(theirs, call.differentiable(call.theirs)) if drawn.with_gradients else []
            for index, (gradient, wanted) in enumerate(zip(result, expected, strict=True)):
                if name == "the same arguments" and call.pytorch_leaves_out(wanting[index]):
                    continue
                assert_equal(gradient, wanted, f"gradient {index}, PyTorch given {name}")

    check()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("length", "keys", "batch"), [(0, 3, 2), (3, 0, 2), (0, 0, 2), (3, 5, 0), (0, 3, None)])
def test_sizes_of_zero(length: int, keys: int, batch: int | None, need_weights: bool, training: bool) -> None:
    ours = clearhead.nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64).train(training)
    theirs = nn.MultiheadAttention(6, 2, batch_first=True, dtype=torch.float64).train(training)
    theirs.load_state_dict(ours.state_dict())
    leading = () if batch is None else (batch,)
    query = torch.randn(*leading, length, 6, dtype=torch.float64)
    key = torch.randn(*leading, keys, 6, dtype=torch.float64)
    result, expected = (m(query, key, key, need_weights=need_weights) for m in (ours, theirs))
    assert_equal(result[0], expected[0], "output")
    assert_equal(result[1], expected[1], "weights")


# An `in_proj_bias` of another dtype than its module, such as one in half precision.


N, L, S, E, H = 2, 5, 7, 12, 3
DTYPES = [
    (torch.float32, torch.bfloat16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float32),
    (torch.float32, torch.float64),
    (torch.bfloat16, torch.float32),
]
dtypes = pytest.mark.parametrize("dtypes", DTYPES, ids=str)
CALLS: dict[str, dict[str, Any]] = {
    "self": {"need_weights": False},
    "memory": {},
    "three inputs": {"key_padding_mask": torch.arange(S).expand(N, S) > torch.tensor([[2], [4]])},
    "other features": {"need_weights": False},
}


def with_bias(kind: type[nn.MultiheadAttention], dtypes: tuple[torch.dtype, torch.dtype], **options: Any) -> Any:
    torch.manual_seed(3)
    module = kind(E, H, dtype=dtypes[0], **options)
    module.in_proj_bias = nn.Parameter(torch.randn(3 * E).to(dtypes[1]))
    return module


def numbers(module: nn.MultiheadAttention, inputs: tuple[Tensor, ...], call: dict[str, Any]) -> list[Tensor]:
    leaves = (*(x.detach().requires_grad_() for x in inputs), *module.parameters())
    query, key, value = (leaves[min(i, len(inputs) - 1)] for i in range(3))
    results = [x for x in module(query, key, value, **call) if x is not None]
    found = derivatives(results, leaves, unused=True)
    assert [x.dtype for x in found[len(results) :]] == [x.dtype for x in leaves]
    return [x.detach() for x in found]


def require_as_exact(tensors: list[Tensor], expected: list[Tensor]) -> None:
    """Relative to the largest number: as exact as the coarser of its own dtype and the output's, the first result's."""
    for x, y in zip(tensors, expected, strict=True):
        assert x.dtype == y.dtype
        allowed = max(_tolerance(x.dtype), _tolerance(tensors[0].dtype))
        require_near(x, y, allowed)


def _tolerance(dtype: torch.dtype) -> float:
    """In half precision four roundings."""
    return {torch.float32: 1e-5, torch.float64: 1e-10}.get(dtype) or 4 * torch.finfo(dtype).eps


@dtypes
@pytest.mark.parametrize("call", CALLS)
def test_as_pytorchs_class(dtypes: tuple[torch.dtype, torch.dtype], call: str) -> None:
    """PyTorch's class computes such a call if its inputs are batch first."""
    options = {"kdim": 11, "vdim": 13} if call == "other features" else {}
    sizes = [(L, E), (S, options.get("kdim", E)), (S, options.get("vdim", E))]
    count = {"self": 1, "memory": 2}.get(call, 3)
    inputs = tuple(torch.randn(N, *size).to(dtypes[0]) for size in sizes[:count])
    ours, theirs = (
        numbers(with_bias(kind, dtypes, batch_first=True, **options), inputs, CALLS[call])
        for kind in (clearhead.nn.MultiheadAttention, nn.MultiheadAttention)
    )
    require_as_exact(ours, theirs)


@dtypes
def test_length_first_and_without_a_batch_too(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    """PyTorch's class raises here. The batch-first call has the same numbers."""
    x = torch.randn(N, L, E).to(dtypes[0])
    first, last = (with_bias(clearhead.nn.MultiheadAttention, dtypes, batch_first=b).eval() for b in (True, False))
    with torch.no_grad():
        output, weights = first(x, x, x)
        transposed, same_weights = last(*(x.transpose(0, 1).contiguous(),) * 3)
        require_as_exact([transposed.transpose(0, 1), same_weights], [output, weights])
        require_as_exact(list(last(x[0], x[0], x[0])), [output[0], weights[0]])
