"""One call of a module that is split over processes, against one process."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import clearhead
from clearhead.distributed import context_parallel, shard_sequence, tensor_parallel
from tests.support.statistics_oracle import EVERY

from .building import full, gradients, largest, require_within
from .processes import line, square

SEED = 4
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5}
#: Options of `clearhead.record`: all there is of a call.
EVERY_STATISTIC: dict[str, Any] = {"statistics": (*EVERY, "rows", "output"), "top_k": 5, "map_size": 7}


def compare_in_parts(
    whole: nn.Module,
    mesh: DeviceMesh | None,
    *inputs: Tensor,
    method: Any = "auto",
    layout: Any = "contiguous",
    prepare: Callable[[Any], Any] = lambda module: module,
    averaged: DeviceMesh | None = None,
    what: str = "",
    **options: Any,
) -> Any:
    """Raise unless output and every gradient are those of one process; the module on parts.

    Gradients are those of the module's parameters, of the inputs, and of the mask's biases that learn. The processes of
    the mesh are seeded apart, and the first one as one process is.

    Args:
        whole: the module of one process; `inputs` are whole sequences (B, L, E), and `options` those of its call.
        mesh: over the processes that share the sequence, by `method` and `layout`; or ``None``, where none do.
        prepare: done to the copy before.
        averaged: over the processes of which each weighs some items of the batch alone, and whose gradients of
            parameters are averaged, as `fully_shard` does; or ``None``.
        what: is compared, for messages.
    """
    split = prepare(copy.deepcopy(whole))
    if mesh is not None:
        split = context_parallel(split, mesh, method=method, layout=layout)
    expected, factors = _one_process(whole, inputs, options)
    exact, terms = expected, dict[str, float]()
    if inputs[0].dtype not in TOLERANCES:  # half precision is judged by float64
        judge = copy.deepcopy(whole).double()
        terms = _magnitudes_of_terms(judge)
        exact, _ = _one_process(judge, [x.double() for x in inputs], options)

    def cut(x: Tensor) -> Tensor:
        return x if mesh is None else shard_sequence(x, mesh, dim=-2, layout=layout)

    parts = [cut(x).clone().requires_grad_() for x in inputs]
    count = 1 if averaged is None else averaged.size()
    if averaged is not None:
        own = torch.arange(len(factors)) % count == averaged.get_local_rank()
        factors = factors * count * own.view(-1, *[1] * (factors.dim() - 1))
    torch.manual_seed(SEED if mesh is None else SEED + mesh.get_local_rank())
    output = split(*parts, **options)
    (output * cut(factors)).sum().backward()
    torch.manual_seed(SEED)  # what a test draws next is equal in every process
    found: dict[str, Any] = {"output": output.detach()}
    found |= {f"input {index}": _summed(part.grad, averaged) / count for index, part in enumerate(parts)}
    found |= {name: _summed(_summed(grad, mesh), averaged) / count for name, grad in _gradients_of_biases(options)}
    found |= {name: _summed(grad, mesh) for name, grad in gradients(split).items()}
    assert found.keys() == expected.keys()
    for name, number in exact.items():
        # Without positions no weight depends on a bias of keys. Its gradient is a sum of the terms of its weight's that
        # cancel, and what is left is their rounding.
        of_keys = name.endswith("k_proj.bias")
        scale = exact[f"{name.removesuffix('bias')}weight"].abs().max().item() if of_keys else 0.0
        of_part = name == "output" or name.startswith("input")
        right, one = (cut(x) if of_part else x for x in (number, expected[name]))
        tolerance = _tolerance(inputs[0].dtype, one, right, scale, terms.get(name, 0.0))
        require_within(found[name], right, tolerance, f"{what} {name}")
    return split


def compare_heads(whole: nn.Module, *inputs: Tensor, **options: Any) -> Any:
    """`compare_in_parts` of a module whose heads are split over all processes."""
    return compare_in_parts(whole, None, *inputs, prepare=lambda module: tensor_parallel(module, line()), **options)


def sequence_mesh() -> DeviceMesh:
    """The processes that share a sequence: all, or two of four of which each has half of the heads."""
    return square()["cp"] if dist.get_world_size() == 4 else line()


def halve_heads(module: Any) -> Any:
    """The module, with its heads split over two of four processes."""
    return tensor_parallel(module, square()["tp"]) if dist.get_world_size() == 4 else module


def _magnitudes_of_terms(module: nn.Module) -> dict[str, float]:
    """For each parameter of a norm the sum of the magnitudes of the terms of its gradient; filled by a backward pass.

    The gradient has a few numbers. Each is a sum over items, heads and positions, whose terms cancel. One process may
    be nearly right by chance, so its error is no bound for another order of the sum. Attention returns each term's
    gradient in the module's dtype: bfloat16 rounds it by at most 2⁻⁹ of the term.
    """
    sums: dict[str, float] = {}

    def watch(name: str, norm: Any, inputs: Any, output: Tensor) -> None:
        bias = getattr(norm, "bias", None)
        normed = (output.detach() - (0 if bias is None else bias.detach())) / norm.weight.detach()

        def add(grad: Tensor) -> None:
            for parameter, terms in (("weight", grad * normed), ("bias", grad)):
                sums[f"{name}.{parameter}"] = largest(terms.abs().flatten(0, -2).sum(0))

        output.register_hook(add)

    for name, norm in module.named_modules():
        if isinstance(norm, nn.LayerNorm | nn.RMSNorm):
            norm.register_forward_hook(partial(watch, name))
    return sums


def _summed(x: Any, mesh: DeviceMesh | None) -> Tensor:
    """The sum over the processes of a mesh, in float32 at least."""
    found = full(x).to(torch.promote_types(x.dtype, torch.float32), copy=True)
    if mesh is not None:
        dist.all_reduce(found, group=mesh.get_group())
    return found


def _gradients_of_biases(options: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Gradients of the tensors of the call's mask that learn, and none left."""
    for index, tensor in enumerate(getattr(options.get("mask"), "bias_tensors", tuple)()):
        if tensor.requires_grad:
            found, tensor.grad = tensor.grad, None
            yield f"bias {index}", found


