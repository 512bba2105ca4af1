from __future__ import annotations

from .cells import Cell, parameters


@parameters("saved")
def test_the_call_under_the_tool(cell: Cell) -> None:
    cell.check()
