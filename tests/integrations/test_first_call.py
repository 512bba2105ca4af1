"""A call of an upgraded model that Clearhead's attention would refuse keeps eager attention in that layer."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations import _first_call

LENGTH, VOCABULARY = 7, 31


@pytest.fixture
def model() -> LlamaModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    made = LlamaModel(LlamaConfig(vocab_size=VOCABULARY, **sizes)).eval()
    made.set_attn_implementation("eager")
    return made


@pytest.fixture
def inputs() -> dict[str, Tensor]:
    mask = torch.tensor([[1] * LENGTH, [0, 0] + [1] * (LENGTH - 2)])
    return {"input_ids": torch.randint(1, VOCABULARY, (2, LENGTH)), "attention_mask": mask}


def test_an_unknown_keyword_leaves_the_layer_eager_with_a_warning(model: LlamaModel, inputs: dict[str, Tensor]) -> None:
    upgraded = copy.deepcopy(model)
    assert clearhead.upgrade(upgraded, linears=False).models == ("",)
    model.requires_grad_()
    expected = model(**inputs).last_hidden_state
    text = "LlamaAttention passes 'stripes', which Clearhead's attention does not take. It keeps the eager attention"
    with pytest.warns(UserWarning, match=text):
        actual = upgraded(**inputs, stripes=torch.ones(1)).last_hidden_state
    real = inputs["attention_mask"].bool()
    assert torch.equal(actual[real], expected[real])
    expected[real].sum().backward()
    actual[real].sum().backward()
    for ours, eager in zip(upgraded.parameters(), model.parameters(), strict=True):
        assert torch.equal(ours.grad, eager.grad)  # type: ignore[arg-type]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        upgraded(**inputs)  # and other calls run on Clearhead


def test_a_chosen_implementation_never_falls_back(model: LlamaModel, inputs: dict[str, Tensor]) -> None:
    import clearhead.integrations.transformers  # noqa: F401  (registers the implementation)

    model.set_attn_implementation("clearhead")
    with pytest.raises(ArgumentError, match="stripes: expected no keyword"):
        model(**inputs, stripes=torch.ones(1))


def test_downgrade_forgets_it(model: LlamaModel, inputs: dict[str, Tensor]) -> None:
    clearhead.upgrade(model, linears=False)
    clearhead.downgrade(model)
    model.set_attn_implementation("clearhead")
    with pytest.raises(ArgumentError, match="stripes: expected no keyword"):
        model(**inputs, stripes=torch.ones(1))


def eager_attention_forward(module: nn.Module, query: Tensor, *others: Any, **options: Any) -> tuple[Tensor, None]:
    return query, None


class Config:
    _attn_implementation = "clearhead"


class Follows(nn.Module):
    config = Config()

    def forward(self) -> Callable[..., Any]:
        return ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)


class CallsAttention(Follows):
    def forward(self) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        return attend(self, torch.ones(1))


class BuildsItsMaskByName(nn.Module):
    config = Config()

    def forward(self) -> Any:
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mask = torch.ones(1) if self.config._attn_implementation in ("eager", "sdpa") else None
        return attend(self, torch.ones(1), mask)


def test_a_layer_that_compares_the_name_does_not_fall_back() -> None:
    """Under our name it has left out what eager attention needs, so eager attention would be silently wrong."""
    compares, calls = BuildsItsMaskByName(), CallsAttention()
    for layer in (compares, calls):
        _first_call.mark(layer)
    assert _first_call.eager_instead(compares, "stripes") is None
    with pytest.warns(UserWarning, match="CallsAttention passes 'stripes'"):
        assert _first_call.eager_instead(calls, "stripes") is eager_attention_forward