def _one_process(module: nn.Module, inputs: Any, options: dict[str, Any]) -> tuple[dict[str, Any], Tensor]:
    """Output and gradients of one process, and what its output was weighed with."""
    own = [x.detach().clone().requires_grad_() for x in inputs]
    torch.manual_seed(SEED)
    output = module(*own, **options)
    torch.manual_seed(3)
    factors = torch.randn(output.shape).to(output.dtype)
    (output * factors).sum().backward()
    found: dict[str, Any] = {"output": output.detach()} | {f"input {i}": x.grad for i, x in enumerate(own)}
    return found | dict(_gradients_of_biases(options)) | gradients(module), factors


def _tolerance(dtype: torch.dtype, one: Tensor, exact: Tensor, scale: float = 0.0, terms: float = 0.0) -> float:
    """How large errors may be of what a module of that dtype gives, of which one process gives `one`.

    In half precision 2.5 times the error of one process, and the rounding of numbers this large: 2⁻⁸ of the result, or
    2⁻⁹ of each term of a sum if that is more. Statistics are float32.

    Args:
        dtype: of the module.
        one, exact: the result of one process, and that of float64.
        scale: of numbers that cancel in the result.
        terms: the sum of the magnitudes of the terms of the result.
    """
    most = max(scale, largest(exact))
    if dtype in TOLERANCES:
        return TOLERANCES[dtype] * max(1.0, most)
    rounding = max(most * 2**-8, terms * 2**-9)
    return max(2.5 * largest(one.double() - exact) + rounding, TOLERANCES[torch.float32])


#: Along which dimension results have a number for each query or key, if not the third, and those that have none.
_DIMENSIONS = {"head_average": 1, "counted": 1}
_OF_THE_WHOLE = ("max_logit", "raw_max_logit", "offset", "map")


