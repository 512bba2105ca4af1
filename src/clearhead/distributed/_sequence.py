"""`shard_sequence` and `gather_sequence`: between a whole sequence and each process's part of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import NamedTuple, cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import integer, strided
from .._environment import is_tracing, outside_graphs
from ..errors import ArgumentError, DistributedError, shape_text
from ._agreement import Gathered, agree, fingerprint, group_of, require_equal, require_layout
from ._collectives import gather_parts
from ._layout import LAYOUTS, Layout, Parts


def shard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "contiguous") -> Tensor:
    """This process's part of a tensor that holds the whole sequence, which every process has.

    Parts follow `torch.tensor_split`: nothing is padded, parts may differ by one position or be empty. Nothing is
    exchanged, and the gradient of the whole is this process's contribution: zero outside its part.

    Args:
        tensor: for example token ids (B, L), labels that were shifted before, or features (B, L, E).
        mesh: one-dimensional, over the processes that share the sequence; W of them.
        dim: that of the sequence. Default 1.
        layout: ``"contiguous"``: process r holds part r of W. ``"zigzag"``: parts r and 2W − 1 − r of 2W, one after
            the other, which under a causal mask is the same work for every process.

    Returns:
        The part; a view where it is one run of positions.

    Raises:
        ArgumentError: for a mesh of several dimensions, or an unknown layout or dimension.
        DTypeError: if `tensor` is none.

    Example:
        >>> import torch, torch.distributed as dist
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from clearhead.distributed import gather_sequence, shard_sequence
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("cp",))
        >>> tokens = torch.arange(10).view(2, 5)
        >>> part = shard_sequence(tokens, mesh, layout="zigzag")
        >>> torch.equal(gather_sequence(part, mesh, layout="zigzag"), tokens)
        True
        >>> dist.destroy_process_group()
    """
    dim = _require(tensor, mesh, dim, layout)
    parts = Parts(tensor.shape[dim], mesh.size(), layout)
    part = parts.take(tensor, dim, mesh.get_local_rank())
    if mesh.size() > 1:
        _mark(tensor, mesh.get_group(), "whole")
        _mark(part, mesh.get_group(), layout)
    return part


def gather_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "contiguous") -> Tensor:
    """The whole sequence from every process's part: what `shard_sequence` cut.

    One exchange of sizes and one all-gather; the gradient of a part is the sum of what all processes pass back for it,
    by one reduce-scatter.

    Args:
        tensor: this process's part, of the same shape on all of them but for `dim`.
        mesh, dim, layout: as for `shard_sequence`.

    Returns:
        The whole, on every process.

    Raises:
        ArgumentError, DTypeError: as for `shard_sequence`.
        DistributedError: on every process, if one of them cannot gather, or the parts do not belong together.

    Example:
        See `shard_sequence`:

        >>> from clearhead.distributed import gather_sequence, shard_sequence
    """
    group, problem = group_of(mesh)
    problem = cast("Exception | None", problem)
    facts = {"dim": 0, "layout": 0, "dtype": 0, "shape": 0, "length": 0}
    if problem is None:
        try:
            dim = _require(tensor, mesh, dim, layout)
            others = *tensor.shape[:dim], *tensor.shape[dim + 1 :]
            words = dim, LAYOUTS.index(layout), fingerprint(str(tensor.dtype)), fingerprint(others), tensor.shape[dim]
            facts = dict(zip(facts, words, strict=True))
        except Exception as error:
            problem = error
    device = mesh.device_type if isinstance(mesh, DeviceMesh) else "cpu"
    gathered = agree("gather_sequence", group, device, facts, problem)
    if len(gathered) == 1:
        return tensor
    fix = "Parts are those of shard_sequence, of one tensor."
    require_equal("gather_sequence", gathered, ("dim", "layout", "dtype", "shape"), fix)
    parts = parts_of("gather_sequence", gathered, "length", layout)
    (gathered_parts,) = gather_parts([tensor.movedim(dim, 0)], parts, group, "gather_sequence")
    whole = gathered_parts.movedim(0, dim).contiguous()
    _mark(whole, group, "whole")
    return whole


class _Mark(NamedTuple):
    """Kind of a tensor when it was made: the whole sequence of a group, or a part in a layout.

    Args:
        kind: ``"whole"``, or the layout of a part.
        version: of the tensor then; after a write in place the mark says nothing.
    """

    kind: str
    version: int


#: Marks of tensors by group. They end with the tensor, and no result of an operation has one.
_marks = cast("MutableMapping[Tensor, MutableMapping[dist.ProcessGroup, _Mark]]", WeakIdKeyDictionary())


def _mark(tensor: Tensor, group: dist.ProcessGroup, kind: str) -> None:
    if is_tracing() or tensor.is_inference():  # these have no version
        return
    if tensor not in _marks:
        _marks[tensor] = WeakKeyDictionary()
    _marks[tensor][group] = _Mark(kind, tensor._version)


@outside_graphs
def require_parts(group: dist.ProcessGroup, layout: Layout, **tensors: object) -> None:
    """Raise for a tensor that is known to be the whole sequence, or a part in another layout; without a mark, for none.

    Args:
        group: over which the sequence is split.
        layout: of the module.
        tensors: arguments by name.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor not in _marks:
            continue
        mark = _marks[tensor].get(group)
        if mark is None or mark.version != tensor._version or mark.kind == layout:
            continue
        if mark.kind == "whole":
            fix = f'Give each process its part: shard_sequence(tensor, mesh, layout="{layout}").'
            raise ArgumentError(name, expected="this process's part of a sequence", got="the whole sequence", fix=fix)
        fix = "Give shard_sequence and context_parallel the same layout."
        raise ArgumentError(name, expected=f'a part in layout "{layout}"', got=f'one in layout "{mark.kind}"', fix=fix)


def parts_of(where: str, gathered: Gathered, name: str, layout: Layout) -> Parts:
    """The parts whose lengths all processes sent as a fact.

    Raises:
        DistributedError: in every process, unless they are those of the layout.
    """
    lengths = tuple(facts[name] for facts in gathered)
    parts = Parts(sum(lengths), len(lengths), layout)
    if lengths != parts.lengths:
        expected = f"lengths {shape_text(parts.lengths)} of {parts.length} positions, as shard_sequence cuts them"
        fix = f'Cut every sequence with shard_sequence(tensor, mesh, layout="{layout}").'
        raise DistributedError(f"{where}: {name}", expected=expected, got=shape_text(lengths), fix=fix)
    return parts


def _require(tensor: object, mesh: object, dim: object, layout: object) -> int:
    """The dimension, not negative; raise for an argument that fits no call."""
    problem = group_of(mesh)[1]
    if problem is not None:
        raise problem
    require_layout(layout)
    dims = strided("tensor", tensor).dim()
    if dims == 0:
        raise ArgumentError("tensor", expected="a dimension to cut", got="a tensor of none")
    expected = f"an int from {-dims} to {dims - 1}, a dimension of the tensor"
    return integer("dim", dim, least=-dims, most=dims - 1, expected=expected) % dims
