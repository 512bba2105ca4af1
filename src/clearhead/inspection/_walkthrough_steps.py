"""The steps themselves: each computes its tensor the textbook way and records what it did."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isclose, sqrt

import torch
from torch import Tensor, nn

from .._call.heads import merge_heads, split_heads
from .._multihead import MultiHeadAttention
from ..masks import Mask
from ..masks._grid import Grid
from ..masks._lowering import dense_mask
from ..masks._tensors import as_mask
from ._walkthrough_text import LANGUAGES


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the call.

    Args:
        name: stable English name, the same in every language: ``"scores"``.
        title: its heading, in the language of the walkthrough.
        symbols: the shape in letters: ``"(B, H, L, S)"``.
        shape: the shape in numbers.
        formula: what is computed.
        meaning: one or two sentences for someone who meets attention for the first time.
        tensor: the result of the step.
    """

    name: str
    title: str
    symbols: str
    shape: tuple[int, ...]
    formula: str
    meaning: str
    tensor: Tensor = field(repr=False)


class Recorder:
    """Collects steps, looking up their words."""

    def __init__(self, language: str) -> None:
        self.words = LANGUAGES[language]
        self.sizes: dict[str, int] = {}
        self.steps: list[Step] = []

    def add(self, name: str, symbols: str, formula: str, tensor: Tensor, *, words: str = "", **numbers: object) -> None:
        text = self.words.steps[words or name]
        meaning = text.meaning.format(**self.sizes, **numbers)
        self.steps.append(Step(name, text.title, symbols, tuple(tensor.shape), formula, meaning, tensor))


