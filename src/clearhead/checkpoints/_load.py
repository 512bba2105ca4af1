"""`load` and `identify`: attention weights under known names → `clearhead.MultiHeadAttention`."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from torch import nn

from .._call.naming import remember_name
from .._checks import is_finite, number_or_none, shown
from .._multihead import MultiHeadAttention
from ..errors import ArgumentError, CheckpointError, DTypeError
from ._namings import Naming, Role, namings_called
from ._recognise import Finding, recognise
from ._tensors import Source, fill, in_order, read_source

_LOGGER = logging.getLogger("clearhead")
_INPUTS: tuple[Role, ...] = ("query", "key", "value")


def identify(source: Source, *, naming: str | Naming | None = None, prefix: str = "") -> Finding:
    """Recognise the naming of attention weights, without loading them.

    Args:
        source: as for `load`.
        naming: the only naming to recognise. Default all of `checkpoints.NAMINGS`.
        prefix: the path that all names start with. Default none.

    Returns:
        A `Finding` with naming, prefix, sizes and biases, and with the keys that `load` ignores or refuses. Print it.

    Raises:
        CheckpointError, ArgumentError, DTypeError: as `load`.

    Example:
        >>> import torch, clearhead
        >>> print(clearhead.checkpoints.identify(torch.nn.MultiheadAttention(12, 3, kdim=5)))
        torch: torch.nn.MultiheadAttention with a kdim or vdim of its own
          weights: q_proj_weight, k_proj_weight, v_proj_weight, out_proj.weight
          sizes: query 12, key 5, value 12, all heads 12, output 12
          biases: query, key, value, output
    """
    return recognise(read_source(source)[0], namings_called(naming), prefix)[0]


def load(
    source: Source,
    num_heads: int | None = None,
    *,
    num_kv_heads: int | None = None,
    naming: str | Naming | None = None,
    prefix: str = "",
    dropout: float | None = None,
    scale: float | None = None,
) -> MultiHeadAttention:
    """Build a `clearhead.MultiHeadAttention` with a copy of attention weights from elsewhere.

    The keys determine the naming. The attribute ``loaded_from`` of the result describes what was read, and the logger
    ``clearhead`` writes it at level INFO. Only weights are loaded. The result does not apply the rotary positions of
    Llama, Mistral and Qwen2, and masks are arguments of the call. `from_transformers` reads both from a model's
    configuration. The result is batch first.

    Each tensor keeps its dtype and device. Files are read onto the CPU. If only some of query, key and value have a
    bias, the others get a bias of zeros, and ``loaded_from`` mentions it.

    Args:
        source: a module, a state dict, a mapping of the four projections, or a path. The mapping has the keys
            ``query``, ``key``, ``value`` and ``output``, or ``q``, ``k``, ``v`` and ``o``. Each value is an `nn.Linear`
            or its (out, in) weight. The path is that of a ``.safetensors`` file, or of a state dict written by
            `torch.save`, which is read with ``weights_only=True``.
        num_heads: H. Default that of the module, or of names with a number for each head. Shapes of weights do not
            determine it, so other sources require it.
        num_kv_heads: Hkv. Default read from the shapes.
        naming: name of the naming, or a `Naming` of your own. Default recognised.
        prefix: path of the attention block, or of a module that holds only one. Default none.
        dropout: dropout of the weights in training. Default that of the module, and 0 for other sources.
        scale: factor of the scores. Default that of the module if it has one (``scaling`` in transformers), and 1/√D
            otherwise. Weights do not determine it. GPT-Neo and T5, for example, use 1.

    Returns:
        The module, in the training mode of the source module.

    Raises:
        CheckpointError: for unknown, incomplete or ambiguous names, tensors that do not fit together, keys that the
            module does not support, or a file that cannot be read. `clearhead.nn.MultiheadAttention` supports `bias_k`
            and `bias_v`.
        ArgumentError: for missing heads, heads that do not fit the sizes, or an unknown naming.
        DTypeError: for a source or naming of another type.

    Example:
        >>> import torch, clearhead
        >>> theirs = {f"w_{part}.weight": torch.randn(12, 12) for part in "qkvo"}
        >>> ours = clearhead.checkpoints.load(theirs, num_heads=3)
        >>> print(ours.loaded_from)
        w_q: lessons that rebuild the original Transformer
          weights: w_q.weight, w_k.weight, w_v.weight, w_o.weight
          sizes: query 12, key 12, value 12, all heads 12, output 12
          biases: none
    """
    tensors, module = read_source(source)
    for name, count in (("num_heads", num_heads), ("num_kv_heads", num_kv_heads)):
        if count is not None and not isinstance(count, (int, float)):
            raise DTypeError(name, expected="an int ≥ 1", got=shown(count))
    scale = number_or_none("scale", scale, "a finite number, or None for 1/√D", is_finite)
    finding, projections = recognise(tensors, namings_called(naming), prefix)
    _require_place(finding)
    block = None if module is None else module.get_submodule(finding.prefix.removesuffix("."))
    module_heads, module_dropout, module_scale = _read_settings(block)
    scale = module_scale if scale is None else scale
    heads = _heads(num_heads, module_heads, finding)
    if finding.naming.by_head:
        projections = in_order(projections, heads)
    head_dim = finding.inner_dim // heads
    loaded = MultiHeadAttention(
        finding.embed_dim,
        heads,
        num_kv_heads=_kv_heads(num_kv_heads, finding, heads, head_dim),
        head_dim=head_dim,
        qdim=finding.qdim,
        kdim=finding.kdim,
        vdim=finding.vdim,
        bias=any(role in finding.biases for role in _INPUTS),
        out_bias="output" in finding.biases,
        scale=None if scale is None or math.isclose(scale, head_dim**-0.5) else scale,
        dropout=(module_dropout or 0.0) if dropout is None else dropout,
        device="meta",
    )
    fill(loaded, projections)
    remember_name(loaded, finding.prefix.removesuffix("."))
    loaded.loaded_from = _report(finding, loaded)  # pyright: ignore[reportArgumentType]
    _LOGGER.info("loaded attention weights from %s", loaded.loaded_from)
    return loaded.train(block is None or block.training)


def _require_place(finding: Finding) -> None:
    if finding.obstacles:
        expected = f"nothing but attention under {finding.prefix!r}, named as {finding.naming.name}"
        got = "; ".join(f"{finding.prefix}{key} ({reason})" for key, reason in finding.obstacles.items())
        fix = "Leave keys that have nothing to do with attention out of the state dict."
        raise CheckpointError("source", expected=expected, got=got, fix=fix)


def _heads(num_heads: int | None, module_heads: int | None, finding: Finding) -> int:
    known = module_heads if finding.num_heads is None else finding.num_heads
    heads = known if num_heads is None else num_heads
    if heads is None:
        raise ArgumentError("num_heads", expected="an int ≥ 1", got="None", fix="Shapes of weights do not say it.")
    if known not in (None, heads):
        says = "module says" if finding.num_heads is None else "names say"
        raise ArgumentError("num_heads", expected=f"{known}, which is what the {says}", got=shown(heads))
    if isinstance(heads, bool) or not isinstance(heads, int) or heads < 1 or finding.inner_dim % heads:
        expected = f"a divisor of {finding.inner_dim}, the features of the queries"
        raise ArgumentError("num_heads", expected=expected, got=shown(heads))
    return heads


def _kv_heads(num_kv_heads: int | None, finding: Finding, heads: int, head_dim: int) -> int:
    kv_heads, remainder = divmod(finding.kv_inner_dim, head_dim)
    if remainder or not kv_heads or heads % kv_heads:
        features = f"{finding.inner_dim} features of queries and {finding.kv_inner_dim} of keys"
        expected = f"a number that splits {features} into heads of one size, the one number a multiple of the other"
        raise ArgumentError("num_heads", expected=expected, got=str(heads))
    if num_kv_heads not in (None, kv_heads):
        expected = f"{kv_heads}, as the shapes say for num_heads = {heads}"
        raise ArgumentError("num_kv_heads", expected=expected, got=shown(num_kv_heads))
    return kv_heads


def _report(finding: Finding, module: MultiHeadAttention) -> str:
    lines = [str(finding)]
    zeros = [role for role in _INPUTS if role not in finding.biases and module.q_proj.bias is not None]
    lines += [f"  biases of zeros added: {', '.join(zeros)}"] if zeros else []
    lines += [f"  dropout: {module.dropout}"] if module.dropout else []
    lines += [f"  scale: {module.scale}"] if module.scale is not None else []
    return "\n".join(lines)


_HEADS = ("num_heads", "nums_head", "nhead", "num_attention_heads", "n_heads", "n_head", "heads", "h")
_DROPOUT = ("attention_dropout", "attn_dropout", "att_dropout", "attn_drop", "dropout")
# Names of the submodule that computes the weights in BERT, ViT and Dive into Deep Learning.
_CHILDREN = ("self", "attention")
#: Settings that change what attention computes, and the class or function that has them.
_REFUSED = {
    "add_zero_attn": "clearhead.nn.MultiheadAttention has it: use clearhead.upgrade(model).",
    "attn_logit_softcapping": "checkpoints.from_transformers reads it from the configuration of the model.",
}


def _read_settings(block: nn.Module | None) -> tuple[int | None, float | None, float | None]:
    """The number of heads, the dropout of the weights and the scale of the scores that an attention module has."""
    if block is None:
        return None, None, None
    for name, fix in _REFUSED.items():
        value = getattr(block, name, None)
        if value is not None and value is not False:
            raise CheckpointError("source", expected=f"attention without {name}", got=f"a module with {name}", fix=fix)
    modules = [block, *(child for name in _CHILDREN if isinstance(child := getattr(block, name, None), nn.Module))]
    # `scaling` is always a factor. In lessons, `scale` is as often a divisor.
    scales = ("scale",) if isinstance(block, MultiHeadAttention) else ("scaling",)
    heads = (value for value in _numbers(modules, _HEADS) if isinstance(value, int))
    dropouts = (float(value) for value in _numbers(modules, _DROPOUT) if 0 <= value <= 1)
    return next(heads, None), next(dropouts, None), next(_numbers(modules, scales), None)


def _numbers(modules: list[nn.Module], names: tuple[str, ...]) -> Iterator[int | float]:
    for name in names:
        for module in modules:
            value = getattr(module, name, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, int | float) and not isinstance(value, bool):
                yield value
