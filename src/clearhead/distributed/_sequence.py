"""`shard_sequence` and `gather_sequence`: between a whole sequence and each process's part of it."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import cast
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.weak import WeakIdKeyDictionary

from .._checks import integer, strided
from .._environment import is_tracing, outside_graphs
from .._torch_private import writes_to
from ..errors import ArgumentError, DistributedError, shape_text
from ._agreement import Gathered, agreement, fingerprint, group_of, require_equal, require_mesh
from ._collectives import gather_shards
from ._layout import LAYOUTS, Layout, Shards, require_layout


def shard_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "contiguous") -> Tensor:
    """Cut a whole sequence, and return the part of this process.

    Every process passes the same whole tensor. It is cut as `torch.tensor_split` does, without padding. Parts may
    differ by one position, and may be empty. Nothing is exchanged. The gradient of the whole tensor is zero outside
    the part.

    Args:
        tensor: for example token ids (B, L), features (B, L, E), or labels (shift labels before you cut them).
        mesh: a mesh of one dimension. Its W processes share the sequence.
        dim: the dimension of the sequence. Default 1.
        layout: ``"contiguous"`` gives process r part r of W. ``"zigzag"`` gives it parts r and 2W − 1 − r of 2W, so
            that every process has the same work under a causal mask. Default ``"contiguous"``.

    Returns:
        The part. It is a view if its positions follow one another.

    Raises:
        ArgumentError: if the mesh has several dimensions, or if the layout or dimension is unknown.
        DTypeError: if `tensor` is not a tensor.

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
    shard = Shards(tensor.shape[dim], mesh.size(), layout).take(tensor, dim, mesh.get_local_rank())
    if mesh.size() > 1:
        _mark(tensor, mesh.get_group(), "whole")
        _mark(shard, mesh.get_group(), layout)
    return shard


def gather_sequence(tensor: Tensor, mesh: DeviceMesh, *, dim: int = 1, layout: Layout = "contiguous") -> Tensor:
    """Join the parts of all processes: the inverse of `shard_sequence`.

    The processes exchange the sizes, then the parts (an all-gather). The gradient of a part is the sum of its gradients
    in all processes (a reduce-scatter).

    Args:
        tensor: the part of this process. Parts may differ in size in `dim` only.
        mesh, dim, layout: as in `shard_sequence`.

    Returns:
        The whole sequence, in every process.

    Raises:
        ArgumentError, DTypeError: as in `shard_sequence`.
        DistributedError: in every process, if one process cannot gather or if the parts do not fit together.

    Example:
        See `shard_sequence`:

        >>> from clearhead.distributed import gather_sequence, shard_sequence
    """
    where = "gather_sequence"

    group, device = group_of(mesh)
    with agreement(where, (group,), device) as exchange:
        dim = _require(tensor, mesh, dim, layout)
        facts = {
            "dim": dim,
            "layout": LAYOUTS.index(layout),
            "dtype": fingerprint(str(tensor.dtype)),
            "shape": fingerprint(tensor.shape[:dim], tensor.shape[dim + 1 :]),
        }
        gathered = exchange(facts | {"length": tensor.shape[dim]})
        require_equal(where, gathered, facts, "Parts are those of shard_sequence, of one tensor.")
        shards = shards_of(where, gathered, "length", layout)
    if shards.world_size == 1:
        return tensor
    (gathered,) = gather_shards([tensor.movedim(dim, 0)], shards, group, where)
    sequence = gathered.movedim(0, dim).contiguous()
    _mark(sequence, group, "whole")
    return sequence


#: By tensor and group: ``"whole"``, or the layout of a shard; and the version of the tensor. A write in place changes
#: the version, and the mark is no longer valid. Marks end with the tensor, and no result of an operation has one.
_Kinds = MutableMapping[dist.ProcessGroup, tuple[str, "int | None"]]
_marks = cast("MutableMapping[Tensor, _Kinds]", WeakIdKeyDictionary())


def _mark(tensor: Tensor, group: dist.ProcessGroup, kind: str) -> None:
    if not (is_tracing() or tensor.is_inference()):  # these have no version
        _marks.setdefault(tensor, WeakKeyDictionary())[group] = kind, writes_to(tensor)


@outside_graphs
def require_shards(group: dist.ProcessGroup, layout: Layout, **tensors: object) -> None:
    """Raise for a tensor that is known to be a whole sequence, or a shard in another layout.

    Args:
        group: the group that shares the sequence.
        layout: the layout of the module.
        tensors: the arguments by name.
    """
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor) or tensor not in _marks:
            continue
        kind, version = _marks[tensor].get(group, (layout, 0))
        if version != writes_to(tensor) or kind == layout:
            continue
        if kind == "whole":
            fix = f'Give each process its part: shard_sequence(tensor, mesh, layout="{layout}").'
            raise ArgumentError(name, expected="this process's part of a sequence", got="the whole sequence", fix=fix)
        fix = "Give shard_sequence and context_parallel the same layout."
        raise ArgumentError(name, expected=f'a part in layout "{layout}"', got=f'one in layout "{kind}"', fix=fix)


def shards_of(where: str, gathered: Gathered, name: str, layout: Layout) -> Shards:
    """The shards, from the fact of every process that is their length.

    Raises:
        DistributedError: in every process, if the lengths do not fit the layout.
    """
    lengths = tuple(facts[name] for facts in gathered)
    shards = Shards(sum(lengths), len(lengths), layout)
    if lengths != shards.lengths:
        expected = f"lengths {shape_text(shards.lengths)} of {shards.length} positions, as shard_sequence cuts them"
        fix = f'Cut every sequence with shard_sequence(tensor, mesh, layout="{layout}").'
        raise DistributedError(f"{where}: {name}", expected=expected, got=shape_text(lengths), fix=fix)
    return shards


def _require(tensor: object, mesh: object, dim: object, layout: object) -> int:
    """The dimension as a number that is not negative. Raise for an invalid argument."""
    require_mesh(mesh)
    require_layout(layout)
    dims = strided("tensor", tensor).dim()
    if dims == 0:
        raise ArgumentError("tensor", expected="a dimension to cut", got="a tensor of none")
    expected = f"an int from {-dims} to {dims - 1}, a dimension of the tensor"
    return integer("dim", dim, least=-dims, most=dims - 1, expected=expected) % dims
