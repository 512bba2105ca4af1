"""`tensor_parallel`: the heads of attention and the features of feed-forward parts, split over processes.

Projections become `DTensor`s, so that their gradients are right for every use. Between them, heads are plain tensors of
this process.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar, final

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._call.naming import remember_names
from .._environment import is_tracing
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError
from ..transformer import FeedForward, SwiGLU
from ._agreement import (
    OfThisProcess,
    agree,
    agreement,
    fingerprint,
    group_for_agreements,
    group_of,
    require_equal,
    require_mesh,
)
from ._description import Split, attention_parts
from ._heads import WHERE
from ._tensor_plan import Splitting

_STATE = "state of PyTorch's generator"


def tensor_parallel(module: Split, mesh: DeviceMesh) -> Split:
    """Split the heads of attention, and the hidden features of feed-forward parts, over processes; in place.

    Query, key and value projections are split column-wise and output projections row-wise (Shoeybi et al.,
    "Megatron-LM", 2019). Each attention and each feed-forward part has one all-reduce forward and one backward. Every
    process takes the whole input and returns the whole output. Sinks, relative biases, ALiBi's slopes, norms with
    parameters of each head, and per-head masks are split with the heads.

    If W processes share fewer than W key/value heads, each process holds whole key and value projections. It
    keeps the head that its queries use. The gradients are summed over the processes.

    Parameters become `DTensor`s, with the values of the mesh's first process. Returned attention weights, and the
    results of `clearhead.record` and `monitor`, cover all heads. Request them in every process alike: the processes
    agree on that before one more exchange. `qk_clip_` takes the logits of all heads, and scales the heads of each
    process.

    A later call raises a `DistributedError` that names the step, if another process has ended, failed or makes another
    call. In a compiled graph the backend raises its own error.

    Outside graphs, the processes compare the sizes and dtypes of their inputs when these change. Every process raises
    `DistributedError` if they are not equal. Dropout of features that every process holds draws from the generator of
    each process. The first training call compares the states of the generators in the same way.

    Args:
        module: a `MultiHeadAttention`, or a layer or stack of `clearhead.transformer` made of them.
        mesh: a mesh of one dimension with W processes, as ``mesh["tp"]`` of a larger one. W divides H, and divides Hkv
            or is divided by it. With one process the module stays as it is.

    Returns:
        The module.

    Raises:
        ArgumentError: for a mesh of several dimensions, heads or features that W does not divide, a part that cannot
            be split, a parameter that two parts share, or a module that was split before. Nothing is changed then, on
            any process.
        DTypeError: for another kind of module, such as latent attention, whose latents belong to no head.
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
    group, device = group_of(mesh)
    with agreement(WHERE, (group,), device) as exchange:
        require_mesh(mesh)
        splitting = Splitting(mesh)
        gathered = exchange(splitting.add(module))
        require_equal(WHERE, gathered, gathered[0], "Build the same module in every process.")
    if mesh.size() > 1:
        for change in splitting.changes:
            change()
        same_inputs = SameInputs(mesh, group_for_agreements(group, device))
        module.register_forward_pre_hook(same_inputs, with_kwargs=True)
        module.register_load_state_dict_pre_hook(_require_split_state)
    remember_names(module)
    return module


def _require_split_state(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Raise for a `state_dict` of whole parameters."""
    for name, parameter in module.named_parameters():
        loaded = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(loaded, Tensor) and not isinstance(loaded, DTensor):
            fix = (
                "Load it before tensor_parallel, or with set_model_state_dict(module, state_dict, "
                "options=StateDictOptions(full_state_dict=True)) of torch.distributed.checkpoint.state_dict."
            )
            raise ArgumentError(f"state_dict: {prefix}{name}", expected="a DTensor", got="a plain tensor", fix=fix)


@final
class SameInputs(OfThisProcess):
    """A hook before each call. It compares sizes and dtypes if they differ from those of the call before.

    gloo ends a process that sums tensors of different sizes. Before the first training call with dropout of features
    that every process holds, it also compares the states of the generators, because the outputs would differ.

    Args:
        mesh: the mesh of the processes.
        agreements: a group of the same processes, used for agreements only.
    """

    where: ClassVar[str] = WHERE

    def __init__(self, mesh: DeviceMesh, agreements: dist.ProcessGroup) -> None:
        self._mesh, self._agreements = mesh, agreements
        self._agreed_inputs: dict[str, int] | None = None
        self._agreed_state = False

    def __call__(self, module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        if is_tracing():
            return
        draws = not self._agreed_state and module.training and _drops_shared_features(module)
        facts = _sizes([*inputs, *keywords.values()])
        if not draws and (facts == self._agreed_inputs or _is_context_parallel(module)):
            return
        device = self._mesh.device_type
        get_state = torch.get_rng_state if device == "cpu" else torch.get_device_module(device).get_rng_state
        state = {_STATE: fingerprint(get_state().tolist()) if draws else 0}
        gathered = agree(WHERE, self._agreements, device, {**facts, **state})
        require_equal(WHERE, gathered, facts, "Give every process the same input.")
        fix = "Features that all of them hold are dropped alike: call torch.manual_seed with one seed in all of them."
        require_equal(f"{WHERE}: dropout", gathered, state, fix)
        self._agreed_inputs, self._agreed_state = facts, self._agreed_state or draws


def _sizes(inputs: Sequence[object]) -> dict[str, int]:
    """Sizes and dtypes of the first two tensors of a call: query and key, or the input and the memory of a decoder."""
    names = ("dimensions", "batch size", "length", "features", "dtype")
    tensors = [x for x in inputs if isinstance(x, Tensor)]
    return {
        f"{name} of the {argument}": size
        for argument, x in zip(("query", "key"), tensors, strict=False)
        for name, size in zip(names, _sizes_of(x), strict=True)
    }


def _sizes_of(x: Tensor) -> tuple[int, ...]:
    tokens = x.values() if x.layout is torch.jagged else x
    batch = x.size(0) if x.is_nested else math.prod(x.shape[:-2]) if x.dim() >= 2 else 0
    length, features = tokens.shape[-2:] if tokens.dim() >= 2 and not tokens.is_nested else (0, 0)
    return x.dim(), batch, length, features, fingerprint(str(x.dtype))


def _is_context_parallel(module: nn.Module) -> bool:
    """Whether `context_parallel` has split the module too. Its calls then agree on more than this."""
    return any(part.sequence_shard is not None for part in module.modules() if isinstance(part, MultiHeadAttention))


def _drops_shared_features(module: nn.Module) -> bool:
    """Whether dropout acts on features that every process holds. Hidden features of feed-forward parts are split."""
    _, other_parts = attention_parts(WHERE, module)
    parts = (
        part for _, module in other_parts if not isinstance(module, FeedForward | SwiGLU) for part in module.modules()
    )
    return any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
