"""`context_parallel`: the sequence of attention, split over processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._call.caching import Cache, KeyValues, Positions
from .._call.call import Results, valid_call
from .._call.dropout import draw_seed
from .._call.naming import remember_names
from .._call.observers import computing, notify
from .._call.request import WeightsWanted, weights_wanted
from .._checks import FLOATS, choice, flag, shown, size
from .._environment import Environment, autocast_off, listening, outside_graphs, outside_graphs_alone, read_environment
from .._layer.layer import Layer
from .._layer.positions import of_whole, positions_of_queries, require_one_length, with_hidden
from .._multihead import MultiHeadAttention, layer_of
from .._multihead_checks import complete, require_cache, require_features, require_inputs
from ..caches._cross import CrossKVCache
from ..caches._kv import KVCache
from ..errors import ArgumentError, KernelError, RecordError, ShapeError, shape_text
from ..kernels._choice import choose
from ..masks._base import Mask
from ..masks._grid import Grid, Offset
from ..masks._tensors import as_mask
from ..transformer import Decoder, DecoderLayer, Encoder, EncoderLayer
from ._agreement import (
    Gathered,
    agree_in_turn,
    agree_on,
    announce,
    fingerprint,
    group_for_agreements,
    group_of,
    next_number,
    not_announced,
    not_pickled,
    require_device,
    require_equal,
    require_mesh,
)
from ._cached import PartCache, ShardedKVCache, common_facts, decode
from ._description import aspects_of
from ._finding import attention_parts
from ._layout import Layout, Parts, require_layout
from ._methods import Chunk, Operands, Whole, by_gathering, by_heads, heads_divide, like_whole, mask_fact
from ._ring import by_ring
from ._sequence import parts_of, require_parts
from ._statistics import shared_call

Split = TypeVar("Split", MultiHeadAttention, EncoderLayer, DecoderLayer, Encoder, Decoder)
Method = Literal["auto", "heads", "gather", "ring"]
METHODS: tuple[Method, ...] = ("auto", "heads", "gather", "ring")

_WHERE = "context_parallel"
_SAME = "All processes of the mesh make the same call, each with its part of the sequence."


def context_parallel(
    module: Split, mesh: DeviceMesh, *, method: Method = "auto", layout: Layout = "contiguous"
) -> Split:
    """Split the sequence that attention works on over processes; in place.

    Every process then calls the module with its part of the sequence (`shard_sequence`), and gets its part of the
    output. Masks, biases and positions are given as for one process: they speak of the whole sequence, and each process
    takes its rows, so every mask stays exact, in any layout and where the length does not divide.

    Every call of an attention first exchanges one small record, by which the processes agree on lengths, and a layer or
    stack exchanges one more at its end; what one of them refuses, all refuse. Gradients of parameters are each
    process's contribution: `fully_shard` or `DistributedDataParallel` over the same processes averages them, so a loss
    that is the local sum · W / the count of all labels gives those of one process.

    Args:
        module: a `MultiHeadAttention`, or a layer or stack of `clearhead.transformer` made of them, after
            `tensor_parallel` if both are used.
        mesh: one-dimensional, as ``mesh["cp"]`` of a larger one; W processes. With one the module stays as it is.
        method: ``"heads"``: an exchange after which each process has some heads of the whole sequence; W divides H, and
            divides Hkv or is divided by it. ``"gather"``: every process gathers all keys and values.
            ``"ring"``: keys and values travel around, in blocks; beside its part a process holds three of them.
            Default ``"auto"``: heads where they divide, else gather. A call that returns weights gathers in any case.
        layout: of all sequences; see `shard_sequence`. Default ``"contiguous"``.

    Returns:
        The module.

    Raises:
        ArgumentError: for a mesh of several dimensions, unknown names, heads that *heads* cannot divide, a module that
            was split before.
        DTypeError: for another kind of module; latent attention is one.
        DistributedError: if another process raises one of these, or has another module.

    A call of the module raises what it raises on one process, and on every process: `DistributedError` where another
    one refused it, where parts do not belong together, or where not all of them record the same. With jagged inputs,
    interventions, a recorder beside a cache, `torch.func`, or dropout of weights on a forced kernel of PyTorch's, it
    raises `ArgumentError`, `RecordError` or `KernelError`.

    With a cache (``module.make_cache``) every process is given all new tokens and returns their whole output; each
    keeps the keys and values of its part of the text, attends to these, and the results are merged by log-sum-exp. So
    does a decoder with a memory, of which each process gives its part in the first call.

    `clearhead.record`, `monitor` and `qk_clip_` work as on one process, in every process alike: what has a number for
    each query is of this process's queries, ``received`` is of its keys, and all else is of the whole.

    Dropped weights are those of one process, whatever W, method and layout: they follow from the first process's seed
    and the places of batch item, head, query and key in the whole.

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

    def find() -> tuple[dict[str, int], list[tuple[str, MultiHeadAttention]]]:
        require_mesh(mesh)
        choice("method", method, METHODS)
        require_layout(layout)
        attentions, others = attention_parts(_WHERE, module)
        heads = [_checked(name, attention, method, mesh.size()) for name, attention in attentions]
        aspects = aspects_of(module, attentions, others)
        facts = {"method": fingerprint(method), "layout": fingerprint(layout), **aspects, "heads": fingerprint(heads)}
        return facts, attentions

    group, device = group_of(mesh)
    gathered, attentions = agree_on(_WHERE, group, device, find)
    require_equal(_WHERE, gathered, tuple(gathered[0]), "Split the same module in the same way in every process.")
    if len(gathered) > 1:
        of_heads = dict.fromkeys(each.head_shard.group for _, each in attentions if each.head_shard is not None)
        agreements = group_for_agreements(group, device), *of_heads
        sequence = _Sequence(group, agreements, device, dist.get_rank(group), len(gathered), method, layout)
        for _, attention in attentions:
            attention.sequence_shard = replace(sequence, number=next_number(group))
        if not isinstance(module, MultiHeadAttention):
            where = f"{_WHERE}: {type(module).__name__}"
            cast(Any, module).forward = partial(_all_or_none, sequence, where, module.forward)
    remember_names(module)
    return module


