"""Encoders of transformers on the real tokens of a padded batch alone, as one row that is padded again at the end.

A forward around the encoder's own does it, so that everything inside is transformers'. Between attention layers an
encoder works token by token; its attention functions are told where each text begins.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeGuard, cast

import torch
from torch import Tensor, nn

from .._environment import is_tracing, read_environment
from .._layer.tokens import Tokens, find_tokens, sequences_between
from .._torch_private import remove_hook
from ._packed_row import boundaries_of
from ._unpad_checks import OF_TOKENS, has_windows, takes_tokens, works_token_by_token

#: What works token by token but for its attention, takes positions, and hands boundaries on to the attention function.
ENCODERS: dict[str, str] = {
    "BertModel": "bert.modeling_bert",
    "CamembertModel": "camembert.modeling_camembert",
    "Data2VecTextModel": "data2vec.modeling_data2vec_text",
    "DistilBertModel": "distilbert.modeling_distilbert",
    "ElectraModel": "electra.modeling_electra",
    "ErnieModel": "ernie.modeling_ernie",
    "EuroBertModel": "eurobert.modeling_eurobert",
    "GteModel": "gte.modeling_gte",
    "JinaEmbeddingsV3Model": "jina_embeddings_v3.modeling_jina_embeddings_v3",
    "ModernBertModel": "modernbert.modeling_modernbert",
    "NomicBertModel": "nomic_bert.modeling_nomic_bert",
    "RobertaModel": "roberta.modeling_roberta",
    "RobertaPreLayerNormModel": "roberta_prelayernorm.modeling_roberta_prelayernorm",
    "XLMRobertaModel": "xlm_roberta.modeling_xlm_roberta",
    "XLMRobertaXLModel": "xlm_roberta_xl.modeling_xlm_roberta_xl",
}

#: Heads that read each real token by itself; others may read the first column, whatever stands there.
_HEADS_OF_TOKENS = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")
#: Heads whose loss is a softmax over all columns, padding included.
_HEADS_OF_PADDING = ("ForQuestionAnswering",)

#: Heads whose loss leaves labels at padding out, whatever they are.
_HEADS_WITHOUT_PADDING = ("ElectraForPreTraining",)
_IGNORED = -100  # the label that PyTorch's cross-entropy leaves out


def why_no_encoder(model: nn.Module) -> str | None:
    """What a model of transformers is if not an encoder that can run without padding; ``None`` if it is one."""
    kind, config = type(model), cast(Any, model.config)
    if kind.__module__ != f"transformers.models.{ENCODERS.get(kind.__name__)}":
        return f"{kind.__name__}, which is not one of them"
    if getattr(config, "is_decoder", False) or getattr(config, "add_cross_attention", False):
        return f"{kind.__name__} as a decoder"
    return None


def why_padded(encoder: nn.Module, head: nn.Module | None) -> str | None:
    """Why an encoder goes on with its padding as it is; ``None`` if it need not.

    Args:
        encoder: of which `why_no_encoder` says nothing.
        head: the model of transformers that it is a part of, if any.
    """
    if is_unpadded(encoder):
        return "it runs without padding already"
    if "forward" in encoder.__dict__:
        return "its forward was replaced"
    if head is not None and "forward" in head.__dict__ and not _is_partial_of(head, _forward_of_head):
        return f"the forward of {type(head).__name__} was replaced"
    if any(not parameter.is_cpu for parameter in encoder.parameters()):
        return "it is not on the CPU"
    if type(head).__name__.endswith(_HEADS_OF_PADDING):
        return f"the loss of {type(head).__name__} counts the columns of padding"
    if type(head).__name__ == "ElectraForMultipleChoice" and cast(Any, head).sequence_summary.summary_type != "first":
        return "its summary reads the columns of padding"
    return None


def leave_out_padding(encoder: nn.Module, head: nn.Module | None) -> None:
    """Let an encoder of which `why_no_encoder` says nothing run on real tokens, from now on."""
    pooler = cast("nn.Module | None", getattr(encoder, "pooler", None))
    of_tokens = head is None or type(head).__name__.endswith(_HEADS_OF_TOKENS)
    # Not hooks: sentence-transformers calls `forward` itself. A `partial` is copied and pickled with its encoder.
    forward: Any = functools.partial(_forward, encoder, pooler is not None or not of_tokens)
    forward.__wrapped__ = encoder.forward  # for its signature
    encoder.forward = forward
    if head is not None and "forward" not in head.__dict__ and type(head).__name__ not in _HEADS_WITHOUT_PADDING:
        of_head: Any = functools.partial(_forward_of_head, head)
        of_head.__wrapped__ = head.forward
        head.forward = of_head
    if pooler is not None:
        _unhook(pooler)
        pooler.register_forward_pre_hook(_pad_for_pooler, prepend=True)


def keep_padding(encoder: nn.Module, head: nn.Module | None) -> None:
    """Undo `leave_out_padding`."""
    del encoder.forward
    if head is not None and _is_partial_of(head, _forward_of_head):
        del head.forward
    pooler = cast("nn.Module | None", getattr(encoder, "pooler", None))
    if pooler is not None:
        _unhook(pooler)


def _unhook(pooler: nn.Module) -> None:
    for part in pooler.modules():  # peft's ModulesToSaveWrapper holds copies
        remove_hook(part, _pad_for_pooler)


def is_unpadded(module: nn.Module) -> bool:
    """Whether `leave_out_padding` was called for a module."""
    return _is_partial_of(module, _forward)


def _is_partial_of(module: nn.Module, function: Callable[..., Any]) -> bool:
    """Whether the forward of a module was replaced by this function of it."""
    own = module.__dict__.get("forward")
    own = getattr(own, "__func__", own)  # accelerate's unwrap_model binds it once more
    return isinstance(own, functools.partial) and own.func is function


@dataclass(frozen=True)
class _Packed:
    """A forward that runs on one row.

    Args:
        encoder: that runs.
        tokens: of the padded batch, which are in the row.
        as_tuple: whether the caller wants a tuple.
        padded: tensors of the row, and what they are padded.
    """

    encoder: nn.Module
    tokens: Tokens
    as_tuple: bool
    padded: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pad(self, x: Tensor) -> Tensor:
        """(1, T, E) → (B, L, E), zero at padding; once for each tensor."""
        for row, whole in self.padded:
            if row is x:
                return whole
        self.padded.append((x, self.tokens.pad(x[0])))
        return self.padded[-1][1]

    def unpack(self, output: Any) -> Any:
        """What the encoder returned for the row, padded."""
        output["last_hidden_state"] = self.pad(output["last_hidden_state"])
        states = output.get("hidden_states")
        if states is not None:
            output["hidden_states"] = tuple(None if state is None else self.pad(state) for state in states)
        return output.to_tuple() if self.as_tuple else output


class _Running(threading.local):
    forwards: tuple[_Packed, ...] = ()
    labels_padding: bool = False  # the head that is running scores padding too


_running = _Running()


def _forward_of_head(head: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a head, whose encoder runs padded where labels at padding count in the loss."""
    if args and args[0] is head:  # accelerate's unwrap_model binds it once more
        args = args[1:]
    before = _running.labels_padding
    _running.labels_padding = not is_tracing() and _labels_padding(type(head), args, kwargs)
    try:
        return type(head).forward(head, *args, **kwargs)
    finally:
        _running.labels_padding = before


