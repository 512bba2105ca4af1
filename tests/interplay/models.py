"""Models of transformers after `upgrade`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import clearhead
from tests.support.randomised import randomised

from .subject import Subject

B, L, E = 3, 7, 24
_SIZES = {"hidden_size": E, "num_attention_heads": 6, "num_hidden_layers": 2, "intermediate_size": 17, "vocab_size": 5}


class Model(nn.Module):
    """A model of transformers that receives features instead of tokens, so that they have gradients."""

    def __init__(self, model: Any, **given: Any) -> None:
        super().__init__()
        self.model, self.given = model, given

    def forward(self, x: Tensor, marks: Tensor) -> Any:
        outputs = self.model(inputs_embeds=x, attention_mask=marks, **self.given)
        # Outputs at padding mean nothing: calls that are not unpadded have other ones.
        output = outputs.last_hidden_state * marks[..., None]
        weights = outputs.attentions if "output_attentions" in self.given else ()
        return (output, *(x * marks[:, None, :, None] for x in weights))


def _given(length: int, *, left: bool) -> tuple[Tensor, Tensor]:
    lengths, columns = torch.tensor([length // 3, length, 1])[:, None], torch.arange(length)
    marks = columns >= length - lengths if left else columns < lengths
    return marks.long(), torch.ones_like(marks).long()


def _subject(model: Any, length: int, *, left: bool = False, **given: Any) -> Subject:
    marks, full = _given(length, left=left)
    model.get_input_embeddings().requires_grad_(False)  # not used
    if given:  # transformers puts its hooks into a model in the first call, which no graph may hold
        model(inputs_embeds=torch.randn(B, length, E), attention_mask=marks, **given)
    return Subject(randomised(Model(model, **given), 0.2).train(), (torch.randn(B, length, E),), (marks,), (full,))


def _encoder(unpad: bool = True, length: int = L, dropout: float = 0.0, **given: Any) -> Subject:
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": dropout}
    model = transformers.BertModel(transformers.BertConfig(**_SIZES, **dropouts, max_position_embeddings=64))
    model.pooler = None
    report = clearhead.upgrade(model, unpad=unpad)
    assert report.models
    assert bool(report.unpadded) == unpad
    return _subject(model, length, **given)


def _decoder(length: int = L, *, left: bool = False, **given: Any) -> Subject:
    model = transformers.LlamaModel(transformers.LlamaConfig(**_SIZES, num_key_value_heads=2, pad_token_id=0))
    assert clearhead.upgrade(model).models
    return _subject(model, length, left=left, use_cache=False, **given)


ENCODER: dict[str, Callable[[], Subject]] = {
    "without padding": _encoder,
    "padded": partial(_encoder, False),
    "with weights": partial(_encoder, output_attentions=True),
    "dropout": partial(_encoder, dropout=0.3),
}
DECODER: dict[str, Callable[[], Subject]] = {
    "padded": _decoder,
    "padded on the left": partial(_decoder, left=True),
    "with weights": partial(_decoder, output_attentions=True),
}
