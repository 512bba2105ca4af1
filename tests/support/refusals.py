"""Calls that are refused, and what an error has to say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from clearhead.errors import ClearheadError

Call = Callable[[], Any]
#: What was done, the error, the argument it names, a part of what was expected, what came and how the advice begins.
Refusal = tuple[str, Call, type[ClearheadError], str, str, str]


def require_words(case: Refusal) -> None:
    _, call, kind, argument, expected, got = case
    with pytest.raises(ClearheadError) as caught:
        call()
    text = str(caught.value)
    assert type(caught.value) is kind
    assert text.startswith(f"{argument}: expected ")
    assert expected in text.partition(", got ")[0]
    assert f", got {got}" in text
    assert "\n" not in text


def require_text(call: Call, text: str) -> None:
    with pytest.raises(ClearheadError) as caught:
        call()
    assert str(caught.value) == text


def require_fix(case: Refusal) -> None:
    with pytest.raises(case[2], match=r", got .+\. [A-Z].+\.$"):
        case[1]()
