"""Checks whether an encoder of transformers computes the same on one row of its real tokens."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..kernels._sdpa_sequences import is_one_kernel
from ._pretrained import is_deberta, runs_on_clearhead

#: Libraries whose layers work token by token.
_LIBRARIES = frozenset({"clearhead", "peft", "torch", "torchao", "transformers"})
#: The exception: dynamic quantisation computes one scale from all activations, including padding.
_OF_WHOLE_BATCHES = "torch.ao."

#: The names under which configurations have the dropout of attention.
_DROPOUT_OF_ATTENTION = ("attention_probs_dropout_prob", "attention_dropout")

#: Arguments with one number or vector per token.
OF_TOKENS = frozenset({"input_ids", "inputs_embeds", "langs", "position_ids", "task_type_ids", "token_type_ids"})
#: Arguments that mean the same for a row of all tokens.
_OF_CALLS = frozenset({"num_items_in_batch", "output_hidden_states", "return_dict", "use_cache"})


def takes_tokens(module: nn.Module, arguments: dict[str, Any], mask: Tensor) -> bool:
    """Whether each argument besides the mask is one per token, or means the same for one row."""
    if ("input_ids" in arguments) == ("inputs_embeds" in arguments):
        return False
    for name, value in arguments.items():
        if name in OF_TOKENS:
            dims = 3 if name == "inputs_embeds" else 2
            if type(value) not in (Tensor, nn.Parameter) or value.dim() != dims or value.device != mask.device:
                return False
            sizes = {mask.shape[0]} if name in ("input_ids", "inputs_embeds") else {1, mask.shape[0]}
            if value.shape[0] not in sizes or value.shape[1] != mask.shape[1]:
                return False
        elif name not in _OF_CALLS and value is not False:
            return False
    config = cast(Any, module.config)
    return not (
        not runs_on_clearhead(module)
        or getattr(config, "output_attentions", False)
        or getattr(config, "is_decoder", False)
        or getattr(config, "chunk_size_feed_forward", 0)
        or _position_scaling_depends_on_length(config)
    )


def _position_scaling_depends_on_length(config: Any) -> bool:
    """Whether the longest text of the batch scales rotary positions. A padded batch may be longer."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(kind for kind in settings.values() if isinstance(kind, dict))]
    return any(kind.get("rope_type") in ("dynamic", "longrope") for kind in kinds)


def counts_distances(module: nn.Module) -> bool:
    """Whether attention depends on how many columns apart two tokens are: by a window, a bias or relative positions."""
    has_windows = "sliding_attention" in (getattr(module.config, "layer_types", None) or ())
    return has_windows or is_deberta(module) or _has_bias(module)


def _has_bias(module: nn.Module) -> bool:
    return hasattr(module.config, "relative_attention_num_buckets")


def runs_in_one_kernel(encoder: nn.Module) -> bool:
    """Whether a CUDA device computes the attention of packed texts in one kernel.

    Otherwise one call would compute the scores of all texts with all others.
    """
    if is_deberta(encoder):
        return False
    config = cast(Any, encoder.config)
    if _has_bias(encoder):  # its texts are calls of their own
        return False
    if encoder.training and any(getattr(config, name, 0) for name in _DROPOUT_OF_ATTENTION):
        return False
    parameter = next(encoder.parameters(), None)
    if parameter is None:
        return False
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else parameter.dtype
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return is_one_kernel(dtype, head_dim)


def windows_fit(encoder: nn.Module) -> bool:
    """Whether the windows of layers are those of the configuration, of which a model makes its padded masks."""
    config: Any = encoder.config
    for layer, kind in zip(getattr(encoder, "layers", ()), getattr(config, "layer_types", None) or (), strict=False):
        window = config.sliding_window + 1 if kind == "sliding_attention" else None
        if getattr(layer, "attention_type", kind) != kind or layer.attn.sliding_window != window:
            return False
    return True


def has_convolution(encoder: nn.Module) -> bool:
    """Whether an encoder mixes neighbouring tokens, as a DeBERTa with ``conv_kernel_size`` does."""
    return getattr(getattr(encoder, "encoder", None), "conv", None) is not None


def works_token_by_token(encoder: nn.Module, known: Collection[str] = ()) -> bool:
    """Whether no module of an encoder has hooks, foreign code or chunks, which may mix tokens.

    Args:
        known: names of children that are known to be as transformers made them.
    """
    children = encoder.__dict__["_modules"].items()
    pending = [module for name, module in children if module is not None and name != "pooler" and name not in known]
    while pending:
        module = pending.pop()
        state = module.__dict__
        if state["_forward_pre_hooks"] or state["_backward_hooks"] or state["_backward_pre_hooks"]:
            return False
        if state.get("chunk_size_feed_forward") or not is_of_single_tokens(type(module)):
            return False
        if any(map(_scales_all_activations, state["_parameters"].values())):
            return False
        if "forward" in state or any(not is_of_the_library(hook) for hook in state["_forward_hooks"].values()):
            return False
        pending.extend(child for child in state["_modules"].values() if child is not None)
    return True


def _scales_all_activations(parameter: Any) -> bool:
    """Whether a quantised weight of torchao computes one scale from all activations, including padding."""
    settings = getattr(parameter, "act_quant_kwargs", None)
    return type(getattr(settings, "granularity", None)).__name__ == "PerTensor"


def is_of_single_tokens(code: Any) -> bool:
    """Whether a class or function belongs to a library whose layers work token by token."""
    package: str = code.__module__
    return package.partition(".")[0] in _LIBRARIES and not package.startswith(_OF_WHOLE_BATCHES)


def collects_outputs() -> bool:
    """Whether a model of transformers that runs now collects hidden states or weights from its layers by hooks."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = getattr(capturing, "_active_collector", None)
    return collector is not None and bool(collector.get())


def is_of_the_library(hook: Any) -> bool:
    """Whether transformers or peft registered the hook, for hidden states or for gradients of embeddings."""
    owner, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    return owner.startswith("transformers.") or (owner.startswith("peft.") and name == "make_inputs_require_grad")
