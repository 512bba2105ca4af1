"""What `benchmarks.gpu --check` compares of attention: every mask, dtype and option, forward and backward."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from benchmarks.peers.work import Outputs, Way
from clearhead import Explanation, masks
from clearhead.masks import Mask
from clearhead.positions import ALiBi

__all__ = [
    "DTYPES",
    "Check",
    "Place",
    "attention_checks",
    "drawn",
    "mask_of",
    "named",
    "rounded",
    "short",
    "with_gradients",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS, HEAD_DIM = 4, 64
#: No multiple of 8, so that the rows of masks need padding.
SHORT, LENGTH, LONG = 131, 515, 4096
#: Mixed with the rest, masks of these names run in `chunked`.
UNFUSED = ("ALiBi",)


@final
@dataclass(frozen=True)
class Place:
    """Where and how precisely a call is computed.

    Args:
        device: of the operands.
        dtype: in which they are computed.
        values: whose numbers they have: they are rounded to it before.
        stock: whether PyTorch's own attention computes it.
    """

    device: str
    dtype: torch.dtype
    values: torch.dtype
    stock: bool = False

    def put(self, tensor: Tensor) -> Tensor:
        """Numbers on the device, a leaf of the graph."""
        return tensor.to(self.values).to(self.dtype).to(self.device)


#: Builds one call at a place.
Prepare = Callable[[Place], Way]


@final
@dataclass(frozen=True)
class Check:
    """One call on the device, and what it is compared with.

    Args:
        name: on its line.
        ours: builds the call, on a device.
        exact: the same in float64 on the CPU; ``None`` where only errors are looked for.
        same: the same in the same dtype, whose error ours may have twice. ``None``: `most`.
        most: the largest error, relative to the largest entry of a tensor.
        fused: whether one of PyTorch's fused kernels has to run.
        backend: the one that has to run, as `Seen` names it; ``None`` for any.
        waits: how often Python may wait for the device; ``None`` for any number.
        memory: the most megabytes at the peak.
        stock: PyTorch's own call of the same operands, on a device. Where it is less exact than `same` allows, ours may
            be as inexact.
        compiled: whether it is a graph, which does not ask PyTorch for its choice.
        explain: says which kernel runs.
    """

    name: str
    ours: Callable[[str], Way]
    exact: Way | None
    same: Callable[[str], Outputs] | None = None
    most: float = 1e-5
    fused: bool = True
    backend: str | None = None
    waits: int | None = 0
    memory: float | None = None
    stock: Callable[[str], Outputs] | None = None
    compiled: bool = False
    explain: Callable[[str], Explanation] | None = None


def short(dtype: torch.dtype) -> str:
    return {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.float64: "f64"}[dtype]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    """Random numbers on the CPU, the same for the same seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(output: Tensor, leaves: Sequence[Tensor]) -> Outputs:
    """The output, and the gradients for a fixed gradient of it, which is computed where the output is."""
    count = torch.arange(output.numel(), dtype=torch.float64, device=output.device).reshape(output.shape)
    # Numbers that bfloat16 has.
    gradient = ((count * 0.6180339887).frac() * 64 - 32).round() / 16
    return output.detach(), *torch.autograd.grad(output, leaves, gradient.to(output.dtype))


def rounded(name: str, dtype: torch.dtype, prepare: Prepare, stock: bool = False, **options: Any) -> Check:
    """A check of one prepared call: beside float64 on the CPU, in half precision also beside the same dtype there."""

    def of_stock(device: str) -> Outputs:
        return prepare(Place(device, dtype, dtype, stock=True))()

    def on_reference(dtype_of_call: torch.dtype) -> Outputs:
        with clearhead.use_kernel("reference"):
            return prepare(Place("cpu", dtype_of_call, dtype))()

    same = None if dtype in (torch.float32, torch.float64) else lambda _: on_reference(dtype)
    options.setdefault("most", 1e-10 if dtype == torch.float64 else 1e-5)
    return Check(
        f"{name} {short(dtype)}",
        lambda device: prepare(Place(device, dtype, dtype)),
        lambda: on_reference(torch.float64),
        same,
        stock=of_stock if stock and same is not None else None,
        **options,
    )