def _labels_padding(kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call of a head has labels (B, L) that are not ignored at padding."""
    given = dict(zip(_parameters(kind), args, strict=False)) | kwargs
    labels, mask = given.get("labels"), given.get("attention_mask")
    if not isinstance(labels, Tensor) or not _is_padding(mask):
        return False
    # On the CPU alone, so that no accelerator is waited for; elsewhere encoders run padded.
    if not labels.is_cpu or labels.shape != mask.shape:
        return False
    return bool(((labels != _IGNORED) & mask.logical_not()).any())


def _forward(encoder: nn.Module, reads_first: bool, *args: Any, **kwargs: Any) -> Any:
    """The forward of an encoder on one row of real tokens, where that fits the call.

    Args:
        encoder: whose class has the forward that is called.
        reads_first: whether something reads the first column of the padded result.
        args, kwargs: of the call.
    """
    if args and args[0] is encoder:  # accelerate's unwrap_model binds it once more
        args = args[1:]
    forward = type(encoder).forward
    found = None if is_tracing() or _running.labels_padding else _pack(encoder, reads_first, args, kwargs)
    if found is None:
        return forward(encoder, *args, **kwargs)
    packed, row = found
    before = _running.forwards
    _running.forwards = (*before, packed)
    try:
        output = forward(encoder, **row)
    finally:
        _running.forwards = before
    return packed.unpack(output)


def _pack(
    encoder: nn.Module, reads_first: bool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[_Packed, dict[str, Any]] | None:
    """The call as one of a row of its real tokens; ``None`` where it has to run padded."""
    given = dict(zip(_parameters(type(encoder)), args, strict=False)) | kwargs
    given = {name: value for name, value in given.items() if value is not None}
    mask = given.pop("attention_mask", None)
    if not _is_padding(mask) or not takes_tokens(encoder, given, mask):
        return None
    # No costs are compared as for a layer (`_layer/packing.py`): all layers share one row, which always pays.
    tokens = find_tokens(mask.bool(), mask.shape[0], mask.shape[1])
    if tokens.indices is None or not _fits(encoder, tokens, reads_first):
        return None
    wanted = given.pop("return_dict", getattr(encoder.config, "return_dict", True))
    given["position_ids"] = _positions(encoder, given, mask.shape[1])
    row = {name: tokens.unpad(value)[None] if name in OF_TOKENS else value for name, value in given.items()}
    boundaries, longest = boundaries_of(sequences_between(tokens, tokens)), max(tokens.counts)
    return _Packed(encoder, tokens, wanted is False), {
        **row,
        "attention_mask": _no_mask(encoder),
        "cu_seq_lens_q": boundaries,
        "cu_seq_lens_k": boundaries,
        "max_length_q": longest,
        "max_length_k": longest,
        "return_dict": True,
    }


def _fits(encoder: nn.Module, tokens: Tokens, reads_first: bool) -> bool:
    """Whether what surrounds the call, and where its padding is, allow for one row."""
    environment = read_environment()
    if environment.observed or environment.transformed or environment.dispatching or environment.module_hooks:
        return False
    if 0 in tokens.counts or (reads_first and any(tokens.starts)):
        return False
    # Across padding between the tokens of a text, windows would reach further in a row.
    if has_windows(encoder) and not tokens.contiguous:
        return False
    pooler = encoder.__dict__["_modules"].get("pooler")
    if pooler is not None and next(iter(pooler._forward_pre_hooks.values()), None) is not _pad_for_pooler:
        return False
    return works_token_by_token(encoder)


def _pad_for_pooler(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a pooler, which reads the first column of the padded result."""
    if is_tracing() or not _running.forwards:
        return None
    packed = _running.forwards[-1]
    return (packed.pad(args[0]), *args[1:]) if getattr(packed.encoder, "pooler", None) is pooler else None


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of the positional arguments of a model's forward."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]


def _is_padding(mask: object) -> TypeGuard[Tensor]:
    return type(mask) is Tensor and mask.dim() == 2 and mask.is_cpu and mask.numel() > 0


def _positions(module: nn.Module, given: dict[str, Any], length: int) -> Tensor:
    """The positions (1 or B, L) that the tokens of the padded batch have."""
    if "position_ids" in given:
        return given["position_ids"]
    # Models that descend from RoBERTa count the tokens that are not padding, by the padding token.
    embeddings = cast(Any, getattr(module, "embeddings", None))
    if hasattr(embeddings, "create_position_ids_from_input_ids"):
        if "input_ids" in given:
            return embeddings.create_position_ids_from_input_ids(given["input_ids"], embeddings.padding_idx)
        return embeddings.create_position_ids_from_inputs_embeds(given["inputs_embeds"], embeddings.padding_idx)
    return torch.arange(length, device="cpu")[None]


def _no_mask(module: nn.Module) -> dict[str, None] | None:
    """What hides nothing: ``None`` would still be made a mask of the row where layers differ in theirs."""
    return {"full_attention": None, "sliding_attention": None} if hasattr(module.config, "layer_types") else None
