"""Encoders of transformers that run only on the real tokens of a padded batch, as one packed row.

A forward around the encoder's own forward removes the padding and restores it. The code inside is unchanged. Outside of
attention, an encoder works token by token. Its attention functions receive the boundaries of the texts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn

from .. import masks
from .._encoder.layers import LeanLayers
from .._environment import Environment, is_tracing, read_environment, reads_values
from .._layer.tokens import RealTokens
from .._torch_private import remove_hook
from ._classes import forward_is, replace_forward
from ._encoder_call import EncoderCall, by_name, is_padding, read_call
from ._lean import Loop
from ._lean_families import FAMILIES, parts_in_loop, results_of, run_lean
from ._lean_reading import read_encoder
from ._packed_row import boundaries_of, running
from ._row_arguments import arguments_of_row
from ._unpad_checks import (
    counts_distances,
    has_convolution,
    is_of_single_tokens,
    windows_fit,
    works_token_by_token,
)

#: Encoders that work token by token outside of attention, accept positions, and pass boundaries to attention.
ENCODERS: dict[str, str] = {
    "BertModel": "bert.modeling_bert",
    "CamembertModel": "camembert.modeling_camembert",
    "Data2VecTextModel": "data2vec.modeling_data2vec_text",
    "DebertaModel": "deberta.modeling_deberta",
    "DebertaV2Model": "deberta_v2.modeling_deberta_v2",
    "DistilBertModel": "distilbert.modeling_distilbert",
    "ElectraModel": "electra.modeling_electra",
    "ErnieModel": "ernie.modeling_ernie",
    "EuroBertModel": "eurobert.modeling_eurobert",
    "FlaubertModel": "flaubert.modeling_flaubert",
    "GteModel": "gte.modeling_gte",
    "JinaEmbeddingsV3Model": "jina_embeddings_v3.modeling_jina_embeddings_v3",
    "MPNetModel": "mpnet.modeling_mpnet",
    "MegatronBertModel": "megatron_bert.modeling_megatron_bert",
    "ModernBertModel": "modernbert.modeling_modernbert",
    "NomicBertModel": "nomic_bert.modeling_nomic_bert",
    "RemBertModel": "rembert.modeling_rembert",
    "RoFormerModel": "roformer.modeling_roformer",
    "RobertaModel": "roberta.modeling_roberta",
    "RobertaPreLayerNormModel": "roberta_prelayernorm.modeling_roberta_prelayernorm",
    "XLMModel": "xlm.modeling_xlm",
    "XLMRobertaModel": "xlm_roberta.modeling_xlm_roberta",
    "XLMRobertaXLModel": "xlm_roberta_xl.modeling_xlm_roberta_xl",
}

#: Encoders whose columns are more than the tokens of a text, and where padding stays for that reason.
_PADDED: dict[str, tuple[str, str]] = {
    "LayoutLMv3Model": ("layoutlmv3.modeling_layoutlmv3", "its attention reads boxes of tokens and patches"),
    "LukeModel": ("luke.modeling_luke", "its words and its entities have padding of their own"),
}

#: Heads that read each real token by itself. Other heads may read the first column, padded or not.
_HEADS_OF_TOKENS = ("ForMaskedLM", "ForTokenClassification", "ForPreTraining")
#: Heads whose loss is a softmax over all columns, including padding.
_HEADS_OF_PADDING = ("ForQuestionAnswering",)
#: Heads whose loss ignores all labels at padding.
_HEADS_WITHOUT_PADDING = ("ElectraForPreTraining",)
_IGNORED = -100  # the label that PyTorch's cross-entropy ignores


def why_no_encoder(model: nn.Module) -> str | None:
    """The reason why a model of transformers is not a supported encoder, or ``None`` if it is one."""
    kind, config = type(model), cast(Any, model.config)
    path = ENCODERS.get(kind.__name__) or _PADDED.get(kind.__name__, ("",))[0]
    if kind.__module__ != f"transformers.models.{path}":
        return f"{kind.__name__}, which is not one of them"
    if any(getattr(config, name, False) for name in ("is_decoder", "add_cross_attention", "causal")):
        return f"{kind.__name__} as a decoder"
    return None


def why_padded(encoder: nn.Module, head: nn.Module | None) -> str | None:
    """The reason why a supported encoder keeps its padding, or ``None``. `head` is the model that contains it."""
    if type(encoder).__name__ in _PADDED:
        return _PADDED[type(encoder).__name__][1]
    if "forward" in encoder.__dict__ and not is_unpadded(encoder):
        return "its forward was replaced"
    if head is not None and "forward" in head.__dict__ and not forward_is(head, _forward_of_head):
        return f"the forward of {type(head).__name__} was replaced"
    if any(not (parameter.is_cpu or parameter.is_cuda) for parameter in encoder.parameters()):
        return "it is neither on the CPU nor on a CUDA device"
    if has_convolution(encoder):
        return "its convolution reads the padded batch"
    if type(head).__name__.endswith(_HEADS_OF_PADDING):
        return f"the loss of {type(head).__name__} counts the columns of padding"
    if getattr(getattr(head, "sequence_summary", None), "summary_type", "first") != "first":
        return "its summary reads the columns of padding"
    return None


def remove_padding(encoder: nn.Module, head: nn.Module | None, dtype: torch.dtype | None) -> str:
    """Let a supported encoder run on real tokens from now on, and its layers in a loop of `dtype` where they can.

    Returns how its layers run, for a report.
    """
    if is_unpadded(encoder):  # in another dtype, or with copies of earlier weights
        keep_padding(encoder, head)
    pooler: nn.Module | None = getattr(encoder, "pooler", None)
    of_tokens = head is None or type(head).__name__.endswith(_HEADS_OF_TOKENS)
    loop = Loop(dtype, read_encoder)
    replace_forward(encoder, _forward, pooler is not None or not of_tokens, loop)
    if head is not None and "forward" not in head.__dict__ and type(head).__name__ not in _HEADS_WITHOUT_PADDING:
        replace_forward(head, _forward_of_head)
    if pooler is not None:
        _unhook(pooler)
        pooler.register_forward_pre_hook(_pad_for_pooler, prepend=True)
    return loop.describe(encoder)


def keep_padding(encoder: nn.Module, head: nn.Module | None) -> None:
    """Undo `remove_padding`."""
    del encoder.forward
    if head is not None:
        restore_head(head)
    pooler: nn.Module | None = getattr(encoder, "pooler", None)
    if pooler is not None:
        _unhook(pooler)


def restore_head(model: nn.Module) -> None:
    """Give a model its own forward again, if `remove_padding` replaced it as that of a head."""
    if forward_is(model, _forward_of_head):
        del model.forward


def _unhook(pooler: nn.Module) -> None:
    for part in pooler.modules():  # peft's ModulesToSaveWrapper holds copies
        remove_hook(part, _pad_for_pooler)


def is_unpadded(module: nn.Module) -> bool:
    """Whether `remove_padding` was called for a module."""
    return forward_is(module, _forward)


@dataclass(frozen=True)
class _Packed:
    """A forward that runs on one packed row.

    Args:
        encoder: the encoder that runs.
        tokens: the real tokens of the padded batch.
        boundaries: of the texts in the row.
        as_tuple: whether the call returns a tuple.
        padded: pairs of a packed tensor and its padded form.
    """

    encoder: nn.Module
    tokens: RealTokens
    boundaries: Tensor
    as_tuple: bool
    padded: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pad(self, x: Tensor) -> Tensor:
        """(1, T, E) → (B, L, E), zero at padding. Each tensor is padded once."""
        for packed, padded in self.padded:
            if packed is x:
                return padded
        self.padded.append((x, self.tokens.pad(x[0])))
        return self.padded[-1][1]

    def unpack(self, output: Any) -> Any:
        """The output of the encoder for the row, padded."""
        output["last_hidden_state"] = self.pad(output["last_hidden_state"])
        states = output.get("hidden_states")
        if states is not None:
            output["hidden_states"] = tuple(None if state is None else self.pad(state) for state in states)
        return output.to_tuple() if self.as_tuple else output


def _forward_of_head(head: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of a head. Its encoder runs padded if labels at padding count in the loss."""
    args = _without_module(head, args)
    before = running.labels_padding
    running.labels_padding = not is_tracing() and _labels_padding(by_name(head, args, kwargs))
    try:
        return type(head).forward(head, *args, **kwargs)
    finally:
        running.labels_padding = before


