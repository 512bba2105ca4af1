"""The table is complete: every entry meets every tool, or a rule says why that makes no sense."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from .cells import REFUSED, cells, reasons_against
from .entries import BY_NAME, ENTRIES, NEEDS
from .tools import GROUPS, TOOLS


def test_every_entry_meets_every_tool() -> None:
    present = {(cell.entry.name, cell.tool.name, cell.case) for group in GROUPS for cell in cells(group)}
    for entry in ENTRIES:
        for tool in TOOLS:
            for case in entry.cases:
                assert ((entry.name, tool.name, case) in present) != bool(reasons_against(entry, tool, case))


def test_an_ordinary_run_has_every_tool_and_every_entry() -> None:
    ordinary = [cell for group in GROUPS for cell in cells(group) if not cell.is_slow]
    assert {cell.tool.name for cell in ordinary} == {tool.name for tool in TOOLS}
    assert {cell.entry.name for cell in ordinary} == BY_NAME.keys()


def test_names_are_unique() -> None:
    for names in ([tool.name for tool in TOOLS], [entry.name for entry in ENTRIES]):
        assert [name for name, count in Counter(names).items() if count > 1] == []


def test_rules_and_refusals_are_used() -> None:
    lacked = frozenset[str]().union(*(entry.lacks_in(case) for entry in ENTRIES for case in entry.cases))
    needed = frozenset[str]().union(*(tool.needs for tool in TOOLS))
    assert lacked == NEEDS.keys() == needed
    tools = {tool.name: tool for tool in TOOLS}
    for entry, tool in REFUSED:
        assert not reasons_against(BY_NAME[entry], tools[tool], next(iter(BY_NAME[entry].cases))), (entry, tool)


def test_the_layer_norm_of_pytorch_reads_strides_that_it_saved() -> None:
    """The reason for a rule. If this fails, PyTorch mended it, and the rule can go."""
    norm, x = nn.LayerNorm(5), torch.randn(3, 7, 5, requires_grad=True)
    factor = torch.randn(3, 7, 5)
    (expected,) = torch.autograd.grad((norm(x) * factor).sum(), x)
    with saved_tensors_hooks(lambda saved: torch.stack([saved, saved], -1)[..., 0], lambda saved: saved):
        output = norm(x)
    (found,) = torch.autograd.grad((output * factor).sum(), x)
    assert not torch.allclose(found, expected, atol=1e-3)
