"""`from_transformers` and `layers_from_transformers`: the attention of a transformers model, with all its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn

from .._call.naming import remember_name
from .._checks import integer, size, text
from ..errors import ArgumentError, CheckpointError, DTypeError
from ._architectures import ARCHITECTURES
from ._blocks import Attention, StoredAttention, StoredLayer, multi_head, setting_of
from ._tensors import Source, Tensors, listed, read_source

_LOGGER = logging.getLogger("clearhead")


def from_transformers(source: Source, layer: int, *, config: Any = None, part: str | None = None) -> Attention:
    """Build one attention layer of a transformers model: its weights and every setting of its configuration.

    The settings are: grouped heads and head size, rotary positions with their scaling, ALiBi or relative bias, norms
    of queries and keys, scale, soft-cap, sinks, gate, sliding window, dropout. The known models are Llama, Mistral,
    Qwen3, Qwen3-Next, Qwen3.5, Gemma 2, gpt-oss, AFMoE, GPT-NeoX, BLOOM, T5, DeepSeek-V2 and -V3, GPT-2, BERT and ViT
    (of hybrid models the layers with attention). The module itself is not causal:
    pass ``mask=masks.causal()``. Its attribute ``loaded_from`` lists what was read, and whether the model is causal.

    Args:
        source: the model, a model that contains it, its state dict, or the path of a file, as for `load`.
        layer: number of the layer, from 0.
        config: the model's configuration, an object with ``model_type``. Default ``source.config``. A state dict or
            a file requires it.
        part: the attention of the layer. It is ``"encoder"``, ``"decoder"`` or ``"cross"`` in T5, and ``"self"`` in
            all other models. Default ``"self"``.

    Returns:
        A `clearhead.MultiHeadAttention`, or a `clearhead.MultiHeadLatentAttention` for DeepSeek. It holds copies of
        the tensors in their own dtypes, and is in the training mode of the model.

    Raises:
        ArgumentError: for an unknown model, a missing layer or part, or settings that Clearhead does not support.
        CheckpointError: for missing or unexpected tensors, or sizes that differ from the configuration.
        DTypeError: for a source, configuration or layer of another type.

    Example:
        >>> import torch
        >>> from types import SimpleNamespace
        >>> from clearhead import checkpoints, masks
        >>> config = SimpleNamespace(model_type="mistral", hidden_size=12, num_attention_heads=3, num_hidden_layers=1,
        ...     num_key_value_heads=1, sliding_window=5, attention_dropout=0.0, max_position_embeddings=32,
        ...     rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
        >>> sizes = {"q": (12, 12), "k": (4, 12), "v": (4, 12), "o": (12, 12)}
        >>> state = {f"layers.0.self_attn.{role}_proj.weight": torch.randn(size) for role, size in sizes.items()}
        >>> attend = checkpoints.from_transformers(state, 0, config=config)
        >>> attend.position, attend.mask.describe()
        (Rotary(head_dim=4, base=10000), 'sliding_window(4, 0)')
        >>> attend(torch.randn(2, 7, 12), mask=masks.causal()).shape
        torch.Size([2, 7, 12])
    """
    load, count = _open(source, config, part)
    expected = f"0 … {count - 1}, the layers of the model"
    fix = "layers_from_transformers reads all of them."
    return load(integer("layer", layer, least=0, most=count - 1, expected=expected, fix=fix))


def layers_from_transformers(source: Source, *, config: Any = None, part: str | None = None) -> list[Attention]:
    """Build the attention of every layer of a transformers model. Parameters that the layers share stay shared.

    T5's layers share one relative bias. Everything else is as in `from_transformers`.

    Args:
        source, config, part: as for `from_transformers`.

    Returns:
        One module per layer.

    Raises:
        ArgumentError, CheckpointError, DTypeError: as `from_transformers`.

    Example:
        >>> from types import SimpleNamespace
        >>> import torch
        >>> from clearhead import checkpoints
        >>> config = SimpleNamespace(model_type="bloom", hidden_size=12, num_attention_heads=3, num_hidden_layers=2,
        ...     attention_dropout=0.0)
        >>> sizes = {"query_key_value": 36, "dense": 12}
        >>> state = {f"h.{layer}.self_attention.{name}.{kind}": torch.randn(rows, 12) if kind == "weight" else
        ...     torch.randn(rows) for layer in (0, 1) for name, rows in sizes.items() for kind in ("weight", "bias")}
        >>> [attend.mask.describe() for attend in checkpoints.layers_from_transformers(state, config=config)]
        ['ALiBi(3)', 'ALiBi(3)']
    """
    load, count = _open(source, config, part)
    return [load(number) for number in range(count)]


def _open(source: Source, config: Any, part: str | None) -> tuple[Callable[[int], Attention], int]:
    """The function that loads a layer by its number, and the number of layers."""
    tensors, module = read_source(source)
    config = getattr(module, "config", None) if config is None else config
    blocks = _blocks_of(config, part)
    count = size(f"config.{blocks[0].layers}", setting_of(config, blocks[0].layers))
    shared: dict[str, nn.Module] = {}

    def load(number: int) -> Attention:
        block, root = _find(tensors, config.model_type, blocks, number)
        loaded = (block.build or multi_head)(StoredLayer(block, config, number, root, tensors, shared))
        remember_name(loaded, root.removesuffix("."))
        _LOGGER.info("loaded attention from %s", loaded.loaded_from)
        return loaded.train(module is None or module.training)

    return load, count


def _blocks_of(config: Any, part: str | None) -> tuple[StoredAttention, ...]:
    """The blocks that may store the part."""
    if config is None:
        fix = "Weights do not say which model they belong to: pass config=model.config."
        raise ArgumentError("config", expected="the model's configuration", got="None", fix=fix)
    model_type = getattr(config, "model_type", None)
    if not isinstance(model_type, str):
        expected = "a configuration of transformers, an object with model_type"
        fix = "transformers.AutoConfig.from_pretrained reads a config.json."
        raise DTypeError("config", expected=expected, got=type(config).__name__, fix=fix)
    if model_type not in ARCHITECTURES:
        expected = f"one of {', '.join(ARCHITECTURES)}"
        fix = "For other models, checkpoints.load reads the weights. Pass the other settings yourself."
        raise ArgumentError("config.model_type", expected=expected, got=repr(model_type), fix=fix)
    architecture = ARCHITECTURES[model_type]
    name = "self" if part is None else text("part", part)
    blocks = tuple(block for block in architecture if block.part == name)
    if not blocks:
        parts = " or ".join(map(repr, dict.fromkeys(block.part for block in architecture)))
        raise ArgumentError("part", expected=f"{parts} in {model_type}", got=repr(part))
    return blocks


def _find(
    tensors: Tensors, model_type: str, blocks: tuple[StoredAttention, ...], number: int
) -> tuple[StoredAttention, str]:
    """The block that stores the part, and the root of its path."""
    matches = [(block, root) for block in blocks for root in _roots(tensors, block, number)]
    if len(matches) == 1:
        return matches[0]
    paths = [block.path.format(layer=number) for block in blocks]
    if matches:
        fix = "Pass the one model that you mean, not what contains several."
        got = "several, under " + ", ".join(repr(root + block.path.format(layer=number)) for block, root in matches)
        raise CheckpointError("source", expected=f"one {paths[0]!r}", got=got, fix=fix)
    expected = f"attention of {model_type} under {' or '.join(map(repr, paths))}"
    fix = "Pass the whole model, or all of its state dict; a sharded checkpoint by the file that has the layer."
    raise CheckpointError("source", expected=expected, got=listed(list(tensors), 6), fix=fix)


def _roots(tensors: Tensors, block: StoredAttention, number: int) -> list[str]:
    """The roots of the block's path at which the tensors include one of its weights."""
    path = block.path.format(layer=number)
    ends = tuple(path + entry.key for entry in block.naming.weights)
    roots = (key.removesuffix(end) for end in ends for key in tensors if key.endswith(end))
    return [root for root in dict.fromkeys(roots) if not root or root.endswith(".")]