def _labels_padding(arguments: dict[str, Any]) -> bool:
    """Whether a call of a head has labels (B, L) that are not ignored at padding."""
    labels, mask = arguments.get("labels"), arguments.get("attention_mask")
    if not isinstance(labels, Tensor) or not is_padding(mask):
        return False
    if labels.shape != mask.shape:
        return False
    # To read labels from an accelerator would wait for it, so that its encoder keeps the padding.
    return not (labels.is_cpu and reads_values(labels)) or bool(((labels != _IGNORED) & mask.logical_not()).any())


def _forward(encoder: nn.Module, reads_first: bool, loop: Loop, *args: Any, **kwargs: Any) -> Any:
    """The forward of an encoder, on one row of real tokens and in Clearhead's own loop if the call allows it.

    `reads_first` tells whether a pooler or a head reads the first column of the padded result.
    """
    args, forward = _without_module(encoder, args), type(encoder).forward
    call = None
    if not is_tracing() and not running.labels_padding and is_of_single_tokens(forward):
        call = read_call(encoder, by_name(encoder, args, kwargs))
    if call is None:
        return forward(encoder, *args, **kwargs)
    environment = read_environment()
    lean = None
    if type(encoder).__name__ in FAMILIES and call.is_plain and 0 not in call.tokens.counts:
        lean = loop.layers_of(encoder, environment)
    packs = call.tokens.indices is not None and _fits(encoder, call.tokens, reads_first, environment, lean)
    output = None if lean is None else _run_lean(lean, encoder, call, environment, packs)
    if output is not None:
        return output
    return _run_packed(encoder, call) if packs else forward(encoder, *args, **kwargs)


