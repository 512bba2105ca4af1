"""`tensor_parallel`: the heads of attention and the features of feed-forward parts, split over processes.

Projections become `DTensor`s, so that their gradients are right however they are used; between them, heads are plain
tensors of this process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from .._call.naming import remember_names
from .._environment import is_tracing
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, DTypeError
from ..masks._base import Mask
from ..masks._combined import And
from ..masks._grid import Offset
from ..masks._part import part_of
from ..positions import RelativeBias
from ..transformer import Decoder, DecoderLayer, Encoder, EncoderLayer, FeedForward, SwiGLU
from ._agreement import (
    agree,
    agree_on,
    fingerprint,
    group_for_agreements,
    group_of,
    not_pickled,
    require_device,
    require_equal,
    require_mesh,
)
from ._collectives import step, sum_dtype, sum_of_gradients
from ._description import aspects_of
from ._finding import attention_parts
from ._statistics import with_all_heads

Split = TypeVar("Split", MultiHeadAttention, EncoderLayer, DecoderLayer, Encoder, Decoder)

_WHERE = "tensor_parallel"


def tensor_parallel(module: Split, mesh: DeviceMesh) -> Split:
    """Split the heads of attention, and the hidden features of feed-forward parts, over processes; in place.

    Query, key and value projections are split column-wise and output projections row-wise (Shoeybi et al.,
    "Megatron-LM", 2019): one all-reduce forward and one backward for each attention and each feed-forward part. Every
    process takes the whole input and returns the whole output. What belongs to a head goes with it: sinks, relative
    biases, ALiBi's slopes, norms with parameters of each head, and the heads of every mask.

    Where W processes share fewer than W key/value heads, each of them holds the key and value projections whole, and
    keeps the head that its queries use of what they compute; their gradients are summed over the processes.

    Parameters become `DTensor`s, with the values of the mesh's first process. Attention weights that are returned, and
    what `clearhead.record` and `monitor` give, are of all heads: every process asks for the same, by which they agree
    before one more exchange. `qk_clip_` takes the logits of all heads, and scales those of each process.

    What the exchange of a later call raises, where another process has ended, failed or makes another call, is a
    `DistributedError` that names the step; in a compiled graph it is the backend's own error.

    The processes compare the sizes and dtypes of their inputs where these differ from those of the call before, outside
    graphs; every process raises `DistributedError` if they are not equal. Dropout of features that every process holds
    draws from each one's own generator; the first training call compares the states of these in the same way.

    Args:
        module: a `MultiHeadAttention`, or a layer or stack of `clearhead.transformer` made of them.
        mesh: one-dimensional, as ``mesh["tp"]`` of a larger one; W processes. W divides H, and divides Hkv or is
            divided by it. With one process the module stays as it is.

    Returns:
        The module.

    Raises:
        ArgumentError: for a mesh of several dimensions, heads or features that W does not divide, a part that cannot
            be split, a parameter that two parts share, a module that was split before. Nothing is changed then, on any
            process.
        DTypeError: for another kind of module; latent attention, whose latents belong to no head, is one.
        DistributedError: if another process raises one of these, or has another module.

    Example:
        >>> import torch.distributed as dist, clearhead
        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from clearhead.distributed import tensor_parallel
        >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # torchrun sets these
        >>> mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
        >>> attend = tensor_parallel(clearhead.MultiHeadAttention(embed_dim=12, num_heads=4), mesh)
        >>> dist.destroy_process_group()
    """

    def find() -> tuple[dict[str, int], _Plan]:
        require_mesh(mesh)
        plan = _Plan(mesh.size(), mesh.get_local_rank())
        plan.add(module)
        plan.require_all(module)
        aspects = aspects_of(module, *attention_parts(_WHERE, module))
        return {**aspects, "placements": fingerprint(*plan.words)}, plan

    group, device = group_of(mesh)
    gathered, plan = agree_on(_WHERE, group, device, find)
    require_equal(_WHERE, gathered, tuple(gathered[0]), "Build the same module in every process.")
    if plan.world > 1:
        for change in plan.changes:
            change(mesh)
        same_calls = _SameCalls(mesh, group_for_agreements(group, device))
        module.register_forward_pre_hook(same_calls, with_kwargs=True)
        module.register_load_state_dict_pre_hook(_require_split_state)
    remember_names(module)
    return module


def _require_split_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Raise for a `state_dict` of whole parameters."""
    for name, parameter in module.named_parameters():
        own = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(own, Tensor) and not isinstance(own, DTensor):
            fix = (
                "Load it before tensor_parallel, or with set_model_state_dict(module, state_dict, "
                "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict."
            )
            raise ArgumentError(f"state_dict: {prefix}{name}", expected="a DTensor", got="a plain tensor", fix=fix)


