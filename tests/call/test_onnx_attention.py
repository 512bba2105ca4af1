"""Every node test that the `onnx` package carries for Attention, on `clearhead.attention` and the cache."""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx.backend.test.case import node
from torch import Tensor

import clearhead
from clearhead import masks, merge_heads, split_heads
from clearhead.caches import KVCache
from clearhead.masks import Mask

PREFIX = "test_attention_"


@dataclass(frozen=True)
class Case:
    """One node test.

    Args:
        name: ONNX's.
        attributes: of the node.
        inputs: by the operator's names: Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen.
        outputs: those that are judged: Y, present_key, present_value, qk_matmul_output.
        rtol, atol: what ONNX allows.
    """

    name: str
    attributes: dict[str, Any]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    rtol: float
    atol: float


@functools.cache
def cases() -> dict[str, Case]:
    """All cases by name, without those that spell one out in other operators (…_expanded), with its inputs."""
    read: dict[str, Case] = {}
    for name, test in ((test.name, test) for test in _node_tests()):
        if not name.startswith(PREFIX) or "_expanded" in name:
            continue
        first = test.model.graph.node[0]
        assert first.op_type == "Attention"
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in first.attribute}
        for inputs, outputs in test.data_sets:
            assert len(test.data_sets) == 1
            graph = test.model.graph
            given = dict(zip((value.name for value in graph.input), map(_tensor, inputs), strict=True))
            expected = dict(zip((value.name for value in graph.output), map(_tensor, outputs), strict=True))
            read[name] = Case(name, attributes, given, expected, test.rtol, test.atol)
    return read


def _node_tests() -> list[Any]:
    """What importing the module of the operator registers; ONNX's loader would import those of all operators."""
    state = np.random.get_state()
    np.random.seed(0)  # the module draws its inputs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.attention")
    np.random.set_state(state)
    return node._NodeTestCases


