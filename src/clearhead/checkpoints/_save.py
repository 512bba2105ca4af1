"""`save`: the weights of a `clearhead.MultiHeadAttention` under another naming."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._multihead import MultiHeadAttention
from ..errors import CheckpointError, DTypeError
from ._namings import ROLES, Entry, Naming, Projection, Role, namings_called
from ._recognise import as_path
from ._tensors import LINEARS, Projections, copied, grouped


def save(module: MultiHeadAttention, naming: str | Naming, *, prefix: str = "") -> dict[str, Tensor]:
    """Write the module's weights under the names, and in the layout, of another class.

    Loading them again gives the same bits. Only weights are written, because heads, scale and dropout have no names.
    If several projections share one tensor and only some of them have a bias, the others are written as zeros.

    Args:
        module: the module.
        naming: a name out of `checkpoints.NAMINGS`, such as ``"w_q"``, ``"d2l"`` or ``"torch"``, or a `Naming`.
            The name ``"torch"`` writes the packed layout, or separate weights if `kdim` or `vdim` requires them.
        prefix: path before the names. Default none.

    Returns:
        A state dict of detached copies, each on its own device and in its own dtype.

    Raises:
        ArgumentError: for an unknown naming.
        CheckpointError: if the naming has no place for the module's sizes, a projection is no plain `nn.Linear`, or
            another part has parameters.
        DTypeError: if `module` is not a `clearhead.MultiHeadAttention`.

    Example:
        >>> import torch, clearhead
        >>> ours = clearhead.MultiHeadAttention(12, 3)
        >>> theirs = torch.nn.MultiheadAttention(12, 3, batch_first=True)
        >>> theirs.load_state_dict(clearhead.checkpoints.save(ours, "torch"))
        <All keys matched successfully>
    """
    projections = _projections(module)
    layouts = namings_called(naming)
    problems = [_problem(layout, projections) for layout in layouts]
    if all(problems):
        expected = f"sizes that the naming {layouts[0].name} has a place for"
        fix = "A naming of four separate weights, such as o_proj, takes every size."
        raise CheckpointError("module", expected=expected, got="; ".join(dict.fromkeys(problems)), fix=fix)
    packed = _pack(layouts[problems.index("")], projections, module.num_heads)
    return {as_path(prefix) + key: tensor for key, tensor in packed.items()}


def _projections(module: object) -> Projections:
    if not isinstance(module, MultiHeadAttention):
        expected = "a clearhead.MultiHeadAttention"
        raise DTypeError("module", expected=expected, got=type(module).__name__)
    others = [name for name, _ in module.named_parameters() if name.split(".")[0] not in LINEARS.values()]
    if others:
        expected, got = "no parameters but those of the four projections", f"{', '.join(others)}, which no naming has"
        raise CheckpointError("module", expected=expected, got=got, fix="Its state_dict() has all of its parameters.")
    projections: dict[Role, Projection] = {}
    for role, name in LINEARS.items():
        linear = getattr(module, name)
        if not isinstance(linear, nn.Linear) or nn.utils.parametrize.is_parametrized(linear):
            got, fix = type(linear).__name__, "Merge adapters and remove parametrizations first."
            raise CheckpointError(f"module.{name}", expected="a plain nn.Linear", got=got, fix=fix)
        projections[role] = Projection(linear.weight, linear.bias)
    return projections


def _problem(naming: Naming, projections: Projections) -> str:
    """The reason why a naming cannot hold these projections. Empty if it can."""
    query, key, _, output = (projections[role].weight for role in ROLES)
    if naming.square and len({*query.shape, *output.shape, key.shape[0]}) > 1:
        sizes = f"query {query.shape[1]}, all heads {query.shape[0]}, key/value heads {key.shape[0]}"
        return f"{sizes} and output {output.shape[0]} features, which must be one number"
    if naming.of_single_heads and query.shape[0] != key.shape[0]:
        return f"grouped heads, {query.shape[0]} features of queries and {key.shape[0]} of keys"
    for entry in (entry for entry in naming.weights + naming.biases if len(entry.holds) > 1):
        fused = [projections[role] for role in entry.holds]
        if entry in naming.weights and len({weight.shape for weight, _ in fused}) > 1:
            inputs = ", ".join(str(weight.shape[1]) for weight, _ in fused)
            return f"inputs of {inputs} features, which share one weight there"
        tensors = [tensor for projection in fused for tensor in projection if tensor is not None]
        if len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
            return f"several dtypes or devices for what is one tensor there, {entry.key}"
    return ""


def _pack(naming: Naming, projections: Projections, heads: int) -> dict[str, Tensor]:
    packed: dict[str, Tensor] = {}
    for entry in naming.weights:
        weight = torch.cat([projections[role].weight for role in entry.holds])  # (rows of all, in)
        packed |= _named(naming, entry, weight, heads)
    for entry in naming.biases:
        fused = [projections[role] for role in entry.holds]
        if any(bias is not None for _, bias in fused):
            biases = [weight.new_zeros(weight.shape[0]) if bias is None else bias for weight, bias in fused]
            packed |= _named(naming, entry, torch.cat(biases), heads)
    return packed


def _named(naming: Naming, entry: Entry, rows: Tensor, heads: int) -> dict[str, Tensor]:
    """The tensor of an entry, or those of each head."""
    if naming.by_head and len(entry.holds) > 1:
        rows = grouped(rows, heads)
    if "*" in entry.key:
        return {entry.key.replace("*", str(head)): copied(part) for head, part in enumerate(rows.chunk(heads))}
    return {entry.key: copied(rows.t() if naming.transposed and rows.dim() == 2 else rows)}
