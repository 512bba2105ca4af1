"""`tensor_parallel`: the heads of attention and the features of feed-forward parts, split over processes.

Projections become `DTensor`s, so that their gradients are right for every use. Between them, heads are plain tensors of
this process.
"""

from __future__ import annotations

from typing import Any, TypeVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .._call.naming import remember_names
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError
from ..transformer import Decoder, DecoderLayer, Encoder, EncoderLayer
from ._agreement import agree_on, group_for_agreements, group_of, require_equal, require_mesh
from ._same_inputs import SameInputs
from ._tensor_hooks import WHERE
from ._tensor_plan import Plan

Split = TypeVar("Split", MultiHeadAttention, EncoderLayer, DecoderLayer, Encoder, Decoder)


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

    def find() -> tuple[dict[str, int], Plan]:
        require_mesh(mesh)
        plan = Plan(mesh)
        return plan.add(module), plan

    group, device = group_of(mesh)
    gathered, plan = agree_on(WHERE, group, device, find)
    require_equal(WHERE, gathered, tuple(gathered[0]), "Build the same module in every process.")
    if len(gathered) > 1:
        for change in plan.changes:
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
