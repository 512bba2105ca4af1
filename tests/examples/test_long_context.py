"""Long passages split over processes: the losses of one process, also after a checkpoint was read by another number."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import _two  # noqa: F401
from tests.distributed.meshes import line
from tests.distributed.processes import Processes, processes

from .conftest import EXAMPLES


def _example(name: str) -> Any:
    """A program of examples/, in a process of the group."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    return importlib.import_module(name)


def _losses(folder: Path | None, steps: int, length: int, save: bool = False) -> list[float]:
    """Losses of all steps, from the newest checkpoint of a folder on."""
    long_context, characters = _example("long_context"), _example("character_model")
    corpus = characters.read_corpus()
    torch.manual_seed(0)
    model = characters.CharacterModel(len(corpus.characters), layers=2)
    training = long_context.Training(long_context.split(model, line()), 4e-3)
    checkpoint = None if folder is None else long_context.newest(folder)
    if checkpoint is not None:
        training.load(checkpoint)
    long_context.train(training, corpus.training, line(), steps, length, seed=0)
    if save:
        training.save(folder / f"step_{steps}")  # type: ignore[operator]
    return training.losses


def _compare(two: Processes, folder: Path, steps: int, length: int) -> None:
    with processes(1) as one:
        (expected,) = one.run(_losses, None, steps, length, seconds=600)
        assert expected[-1] < expected[0] - 1, "it learns"
        half = steps // 2
        for found in two.run(_losses, folder, half, length, True, seconds=600):
            assert found == pytest.approx(expected[:half], abs=1e-4)
        (found,) = one.run(_losses, folder, steps, length, seconds=600)
        assert found == pytest.approx(expected, abs=1e-4)
        for found in two.run(_losses, folder, steps, length, seconds=600):
            assert found == pytest.approx(expected, abs=1e-4)


def test_losses_are_those_of_one_process(two: Processes, tmp_path: Path) -> None:
    _compare(two, tmp_path, 10, 331)


def test_a_checkpoint_of_one_process_is_read_by_two(two: Processes, tmp_path: Path) -> None:
    """And what two go on to, by one."""
    with processes(1) as one:
        (expected,) = one.run(_losses, None, 6, 131)
        one.run(_losses, tmp_path, 2, 131, True)
        for found in two.run(_losses, tmp_path, 4, 131, True):
            assert found == pytest.approx(expected[:4], abs=1e-4)
        (found,) = one.run(_losses, tmp_path, 6, 131)
        assert found == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
def test_losses_of_twenty_steps_are_those_of_one_process(two: Processes, tmp_path: Path) -> None:
    _compare(two, tmp_path, 20, 4096)
