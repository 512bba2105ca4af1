"""`context_parallel`: the sequence of attention, split over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._call.naming import remember_names
from .._checks import choice
from .._environment import outside_graphs_alone
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError
from ._agreement import (
    agreement,
    announce,
    fingerprint,
    group_for_agreements,
    group_of,
    module_numbers,
    require_equal,
    require_mesh,
)
from ._collectives import WHERE
from ._description import Split, attention_parts, facts_of_module
from ._layout import Layout, require_layout
from ._methods import METHODS, Method, heads_divide
from ._sequence import require_shards
from ._sequence_shard import LocalSequence


def context_parallel(
    module: Split, mesh: DeviceMesh, *, method: Method = "auto", layout: Layout = "contiguous"
) -> Split:
    """Split the sequence of attention over processes; in place.

    Every process then calls the module with its shard of the sequence (`shard_sequence`), and gets its shard of the
    output. Pass masks, biases and positions of the whole sequence, as for one process. Each process takes its rows.
    Every mask stays exact, in any layout and for any length.

    Every call of an attention first exchanges one small record, in which the processes agree on lengths. A layer or
    stack exchanges one more record at its end. If one process raises an error, all processes raise one. The gradients
    of parameters are the contribution of each process. `fully_shard` or `DistributedDataParallel` over the same
    processes averages them. The local sum of a loss · W / the count of all labels gives the gradients of one process.

    Args:
        module: a `MultiHeadAttention`, or a layer or stack of `clearhead.transformer` made of them. Use
            `tensor_parallel` before, if you use both.
        mesh: a mesh of one dimension with W processes, as ``mesh["cp"]`` of a larger one. With one process the module
            stays as it is.
        method: ``"heads"`` exchanges heads, so that each process has some heads of the whole sequence. W divides H, and
            divides Hkv or is divided by it. With ``"gather"`` every process gathers all keys and values. With
            ``"ring"`` keys and values travel around in blocks. A process holds three of them beside its shard.
            Default ``"auto"``: heads if they divide, else gather. A call that returns weights always gathers.
        layout: the layout of all sequences, as in `shard_sequence`. Default ``"contiguous"``.

    Returns:
        The module.

    Raises:
        ArgumentError: for a mesh of several dimensions, unknown names, heads that *heads* cannot divide, or a module
            that was split before.
        DTypeError: for another kind of module, such as latent attention.
        DistributedError: if another process raises one of these, or has another module.

    A call of the module raises the errors of one process, on every process. It raises `DistributedError` if another
    process raised an error, if the shards do not fit together, or if not all processes record the same. It raises
    `ArgumentError`, `RecordError` or `KernelError` for jagged inputs, interventions, a recorder beside a cache,
    `torch.func`, and dropout of weights on a forced kernel of PyTorch.

    With a cache (``module.make_cache``) you pass all new tokens to every process, and every process returns their whole
    output. Each process keeps some keys and values, and attends to these. The results are merged by log-sum-exp. A
    decoder with a memory does the same. Each process passes its shard of the memory in the first call.

    `clearhead.record`, `monitor` and `qk_clip_` work as on one process. Use them in every process alike. Per-query
    statistics cover the queries of this process, and ``received`` covers its keys. All others cover the whole.

    Dropout drops the same weights as one process, for any W, method and layout. They follow from the seed of the first
    process and the indices of batch item, head, query and key in the whole.

    Example:
        >>> import torch, torch.distributed as dist, clearhead
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from clearhead.distributed import context_parallel, gather_sequence, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> attend = context_parallel(clearhead.MultiHeadAttention(12, 3), mesh, layout="zigzag")
        >>> part = shard_sequence(torch.randn(2, 7, 12), mesh, layout="zigzag")
        >>> output = attend(part, mask=clearhead.masks.causal())
        >>> gather_sequence(output, mesh, layout="zigzag").shape
        torch.Size([2, 7, 12])
        >>> dist.destroy_process_group()
    """
    group, device = group_of(mesh)
    with agreement(WHERE, (group,), device) as exchange:
        require_mesh(mesh)
        choice("method", method, METHODS)
        require_layout(layout)
        attentions, other_parts = attention_parts(WHERE, module)
        heads = [(name, _heads_of(name, attention, method, mesh.size())) for name, attention in attentions]
        facts = {"method": fingerprint(method), "layout": fingerprint(layout)}
        facts |= facts_of_module(module, attentions, other_parts) | {"heads": fingerprint(heads)}
        gathered = exchange(facts)
        require_equal(WHERE, gathered, gathered[0], "Split the same module in the same way in every process.")
    if mesh.size() > 1:
        head_groups = dict.fromkeys(part.head_shard.group for _, part in attentions if part.head_shard is not None)
        if device != "cpu":  # made now, because an error is announced without waiting for the others
            head_groups = [group_for_agreements(each, device) for each in head_groups]
        agreements = group_for_agreements(group, device), *head_groups
        sequence = LocalSequence(group, agreements, device, dist.get_rank(group), mesh.size(), method, layout)
        numbers = module_numbers.setdefault(group, count(1))
        for _, attention in attentions:
            attention.sequence_shard = replace(sequence, number=next(numbers))
        if not isinstance(module, MultiHeadAttention):
            where = f"{WHERE}: {type(module).__name__}"
            cast(Any, module).forward = partial(_forward_or_refuse, sequence, where, module.forward)
    remember_names(module)
    return module


def _heads_of(name: str, module: MultiHeadAttention, method: str, world: int) -> tuple[int, int]:
    """H and Hkv of this process. Raise if an attention cannot be split."""
    if module.sequence_shard is not None:
        expected, fix = "an attention that was not split before", "Call context_parallel once."
        raise ArgumentError(name, expected=expected, got="one after context_parallel", fix=fix)
    owner = module if module.head_shard is None else module.head_shard
    if method == "heads" and not heads_divide(owner.num_heads, owner.num_kv_heads, world):
        raise ArgumentError(
            "method",
            expected=f'"heads" where the mesh\'s W = {world} divides H, and divides Hkv or is divided by it',
            got=f"H = {owner.num_heads}, Hkv = {owner.num_kv_heads} in {name}",
            fix='Use method="gather", for any number of heads.',
        )
    return owner.num_heads, owner.num_kv_heads


@outside_graphs_alone
def _forward_or_refuse(
    sequence: LocalSequence, where: str, forward: Callable[..., Any], *inputs: object, **options: object
) -> Any:
    """The forward pass of a layer or stack. If one process raises, all raise, at its end at the latest."""
    try:
        tensors = dict(zip(("x", "memory"), inputs, strict=False)) | options
        # With a cache every process has all new tokens.
        names = ("x", "memory") if options.get("cache") is None else ("memory",)
        require_shards(sequence.group, sequence.layout, **{name: tensors.get(name) for name in names})
        output = forward(*inputs, **options)
    except Exception as error:
        announce(where, sequence.agreements, sequence.device, error)
        raise
    with agreement(where, sequence.agreements, sequence.device) as exchange:
        exchange({})
    return output