def take_steps(
    recorder: Recorder,
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask | Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute and record every step; returns the output (B, L, E) and which rows (B, H, L) see no key."""
    keys_from = query if key is None else key
    values_from = keys_from if value is None else value
    _name_sizes(recorder, module, query, keys_from, values_from)
    _add_inputs(recorder, query, keys_from, values_from)
    q, k, v = _project(recorder, module, query, keys_from, values_from)
    q, k, v = _split(recorder, module, q, k, v)
    compute = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    with torch.autocast(q.device.type, enabled=False):
        scores = _score(recorder, module, q.to(compute), k.to(compute))
        scores, visible = _hide(recorder, scores, mask)
        collected = _collect(recorder, scores, visible, v.to(compute)).to(q.dtype)
    merged = merge_heads(collected)  # (B, L, H·D)
    recorder.add("merge", "(B, L, H·D)", "merge_heads(o)", merged)
    output = module.out_proj(merged)  # (B, L, E)
    recorder.add("output_projection", "(B, L, E)", _linear_formula("output", "o", "o", module.out_proj), output)
    return output, ~visible.any(-1)


def _name_sizes(
    recorder: Recorder, module: MultiHeadAttention, query: Tensor, keys_from: Tensor, values_from: Tensor
) -> None:
    sizes = recorder.sizes
    sizes["B"], sizes["H"] = query.shape[0], module.num_heads
    if module.num_kv_heads != module.num_heads:
        sizes["Hkv"] = module.num_kv_heads
    sizes["L"], sizes["S"], sizes["D"], sizes["E"] = (
        query.shape[1],
        keys_from.shape[1],
        module.head_dim,
        module.embed_dim,
    )
    for letter, tensor in (("Eq", query), ("Ek", keys_from), ("Ev", values_from)):
        if tensor.shape[-1] != module.embed_dim:
            sizes[letter] = tensor.shape[-1]


def _add_inputs(recorder: Recorder, query: Tensor, keys_from: Tensor, values_from: Tensor) -> None:
    width = {letter: letter if letter in recorder.sizes else "E" for letter in ("Eq", "Ek", "Ev")}
    recorder.add("input", f"(B, L, {width['Eq']})", "query", query)
    if keys_from is not query:
        recorder.add("key_input", f"(B, S, {width['Ek']})", "key", keys_from)
    if values_from is not keys_from:
        recorder.add("value_input", f"(B, S, {width['Ev']})", "value", values_from)


def _project(
    recorder: Recorder, module: MultiHeadAttention, query: Tensor, keys_from: Tensor, values_from: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    key_source = "query" if keys_from is query else "key"
    value_source = key_source if values_from is keys_from else "value"
    kv_width = _kv_heads(recorder) + "·D"
    q = module.q_proj(query)  # (B, L, H·D)
    recorder.add("query_projection", "(B, L, H·D)", _linear_formula("q", "query", "q", module.q_proj), q)
    k = module.k_proj(keys_from)  # (B, S, Hkv·D)
    recorder.add("key_projection", f"(B, S, {kv_width})", _linear_formula("k", key_source, "k", module.k_proj), k)
    v = module.v_proj(values_from)  # (B, S, Hkv·D)
    formula = _linear_formula("v", value_source, "v", module.v_proj)
    recorder.add("value_projection", f"(B, S, {kv_width})", formula, v)
    return q, k, v


def _split(
    recorder: Recorder, module: MultiHeadAttention, q: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    kv = _kv_heads(recorder)
    q_heads = split_heads(q, module.num_heads)  # (B, H, L, D)
    k_heads = split_heads(k, module.num_kv_heads)  # (B, Hkv, S, D)
    v_heads = split_heads(v, module.num_kv_heads)  # (B, Hkv, S, D)
    recorder.add("query_heads", "(B, H, L, D)", "split_heads(q, H)", q_heads, query_width=q.shape[-1])
    recorder.add("key_heads", f"(B, {kv}, S, D)", f"split_heads(k, {kv})", k_heads)
    recorder.add("value_heads", f"(B, {kv}, S, D)", f"split_heads(v, {kv})", v_heads)
    group = module.num_heads // module.num_kv_heads
    if group > 1:
        k_heads = k_heads.repeat_interleave(group, dim=1)  # (B, H, S, D)
        v_heads = v_heads.repeat_interleave(group, dim=1)  # (B, H, S, D)
        sharing = _sharing(recorder, module.num_kv_heads, group)
        recorder.add("shared_heads", "(B, H, S, D)", f"k_h = k_(h // {group})", k_heads, group=group, sharing=sharing)
    return q_heads, k_heads, v_heads


def _score(recorder: Recorder, module: MultiHeadAttention, q: Tensor, k: Tensor) -> Tensor:
    default = 1 / sqrt(module.head_dim)
    scale = default if module.scale is None else module.scale
    origin = "1/√D = " if isclose(scale, default) else ""
    scores = scale * (q @ k.transpose(-2, -1))  # (B, H, L, S)
    recorder.add("scores", "(B, H, L, S)", f"s_ij = scale · q_i·k_j, scale = {origin}{scale:.4g}", scores)
    return scores


def _hide(recorder: Recorder, scores: Tensor, mask: Mask | Tensor | None) -> tuple[Tensor, Tensor]:
    batch, heads, queries, keys = scores.shape
    if mask is None:
        recorder.add("mask", "(B, H, L, S)", "s_ij", scores, words="mask_none")
        return scores, torch.ones_like(scores, dtype=torch.bool)
    dense = dense_mask(as_mask(mask), Grid(batch, heads, queries, keys, scores.device))  # (B, H, L, S)
    phrases = recorder.words.phrases
    formula, words = phrases["hidden"], "mask"
    if dense.dtype == torch.bool:
        visible = dense
    else:
        visible = dense != float("-inf")
        scores = scores + dense.to(scores.dtype)
        formula, words = phrases["biased"] + phrases["separator"] + formula, "mask_bias"
    scores = scores.masked_fill(~visible, float("-inf"))
    hidden = int((~visible).sum())
    recorder.add("mask", "(B, H, L, S)", formula, scores, words=words, hidden=hidden, total=scores.numel())
    return scores, visible


def _collect(recorder: Recorder, scores: Tensor, visible: Tensor, v: Tensor) -> Tensor:
    weights = scores.softmax(-1).masked_fill(~visible, 0.0)  # (B, H, L, S)
    recorder.add("softmax", "(B, H, L, S)", "p_ij = exp(s_ij) / Σ_j exp(s_ij)", weights)
    unseen = ~visible.any(-2)  # (B, H, S)
    collected = weights @ v.masked_fill(unseen[..., None], 0.0)  # (B, H, L, D); NaN in padding stays out
    recorder.add("weighted_sum", "(B, H, L, D)", "o_i = Σ_j p_ij · v_j", collected)
    return collected


def _kv_heads(recorder: Recorder) -> str:
    return "Hkv" if "Hkv" in recorder.sizes else "H"


def _linear_formula(result: str, source: str, letter: str, layer: nn.Module) -> str:
    """``q = query · W_q^T + b_q``, or the call itself where the layer was replaced by something else."""
    if not isinstance(layer, nn.Linear):
        return f"{result} = {type(layer).__name__}({source})"
    bias = f" + b_{letter}" if layer.bias is not None else ""
    return f"{result} = {source} · W_{letter}^T{bias}"


def _sharing(recorder: Recorder, num_kv_heads: int, group: int) -> str:
    phrases = recorder.words.phrases
    shown = [
        phrases["sharing"].format(first=kv * group, last=kv * group + group - 1, kv=kv)
        for kv in range(min(num_kv_heads, 4))
    ]
    if num_kv_heads > len(shown):
        shown.append("…")
    return phrases["separator"].join(shown)