class _SameCalls:
    """Before a call whose inputs differ in size or dtype from those of the call before: the processes compare them.

    gloo ends a process that sums tensors of different sizes. Before the first training call that drops features of
    every process, they also compare the states of their generators, because their outputs would differ.

    Args:
        mesh: over the processes.
        agreements: a group of the same processes, for nothing else.
    """

    def __init__(self, mesh: DeviceMesh, agreements: dist.ProcessGroup) -> None:
        self._mesh, self._agreements = mesh, agreements
        self._agreed_inputs: dict[str, int] | None = None
        self._agreed_state = False

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if is_tracing():
            return
        draws = not self._agreed_state and module.training and _drops_whole(module)
        facts = _sizes([*inputs, *keywords.values()])
        if not draws and (facts == self._agreed_inputs or _compares_itself(module)):
            return
        kind = self._mesh.device_type
        get_state = torch.get_rng_state if kind == "cpu" else torch.get_device_module(kind).get_rng_state
        state = {_STATE: fingerprint(get_state().tolist()) if draws else 0}
        gathered = agree(_WHERE, self._agreements, kind, {**facts, **state})
        require_equal(_WHERE, gathered, tuple(facts), "Give every process the same input.")
        fix = "Features that all of them hold are dropped alike: call torch.manual_seed with one seed in all of them."
        require_equal(f"{_WHERE}: dropout", gathered, tuple(state), fix)
        self._agreed_inputs, self._agreed_state = facts, self._agreed_state or draws

    def __deepcopy__(self, memo: object) -> _SameCalls:
        return _SameCalls(self._mesh, self._agreements)

    def __reduce__(self) -> str:
        raise not_pickled(_WHERE)


_STATE = "state of PyTorch's generator"


def _sizes(inputs: Sequence[object]) -> dict[str, int]:
    """Sizes and dtypes of the first two tensors of a call: query and key, or the input of a decoder and its memory."""
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return _sizes_of("query", tensors[:1]) | _sizes_of("key", tensors[1:2])


def _sizes_of(name: str, tensor: Sequence[Tensor]) -> dict[str, int]:
    dims = batch = length = features = dtype = 0
    for x in tensor:
        rows = x.values() if x.layout is torch.jagged else x
        dims, dtype = x.dim(), fingerprint(str(x.dtype))
        if x.is_nested:
            batch = x.size(0)
        elif dims >= 2:
            batch = math.prod(x.shape[:-2])
        if rows.dim() >= 2 and not rows.is_nested:
            length, features = rows.shape[-2:]
    sizes = {"dimensions": dims, "batch size": batch, "length": length, "features": features, "dtype": dtype}
    return {f"{what} of the {name}": size for what, size in sizes.items()}


def _compares_itself(module: nn.Module) -> bool:
    """Whether `context_parallel` has split the module too: its calls agree on more than this."""
    return any(each.sequence_shard is not None for each in module.modules() if isinstance(each, MultiHeadAttention))


def _drops_whole(module: nn.Module) -> bool:
    """Whether dropout acts on features that every process holds; hidden ones of feed-forward parts are split."""
    _, others = attention_parts(_WHERE, module)
    whole = (part for _, part in others if not isinstance(part, FeedForward | SwiGLU))
    return any(isinstance(each, nn.Dropout) and each.p > 0 for part in whole for each in part.modules())