def _run_packed(encoder: nn.Module, call: EncoderCall) -> Any:
    """The encoder's own code on one row."""
    boundaries = boundaries_of(call.sequences())
    packed = _Packed(encoder, call.tokens, boundaries, call.as_tuple)
    before, running.packed = running.packed, packed
    try:
        of_row = arguments_of_row(encoder, call.tokens, boundaries)
        output = type(encoder).forward(encoder, **call.in_row(), **of_row, return_dict=True)
    finally:
        running.packed = before
    return packed.unpack(output)


def _run_lean(lean: LeanLayers, encoder: nn.Module, call: EncoderCall, environment: Environment, packs: bool) -> Any:
    """Clearhead's loop, on one row if `packs`. ``None`` if the encoder's own code has to run."""
    if packs:
        states = run_lean(lean, encoder, call.in_row(), environment, sequences=call.sequences())
        states = None if states is None else call.tokens.pad(states[0])
    else:
        mask = None if call.tokens.indices is None else masks.keep(keys=call.tokens.real)
        states = run_lean(lean, encoder, call.arguments, environment, mask=mask, sequences=call.texts)
    return None if states is None else results_of(encoder, states, call.as_tuple)


def _fits(
    encoder: nn.Module, tokens: RealTokens, reads_first: bool, environment: Environment, lean: LeanLayers | None
) -> bool:
    """Whether the environment, the modules and the position of the padding allow one row."""
    if environment.sees_modules:
        return False
    if 0 in tokens.counts or (reads_first and any(tokens.starts)):
        return False
    # In a row, two tokens are closer if padding between them is removed.
    if counts_distances(encoder) and not (tokens.contiguous and windows_fit(encoder)):
        return False
    pooler = encoder.__dict__["_modules"].get("pooler")
    if pooler is not None and next(iter(pooler._forward_pre_hooks.values()), None) is not _pad_for_pooler:
        return False
    return works_token_by_token(encoder, () if lean is None else parts_in_loop(encoder))


def _pad_for_pooler(pooler: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of a pooler, which then reads the first column of the padded result."""
    packed = running.packed
    if is_tracing() or packed is None or getattr(packed.encoder, "pooler", None) is not pooler:
        return None
    return packed.pad(args[0]), *args[1:]


def _without_module(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return args[1:] if args and args[0] is module else args  # accelerate's unwrap_model binds it again
