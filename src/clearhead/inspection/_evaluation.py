"""A model in evaluation mode for a while."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from torch import nn


@contextmanager
def evaluation_mode(model: nn.Module) -> Generator[bool, None, None]:
    """Switch to evaluation mode inside the block. Yields whether the model was in training mode.

    Only flags change: ``train`` and ``eval`` of a model may do more, such as merging adapters into its parameters.
    """
    modes = [(submodule, submodule.training) for submodule in model.modules()]
    try:
        for submodule, _ in modes:
            submodule.training = False
        yield modes[0][1]
    finally:
        for submodule, training in modes:
            submodule.training = training