@dataclass(frozen=True)
class _Heads:
    """The `HeadShard` of one process.

    Args:
        name: of the module, for messages.
        mesh: over the processes that share the heads.
        total: H of the module.
        first: of this process's heads.
        num_heads, num_kv_heads: of this process.
        all_num_kv_heads: Hkv of the module.
    """

    name: str
    mesh: DeviceMesh
    total: int
    first: int
    num_heads: int
    num_kv_heads: int
    all_num_kv_heads: int

    @property
    def group(self) -> dist.ProcessGroup:
        return self.mesh.get_group()

    def enter(self, *inputs: Tensor | None) -> tuple[Tensor | None, ...]:
        for x in inputs:
            if x is not None:
                require_device(_WHERE, "query", x, self.mesh.device_type)
        # One DTensor for one tensor: gradients of the projections are added before they are summed over processes.
        entered: dict[int, Tensor] = {}
        for x in inputs:
            if x is not None and id(x) not in entered:
                entered[id(x)] = _placed(self.mesh, Replicate(), self.name, x)
        return tuple(None if x is None else entered[id(x)] for x in inputs)

    def local(self, parameter: Tensor) -> Tensor:
        return _local(parameter)

    def mask(self, mask: Mask | None) -> Mask | None:
        if mask is None:
            return None
        parts = mask.parts() if isinstance(mask, And) else (mask,)
        found = tuple(self._part(part) for part in parts)
        return found[0] if len(found) == 1 else And(found)

    def all_weights(self, weights: Tensor) -> Tensor:
        if not is_tracing():
            # The all-reduce of averages would meet the one of the outputs of a process that wants no weights.
            self._agree("weights", tuple(weights.shape), None, "Ask for weights in every process alike.")
        placement: Placement = Shard(1)
        if weights.dim() == 3:
            weights, placement = weights / self.mesh.size(), Partial()
        split = DTensor.from_local(weights, self.mesh, [placement], run_check=False)
        with step(f"forward: exchange of the weights of {self.name}", _WHERE):
            return split.redistribute(placements=[Replicate()]).to_local()

    def agree(self, wanted: Hashable, problem: Exception | None) -> None:
        self._agree("recorders", wanted, problem, "Record in every process alike.")

    def _agree(self, what: str, wanted: Hashable, problem: Exception | None, fix: str) -> None:
        where = f"{_WHERE}: {what} of {self.name}"
        gathered = agree(where, self.group, self.mesh.device_type, problem or {what: fingerprint(wanted)})
        require_equal(_WHERE, gathered, (what,), fix)

    def all_heads(self, results: dict[str, Any]) -> dict[str, Any]:
        return with_all_heads(results, self.group, lambda name, tensor, rank: tensor, _WHERE)

    def _part(self, part: Mask) -> Mask:
        tensors = part.bias_tensors()
        if any(isinstance(tensor, DTensor) for tensor in tensors):
            return part.with_bias_tensors(map(_local, tensors))
        if any(tensor.requires_grad for tensor in tensors):
            group = self.group
            part = part.with_bias_tensors(sum_of_gradients(tensor, group, _WHERE) for tensor in tensors)
        return cast(Mask, part_of(part, Offset(self.total, self.first)))

    def __deepcopy__(self, memo: object) -> _Heads:
        return self

    def __reduce__(self) -> str:
        raise not_pickled(_WHERE)


def _none() -> list[Any]:
    return []


