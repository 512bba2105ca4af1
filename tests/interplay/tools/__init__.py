"""The columns of the table, in groups: a group is one file of tests."""

from . import checkpoints, hooks, libraries, modes, parallel, parameters, samples, saved, tracers, transforms
from ._tool import Tool

GROUPS: dict[str, tuple[Tool, ...]] = {
    "saved": saved.TOOLS,
    "checkpoints": checkpoints.TOOLS,
    "transforms": transforms.TOOLS,
    "tracers": tracers.TOOLS,
    "modes": modes.TOOLS,
    "hooks": hooks.TOOLS,
    "parameters": parameters.TOOLS,
    "libraries": libraries.TOOLS,
    "samples": samples.TOOLS,
    "parallel": parallel.TOOLS,
}
TOOLS = tuple(tool for group in GROUPS.values() for tool in group)

__all__ = ["GROUPS", "TOOLS", "Tool"]
