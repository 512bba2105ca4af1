"""Kernels that are compiled on a GPU are checked there once, before their results are used."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable

import torch

from ..errors import KernelError


class FirstCheck:
    """One check of kernels. It runs once on each device in each dtype.

    Args:
        kernels: their name, which begins the warning.
        instead: a sentence that says what runs where they fail.
        compare: what is wrong with a small call on a device in a dtype, or ``None``. It may raise any error.
        switch: the environment variable that forces them with 1 and switches them off with 0, or ``None``.
    """

    def __init__(
        self,
        kernels: str,
        instead: str,
        compare: Callable[[torch.device, torch.dtype], str | None],
        switch: str | None = "CLEARHEAD_TRITON",
    ) -> None:
        self._kernels, self._instead, self._compare, self._switch = kernels, instead, compare, switch
        self._passed: dict[tuple[torch.device, torch.dtype], bool] = {}

    def passes(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether the kernels passed. The first call checks them, and warns if they fail.

        While a CUDA graph is captured no check runs, and kernels that were not checked before do not pass.

        Raises:
            KernelError: if they failed, and the switch forces them.
        """
        place = device, dtype
        if place not in self._passed:
            if torch.cuda.is_current_stream_capturing():
                return False
            problem = self.problem(device, dtype)
            if problem is not None:
                self._report(f"{self._kernels} failed the check on {device} in {dtype}: {problem}.")
            self._passed[place] = problem is None
        return self._passed[place]

    def problem(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """What is wrong on a device in a dtype, or ``None``. Nothing is remembered."""
        try:
            return self._compare(device, dtype)
        except Exception as error:  # PyTorch's compiler and Triton raise errors of many classes
            return f"{type(error).__name__}: {error}"

    def _report(self, problem: str) -> None:
        switch = self._switch
        if switch is not None and os.environ.get(switch) == "1":
            raise KernelError(f"{problem} {switch}=1 forces them. Unset it: {self._instead}")
        text = f"{problem} Therefore {self._instead}"
        if switch is not None:
            text += f" {switch}=0 switches the kernels and this check off."
        warnings.warn(text, RuntimeWarning, stacklevel=2)
