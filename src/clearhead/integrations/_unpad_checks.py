"""Whether a call of an encoder of transformers means the same for one row of its real tokens."""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn

#: Whose layers work token by token.
_LIBRARIES = frozenset({"clearhead", "peft", "torch", "torchao", "transformers"})
#: But for these: dynamic quantisation takes one scale from all activations, padding included.
_OF_WHOLE_BATCHES = "torch.ao."

#: Arguments with a number, or a vector, for each token.
OF_TOKENS = frozenset({"input_ids", "inputs_embeds", "position_ids", "task_type_ids", "token_type_ids"})
#: Arguments that mean the same for a row of all tokens.
_OF_CALLS = frozenset({"num_items_in_batch", "output_hidden_states", "return_dict", "use_cache"})


def takes_tokens(module: nn.Module, given: dict[str, Any], mask: Tensor) -> bool:
    """Whether the arguments besides the mask are of tokens, or mean the same for one row."""
    if "input_ids" not in given and "inputs_embeds" not in given:
        return False
    for name, value in given.items():
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
        config._attn_implementation != "clearhead"
        or getattr(config, "output_attentions", False)
        or getattr(config, "is_decoder", False)
        or getattr(config, "chunk_size_feed_forward", 0)
        or _position_scaling_depends_on_length(config)
    )


def _position_scaling_depends_on_length(config: Any) -> bool:
    """Rotary positions that are scaled by the longest text of the batch; a padded batch may be longer."""
    settings = getattr(config, "rope_parameters", None) or {}
    kinds = [settings, *(part for part in settings.values() if isinstance(part, dict))]
    return any(part.get("rope_type") in ("dynamic", "longrope") for part in kinds)


def has_windows(module: nn.Module) -> bool:
    return "sliding_attention" in (getattr(module.config, "layer_types", None) or ())


def works_token_by_token(encoder: nn.Module) -> bool:
    """Whether all that is inside an encoder works token by token: no hooks, no foreign layers, no chunks."""
    own = encoder.__dict__["_modules"].items()
    waiting = [module for name, module in own if module is not None and name != "pooler"]
    while waiting:
        module = waiting.pop()
        inside = module.__dict__
        if inside["_forward_pre_hooks"] or inside["_backward_hooks"] or inside["_backward_pre_hooks"]:
            return False
        if inside.get("chunk_size_feed_forward") or not _is_of_single_tokens(type(module)):
            return False
        if "forward" in inside or any(not _is_of_the_library(hook) for hook in inside["_forward_hooks"].values()):
            return False
        waiting.extend(part for part in inside["_modules"].values() if part is not None)
    return True


def _is_of_single_tokens(kind: type[nn.Module]) -> bool:
    of = kind.__module__
    return of.partition(".")[0] in _LIBRARIES and not of.startswith(_OF_WHOLE_BATCHES)


def _is_of_the_library(hook: Any) -> bool:
    """Whether transformers or peft registered it: to collect hidden states, or to make embeddings want gradients."""
    owner, name = getattr(hook, "__module__", ""), getattr(hook, "__name__", "")
    return owner.startswith("transformers.") or (owner.startswith("peft.") and name == "make_inputs_require_grad")