def _tensor(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16").copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def run(case: Case) -> dict[str, Tensor]:
    """The operator's outputs, as far as the case judges them."""
    given, attributes = case.inputs, case.attributes
    q, k, v = given["Q"], given["K"], given["V"]
    if q.dim() == 3:
        q = split_heads(q, attributes["q_num_heads"])  # (B, H, L, D)
        k, v = (split_heads(x, attributes["kv_num_heads"]) for x in (k, v))  # (B, Hkv, S, D)
    past = 0
    if "past_key" in given:
        past = given["past_key"].shape[2]
        k, v = _through_a_cache(given["past_key"], given["past_value"], k, v)
    options: dict[str, Any] = {
        "scale": attributes.get("scale"),
        "softcap": attributes.get("softcap", 0.0) or None,
        "query_positions": _query_positions(past, q.shape[2], given.get("nonpad_kv_seqlen")),
    }
    rules = _rules(attributes, given.get("nonpad_kv_seqlen"))
    mask = _mask(given.get("attn_mask"), rules, slice(0, k.shape[2]), k.shape[2])
    output = clearhead.attention(q, k, v, mask, **options)
    outputs = {"Y": output if given["Q"].dim() == 4 else merge_heads(output), "present_key": k, "present_value": v}
    if "qk_matmul_output" in case.outputs:
        outputs["qk_matmul_output"] = _scores(case, q, k, mask, rules, options)
    return {name: outputs[name] for name in case.outputs}


def _through_a_cache(past_key: Tensor, past_value: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    batch, heads, past, dim = past_key.shape
    cache = KVCache(
        batch, heads, past + key.shape[2], dim, value_head_dim=past_value.shape[3], dtype=key.dtype, device=key.device
    )
    cache.update(past_key, past_value)
    found = cache.update(key, value)
    return found.key, found.value


def _query_positions(past: int, length: int, filled: Tensor | None) -> Tensor | int:
    """Queries stand after the past; or at the end of what is filled of every row."""
    if filled is None:
        return past
    return (filled - length)[:, None] + torch.arange(length)


def _rules(attributes: dict[str, Any], filled: Tensor | None) -> Mask | None:
    """Everything that hides by positions."""
    rules: list[Mask] = [masks.causal()] if attributes.get("is_causal") else []
    left, right = (attributes.get(f"{side}_window_size", -1) for side in ("left", "right"))
    if left >= 0 or right >= 0:
        rules.append(masks.sliding_window(*(size if size >= 0 else 1 << 40 for size in (left, right))))
    if filled is not None:
        rules.append(masks.lengths(filled))
    return functools.reduce(lambda a, b: a & b, rules) if rules else None


def _mask(tensor: Tensor | None, rules: Mask | None, columns: slice, length: int) -> Mask | None:
    """The mask of some columns: the operator's tensor, up to four dimensions and hiding what it is too short for."""
    if tensor is None:
        return rules
    tensor = tensor[(None,) * (4 - tensor.dim())]  # (1 or B, 1 or H, 1 or L, S)
    hidden = False if tensor.dtype == torch.bool else -torch.inf
    tensor = torch.nn.functional.pad(tensor, (0, length - tensor.shape[3]), value=hidden)[..., columns]
    mask = masks.keep(tensor) if tensor.dtype == torch.bool else masks.bias(tensor)
    return mask if rules is None else rules & mask


def _scores(case: Case, q: Tensor, k: Tensor, mask: Mask | None, rules: Mask | None, options: Any) -> Tensor:
    """What the case calls qk_matmul_output: 3 the weights; the score of a key is the log-sum-exp of that key alone."""
    mode = case.attributes.get("qk_matmul_output_mode", 0)
    if mode == 3:
        return clearhead.attention_weights(q, k, mask, **options).to(q.dtype)
    options = options if mode > 0 else {**options, "softcap": None}
    columns: list[Tensor] = []
    for j in range(k.shape[2]):
        key = k[:, :, j : j + 1]
        own = _mask(case.inputs.get("attn_mask"), rules, slice(j, j + 1), k.shape[2]) if mode == 2 else None
        _, lse = clearhead.attention(q, key, key, own, **options, key_positions=j, return_lse=True)
        columns.append(lse)
    return torch.stack(columns, -1).to(q.dtype)  # (B, H, L, S)


@pytest.mark.parametrize("kernel", [None, "chunked", "reference"])
@pytest.mark.parametrize("name", cases())
def test_a_case(name: str, kernel: str | None) -> None:
    case = cases()[name]
    with contextlib.nullcontext() if kernel is None else clearhead.use_kernel(kernel):
        found = run(case)
    assert found.keys() == case.outputs.keys()
    for output, expected in case.outputs.items():
        judge(output, found[output], expected, case.rtol, case.atol)


def judge(output: str, found: Tensor, expected: Tensor, rtol: float, atol: float) -> None:
    """Cached keys and values to the last bit, float32 as everywhere here, half precision as ONNX's own runner does."""
    if output.startswith("present"):
        rtol = atol = 0.0
    elif expected.dtype == torch.float32:
        rtol, atol = 0.0, 1e-5 * float(expected[expected.isfinite()].abs().max())
    elif expected.dtype == torch.bfloat16:
        rtol = max(rtol, 2**-6)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=atol, msg=lambda text: f"{output}: {text}")


def test_the_cases_cover_what_they_are_meant_to() -> None:
    """All cases that the package's source names are there, and what the operator can be asked for is in some case."""
    sources = [path.read_text(encoding="utf-8") for path in Path(node.__path__[0]).glob("*.py")]
    assert cases().keys() == {name for text in sources for name in re.findall(rf'"({PREFIX}\w+)"', text)}
    everything = cases().values()
    assert {case.inputs["Q"].dtype for case in everything} == {torch.float32, torch.float16, torch.bfloat16}
    assert {case.inputs["Q"].dim() for case in everything} == {3, 4}
    asked = {name for case in everything for name in (*case.inputs, *case.outputs, *case.attributes)}
    assert asked >= {"past_key", "nonpad_kv_seqlen", "present_value", "qk_matmul_output", "softcap", "is_causal"}
    ranks = {case.inputs["attn_mask"].dim() for case in everything if "attn_mask" in case.inputs}
    assert 3 in ranks, "a mask per head"