def compare_records(
    whole: nn.Module,
    split: nn.Module,
    x: Tensor,
    mesh: DeviceMesh | None,
    options: dict[str, Any],
    *,
    layout: Any = "contiguous",
    what: str = "",
    **call: Any,
) -> None:
    """`compare_statistics` of the module of one process and the split one; recorded of x (B, L, E) with `options`."""
    one = _recorded(whole, x, options, call)
    judge, double = (whole, x) if x.dtype in TOLERANCES else (copy.deepcopy(whole).double(), x.double())
    exact = None if judge is whole else _recorded(judge, double, options, call)
    every = options | {"statistics": ("rows",), "queries": None, "per": "query_head"}
    weights = _recorded(judge, double, every, call).rows if "top_k" in options["statistics"] else None
    found = _recorded(split, x if mesh is None else shard_sequence(x, mesh, layout=layout), options, call)
    compare_statistics(found, one, mesh, what, layout, x.dtype, exact, options.get("queries"), weights)


def _recorded(module: nn.Module, x: Tensor, options: dict[str, Any], call: dict[str, Any]) -> Any:
    with torch.no_grad(), clearhead.record(module, **options) as rec:
        module(x, **call)
    return rec[""][0]


def compare_statistics(
    found: Any,
    one: Any,
    mesh: DeviceMesh | None,
    what: str,
    layout: Any = "contiguous",
    dtype: torch.dtype = torch.float64,
    exact: Any = None,
    queries: Tensor | None = None,
    weights: Tensor | None = None,
) -> None:
    """Raise unless the statistics of this process are those of one, of the queries and keys that it has.

    Args:
        found, one: of this process, and of one process.
        mesh, what, layout: as in `compare_in_parts`.
        dtype: of the module.
        exact: of float64, if that judges.
        queries: those whose weights are recorded.
        weights: exact ones (B, H, L, S), by which the keys of ``top_k`` are compared.
    """

    def cut(name: str, number: Tensor) -> Tensor:
        if mesh is None or name.startswith(("sum", "number")) or name in _OF_THE_WHOLE:
            return number
        if name == "rows" and queries is not None:
            own = shard_sequence(torch.arange(one.query_length), mesh, dim=0, layout=layout)
            return number[:, :, torch.isin(queries, own)]
        return shard_sequence(number, mesh, dim=_DIMENSIONS.get(name, 2), layout=layout)

    sizes = [(each.num_heads, each.num_kv_heads, each.key_length, each.heads) for each in (found, one)]
    assert sizes[0] == sizes[1], (what, sizes)
    own = _numbers(found, None if weights is None else cut("weights", weights))
    of_one, right = _numbers(one, None), _numbers(one if exact is None else exact, weights)
    assert own.keys() == of_one.keys() == right.keys(), what
    for name, number in own.items():
        expected = cut(name, right[name])
        assert number.dtype == of_one[name].dtype, (what, name)
        if name == "extreme_keys" and exact is not None:
            continue  # scores that are rounded otherwise may be in another order
        if not number.is_floating_point():
            assert torch.equal(number, expected), (what, name)
            continue
        # The largest of no logits is −∞, and the smallest ∞.
        assert torch.equal(number[number.isinf()], expected[expected.isinf()]), (what, name)
        assert torch.equal(number.isinf(), expected.isinf()), (what, name)
        tolerance = _tolerance(dtype, _finite(of_one[name]), _finite(right[name]))
        require_within(_finite(number), _finite(expected), tolerance, f"{what} {name}")


def _finite(x: Tensor) -> Tensor:
    return x.masked_fill(x.isinf(), 0)


def _numbers(found: Any, weights: Tensor | None) -> dict[str, Tensor]:
    """All tensors of a call's statistics by name, and the sums of heads.

    Keys of nearly the same weight may change places in ``top_k``. Instead of indices there is where there are keys, and
    the exact weights at these keys, of `weights` (B, H, l, S); without them, the weights as they were found.
    """
    numbers: dict[str, Tensor] = {"counted": found.counted} | found.results
    if "top_k" in numbers:
        indices, found_weights = numbers.pop("top_k")
        at_keys = found_weights
        if weights is not None:
            at_keys = weights.gather(-1, indices.clamp(min=0)).masked_fill(indices < 0, 0).to(found_weights.dtype)
        numbers |= {"top_k.keys": indices >= 0, "top_k.weights": found_weights, "top_k.exact": at_keys}
    for name in ("entropy", "sink", "output_norm"):
        if name in numbers:
            total, count = found.head_sums(name)
            numbers |= {f"sum of {name}": total.double(), f"number of {name}": count.double()}
    return numbers
