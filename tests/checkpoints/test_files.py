"""Files: safetensors and plain tensors written by torch.save are read, whatever could run code is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from clearhead.checkpoints import load, save
from clearhead.errors import CheckpointError

from .lessons import TransformerLesson

E, H = 35, 5


@pytest.fixture
def state() -> dict[str, Tensor]:
    return {f"layers.3.attn.{key}": value for key, value in TransformerLesson(E, H).state_dict().items()}


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize(("suffix", "kind"), [("safetensors", str), ("pt", Path), ("pth", Path), ("bin", str)])
def test_a_state_dict_is_read(tmp_path: Path, state: dict[str, Tensor], suffix: str, kind: type[Any]) -> None:
    ours = load(kind(write(tmp_path / f"weights.{suffix}", state)), H)
    saved = save(ours, "w_q", prefix="layers.3.attn")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)


def test_what_is_loaded_does_not_hold_on_to_the_file(tmp_path: Path, state: dict[str, Tensor]) -> None:
    path = write(tmp_path / "weights.safetensors", state)
    ours = load(path, H)
    before = ours.q_proj.weight.detach().clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(ours.q_proj.weight, before)


def test_a_pickled_module_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "module.pt", TransformerLesson(E, H))
    text = "source: expected a file of tensors alone.*module.pt, which fails with UnpicklingError.*runs code when it is"
    with pytest.raises(CheckpointError, match=text):
        load(path, H)


class Trap:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    path = write(tmp_path / "trap.pt", {"w_q.weight": Trap(tmp_path / "sprung")})
    with pytest.raises(CheckpointError):
        load(path, H)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint" * 9, None], ids=["empty", "other bytes", "cut off"])
def test_a_broken_file(tmp_path: Path, state: dict[str, Tensor], suffix: str, content: bytes | None) -> None:
    path = write(tmp_path / f"broken.{suffix}", state)
    path.write_bytes(path.read_bytes()[:-999] if content is None else content)
    with pytest.raises(CheckpointError, match=f"source: expected .*broken.{suffix}, which fails with"):
        load(path, H)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "model"])
def test_another_kind_of_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"expected a file that ends in \.safetensors, \.pt, \.pth, \.bin, got"):
        load(tmp_path / name, H)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    for name in ("missing.safetensors", "folder.pt"):
        with pytest.raises(CheckpointError, match=f"source: expected a file, got .*{name}, which is none"):
            load(tmp_path / name, H)


def test_a_file_with_something_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="expected a file with a state dict, names and tensors, got list in"):
        load(write(tmp_path / "list.pt", [torch.ones(3)]), H)
