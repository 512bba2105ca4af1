"""Two calls that differ in one thing, in both orders: each returns what it returns alone, without a plan of the other.

What a call returns alone is compared with the formulas in `tests/kernels/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import clearhead
from clearhead import masks
from clearhead.errors import KernelError
from tests.support.budgets import in_turn
from tests.support.forgetting import LAYOUT_FIELDS, forget

Changes = dict[str, Any]
KERNELS = (None, "native", "sdpa", "chunked", "reference")
SEEDED = ("native", "chunked", "reference")
REFUSED = "refused by the kernel"
OPERANDS, LEAVES = ("query", "key", "value"), ("query", "key", "value", "sinks", "bias")

_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "features first": lambda x: x.mT.contiguous().mT,
    "every other row": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "expanded": lambda x: x[:1].expand(x.shape),
    "imaginary": lambda x: torch.complex(torch.zeros_like(x), x).imag,
    "negated": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
}
_STRIDES = [*_LAYOUTS][:5]
_PACKED = (((3, 4), (0, 2), (4, 5)), ((3, 4), (4, 7)), ((7, 11),), ((2, 0), (5, 11)), ((0, 3), (7, 8)))


class Sizes:
    """Sizes of a call, and the random numbers of its mask."""

    def __init__(self, call: Changes) -> None:
        self.batch, self.heads, self.length, self.keys = (call[name] for name in ("batch", "heads", "length", "keys"))
        self.random = torch.Generator().manual_seed(call["mask_seed"])

    def visible(self, *shape: int) -> Tensor:
        """Three of five. The first row is fully masked, and the last key is masked for every query."""
        marks = torch.rand(shape, generator=self.random) < 0.6
        marks[..., -1] = False
        if marks.dim() > 2 or shape[0] == self.length:
            marks[..., 0, :] = False
        return marks

    def bias(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)


MASKS: dict[str, Callable[[Sizes], Any]] = {
    "causal": lambda s: masks.causal(),
    "bottom right": lambda s: masks.causal("bottom_right"),
    "window": lambda s: masks.sliding_window(2, 1),
    "other window": lambda s: masks.sliding_window(1, 3),
    "prefix": lambda s: masks.causal() | masks.prefix(3),
    "keys": lambda s: masks.keep(keys=s.visible(s.batch, s.keys)),
    "drop": lambda s: masks.drop(~s.visible(s.length, s.keys)),
    "per item": lambda s: masks.keep(s.visible(s.batch, 1, s.length, s.keys)),
    "per head": lambda s: masks.keep(s.visible(1, s.heads, s.length, s.keys)),
    "bool tensor": lambda s: s.visible(s.length, s.keys),
    "lengths": lambda s: masks.lengths((torch.rand(s.batch, generator=s.random) * s.keys).long()),
    "computed": lambda s: masks.mask_mod(lambda b, h, q, k: (q + k + b) % 3 > 0),
    "causal and keys": lambda s: masks.causal() & masks.keep(keys=s.visible(s.batch, s.keys)),
}
#: Biases are masks whose tensor may learn.
BIASES: dict[str, Callable[[Sizes], Tensor]] = {
    "bias": lambda s: s.bias(1, s.heads, s.length, s.keys),
    "bias of items": lambda s: s.bias(s.batch, 1, s.length, s.keys).masked_fill(
        ~s.visible(s.length, s.keys), -torch.inf
    ),
    "window and bias": lambda s: s.bias(1, s.heads, s.length, s.keys),
}

DEFAULT: Changes = {
    **{"seed": 0, "batch": 2, "heads": 6, "kv_heads": 3, "length": 5, "keys": 7, "dim": 11, "value_dim": 11},
    **{"dtype": torch.float32, "layouts": ("contiguous",) * 3, "mask": None, "mask_seed": 1, "poison": False},
    **{"query_positions": None, "key_positions": None, "scale": None, "softcap": None, "sinks": False},
    **{"dropout_p": 0.0, "learns": (), "lse": False, "weights": None, "packed": None, "around": "nothing"},
}

#: For each field of a spec the settings that change from one call to the next. No field of a spec holds "values".
FIELDS: dict[str, list[Changes]] = {
    "query": [
        *({"length": length} for length in (1, 2, 13)),
        *({"batch": batch} for batch in (1, 3)),
        *({"heads": heads} for heads in (3, 12)),
    ],
    "key": [
        *({"keys": keys} for keys in (1, 6, 17)),
        *({"kv_heads": heads} for heads in (1, 6)),
        *({"dim": dim} for dim in (3, 13)),
    ],
    "value": [{"value_dim": dim} for dim in (3, 13)],
    "strides": [
        {"layouts": ("contiguous",) * before + (layout,) + ("contiguous",) * (2 - before)}
        for before in range(3) for layout in _STRIDES
    ],
    "dtype": [{"dtype": dtype} for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16)],
    "negative": [{"layouts": (layout,) * 3} for layout in ("imaginary", "negated")],
    "mask": [{"mask": name} for name in (*MASKS, *BIASES)],
    "masked": [{"mask": name} for name in (None, "causal", "computed", "drop")],
    "query_positions": [{"query_positions": places} for places in (None, 0, 2, 5, "(L,)", "(B, L)")],
    "key_positions": [{"key_positions": places} for places in (None, 0, 1, 3, "(L,)", "(B, L)")],
    "scale": [{"scale": scale} for scale in (None, 0.3, 1.0, -0.5)],
    "softcap": [{"softcap": softcap} for softcap in (None, 0.7, 3.0)],
    "sinks": [{"sinks": sinks} for sinks in (False, True, "rows")],
    "dropout_p": [{"dropout_p": p} for p in (0.0, 0.3, 0.6, 1.0)],
    "gradients": [
        *({"learns": learns} for learns in ((), ("query",), ("key", "value"), LEAVES, ("bias", "sinks"))),
        {"learns": OPERANDS, "around": "no_grad"},
    ],
    "lse": [{"lse": lse} for lse in (False, True)],
    "weights": [{"weights": weights} for weights in ("heads", "average")],
    "sequences": [{"packed": packed} for packed in _PACKED],
    **{
        field: [{"around": around} for around in ("nothing", name)]
        for field, name in {
            "transformed": "vmap", "dispatching": "dispatch mode", "tracing": "trace", "subclass": "subclass"
        }.items()
    },
    "values": [*({"seed": seed} for seed in (2, 3)), *({"mask_seed": seed} for seed in (2, 3, 4)), {"poison": True}],
}  # fmt: skip
#: Fields whose pairs of calls are in other files.
ELSEWHERE = {
    "device": "test_wrong_values_on_a_hit",
    "is_part": "kernels/test_dropout",
    "formula": "kernels/test_formula",
    "merged": "layer/test_merged_heads",
    "same_sequences": "gpu/pretended/test_sequences",
}

#: Calls on different paths. One setting of them is changed.
BASES: dict[str, Changes] = {
    "unmasked": {},
    "causal": {"mask": "causal", "learns": LEAVES},
    "double": {"dtype": torch.float64, "learns": OPERANDS},
    "everything": {
        **{"dtype": torch.float64, "mask": "causal and keys", "softcap": 2.0, "sinks": True, "lse": True},
        **{"learns": OPERANDS, "poison": True},
    },
    "bias": {"mask": "window and bias", "learns": LEAVES, "lse": True},
}


def settings(base: Changes, changes: Changes) -> Changes:
    """A call, without settings of the base that the changes do not allow."""
    call = {**DEFAULT, **base, **changes}
    if call["packed"] is not None:
        call["length"], call["keys"] = (sum(counts) for counts in zip(*call["packed"], strict=True))
        call |= {"batch": 1, "poison": False, "mask": call["mask"] if call["mask"] in ("causal", "bias") else None}
    if call["weights"] is not None:
        call |= {"lse": False, "sinks": False}
    if call["around"] == "vmap" and call["mask"] not in ("causal", None):
        call |= {"mask": "window", "poison": False}
    if changes.get("layouts"):
        call["poison"] = False
    return call


def leaves_of(call: Changes) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(call["seed"])
    heads = call["heads"], call["kv_heads"], call["kv_heads"]
    sizes = (call["length"], call["dim"]), (call["keys"], call["dim"]), (call["keys"], call["value_dim"])
    leaves: dict[str, Tensor] = {}
    for name, count, size, layout in zip(OPERANDS, heads, sizes, call["layouts"], strict=True):
        drawn = torch.randn(call["batch"], count, *size, generator=random, dtype=torch.float64)
        if call["poison"] and name != "query" and call["mask"] in ("keys", "causal and keys"):
            drawn[:, :, -1] = torch.nan
        leaves[name] = _LAYOUTS[layout](drawn.to(call["dtype"])).detach()
    if call["sinks"]:
        of_rows = (call["batch"], call["heads"], call["length"]) if call["sinks"] == "rows" else (call["heads"],)
        leaves["sinks"] = torch.randn(of_rows, generator=random).to(call["dtype"])
    if call["mask"] in BIASES:
        leaves["bias"] = BIASES[call["mask"]](Sizes(call)).to(call["dtype"])
    return {name: x.requires_grad_(name in call["learns"]) for name, x in leaves.items()}


def _positions(kind: int | str | None, size: int, batch: int) -> Tensor | int | None:
    if not isinstance(kind, str):
        return kind
    random = torch.Generator().manual_seed(5)
    rows = [torch.randperm(size + 3, generator=random)[:size] for _ in range(batch)]
    return rows[0] if kind == "(L,)" else torch.stack(rows)


class Subclass(Tensor):
    """A subclass of tensors without behaviour of its own."""


class Seeing(TorchDispatchMode):
    """Notes the memory that operators return."""

    def __init__(self) -> None:
        super().__init__()
        self.made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = result if isinstance(result, (tuple, list)) else (result,)
        self.made |= {x.untyped_storage().data_ptr() for x in tensors if isinstance(x, Tensor)}
        return result


@contextmanager
def tracing() -> Iterator[None]:
    """As while a graph is recorded, without recording one."""
    before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.compiler._is_compiling_flag = before  # type: ignore[attr-defined]


def results_of(call: Changes, leaves: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """Output, and log-sum-exp or weights."""
    mask = MASKS[call["mask"]](Sizes(call)) if call["mask"] in MASKS else None
    if "bias" in leaves:
        mask = masks.bias(leaves["bias"]) & masks.sliding_window(3 if call["mask"] == "window and bias" else 99, 99)
    options = {"scale": call["scale"], "softcap": call["softcap"]}
    operands = [leaves[name] for name in OPERANDS]
    if call["weights"] is not None:
        torch.manual_seed(3)
        widths = {f"{name[0]}dim": x.shape[1] * x.shape[3] for name, x in zip(OPERANDS, operands, strict=True)}
        module = clearhead.MultiHeadAttention(
            66, call["heads"], num_kv_heads=call["kv_heads"], **widths, **options, dtype=call["dtype"]
        )
        inputs = map(clearhead.merge_heads, operands)
        return module(*inputs, mask=mask, need_weights=True, average_attn_weights=call["weights"] == "average")
    options |= {"sinks": leaves.get("sinks"), "dropout_p": call["dropout_p"], "return_lse": call["lse"]}
    if call["packed"] is not None:
        ends = [torch.tensor([0, *counts]).cumsum(0) for counts in zip(*call["packed"], strict=True)]
        results = clearhead.attention_varlen(*(x[0].transpose(0, 1) for x in operands), *ends, mask, **options)
        return results if isinstance(results, tuple) else (results,)
    for name, size in (("query_positions", call["length"]), ("key_positions", call["keys"])):
        options[name] = _positions(call[name], size, call["batch"])

    def attend(*inputs: Tensor) -> tuple[Tensor, ...]:
        results = clearhead.attention(*inputs, mask, **options)
        return results if isinstance(results, tuple) else (results,)

    if call["around"] == "vmap":
        return tuple(x[0] for x in torch.vmap(attend)(*(x[None] for x in operands)))
    if call["around"] == "subclass":
        return tuple(x.as_subclass(Tensor) for x in attend(*(x.as_subclass(Subclass) for x in operands)))
    contexts = {"no_grad": torch.no_grad, "dispatch mode": Seeing, "trace": tracing}
    with contexts.get(call["around"], nullcontext)() as mode:
        results = attend(*operands)
    # A mode cannot record, replace or move what it does not see.
    assert not isinstance(mode, Seeing) or results[0].untyped_storage().data_ptr() in mode.made
    return results


def run(call: Changes, kernel: str | None) -> list[Tensor] | str:
    """Results and gradients, or `REFUSED` if the forced kernel cannot run the call."""
    leaves = leaves_of(call)
    learning = [x for x in leaves.values() if x.requires_grad]
    torch.manual_seed(29)
    try:
        with nullcontext() if kernel is None else clearhead.use_kernel(kernel):
            results = results_of(call, leaves)
    except KernelError:
        return REFUSED
    if not learning or call["around"] == "no_grad":
        return list(results)
    loss = sum((x[x.isfinite()].double() * torch.linspace(-1, 1, int(x.isfinite().sum()))).sum() for x in results)
    return [*results, *torch.autograd.grad(loss, learning, allow_unused=True, materialize_grads=True)]


def require_same(outcome: list[Tensor] | str, alone: list[Tensor] | str, call: Changes) -> None:
    if isinstance(outcome, str) or isinstance(alone, str):
        assert outcome is alone is REFUSED, f"{outcome}, and alone {alone}: {call}"
        return
    for x, y in zip(outcome, alone, strict=True):
        assert (x.dtype, x.shape, x.requires_grad) == (y.dtype, y.shape, y.requires_grad)
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(x, y, rtol=4 * eps, atol=16 * eps)


def test_every_field_of_a_layout_has_a_case() -> None:
    beside_the_layout = {"mask", "query_positions", "key_positions"}  # in the key of a plan, or read in each call
    assert {*FIELDS, *ELSEWHERE} - {"values"} == {*LAYOUT_FIELDS, *beside_the_layout}


@in_turn({"field": FIELDS}, {"base": BASES}, always=1)
def test_calls_that_differ_in_one_field(field: str, base: str) -> None:
    alternatives = [settings(BASES[base], changes) for changes in FIELDS[field]]
    following = [*alternatives[1:], alternatives[0]] if len(alternatives) > 2 else alternatives[1:]
    for number, pair in enumerate(zip(alternatives, following, strict=False)):
        # PyTorch's kernel does not draw dropout from our seed.
        kernels = SEEDED if any(call["dropout_p"] not in (0.0, 1.0) for call in pair) else KERNELS
        # Of many pairs each is computed by another kernel with every base.
        place = number + [*BASES].index(base)
        for kernel in (kernels[place % len(kernels)],) if len(alternatives) > 2 else kernels:
            require_same_in_turn(pair, kernel)


def require_same_in_turn(pair: tuple[Changes, Changes], kernel: str | None) -> None:
    """In both orders, twice in a row."""
    alone: list[list[Tensor] | str] = []
    for call in pair:
        forget()
        alone.append(run(call, kernel))
    for order in ((0, 1), (1, 0)):
        forget()
        for number in (*order, *order):
            require_same(run(pair[number], kernel), alone[number], pair[number])


@pytest.mark.parametrize("learns", [(), OPERANDS], ids=["eval", "training"])
@pytest.mark.parametrize("order", [(None, "sdpa"), ("sdpa", None)], ids=str)
@pytest.mark.parametrize(
    "extras", [{"softcap": 2.0}, {"sinks": True}, {"lse": True}, {"dtype": torch.bfloat16}], ids=str
)
def test_a_kernel_that_is_forced_for_one_of_two_calls(learns: Any, order: Any, extras: Changes) -> None:
    """The one that refuses does so before and after the one that is chosen has computed the call."""
    call, alone = settings({"learns": learns}, extras), {}
    for kernel in order:
        forget()
        alone[kernel] = run(call, kernel)
    assert (alone["sdpa"] is REFUSED) is ("sinks" not in extras)
    forget()
    for kernel in (*order, *order):
        require_same(run(call, kernel), alone[kernel], call)
