"""The steps of a call, computed by the module's `Layer` and the `reference` kernel.

The step before a norm, a position part, a soft-cap or a mask is the same computation without that part.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from math import isclose, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from .._call.call import Call, Results, valid_call, zero_hidden
from .._call.heads import merge_heads
from .._environment import Environment, autocast_off, read_environment
from .._layer.layer import Layer
from .._multihead import MultiHeadAttention, layer_of
from ..kernels._reference import reference_results, reference_scores, reference_weights
from ..masks import Mask
from ..masks._bound import bind
from ..masks._grid import Grid
from ..masks._lowering import dense_mask
from ..masks._tensors import as_mask

_SCORES = "(B, H, L, S)"

Tensors = tuple[Tensor, Tensor, Tensor]  # of query, key and value


@cache
def words_in(language: str) -> dict[str, Any]:
    """The text in one language: ``letters`` of shapes, ``steps`` with title and meaning, and other ``phrases``."""
    file = resources.files("clearhead.inspection").joinpath(f"walkthrough_{language}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


@dataclass(frozen=True, eq=False)
class Step:
    """One step of the call.

    Args:
        name: an English name, such as ``"scores"``, which is the same in all languages.
        title: the heading, in the language of the walkthrough.
        symbols: the shape in letters, such as ``"(B, H, L, S)"``.
        shape: the shape in numbers.
        formula: the formula of the result.
        meaning: one or two sentences for a reader who is new to attention.
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
    """Collects the steps with their text in one language."""

    def __init__(self, language: str) -> None:
        self.words = words_in(language)
        self.sizes: dict[str, int] = {}
        self.steps: list[Step] = []

    @property
    def operands(self) -> tuple[tuple[str, str, str], ...]:
        """Name, letter of the heads and letter of the length of query, key and value."""
        kv = "Hkv" if "Hkv" in self.sizes else "H"
        return ("query", "H", "L"), ("key", kv, "S"), ("value", kv, "S")

    def add(self, name: str, symbols: str, formula: str, tensor: Tensor, *, words: str = "", **numbers: object) -> None:
        text = self.words["steps"][words or name]
        meaning = text["meaning"].format(**self.sizes, **numbers)
        self.steps.append(Step(name, text["title"], symbols, tuple(tensor.shape), formula, meaning, tensor))