def _lengths(length: int) -> Tensor:
    return torch.tensor([length, length * 7 // 10])


def _real(length: int, device: str) -> Tensor:
    return (torch.arange(length) < _lengths(length)[:, None]).to(device)


def _left_padded(length: int, device: str) -> Mask:
    """Texts end at the last column."""
    return masks.keep(keys=_real(length, device).flip(1))


def _bias(length: int, device: str) -> Mask:
    return masks.bias(drawn(1, HEADS, length, length, seed=3).bfloat16().float().to(device))


#: Masks of as many queries as keys. Tensors of lengths and documents lie on the device, except where the name says so.
MASKS: dict[str, Callable[[int, str], Mask | None]] = {
    "none": lambda length, device: None,
    "lengths": lambda length, device: masks.lengths(_lengths(length).to(device)),
    "left-padded": _left_padded,
    "window": lambda length, device: masks.sliding_window(length // 10, length // 10),
    "documents": lambda length, device: masks.documents((torch.arange(length) // (length // 7)).to(device)),
    "keep": lambda length, device: masks.keep(_pattern(length).to(device)),
    "drop": lambda length, device: masks.drop(keys=~_real(length, device)),
    "bias": _bias,
    "prefix": lambda length, device: masks.prefix(length // 10),
    "ALiBi": lambda length, device: ALiBi(HEADS),
}


def _pattern(length: int) -> Tensor:
    """(L, L), every query sees some keys."""
    return (torch.arange(length)[:, None] * 3 + torch.arange(length)) % 5 != 0


def mask_of(name: str, causal: bool, length: int, device: str) -> Mask | None:
    mask = MASKS[name](length, device)
    return mask if not causal else masks.causal() if mask is None else mask & masks.causal()


def named(name: str, length: int, device: str) -> Mask | None:
    """One of `MASKS`, or ``"causal"``."""
    return masks.causal() if name == "causal" else MASKS[name](length, device)


def _operands(
    place: Place, shape: tuple[int, int, int, int] = (2, HEADS, LENGTH, HEAD_DIM), kv: tuple[int, int] | None = None
) -> list[Tensor]:
    """Query, key and value: ``kv`` has the heads and the length of the latter two."""
    batch, _, _, dim = shape
    heads, keys = kv or (shape[1], shape[2])
    shapes = (shape, (batch, heads, keys, dim), (batch, heads, keys, dim))
    return [place.put(drawn(*each, seed=number)).requires_grad_() for number, each in enumerate(shapes, 11)]


def _attend(mask: Callable[[str], Mask | None], poisoned: bool, options: dict[str, Any], place: Place) -> Way:
    """Forward and backward."""
    query, key, value = _operands(place)
    if poisoned:  # padding that holds NaN
        with torch.no_grad():
            for x in (key, value):
                x[1, :, int(_lengths(LENGTH)[1]) :] = torch.nan
    made = mask(place.device)
    if place.stock:
        return lambda: with_gradients(_stock(query, key, value, made), (query, key, value))
    return lambda: with_gradients(clearhead.attention(query, key, value, made, **options), (query, key, value))


def _stock(query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
    """PyTorch's attention with a tensor of the mask."""
    visible = None if mask is None else mask.dense(query.shape[2], key.shape[2]).to(query.device)
    return F.scaled_dot_product_attention(query, key, value, visible, enable_gqa=key.shape[1] != query.shape[1])


def _explain(mask: Callable[[str], Mask | None], dtype: torch.dtype, device: str) -> Explanation:
    query, key, value = _operands(Place(device, dtype, dtype))
    return clearhead.explain(query, key, value, mask(device))


def attention_checks() -> Iterator[Check]:
    """Every mask alone and with causal, in every dtype; then options, shapes and packed sequences."""
    for name in MASKS:
        for causal in (False, True):
            for dtype in DTYPES:
                mask = partial(mask_of, name, causal, LENGTH)
                label = name if not causal else f"{name} & causal" if name != "none" else "causal"
                yield rounded(
                    label,
                    dtype,
                    partial(_attend, mask, name in ("lengths", "drop"), {}),
                    name in ("none", "window", "documents", "prefix", "keep"),
                    fused=name not in UNFUSED,
                    explain=partial(_explain, mask, dtype),
                )
    yield from _options()
    yield from _shapes()
    yield from _packed()
    yield from _of_weights()


def _options() -> Iterator[Check]:
    half = torch.bfloat16
    prepared = partial(_attend, _prepared, False, {})
    yield rounded("prepared lengths & causal", half, prepared)
    yield rounded(
        "lengths on the CPU", half, partial(_attend, lambda _: masks.lengths(_lengths(LENGTH)), False, {}), waits=None
    )
    yield rounded(
        "an empty row",
        half,
        partial(_attend, lambda _: masks.lengths(torch.tensor([LENGTH, 0])), False, {}),
        waits=None,
    )
    causal = partial(named, "causal", LENGTH)
    yield rounded("causal, float64", torch.float64, partial(_attend, causal, False, {}), fused=False)
    yield rounded("causal, soft-cap", half, partial(_attend, causal, False, {"softcap": 20.0}), fused=False)
    for dtype in (torch.float32, half):
        yield rounded("causal, lse", dtype, partial(_with_lse, causal, LENGTH), fused=False)
    # In half precision the gradient of a sink has the rounding of the output.
    yield rounded("causal, sinks", torch.float32, partial(_with_sinks, causal, True), waits=None)
    yield rounded("causal, frozen sinks", half, partial(_with_sinks, causal, False), waits=None)
    # Enough scores for FlexAttention, and a length of whole blocks and another.
    for name, length in (("causal", 768), ("documents", 771), ("lengths", 768), ("lengths", 771)):
        mask = partial(mask_of, "none" if name == "causal" else name, True, length)
        yield rounded(f"{name}, lse, L={length}", half, partial(_with_lse, mask, length), stock=True, backend="flex")
    yield Check("dropout runs", _with_dropout, None)
    yield rounded("causal, learned bias, L=768", half, _with_bias, backend="flex")
    for name in ("none", "causal", "lengths", "window"):
        # (B, H, L, S) in the inputs' dtype would take 268 MB.
        mask = partial(named, name, LONG)
        yield Check(f"L={LONG} {name} bf16, memory", partial(_long, mask), None, memory=150.0)


def _prepared(device: str) -> Mask:
    mask = masks.lengths(_lengths(LENGTH)) & masks.causal()
    return mask.prepare(LENGTH, LENGTH, batch_size=2, num_heads=HEADS, device=device)


def _with_lse(mask: Callable[[str], Mask | None], length: int, place: Place) -> Way:
    query, key, value = _operands(place, (2, HEADS, length, HEAD_DIM))
    made = mask(place.device)
    attend = _stock_with_lse(made, query) if place.stock else partial(clearhead.attention, mask=made, return_lse=True)

    def run() -> Outputs:
        output, lse = attend(query, key, value)
        gradients = torch.autograd.grad((output.float().sum() + lse.sum()), (query, key, value))
        return output.detach(), lse.detach(), *gradients

    return run


def _stock_with_lse(mask: Mask | None, query: Tensor) -> Callable[..., tuple[Tensor, Tensor]]:
    """PyTorch's FlexAttention with a tensor of the mask, compiled."""
    flex = importlib.import_module("torch.nn.attention.flex_attention")
    batch, heads, length, _ = query.shape
    visible = torch.ones(1, 1, length, length, dtype=torch.bool) if mask is None else mask.dense(length, length)
    visible = visible.to(query.device).expand(batch, heads, -1, -1)

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return visible[b, h, i, j]

    blocks = flex.create_block_mask(rule, batch, heads, length, length, query.device)
    compiled: Any = torch.compile(flex.flex_attention, dynamic=False)

    def attend(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        output, others = compiled(query, key, value, block_mask=blocks, return_aux=flex.AuxRequest(lse=True))
        return output, others.lse

    return attend


def _with_sinks(mask: Callable[[str], Mask | None], learned: bool, place: Place) -> Way:
    query, key, value = leaves = _operands(place)
    sinks, made = place.put(drawn(HEADS, seed=5)), mask(place.device)
    wanted = (*leaves, sinks.requires_grad_()) if learned else leaves
    return lambda: with_gradients(clearhead.attention(query, key, value, made, sinks=sinks), wanted)


def _with_bias(place: Place) -> Way:
    leaves = query, key, value = _operands(place, (2, HEADS, 768, HEAD_DIM))
    numbers = drawn(1, HEADS, 768, 768, seed=5).to(place.device, torch.promote_types(place.dtype, torch.float32))
    mask = masks.causal() & masks.bias(numbers.requires_grad_())
    return lambda: with_gradients(clearhead.attention(query, key, value, mask), (*leaves, numbers))


def _with_dropout(device: str) -> Way:
    leaves = query, key, value = _operands(Place(device, torch.bfloat16, torch.bfloat16))
    return lambda: with_gradients(clearhead.attention(query, key, value, masks.causal(), dropout_p=0.1), leaves)


def _long(mask: Callable[[str], Mask | None], device: str) -> Way:
    place = Place(device, torch.bfloat16, torch.bfloat16)
    length = LONG if device != "cpu" else LENGTH
    query, key, value = (x.detach() for x in _operands(place, (2, HEADS, length, HEAD_DIM)))
    made = mask(device) if length == LONG else None
    return lambda: (clearhead.attention(query, key, value, made),)


def _shaped(shape: tuple[int, int, int, int], kv: tuple[int, int], mask: Mask | None, place: Place) -> Way:
    leaves = query, key, value = _operands(place, shape, kv)
    if place.stock:
        return lambda: with_gradients(_stock(query, key, value, mask), leaves)
    return lambda: with_gradients(clearhead.attention(query, key, value, mask), leaves)


def _shapes() -> Iterator[Check]:
    for label, shape, kv, mask in (
        ("grouped heads", (2, 8, 96, 64), (2, 96), masks.causal()),
        ("grouped heads, one row", (2, 8, 1, 64), (2, 200), None),
        ("grouped heads, few rows", (2, 8, 5, 64), (2, 200), masks.causal("bottom_right")),
        ("L≠S, bottom right", (2, 4, 33, 64), (4, 200), masks.causal("bottom_right")),
        ("D=128", (1, 4, 257, 128), (4, 257), masks.causal()),
        ("D=80", (1, 4, 257, 80), (4, 257), masks.causal()),
        ("D=256", (1, 2, 130, 256), (2, 130), masks.causal()),
        ("D=24", (1, 2, 130, 24), (2, 130), None),
        ("one key", (1, 2, 7, 64), (2, 1), None),
    ):
        for dtype in (torch.float32, torch.bfloat16) if "grouped" in label else (torch.bfloat16,):
            yield rounded(label, dtype, partial(_shaped, shape, kv, mask), True)
    # PyTorch's fused kernels take multiples of 8 in half precision.
    yield rounded(
        "D=13", torch.bfloat16, partial(_shaped, (1, 2, 130, 13), (2, 130), masks.causal()), True, fused=False
    )


def _packed() -> Iterator[Check]:
    for name, mask in (("", None), (", causal", masks.causal()), (", window", masks.sliding_window(30, 20))):
        for dtype in DTYPES:
            yield rounded(
                f"packed{name}", dtype, partial(_sequences, mask, HEADS, "longest"), waits=None if name else 0
            )
    half = torch.bfloat16
    yield rounded("packed, grouped heads", half, partial(_sequences, masks.causal(), 2, "longest"))
    yield rounded("packed, longest unknown", half, partial(_sequences, masks.causal(), HEADS, "unknown"))
    yield rounded("packed, lse", half, partial(_sequences_lse, masks.causal()))


def _boundaries(device: str) -> Tensor:
    return torch.tensor([0, 5, 200, 201, 460, LENGTH], dtype=torch.int32).to(device)


def _tokens(place: Place, kv_heads: int) -> list[Tensor]:
    shapes = ((LENGTH, HEADS, HEAD_DIM), *((LENGTH, kv_heads, HEAD_DIM),) * 2)
    return [place.put(drawn(*each, seed=number)).requires_grad_() for number, each in enumerate(shapes, 21)]


def _sequences(mask: Mask | None, kv_heads: int, longest: Literal["longest", "unknown"], place: Place) -> Way:
    leaves, ends = _tokens(place, kv_heads), _boundaries(place.device)
    options = {"max_seqlen_q": 259, "max_seqlen_k": 259} if longest == "longest" else {}
    attend: Any = clearhead.attention_varlen
    return lambda: with_gradients(attend(*leaves, ends, ends, mask, **options), leaves)


def _sequences_lse(mask: Mask | None, place: Place) -> Way:
    tokens, ends = [x.detach() for x in _tokens(place, HEADS)], _boundaries(place.device)
    attend: Any = clearhead.attention_varlen
    return lambda: attend(*tokens, ends, ends, mask, max_seqlen_q=259, max_seqlen_k=259, return_lse=True)


def _of_weights() -> Iterator[Check]:
    """Weights and their gradients: each mask, then options and shapes."""
    square, half = ((2, HEADS, SHORT, HEAD_DIM), (HEADS, SHORT)), torch.bfloat16
    causal = partial(named, "causal", SHORT)
    for dtype in DTYPES:
        yield rounded("weights", dtype, partial(_weights, *square, causal, {}), fused=False)
        average = {"average_attn_weights": True}
        yield rounded("averaged weights", dtype, partial(_weights, *square, causal, average), fused=False)
    for name in MASKS:
        mask = partial(named, name, SHORT)
        yield rounded(f"weights, {name}", torch.float32, partial(_weights, *square, mask, {}), fused=False)
    chosen = {"queries": [3, SHORT - 1, 3, 0]}
    yield rounded("weights, chosen", half, partial(_weights, *square, causal, chosen), fused=False, waits=None)
    capped = {"softcap": 5.0, "sinks": drawn(HEADS, seed=5)}
    yield rounded("weights, soft-cap and sinks", half, partial(_weights, *square, causal, capped), fused=False)
    # Each size of a head and each mask is compiled. `benchmarks.gpu.kernels` checks more of them.
    for dtype, dim in ((torch.float32, 128), (half, 80), (half, 256)):
        make = partial(_weights, (1, 8, 67, dim), (2, SHORT), lambda _: masks.causal("bottom_right"), {})
        yield rounded(f"weights, grouped heads, D={dim}", dtype, make, fused=False)


def _weights(
    shape: tuple[int, int, int, int],
    kv: tuple[int, int],
    mask: Callable[[str], Mask | None],
    options: dict[str, Any],
    place: Place,
) -> Way:
    query, key, _ = _operands(place, shape, kv)
    leaves, given, made = [query, key], dict(options), mask(place.device)
    if "sinks" in given:
        given["sinks"] = place.put(given["sinks"]).requires_grad_()
        leaves.append(given["sinks"])
    return lambda: with_gradients(clearhead.attention_weights(query, key, made, **given), leaves)