@dataclass
class _Plan:
    """What splitting a module changes: looked for first, so that a refusal changes nothing.

    Args:
        world, rank: W, and this process.
        changes: made when every process has found them.
        words: what is split and how, equal in every process.
        covered: the parameters that are, with the module and the name that each is found by.
        roles: how each part is split, by the name it was found by first; layers may share a part.
    """

    world: int
    rank: int
    changes: list[Callable[[DeviceMesh], None]] = field(default_factory=_none)
    words: list[object] = field(default_factory=_none)
    covered: dict[int, tuple[int, str, str]] = field(default_factory=dict[int, tuple[int, str, str]])
    roles: dict[int, tuple[str, object]] = field(default_factory=dict[int, tuple[str, object]])

    def add(self, module: object) -> None:
        attentions, others = attention_parts(_WHERE, module)
        for name, attention in attentions:
            self._add_attention(name, attention)
        for name, part in others:
            if isinstance(part, FeedForward):
                self._require_plain(f"{name}.activation", part.activation)
                self._add_column(f"{name}.linear1", part.linear1, self._split_output)
                self._add_row(f"{name}.linear2", part.linear2)
            elif isinstance(part, SwiGLU):
                if self._is_new(name, part, "gated"):
                    self.changes.append(partial(_enter_once, part, name))
                self._add_column(f"{name}.gate_proj", part.gate_proj, self._split_output)
                self._add_column(f"{name}.up_proj", part.up_proj, self._split_output)
                self._add_row(f"{name}.down_proj", part.down_proj)
            elif isinstance(part, nn.LayerNorm | nn.RMSNorm) or not list(part.parameters()):
                self._add_norm(name, part, Replicate(), {key: Replicate() for key, _ in part.named_parameters()})
            else:
                fix = "Feed-forward parts are FeedForward or SwiGLU, and norms nn.LayerNorm or nn.RMSNorm."
                raise DTypeError(name, expected="a part that can be split", got=_kind(part), fix=fix)

    def require_all(self, module: nn.Module) -> None:
        """Raise for a parameter that no change covers: it would be trained apart on every process."""
        for name, parameter in module.named_parameters():
            if id(parameter) not in self.covered:
                raise ArgumentError(
                    f"module.{name}",
                    expected="a parameter of a projection, norm, sink or relative bias",
                    got=f"a {parameter.dtype} parameter that cannot be split",
                    fix="Leave the part that holds it out, or replace it.",
                )

    def _add_attention(self, name: str, module: MultiHeadAttention) -> None:
        if module.head_shard is not None or module.sequence_shard is not None:
            before = _WHERE if module.head_shard is not None else "context_parallel"
            fix = "Split every module once, over heads first and over sequences then."
            raise ArgumentError(name, expected="a whole attention", got=f"one after {before}", fix=fix)
        heads, kv_heads, world = module.num_heads, module.num_kv_heads, self.world
        shares = kv_heads % world == 0
        if heads % world or not (shares or world % kv_heads == 0):
            raise ArgumentError(
                f"{name}: num_heads, num_kv_heads",
                expected=f"H a multiple of the mesh's W = {world}, and Hkv a multiple or a divisor of it",
                got=f"H = {heads}, Hkv = {kv_heads}",
                fix="Use a mesh of another size.",
            )
        local, local_kv = heads // world, kv_heads // world if shares else 1
        first = self.rank * local
        if not self._is_new(name, module, "attention"):
            return
        self._add_column(f"{name}.q_proj", module.q_proj, self._split_output)
        start = first * kv_heads // heads * module.head_dim
        own = slice(start, start + local_kv * module.head_dim)
        for key in ("k_proj", "v_proj"):
            projection = getattr(module, key)
            if shares:
                self._add_column(f"{name}.{key}", projection, self._split_output)
            else:
                keep = partial(_own_features, own)
                self._add_linear(f"{name}.{key}", projection, {}, Replicate(), keep, (own.start, own.stop))
        self._add_row(f"{name}.out_proj", module.out_proj)
        self._add_head_norm(f"{name}.q_norm", module.q_norm, heads, module.head_dim, True)
        self._add_head_norm(f"{name}.k_norm", module.k_norm, kv_heads, module.head_dim, shares)
        if isinstance(module.position, nn.Module):
            self._require_plain(f"{name}.position", module.position)
        if module.sinks is not None:
            self._add_parameter(f"{name}.sinks", module, "sinks", Shard(0))
        for part in () if module.mask is None else module.mask.parts():
            if isinstance(part, RelativeBias):
                self._add_parameter(f"{name}.mask", part, "weight", Shard(1))

        def share(mesh: DeviceMesh) -> None:
            module.head_shard = _Heads(name, mesh, heads, first, local, local_kv, kv_heads)

        self.changes.append(share)

    def _add_column(self, name: str, module: nn.Module, output: Callable[..., Tensor]) -> None:
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0), "lora_B": Shard(0)}
        self._add_linear(name, module, placements, Replicate(), output)

    def _add_row(self, name: str, module: nn.Module) -> None:
        self._add_linear(
            name, module, {"weight": Shard(1), "lora_A": Shard(1)}, Shard(-1), partial(_summed_output, name)
        )

    def _add_linear(
        self,
        name: str,
        module: nn.Module,
        placements: dict[str, Placement],
        input: Placement,
        output: Callable[..., Tensor],
        kept: tuple[int, int] | None = None,
    ) -> None:
        """A linear layer, or LoRA's around one, whose parameters are placed so, and replicated otherwise.

        `kept` are the features that the output keeps of those that every process computes.
        """
        if not _is_linear(module):
            expected, fix = (
                "a linear layer, or peft's LoRA layer of one without DoRA",
                "Split the module before it is replaced.",
            )
            raise DTypeError(name, expected=expected, got=_kind(module), fix=fix)
        if not self._is_new(name, module, (sorted(placements), str(input), kept)):
            return
        placed: dict[str, Placement] = {}
        for key, parameter in module.named_parameters():
            placement = placements.get(key.removeprefix("base_layer.").split(".")[0], Replicate())
            placed[key] = placement
            size = parameter.shape[placement.dim] if isinstance(placement, Shard) else 0
            if size % self.world:
                expected, fix = f"a multiple of the mesh's W = {self.world} features", "Use a mesh of another size."
                raise ArgumentError(name, expected=expected, got=str(size), fix=fix)
        self._add_parameters(name, module, placed)
        self.changes.append(lambda mesh: _hook(module, partial(_as_rows, partial(_placed, mesh, input, name)), output))

    def _add_norm(self, name: str, module: nn.Module, input: Placement, placements: dict[str, Placement]) -> None:
        """A module on tensors that are placed so, before and after it."""
        if placements and self._is_new(name, module, (str(input), sorted(map(str, placements.items())))):
            self._add_parameters(name, module, placements)
            output = _whole_output if input.is_replicate() else _local
            self.changes.append(lambda mesh: _hook(module, partial(_placed, mesh, input, name), output))

    def _add_head_norm(self, name: str, norm: nn.Module | None, heads: int, dim: int, splits: bool) -> None:
        if norm is None:
            return
        placements: dict[str, Placement] = {}
        for key, parameter in norm.named_parameters():
            per_head = parameter.dim() > 1 and parameter.shape[0] == heads
            if tuple(parameter.shape) != (dim,) and not (per_head and splits):
                expected = f"parameters ({dim},) of all heads" + (f", or of each head ({heads}, …)" if splits else "")
                got = f"{key} {tuple(parameter.shape)}"
                raise ArgumentError(name, expected=expected, got=got)
            placements[key] = Shard(0) if per_head else Replicate()
        self._add_norm(name, norm, Shard(1), placements)

    def _is_new(self, name: str, part: nn.Module, role: object) -> bool:
        """Whether a part is met for the first time; raise if it is split in another way where it was met before."""
        first, before = self.roles.setdefault(id(part), (name, role))
        if before != role:
            fix = "Give each a part of its own."
            raise ArgumentError(name, expected="a part that is split in one way", got=f"that of {first}", fix=fix)
        return first == name

    def _add_parameters(self, name: str, module: nn.Module, placements: dict[str, Placement]) -> None:
        for key, _ in list(module.named_parameters()):
            path, _, own = key.rpartition(".")
            self._add_parameter(f"{name}.{key}", module.get_submodule(path), own, placements.get(key, Replicate()))

    def _add_parameter(self, name: str, owner: nn.Module, key: str, placement: Placement) -> None:
        parameter: Any = getattr(owner, key)
        if isinstance(parameter, DTensor):
            fix = "Split every module once, before fully_shard."
            raise ArgumentError(name, expected="a plain parameter", got="a DTensor", fix=fix)
        self.words.append((name, tuple(parameter.shape), str(parameter.dtype), str(placement)))
        # A relative bias, and a part, may belong to several layers; it is split once.
        place = id(owner), key
        *found, first = self.covered.setdefault(id(parameter), (*place, name))
        if tuple(found) != place:
            fix = "Splitting would untie them: share the whole part, or the whole layer, instead of a parameter."
            raise ArgumentError(name, expected="a parameter of one part", got=f"that of {first} too", fix=fix)
        if first == name:
            self.changes.append(lambda mesh: _distribute(name, owner, key, mesh, placement))

    def _require_plain(self, name: str, part: object) -> None:
        if isinstance(part, nn.Module) and list(part.parameters()):
            fix = "Its gradient would be another on every process."
            raise ArgumentError(name, expected="a part that learns nothing", got=_kind(part), fix=fix)

    @staticmethod
    def _split_output(output: Any) -> Tensor:
        return output.redistribute(placements=[Shard(-1)]).to_local()


