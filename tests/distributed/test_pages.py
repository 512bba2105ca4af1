"""The pages about several processes, on meshes of several: what they compute is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from tests.test_docs import DOCS, blocks

from .building import full, require_close
from .processes import processes

#: What pages write for the sizes of a mesh's dimensions, "cp" and "tp".
SIZES = "(world, 1)"
PAGES = [page for page in sorted(DOCS.glob("distributed*.md")) if any(SIZES in block for block, _ in blocks(page))]


def _ran(page: Path, sizes: tuple[int, int]) -> dict[str, Tensor]:
    """The blocks as one program, on a mesh of these sizes; tensors of it that are of the whole."""
    namespace: dict[str, Any] = {"__name__": page.stem}
    # The group is there already, and later pages need it.
    with mock.patch.multiple(dist, init_process_group=mock.DEFAULT, destroy_process_group=mock.DEFAULT):
        for block, _ in blocks(page):
            exec(compile(block.replace(SIZES, str(sizes)), str(page), "exec"), namespace)
    found = {
        name: namespace[name] for name in ("whole", "following", "entropy", "received", "norm") if name in namespace
    }
    for name in ("model", "head"):
        if name in namespace:
            found |= {f"{name}.{key}": full(x) for key, x in namespace[name].named_parameters()}
    if "loss" in namespace:
        loss = namespace["loss"].detach().clone()
        dist.all_reduce(loss, group=namespace["mesh"]["cp"].get_group())
        found["loss"] = loss
    return {name: x.detach() for name, x in found.items()}


def _compare(page: Path, expected: dict[str, Tensor], sizes: tuple[int, int]) -> None:
    found = _ran(page, sizes)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        require_close(x, expected[name], 1e-5, name)


def test_the_page_about_training_is_among_them() -> None:
    assert any("clip_grad_norm_(" in block for page in PAGES for block, _ in blocks(page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
@pytest.mark.parametrize(
    "sizes",
    [(1, 2), (2, 1), pytest.param((2, 2), marks=pytest.mark.slow)],
    ids=lambda sizes: f"cp{sizes[0]}-tp{sizes[1]}",
)
def test_a_page_runs_on_several_processes(page: Path, sizes: tuple[int, int]) -> None:
    with processes(1) as one:
        (expected,) = one.run(_ran, page, (1, 1))
    with processes(sizes[0] * sizes[1]) as several:
        several.run(_compare, page, expected, sizes)