def take_steps(
    recorder: Recorder, module: MultiHeadAttention, inputs: Tensors, mask: Mask | Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute and record every step. Returns the output (B, L, E) and the fully masked rows (B, H, L)."""
    environment = read_environment()
    layer = layer_of(module, environment)
    _name_sizes(recorder, module, inputs)
    projections = _project(recorder, module, layer, inputs)
    operands = _make_heads(recorder, layer, projections, environment)
    with autocast_off(inputs[0]):
        mixed, hidden_rows = _attend(recorder, layer, operands, mask, environment)
    merged = merge_heads(mixed)
    recorder.add("merge", "(B, L, H·D)", "merge_heads(o)", merged)
    if module.gate_proj is not None:
        factors = f"sigmoid({_linear_formula('', 'query', 'g', module.gate_proj).removeprefix(' = ')})"
        recorder.add("gate", "(B, L, H·D)", f"o = o · {factors}", layer.gated(merged, inputs[0]))
    output, _ = layer.projected_out(Results(mixed), inputs[0], environment)
    recorder.add("output_projection", "(B, L, E)", _linear_formula("output", "o", "o", module.out_proj), output)
    return output, hidden_rows


def _name_sizes(recorder: Recorder, module: MultiHeadAttention, inputs: Tensors) -> None:
    sizes = recorder.sizes
    sizes["B"], sizes["H"] = inputs[0].shape[0], module.num_heads
    if module.num_kv_heads != module.num_heads:
        sizes["Hkv"] = module.num_kv_heads
    sizes["L"], sizes["S"] = inputs[0].shape[1], inputs[1].shape[1]
    sizes["D"], sizes["E"] = module.head_dim, module.embed_dim
    for letter, tensor in zip(("Eq", "Ek", "Ev"), inputs, strict=True):
        if tensor.shape[-1] != module.embed_dim:
            sizes[letter] = tensor.shape[-1]


def _project(recorder: Recorder, module: MultiHeadAttention, layer: Layer, inputs: Tensors) -> Tensors:
    """Record each input once, and the projections (B, length, heads·D). Returns the projections."""
    query, key, value = inputs
    key_source = "query" if key is query else "key"
    sources = "query", key_source, key_source if value is key else "value"
    for (name, _, length), source, tensor in zip(recorder.operands, sources, inputs, strict=True):
        if source == name:
            width = f"E{name[0]}" if f"E{name[0]}" in recorder.sizes else "E"
            step = "input" if name == "query" else f"{name}_input"
            recorder.add(step, f"(B, {length}, {width})", name, tensor)
    projections = layer.project(*inputs, layer.multiply)
    for (name, heads, length), source, tensor in zip(recorder.operands, sources, projections, strict=True):
        formula = _linear_formula(name[0], source, name[0], module.get_submodule(f"{name[0]}_proj"))
        recorder.add(f"{name}_projection", f"(B, {length}, {heads}·D)", formula, tensor)
    return projections


def _make_heads(recorder: Recorder, layer: Layer, projections: Tensors, environment: Environment) -> Tensors:
    """Record the heads, the norms and the position part. Returns query, key and value of the attention call."""

    def add(step: str, formula: str, tensors: Tensors, parts: tuple[object, ...]) -> None:
        for (name, heads, length), part, tensor in zip(recorder.operands, parts, tensors, strict=True):
            if part is not None:
                text = formula.format(x=name[0], heads=heads, part=getattr(part, "__name__", type(part).__name__))
                width = projections[0].shape[-1]
                recorder.add(f"{name}_{step}", f"(B, {heads}, {length}, D)", text, tensor, query_width=width)

    def heads(**without: Any) -> Tensors:
        # Copies, because norms and position parts may write in place.
        q, k, v = (tensor.clone() for tensor in projections)
        return replace(layer, project=lambda *_: (q, k, v), **without).projected(q, k, v, 0, environment)

    operands = heads()
    add("heads", "split_heads({x}, {heads})", heads(q_norm=None, k_norm=None, position=None), operands)
    add("norm", "{x} = {part}({x})", heads(position=None), (layer.q_norm, layer.k_norm, None))
    add("position", "q, k = {part}(q, k, 0 … L-1)", operands, (layer.position, layer.position, None))
    group = layer.num_heads // layer.num_kv_heads
    if group > 1:
        shared = operands[1].repeat_interleave(group, dim=1)  # (B, H, S, D)
        sharing = _sharing(recorder, layer.num_kv_heads, group)
        recorder.add("shared_heads", "(B, H, S, D)", f"k_h = k_(h // {group})", shared, group=group, sharing=sharing)
    return operands


def _attend(
    recorder: Recorder, layer: Layer, operands: Tensors, mask: Mask | Tensor | None, environment: Environment
) -> tuple[Tensor, Tensor]:
    """Record scores, weights and sums. Returns the sums (B, H, L, D) and the fully masked rows (B, H, L)."""
    options: dict[str, Any] = {**layer.options, "mask": layer.combined(mask)}

    def call_of(**changes: Any) -> Call:
        return valid_call(Call(*operands, **{**options, **changes}), environment)

    call = call_of(softcap=None, mask=None)
    scores = reference_scores(call)
    origin = "1/√D = " if isclose(call.layout.scale, 1 / sqrt(operands[0].shape[-1])) else ""
    formula = f"s_ij = scale · q_i·k_j, scale = {origin}{call.layout.scale:.4g}"
    recorder.add("scores", _SCORES, formula, scores)
    if options.get("softcap") is not None:
        scores = reference_scores(call_of(mask=None))
        cap = f"{options['softcap']:.4g}"
        recorder.add("softcap", _SCORES, f"s_ij = {cap} · tanh(s_ij / {cap})", scores, softcap=cap)
    hidden, module_mask = torch.zeros_like(scores, dtype=torch.bool), layer.combined(None)
    if module_mask is not None:
        scores = reference_scores(call_of(mask=module_mask))
        hidden = _add_mask(recorder, "own_mask", module_mask, call.grid, scores)
    if mask is not None:
        scores = reference_scores(call_of())
        hidden = hidden | _add_mask(recorder, "mask", as_mask(mask), call.grid, scores)
    else:
        recorder.add("mask", _SCORES, "s_ij", scores, words="mask_none" if module_mask is None else "mask_own_only")
    call = zero_hidden(call_of())
    total, words = "Σ_j exp(s_ij)", "softmax"
    if call.finite_sinks is not None:
        recorder.add("sinks", "(H,)", "sink_h", call.finite_sinks)
        total, words = f"({total} + exp(sink_h))", "softmax_sinks"
    recorder.add("softmax", _SCORES, f"p_ij = exp(s_ij) / {total}", reference_weights(call)[0], words=words)
    mixed = reference_results(call).output
    recorder.add("weighted_sum", "(B, H, L, D)", "o_i = Σ_j p_ij · v_j", mixed)
    return mixed, hidden.all(-1)


def _add_mask(recorder: Recorder, name: str, mask: Mask, grid: Grid, scores: Tensor) -> Tensor:
    """Record the scores under a mask. Returns a bool tensor of the scores that it hides."""
    phrases, words = recorder.words["phrases"], name
    dense, formula = dense_mask(bind(mask, grid)), phrases["hidden"]  # (B, H, L, S)
    hidden = dense.isneginf() if dense.is_floating_point() else ~dense
    if dense.is_floating_point():
        formula, words = phrases["biased"] + phrases["separator"] + formula, "mask_bias" if name == "mask" else name
    numbers = {"hidden": int(hidden.sum()), "total": hidden.numel(), "rule": mask.describe()}
    recorder.add(name, _SCORES, formula, scores, words=words, **numbers)
    return hidden


def _linear_formula(result: str, source: str, letter: str, layer: nn.Module) -> str:
    """``q = query · W_q^T + b_q``, or a call if the layer is no linear layer."""
    if not isinstance(layer, nn.Linear):
        return f"{result} = {type(layer).__name__}({source})"
    bias = f" + b_{letter}" if layer.bias is not None else ""
    return f"{result} = {source} · W_{letter}^T{bias}"


def _sharing(recorder: Recorder, num_kv_heads: int, group: int) -> str:
    phrases = recorder.words["phrases"]
    kv_heads = range(min(num_kv_heads, 4))
    shown = [phrases["sharing"].format(first=kv * group, last=kv * group + group - 1, kv=kv) for kv in kv_heads]
    return phrases["separator"].join(shown + ["…"] * (num_kv_heads > len(shown)))