def _checked(name: str, module: MultiHeadAttention, method: str, world: int) -> object:
    """What is equal in every process of an attention that can be split; raise for one that cannot."""
    if module.sequence_shard is not None:
        expected, fix = "an attention that was not split before", "Call context_parallel once."
        raise ArgumentError(name, expected=expected, got="one after context_parallel", fix=fix)
    shard = module.head_shard
    heads = (module.num_heads, module.num_kv_heads) if shard is None else (shard.num_heads, shard.num_kv_heads)
    if method == "heads" and not heads_divide(*heads, world):
        raise ArgumentError(
            "method",
            expected=f'"heads" where the mesh\'s W = {world} divides H, and divides Hkv or is divided by it',
            got=f"H = {heads[0]}, Hkv = {heads[1]} in {name}",
            fix='Use method="gather", for any number of heads.',
        )
    return name, heads


class _Request(NamedTuple):
    """A call, as far as one process can check it.

    Args:
        query, key, value: with a batch.
        mask: of all heads of this process.
        positions: of the whole sequence.
        weights: which.
        batched: whether the caller gave a batch.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None
    positions: Positions | None
    weights: WeightsWanted
    batched: bool


_NUMBER = "number of the module"
_IN_ORDER = "Each attention is numbered when it is split: split and call modules in one order in every process."

#: Facts in which the processes may differ: the lengths of their shards, and the seeds that they draw.
_MAY_DIFFER = ("query", "key", "seed")


@dataclass(frozen=True)
class _Sequence:
    """The `SequenceShard` of one process.

    Args:
        group: of the processes.
        agreements: of the same processes, for nothing else; and of those that share the heads of this part, if any.
        device: on which their collectives work.
        rank, world: of this process, and how many there are.
        method, layout: see `context_parallel`.
        number: of the module among all that were split over the group; 0 for a stack.
    """

    group: dist.ProcessGroup
    agreements: tuple[dist.ProcessGroup, ...]
    device: str
    rank: int
    world: int
    method: str
    layout: Layout
    number: int = 0

    @outside_graphs
    @not_announced()  # all processes raise it, or the others wait in an exchange
    def call(
        self,
        module: MultiHeadAttention,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        mask: Mask | Tensor | None,
        positions: Positions | None,
        cache: Cache | None,
        need_weights: bool,
        average_attn_weights: bool,
    ) -> tuple[Tensor, Tensor | None]:
        environment = read_environment()

        def find() -> tuple[dict[str, int], tuple[_Request, PartCache | None]]:
            held = _require_plain(module, environment, cache, positions, need_weights)
            if held is None:
                require_parts(self.group, self.layout, query=query, key=key, value=value)
            elif isinstance(held, CrossKVCache):
                require_parts(self.group, self.layout, key=key, value=value)
            require_device(_WHERE, "query", query, self.device)
            request = _read(module, query, key, value, mask, positions, held, need_weights, average_attn_weights)
            return {_NUMBER: self.number, **_facts(module, request, held, environment)}, (request, held)

        read = self._require_one_call
        gathered, request, held, parts = agree_in_turn(_WHERE, self.agreements, self.device, find, read)
        if held is not None:
            layer, inputs = layer_of(module, request.query, environment), request[:4]
            place = self._place(layer.num_heads, request, held, parts)
            output = decode(layer, *inputs, held, *place, self.group, environment)
            return output if request.batched else output.squeeze(0), None
        queries, keys = parts
        layer = layer_of(module, request.query, environment)
        if layer.request.dropout_p:
            seed = torch.tensor(gathered[0]["seed"], device=request.query.device)
            heads = layer.request.offset or Offset(module.num_heads)
            layer = replace(layer, request=layer.request._replace(seed=seed, offset=heads))
        output, weights = self._compute(layer, request, queries, keys, environment)
        if request.batched:
            return output, weights
        return output.squeeze(0), None if weights is None else weights.squeeze(0)

    def _require_one_call(
        self, gathered: Gathered, found: tuple[_Request, PartCache | None]
    ) -> tuple[Gathered, _Request, PartCache | None, list[Parts]]:
        """The facts, and the parts of queries and keys as far as these are split; raise unless all make one call."""
        request, cache = found
        require_equal(_WHERE, gathered, (_NUMBER,), _IN_ORDER)
        require_equal(_WHERE, gathered, [name for name in gathered[0] if name not in _MAY_DIFFER], _SAME)
        split = ["query", "key"] if cache is None else ["key"] if isinstance(cache, CrossKVCache) else []
        whole = [name for name in ("query", "key") if name not in split]
        require_equal(_WHERE, gathered, whole, "With a cache every process is given all new tokens.")
        return gathered, request, cache, [parts_of(_WHERE, gathered, name, self.layout) for name in split]

    def _compute(
        self,
        layer: Layer,
        request: _Request,
        queries: Parts,
        keys: Parts,
        environment: Environment,
    ) -> tuple[Tensor, Tensor | None]:
        query, key, value, mask, positions, wanted, _ = request
        at = None if positions is None else positions_of_queries(positions, None, queries.length)
        if isinstance(at, Tensor) and at.shape[-1] != queries.length:
            expected = f"positions of the whole sequence, ({queries.length},) or (B, {queries.length})"
            raise ShapeError("positions", expected=expected, got=shape_text(at.shape))
        # Where the keys are too; as in `Layer`.
        own = at if key is query or layer.position is not None else None
        combined = with_hidden(layer.combined(mask), KeyValues(query, query), 0 if at is None else at)
        grid = Grid(query.shape[0], layer.num_heads, queries.length, keys.length, query.device, at, own)
        if combined is not None:  # before anything is exchanged, and in every process alike
            combined.validate(grid)
        if layer.position is not None:
            require_one_length(queries.length, keys.length)
            layer = replace(layer, position=of_whole(layer.position, at, queries.length))
        asked = layer.request._replace(mask=combined, lse=self._turns(wanted), weights=wanted)
        whole = Whole(self.group, self.rank, queries, keys, grid, asked, environment)
        operands = layer.projected(query, key, value, self._positions(at, queries, query.device), environment)
        return layer.projected_out(self._attend(operands, whole), environment)

    def _attend(self, operands: Operands, whole: Whole) -> Results:
        """Exchange and attend, and show the call to observers."""
        _require_kernel(operands, whole)
        if not whole.environment.observed:
            return self._exchanged(operands, whole)[0]
        whole = replace(whole, environment=whole.environment._replace(observed=False))
        with computing():
            results, chunks = self._exchanged(operands, whole)
            with torch.no_grad(), autocast_off(operands[0]):
                notify(shared_call(operands, whole, chunks, results.lse), results.output)
        return results

    def _turns(self, wanted: WeightsWanted) -> bool:
        """Whether keys travel around: for rows of weights all of them have to be here."""
        return self.method == "ring" and wanted is None

    def _exchanged(self, operands: Operands, whole: Whole) -> tuple[Results, list[Chunk]]:
        """The results, and the chunks that they were computed from, if keys did not travel around."""
        if whole.request.lse:
            return by_ring(*operands, whole), []
        q, k, _ = operands
        divides = heads_divide(q.shape[1], k.shape[1], self.world)
        uses_heads = whole.request.weights is None and self.method != "gather" and divides
        return (by_heads if uses_heads else by_gathering)(*operands, whole)

    def _positions(self, at: Positions | None, queries: Parts, device: torch.device) -> Positions:
        """The positions of this process's queries: an int where they count up."""
        if isinstance(at, Tensor):
            return queries.take(at, -1, self.rank)
        first, runs = at or 0, queries.runs(self.rank)
        if len(runs) < 2:
            return first + (runs[0].start if runs else 0)
        return queries.positions(self.rank, device) + first

    def _place(self, num_heads: int, request: _Request, cache: PartCache, parts: list[Parts]) -> tuple[Grid, Tensor]:
        """The grid of new tokens and all keys, and which of the keys this process holds."""
        (batch, count, _), device = request.query.shape, request.query.device
        if isinstance(cache, ShardedKVCache):
            length, first = cache.length + request.key.shape[1], cache.length
            columns = torch.arange(self.rank, max(self.rank, length), self.world, device=device)
        else:
            (memory,) = parts
            length, first, columns = memory.length, 0, memory.positions(self.rank, device)
        return Grid(batch, num_heads, count, length, device, first), columns

    def shared_cache(self, make: Callable[[int], KVCache], max_length: int) -> ShardedKVCache:
        return ShardedKVCache(make(-(-size("max_length", max_length) // self.world)), max_length, self.rank, self.world)

    def __deepcopy__(self, memo: object) -> _Sequence:
        return self

    def __reduce__(self) -> str:
        raise not_pickled(_WHERE)


def _require_plain(
    module: MultiHeadAttention,
    environment: Environment,
    cache: object,
    positions: object,
    need_weights: object,
) -> PartCache | None:
    """The call's cache; raise for what a call on parts of a sequence does not have."""
    if cache is not None and not isinstance(cache, PartCache):
        fix = "module.make_cache(batch_size, max_length) makes one after context_parallel."
        raise ArgumentError("cache", expected="a cache of the split module", got=type(cache).__name__, fix=fix)
    if cache is not None:
        require_cache(cache, module.position)
        weights = flag("need_weights", need_weights) or None
        for name, given in (("positions", positions), ("need_weights", weights)):
            if given is not None:
                fix = "Decode with a module that was not split."
                raise ArgumentError(name, expected="nothing beside keys that are split", got=shown(given), fix=fix)
    if environment.observed and cache is not None:
        raise RecordError(f"{_WHERE}: a recorder does not see decoding with keys that are split.")
    if environment.transformed:
        raise KernelError(f"{_WHERE}: torch.func and forward-mode derivatives do not follow exchanges.")
    kernel = environment.kernel
    if module.training and module.dropout and kernel is not None and not kernel.seeds_dropout:
        raise KernelError(
            f"{_WHERE}: use_kernel({kernel.name!r}) cannot drop the weights that one process drops. "
            "Leave the choice to Clearhead, or set module.dropout = 0.0."
        )
    if cache is not None and module.training and module.dropout:
        raise ArgumentError("cache", expected="a module in eval()", got="one that drops weights", fix="Call eval().")
    return cache


def _require_kernel(operands: Operands, whole: Whole) -> None:
    """Raise if a forced kernel refuses the call of the whole: in every process alike, and before an exchange."""
    kernel = whole.environment.kernel
    if kernel is None:
        return
    # Kernels refuse shapes, dtypes and masks, not values.
    like = like_whole(operands, whole.queries, whole.keys)
    choose(valid_call(*like, whole.request_at(whole.start, whole.grid.num_heads), whole.environment), kernel)


def _read(
    module: MultiHeadAttention,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    mask: Mask | Tensor | None,
    positions: Positions | None,
    cache: PartCache | None,
    need_weights: bool,
    average_attn_weights: bool,
) -> _Request:
    """The call's arguments; raise for those that fit no call."""
    wanted = weights_wanted(need_weights, average_attn_weights)
    if isinstance(query, Tensor) and query.is_nested:
        fix = "Pad them and pass masks.lengths(...)."
        raise ArgumentError("query", expected="a padded tensor", got="a jagged one", fix=fix)
    if cache is None or cache.get() is None:
        if isinstance(cache, CrossKVCache) and key is None:
            fix = "The first call needs it; later ones with the same cache do not."
            raise ArgumentError("key", expected="this process's part of the memory", got="None", fix=fix)
        key, value = complete(query, key, value)
        require_inputs(module, query, key, value)
    else:  # a memory whose keys are projected already
        require_features("query", query, module.q_proj)
        key = value = query
    own = None if mask is None else as_mask(mask)
    if module.head_shard is not None:
        own = module.head_shard.mask(own)
    if positions is not None:
        positions_of_queries(positions, None, query.shape[-2])
    batched = query.dim() == 3
    if not batched:
        same, alike = key is query, value is key
        query = query[None]
        key = query if same else key[None]
        value = key if alike else value[None]
    return _Request(query, key, value, own, positions, wanted, batched)


def _facts(
    module: MultiHeadAttention, request: _Request, cache: PartCache | None, environment: Environment
) -> dict[str, int]:
    """The facts of a call."""
    query, key, value, mask, positions, weights, batched = request
    inputs = (query, key, value, *module.parameters())
    of_positions = tuple(positions.shape) if isinstance(positions, Tensor) else positions
    return {
        "batch size": query.shape[0],
        "a batch": batched,
        "dtype": FLOATS.index(query.dtype),
        "cache": fingerprint(common_facts(cache)),
        "key is query": key is query,
        "value is key": value is key,
        "need_weights": weights is not None,
        "average_attn_weights": weights == "average",
        "training": module.training,
        # A process that needs no gradient of the keys joins no exchange of it.
        "gradients": environment.gradients and fingerprint([tensor.requires_grad for tensor in inputs]),
        "autocast": environment.autocast,
        "kernel": fingerprint(getattr(environment.kernel, "name", None)),
        "mask": mask_fact(mask),
        "positions": fingerprint(of_positions),
        "dropout": fingerprint(module.dropout),
        "recorders": fingerprint([observer.wanted() for observer in listening()]) if environment.observed else 0,
        "query": query.shape[1],
        "key": key.shape[1] if cache is None or cache.get() is None else cache.length,
        # Every process draws a seed, so that all generators advance alike. The first process's seed is used.
        "seed": int(draw_seed(query.device)) if module.training and module.dropout else 0,
    }


@outside_graphs_alone
def _all_or_none(
    sequence: _Sequence, where: str, forward: Callable[..., Any], *inputs: object, **options: object
) -> Any:
    """The forward pass of a layer or stack; raise in every process if it raises in one, before its end or at it."""
    try:
        names = ("x", "memory")
        given = dict(zip(names, inputs, strict=False)) | {name: options[name] for name in names if name in options}
        if options.get("cache") is not None:  # of new tokens every process is given all
            given.pop("x", None)
        require_parts(sequence.group, sequence.layout, **given)
        output = forward(*inputs, **options)
    except Exception as error:
        announce(where, sequence.agreements, sequence.device, error)
        raise
    agree_in_turn(where, sequence.agreements, sequence.device, lambda: ({}, None), lambda *_: None)
    return output