def _distribute(name: str, owner: nn.Module, key: str, mesh: DeviceMesh, placement: Placement) -> None:
    parameter = getattr(owner, key)
    placed = distribute_tensor(parameter.detach(), mesh, [placement])
    own = nn.Parameter(placed, requires_grad=parameter.requires_grad)
    if parameter.requires_grad and placement.is_replicate():
        own.register_post_accumulate_grad_hook(partial(_sum_gradient, name))
    owner.register_parameter(key, own)


def _sum_gradient(name: str, parameter: Tensor) -> None:
    """Sum the gradient of what every process holds over the processes, where each has a part of it."""
    gradient, placed = cast(Any, parameter.grad), cast(Any, parameter).placements
    if gradient is not None and gradient.placements != placed:
        own = sum_dtype(gradient)
        with step(f"backward: all-reduce of the gradient of {name}", _WHERE):
            parameter.grad = gradient.to(own).redistribute(placements=placed).to(gradient.dtype)


def _hook(module: nn.Module, enter: Callable[[Tensor], Tensor], leave: Callable[[Any], Tensor]) -> None:
    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (enter(inputs[0]), *inputs[1:])

    def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Tensor:
        left = leave(output)
        leading = getattr(inputs[0], "_leading", None)
        return left if leading is None else left.view(*leading, left.shape[-1])

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def _as_rows(enter: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The input of a linear layer, in which one without a position (B, 0, E) becomes (0, E).

    A linear layer views an input of more dimensions as rows and back. `DTensor`'s rules for views divide by sizes and
    compare products of sizes: with a size of zero they raise, or never end.
    """
    placed = enter(x)
    leading = placed.shape[:-1]
    if len(leading) < 2 or 0 not in leading:
        return placed
    empty = leading.index(0)
    rows = placed.sum([dim for dim in range(len(leading)) if dim != empty])  # no view, also in its gradient
    rows._leading = leading  # pyright: ignore[reportAttributeAccessIssue] # for the hook that takes it back
    return rows


def _enter_once(module: nn.Module, name: str, mesh: DeviceMesh) -> None:
    """Let several projections share one input, whose gradient is then summed once."""

    def before(module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        return (_placed(mesh, Replicate(), name, inputs[0]), *inputs[1:])

    module.register_forward_pre_hook(before)


def _placed(mesh: DeviceMesh, placement: Placement, name: str, x: Tensor) -> Tensor:
    """The input of a part as a `DTensor`; the gradient of one that every process holds is summed over them."""
    if isinstance(x, DTensor):
        return x
    placed = DTensor.from_local(x, mesh, [placement], run_check=False)
    if placement.is_replicate() and placed.requires_grad and not is_tracing():
        # `from_local` would sum it too, as it does in a graph, but a failure would not name the step.
        placed.register_hook(partial(_summed_input_gradient, name))
    return placed


def _summed_input_gradient(name: str, gradient: Any) -> Tensor:
    with step(f"backward: all-reduce of the gradient of the input of {name}", _WHERE):
        return gradient.redistribute(placements=[Replicate()])


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


def _own_features(own: slice, output: Any) -> Tensor:
    """The features of this process's key/value head, of the projections of all; each gradient is a part of the sum."""
    return output.to_local(grad_placements=[Partial()])[..., own]


def _summed_output(name: str, output: Any) -> Tensor:
    with step(f"forward: all-reduce of the output of {name}", _WHERE):
        return _whole_output(output.redistribute(placements=[Replicate()]))


def _whole_output(output: Any) -> Tensor:
    """What leaves a part; no view, which `fully_shard` warns of where it is what a module returns."""
    return output.to_local().clone()


def _is_linear(module: nn.Module) -> bool:
    """Whether it computes W x + b, or W x + b + s B A x as peft's LoRA layers do (Hu et al., "LoRA", 2021)."""
    base = getattr(module, "base_layer", None)
    if base is None:
        return isinstance(module, nn.Linear)
    inside = {name for name, part in module.named_children() if list(part.parameters())}
    return isinstance(base, nn.Linear) and inside <= {"base_layer", "lora_A", "lora_B"}


def _kind(part: object) -> str:
    return type(part).__name__
