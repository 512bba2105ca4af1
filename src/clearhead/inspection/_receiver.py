"""What receives the scalars and figures of `monitor`: a function, or a writer as TensorBoard's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, cast

from .._checks import shown
from ..errors import DTypeError

#: A function of the step and {name: value}: numbers, and a matplotlib figure if a census is taken.
Scalars = Callable[[int, dict[str, Any]], object]


class ScalarWriter(Protocol):
    """An object with TensorBoard's method for scalars, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one scalar of one step."""
        ...


def receiver(to: object, *, figures: bool = False) -> Scalars:
    """The function to which scalars, and `figures`, are passed.

    Raises:
        DTypeError: for an argument that is no function and has no ``add_scalar``, or no ``add_figure`` for figures.
    """
    methods = ("add_scalar", "add_figure") if figures else ("add_scalar",)
    adds: list[Any] = [getattr(to, name, None) for name in methods]
    writes = all(map(callable, adds))
    if isinstance(to, type) or not (writes or (callable(to) and not callable(adds[0]))):
        expected = f"a function (step, {{name: value}}), or something with {' and '.join(methods)}"
        raise DTypeError("to", expected=expected, got=shown(to))
    if not writes:
        return cast(Scalars, to)

    def write(step: int, values: dict[str, Any]) -> None:
        for name, value in values.items():
            adds[0 if isinstance(value, float) else 1](name, value, step)

    return write
