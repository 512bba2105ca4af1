"""Long passages split over processes: the losses of one process, also after a checkpoint was read by another number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.conftest import _groups  # noqa: F401
from tests.distributed.processes import Groups, line, processes

from .conftest import example


def _losses(folder: Path | None, steps: int, length: int, save: bool = False) -> list[float]:
    """Losses of all steps, from the newest checkpoint of a folder on."""
    long_context, characters = example("long_context"), example("character_model")
    corpus = characters.read_corpus()
    torch.manual_seed(0)
    model = characters.CharacterModel(len(corpus.characters), layers=2)
    training = long_context.Training(long_context.split(model, line()), 4e-3)
    checkpoint = None if folder is None else long_context.newest(folder)
    if checkpoint is not None:
        training.load(checkpoint)
    long_context.train(training, corpus.training, line(), steps, length, seed=0)
    if folder is not None and save:
        training.save(folder / f"step_{steps}")
    return training.losses


@pytest.mark.parametrize(("steps", "length"), [(10, 331), pytest.param(20, 4096, marks=pytest.mark.slow)])
def test_losses_are_those_of_one_process(groups: Groups, tmp_path: Path, steps: int, length: int) -> None:
    """Also after a checkpoint: of two processes, which one and two read, and of one, which two read."""
    half = steps // 2
    options: dict[str, Any] = {"seconds": 600}
    with processes(1) as one:
        (expected,) = one.run(_losses, None, steps, length, **options)
        assert expected[-1] < expected[0] - 1, "it learns"
        two = groups(2)
        one.run(_losses, tmp_path / "one", half, length, True, **options)
        saved = two.run(_losses, tmp_path / "two", half, length, True, **options)
        resumed = one.run(_losses, tmp_path / "two", steps, length, **options)
        resumed += two.run(_losses, tmp_path / "two", steps, length, **options)
        resumed += two.run(_losses, tmp_path / "one", steps, length, **options)
    for losses in [*saved, *resumed]:
        assert losses == pytest.approx(expected[: len(losses)], abs=1e-4)
    assert {len(losses) for losses in resumed} == {steps}
