"""What records, interventions, rankings, rollouts and walkthroughs refuse, and how they say it.

`tests/malformed` has others; those of `monitor` and `qk_clip_` are beside their tests.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError, DTypeError, RecordError, ShapeError

from .conftest import BATCH, HEADS, LENGTH, NAMES, WIDTH, Stack, recorded

WORDS = ["[CLS]", "it", "was", "too", "tired", "too", "[SEP]"]


def x() -> Tensor:
    return torch.randn(BATCH, LENGTH, WIDTH)


def record(**options: Any) -> clearhead.record:
    return recorded(Stack(), x(), **options)


kept = cache(partial(record, keep="queries_keys"))


def rank(query: Any, key: Any, **options: Any) -> Any:
    return kept().rank_heads(query, key, **options)


def change(head: int, change: Any, name: str = NAMES[0], model: nn.Module | None = None) -> None:
    model = model or Stack()
    with clearhead.intervene(model, {(name, head): change}):
        model(x())


def importance(model: nn.Module, *batches: Tensor, mean: bool = True) -> Any:
    loss = (lambda model, x: model(x).square().mean()) if mean else lambda model, x: model(x)
    return clearhead.head_importance(model, batches, loss, progress=False)


def walk(attribute: str) -> None:
    module = clearhead.MultiHeadAttention(WIDTH, HEADS)
    setattr(module, attribute, object())
    clearhead.walkthrough(module, x())


theirs = partial(nn.TransformerEncoderLayer, WIDTH, HEADS, 16, batch_first=True)
NUMBERS, BELOW = "heads: expected numbers in 0 …", r"targets: expected token numbers below 7, got \["
KEPT = r"keep: expected a record made with keep='queries_keys', got keep='statist"
NAMED = r"changes: expected names of the model's modules, got 'blocks\.0\.atend'.*Near: .*blocks\.0\.attend"
NO_CLEARHEAD = r"expected modules whose attention runs through Clearhead, got 'self_attn'.*clearhead\.upgrade\(model\)"
NO_CALL = r"^model, batches: .* runs through .*clearhead\.upgrade\(model\)"
SPLIT = r"^module: expected a module that one process computes, got .* Walk through the module before it is split\."
NO_TOKENS = "query: expected a token's number, or tokens= beside its text, got 'it' with"
NO_TEXT = r"key: expected the text of one of key_tokens, got 'dog', which is none of them\. They are \[SEP\], too, "
REFUSED: dict[type[Exception], list[tuple[str, Callable[[], Any]]]] = {
    ArgumentError: [
        (r"for top_k.*Write statistics=\('entropy', 'received', 'max_logit'\)", lambda: record(per="kv_head")),
        ("keep: expected 'statistics' or 'queries_keys', got 'all'", lambda: record(keep="all")),
        ("heads: expected a list of whole numbers, got 2", lambda: record(heads=2)),
        (r"a list of names or numbers, got 'blocks'\. Write \['blocks'\]", lambda: record(layers="blocks")),
        ("layers: expected", lambda: record(layers=["blocks.1.attention"])),
        ("layers: expected", lambda: record(layers=[0, 3])),
        ("layers: expected", lambda: record(layers=[-1])),
        ("layers: expected", lambda: record(layers=["blocks.1", 0])),  # no attention runs in the block itself
        (NUMBERS, lambda: record(heads=[HEADS])),
        (NUMBERS, lambda: record(heads=[-HEADS - 1])),
        (NUMBERS, lambda: record(heads=[2], per="kv_head", statistics=("entropy",))),
        (r"residual: expected a share in \[0, 1\], got 1.5", lambda: kept().rollout([0], residual=1.5)),
        (BELOW, lambda: kept().rollout([LENGTH])),
        (BELOW, lambda: kept().rollout([0, -LENGTH - 1])),
        ("layers: expected at least one", lambda: kept().rollout([0], layers=[])),
        (NO_TOKENS, lambda: rank("it", 0)),
        (r"got 'too' at 3, 5\. Pass its number\.", lambda: rank("too", 0, tokens=WORDS)),
        (NO_TEXT, lambda: rank(0, "dog", tokens=WORDS, key_tokens=WORDS[::-1])),
        ("query: expected", lambda: rank(LENGTH, 0)),
        ("key: expected", lambda: rank(0, -LENGTH - 1)),
        ("item: expected", lambda: rank(0, 0, item=BATCH)),
        (NAMED, lambda: change(0, 0.0, "blocks.0.atend")),
        ("changes: expected head numbers ≥ 0, got -1", lambda: change(-1, 0.0)),
        (r"changes: expected a head of 'blocks\.0\.attend', 0 … 3, got 4", lambda: change(4, 0.0)),
        (NO_CLEARHEAD, lambda: change(0, 0.0, "self_attn", theirs())),
        (NO_CALL, lambda: importance(Stack())),
        (NO_CALL, lambda: importance(nn.Linear(WIDTH, 1), x())),
        (SPLIT, lambda: walk("head_shard")),
        (SPLIT, lambda: walk("sequence_shard")),
    ],
    ShapeError: [
        ("query_mask: expected", lambda: record(query_mask=torch.ones(BATCH, LENGTH + 2).bool())),
        ("tokens: expected 7, one for each that the layers have", lambda: rank("it", 0, tokens=WORDS[1:])),
        (r"expected a patch that broadcasts.*\(2, 7, 3\), got \(5, 4\)", lambda: change(0, torch.ones(5, 4))),
        (r"changes: expected a tensor \(2, 7, 3\), got", lambda: change(0, lambda output: output[:, :3])),
        (r"loss: expected a scalar, got \(2, 7, 12\)", lambda: importance(Stack(), x(), mean=False)),
    ],
    DTypeError: [
        ("changes: expected a number, 'mean', a tensor or a function, got str", lambda: change(0, "zero")),
    ],
    RecordError: [
        (KEPT, lambda: record().weights(0)),
        (KEPT, lambda: record().rollout([0])),
        (KEPT, lambda: record().rank_heads(0, 0)),
    ],
}


@pytest.mark.parametrize(("error", "text", "call"), [(error, *row) for error, rows in REFUSED.items() for row in rows])
def test_refused(error: type[Exception], text: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=text):
        call()
