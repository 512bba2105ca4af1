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

from .lessons import TransformerLesson, assert_same_bits

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
    path = write(tmp_path / f"weights.{suffix}", state)
    ours = load(kind(path), H)
    path.write_bytes(bytes(path.stat().st_size))  # which changes nothing that was loaded
    for prefix in ("layers.3.attn", "layers.3.attn."):
        assert_same_bits(save(ours, "w_q", prefix=prefix), state)


class Trap(TransformerLesson):
    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    trap = Trap(E, H)
    trap.path = tmp_path / "sprung"
    text = "source: expected a file of tensors alone.*module.pt, which fails with UnpicklingError.*runs code when it is"
    with pytest.raises(CheckpointError, match=text):
        load(write(tmp_path / "module.pt", trap), H)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
@pytest.mark.parametrize("content", [b"", b"not a checkpoint" * 9, None], ids=["empty", "other bytes", "cut off"])
def test_a_broken_file(tmp_path: Path, state: dict[str, Tensor], suffix: str, content: bytes | None) -> None:
    path = write(tmp_path / f"broken.{suffix}", state)
    path.write_bytes(path.read_bytes()[:-999] if content is None else content)
    with pytest.raises(CheckpointError, match=f"source: expected .*broken.{suffix}, which fails with"):
        load(path, H)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    (tmp_path / "model.safetensors.index.json").write_bytes(b"{}")
    write(tmp_path / "list.pt", [torch.ones(3)])
    for name, text in (
        ("model.safetensors.index.json", r"expected a file that ends in \.safetensors, \.pt, \.pth, \.bin, got"),
        ("missing.safetensors", "source: expected a file, got .*missing.safetensors, which is none"),
        ("folder.pt", "source: expected a file, got .*folder.pt, which is none"),
        ("list.pt", "expected a file with a state dict, names and tensors, got list in"),
    ):
        with pytest.raises(CheckpointError, match=text):
            load(tmp_path / name, H)
