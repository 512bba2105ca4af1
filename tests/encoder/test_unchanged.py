"""Pictures of modules: what they see, and what leaves them as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clearhead._encoder.unchanged import Picture, digest, samples_of
from clearhead._native import extension

pytestmark = pytest.mark.skipif(extension is None, reason="the native kernel was not built")


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(40, 30), nn.Dropout(0.1), nn.LayerNorm(30)).eval()


CHANGES: dict[str, Callable[[Any], object]] = {
    "a hook": lambda part: part.register_forward_hook(lambda module, args, output: None),
    "a pre-hook": lambda part: part.register_forward_pre_hook(lambda module, args: None),
    "training": lambda part: part.train(),
    "a forward": lambda part: setattr(part, "forward", lambda x: x),
    "a child": lambda part: part.add_module("more", nn.Identity()),
    "a compiled part": lambda part: part.compile(backend="eager"),
    "another class": lambda part: setattr(part, "__class__", nn.Identity),
}
OF_PARAMETERS: dict[str, Callable[[Any], object]] = {
    "another parameter": lambda part: setattr(part, "weight", nn.Parameter(part.weight.detach().clone())),
    "another tensor": lambda part: setattr(part.weight, "data", part.weight.detach().clone()),
    "one number": lambda part: part.bias[3].add_(1),
    "written through data": lambda part: part.weight.data.mul_(2),
    "no memory": lambda part: part.weight.untyped_storage().resize_(0),
}


@pytest.mark.parametrize("number", [0, 1, 2])
@pytest.mark.parametrize("change", [*CHANGES, *OF_PARAMETERS])
@torch.no_grad()
def test_changes_are_seen(change: str, number: int) -> None:
    if change in OF_PARAMETERS and number == 1:
        return
    modules = model()
    picture = Picture(list(modules.modules()))
    assert picture.holds()
    assert picture.holds()
    {**CHANGES, **OF_PARAMETERS}[change](modules[number])
    assert not picture.holds()
    assert Picture(list(modules.modules())).holds()


def test_settings_and_code_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    settings, modules = {"window": 3}, list(model().modules())
    picture = Picture(modules, settings)
    settings["window"] = 4
    assert not picture.holds()
    picture = Picture(modules, settings)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert not picture.holds()
    assert picture.holds()


def test_parameters_that_cannot_be_sampled() -> None:
    module = nn.Linear(6, 5, bias=False)
    for weight in (torch.ones(()).expand(5, 6), torch.empty(5, 6, device="meta"), torch.empty(0, 6)):
        module.weight = nn.Parameter(weight, requires_grad=False)
        assert Picture([module]).holds()
    with torch.inference_mode():
        module.weight = nn.Parameter(torch.randn(5, 6), requires_grad=False)
    assert Picture([module]).holds()


def digest_of(tensors: list[Tensor]) -> int:
    return digest(samples_of(tensors))


def test_digests_tell_tensors_apart() -> None:
    weights = [torch.randn(40, 30), torch.randn(7)]
    before = digest_of(weights)
    assert digest_of([weight.clone() for weight in weights]) == before
    assert digest_of(weights[::-1]) != before
    for change in (lambda: weights[0].mul_(1.001), lambda: weights[1][3:4].add_(1), lambda: weights[0][:20].zero_()):
        change()
        after = digest_of(weights)
        assert after != before
        before = after
    assert isinstance(digest_of([torch.empty(0)]), int)
