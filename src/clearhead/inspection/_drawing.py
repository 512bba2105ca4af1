"""The functions of `clearhead.plot` as methods of a record."""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import TYPE_CHECKING


class _Method:
    """A function of `clearhead.plot`, imported on first use, with the record as its first argument."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, rec: object, owner: type) -> FunctionType | MethodType:
        from .. import plot

        function = getattr(plot, self._name)
        return function if rec is None else MethodType(function, rec)


class Drawable:
    """Methods of a record that draw it: an HTML page, a `Comparison`, and matplotlib figures.

    Arguments, results and errors are those of the functions of the same names in `clearhead.plot`.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        from ..plot import compare, page, plot_heads, plot_image, plot_map, plot_received, plot_rollout
    else:
        compare, page, plot_heads, plot_image, plot_map, plot_received, plot_rollout = (_Method() for _ in range(7))
