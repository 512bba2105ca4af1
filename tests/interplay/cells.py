"""The table: what each entry is under each tool."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import pytest
from torch._dynamo.exc import Unsupported

from clearhead.errors import ArgumentError, ClearheadError, RecordError
from tests.support.closeness import require_near

from .entries import BY_NAME, ENTRIES, NEEDS, Entry
from .subject import Numbers
from .tools import GROUPS, Tool


@dataclass(frozen=True)
class Refusal:
    """What a cell raises instead of a result."""

    kind: type[Exception]
    text: str


_UNDER_VMAP = Refusal(RecordError, "record: no attention was seen. Attention under torch.vmap was computed by")
_COMPILED = "record: expected to be made outside of compiled functions."
_COMPUTED_AGAIN = Refusal(RecordError, "record: expected a block around the checkpointed function, got")
_IN_COMPILED = tuple(tool.name for tool in GROUPS["transforms"] if tool.name.endswith((" in compile", " of compiled")))
#: Entries, tools and what they raise together. All other cells are right.
_REFUSALS = (
    ("record", ("vmap", "vmap(grad)", "gradients per sample"), _UNDER_VMAP),
    ("record", ("reentrant checkpoint", "checkpoint to the end"), _COMPUTED_AGAIN),
    ("record", ("compile with symbolic sizes", *_IN_COMPILED), Refusal(RecordError, _COMPILED)),
    ("record", ("compile",), Refusal(Unsupported, _COMPILED)),  # in one graph
    ("attention_statistics", ("compile",), Refusal(Unsupported, "in attention_statistics")),
    ("record", ("fx.symbolic_trace",), Refusal(RecordError, "record: no attention was seen.")),
    (
        "attention_statistics",
        ("fx.symbolic_trace",),
        Refusal(ClearheadError, "got Proxy"),
    ),
    (
        "attention_statistics",
        ("vmap", "vmap in compile", "vmap of compiled"),
        Refusal(ArgumentError, "query: expected a tensor outside torch.func.vmap"),
    ),
)
REFUSED = {(entry, tool): refusal for entry, tools, refusal in _REFUSALS for tool in tools}


@dataclass(frozen=True)
class Cell:
    """One call of an entry under a tool."""

    entry: Entry
    tool: Tool
    case: str

    @property
    def is_slow(self) -> bool:
        """Whether an ordinary run leaves the cell out: other calls of an entry, and compilers for all but one entry."""
        return self.case != next(iter(self.entry.cases)) or (self.tool.slow and self.entry is not ENTRIES[0])

    @property
    def name(self) -> str:
        return f"{self.tool.name}-{self.entry.name}-{self.case}"

    def check(self) -> None:
        """Raise unless the tool leaves the numbers as they are, or the call is refused with the text of the table."""
        refusal = REFUSED.get((self.entry.name, self.tool.name))
        if refusal is not None:
            with pytest.raises(refusal.kind, match=re.escape(refusal.text)):
                self.tool.found(self.entry.build(self.case))
            return
        found = self.tool.found(self.entry.build(self.case))
        assert found, "the tool returned nothing to compare"
        require_near(found, self._expected(), self.tool.tolerance or self.entry.tolerance, together=True)

    def _expected(self) -> Numbers:
        return _expected(self.entry.name, self.case, self.tool.expected)


@cache
def _expected(entry: str, case: str, call: object) -> Numbers:
    assert callable(call)
    return call(BY_NAME[entry].build(case).double())


def reasons_against(entry: Entry, tool: Tool, case: str) -> list[str]:
    """Why a cell makes no sense; nothing if it does."""
    return [NEEDS[need] for need in sorted(tool.needs & entry.lacks_in(case))]


def cells(group: str) -> list[Cell]:
    """All cells of a group of tools that make sense."""
    return [
        Cell(entry, tool, case)
        for tool in GROUPS[group]
        for entry in ENTRIES
        for case in entry.cases
        if not reasons_against(entry, tool, case)
    ]


#: Warnings of PyTorch and of the tools about how they are used here.
_IGNORED = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in (
        "Anomaly Detection has been enabled",
        "For backward hooks to be called, module output should be",
        "Full backward hook is firing when gradients are computed with respect to module outputs",
        "Already found a `peft_config` attribute in the model",
        "FSDP is switching to use `NO_SHARD`",
        "FSDP2-wrapped module",
        "`is_gradient_checkpointing` is deprecated",
        "`isinstance.treespec, LeafSpec.` is deprecated",
        "The .grad attribute of a Tensor that is not a leaf",  # where a graph breaks
        ":torch.jit.TracerWarning",
        "`torch.jit.[a-z_]+` is (deprecated|not supported)",
    )
]


def parameters(group: str) -> pytest.MarkDecorator:
    """The cells as parameters of a test."""
    return pytest.mark.parametrize(
        "cell", [pytest.param(cell, id=cell.name, marks=_marks(cell)) for cell in cells(group)]
    )


def _marks(cell: Cell) -> list[pytest.MarkDecorator]:
    return [*_IGNORED, pytest.mark.slow] if cell.is_slow else _IGNORED
