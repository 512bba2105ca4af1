"""The keywords that transformers' models pass to an attention function, and what is refused among them."""

from __future__ import annotations

from collections.abc import Mapping, Set
from typing import Any

from ..errors import ArgumentError

# Models pass these to every attention function, for caches, outputs, losses or other kernels. The eager attention of
# transformers ignores them too.
WITHOUT_EFFECT = frozenset(
    {
        "cache",
        "cache_position",
        "decoder_attention_mask",
        "deterministic",
        "encoder_hidden_states",
        "grid_thw",
        "input_ids",
        "logits_to_keep",
        "max_length_k",
        "max_length_q",
        "num_items_in_batch",
        "output_hidden_states",
        "output_router_logits",
        "past_key_values",
        "position_embeddings",
        "position_ids",
        "return_dict",
        "seq_idx",
        "use_cache",
        "vision_feature_layer",
    }
)


def unknown_keyword(keywords: Mapping[str, Any], known: Set[str]) -> str | None:
    """The first keyword that may change the result and is not known."""
    return next((keyword for keyword, value in keywords.items() if value is not None and keyword not in known), None)


def refuse_unknown(keywords: Mapping[str, Any], known: Set[str], name: str, instead: str) -> Any:
    """Raise for a keyword that may change the result and that the attention of this name does not have.

    Args:
        keywords: of a call.
        known: those that it has, or that change nothing.
        name: of the attention.
        instead: the name of one that has them.
    """
    keyword = unknown_keyword(keywords, known)
    if keyword is not None:
        expected = f'no keyword that "{name}" does not know'
        fix = f'It may change the result, so it is not ignored. Use model.set_attn_implementation("{instead}").'
        got = f"a {type(keywords[keyword]).__name__} from the model"
        raise ArgumentError(keyword, expected=expected, got=got, fix=fix)
