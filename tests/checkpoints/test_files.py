"""Files: safetensors and plain tensors written by torch.save are read, whatever could run code is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import clearhead
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


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "pth", "bin"])
@pytest.mark.parametrize("as_text", [False, True])
def test_a_state_dict_is_read(tmp_path: Path, state: dict[str, Tensor], suffix: str, as_text: bool) -> None:
    path = write(tmp_path / f"weights.{suffix}", state)
    ours = load(str(path) if as_text else path, H)
    saved = save(ours, "w_q", prefix="layers.3.attn")
    assert saved.keys() == state.keys()
    assert all(torch.equal(saved[key], state[key]) for key in state)


def test_what_is_loaded_does_not_hold_on_to_the_file(tmp_path: Path, state: dict[str, Tensor]) -> None:
    path = write(tmp_path / "weights.safetensors", state)
    ours = load(path, H)
    before = ours.q_proj.weight.detach().clone()
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(ours.q_proj.weight, before)


@pytest.mark.parametrize("suffix", ["pt", "pth", "bin"])
def test_a_pickled_module_is_refused(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"module.{suffix}", TransformerLesson(E, H))
    with pytest.raises(CheckpointError) as raised:
        load(path, H)
    text = str(raised.value)
    assert text.startswith("source: expected a file of tensors alone")
    assert f"{path}, which fails with UnpicklingError" in text
    assert "runs code when it is opened and is not read here" in text


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


@pytest.mark.parametrize("suffix", ["safetensors", "pt", "bin"])
@pytest.mark.parametrize("content", [b"", b"\x00" * 9, b"not a checkpoint" * 9])
def test_a_broken_file(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"broken.{suffix}"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"source: expected .*broken.{suffix}, which fails with"):
        load(path, H)


def test_a_cut_off_file(tmp_path: Path, state: dict[str, Tensor]) -> None:
    for name in ("weights.safetensors", "weights.pt"):
        path = write(tmp_path / name, state)
        path.write_bytes(path.read_bytes()[:-999])
        with pytest.raises(CheckpointError, match="which fails with"):
            load(path, H)


@pytest.mark.parametrize("name", ["model.ckpt", "model.safetensors.index.json", "model.pkl", "model"])
def test_another_kind_of_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=r"expected a file that ends in \.safetensors, \.pt, \.pth, \.bin, got"):
        load(tmp_path / name, H)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "folder.pt").mkdir()
    for name in ("missing.safetensors", "folder.pt"):
        with pytest.raises(CheckpointError, match=f"source: expected a file, got .*{name}, which is none"):
            load(tmp_path / name, H)


def test_a_file_with_something_else(tmp_path: Path, state: dict[str, Tensor]) -> None:
    with pytest.raises(CheckpointError, match="expected a file with a state dict, names and tensors, got list in"):
        load(write(tmp_path / "list.pt", [torch.ones(3)]), H)
    path = write(tmp_path / "training.pt", {"model_state_dict": state, "epoch": 3})
    with pytest.raises(CheckpointError, match=r"got dict under 'model_state_dict'\. .*source\['model_state_dict'\]"):
        load(path, H)
    assert load(torch.load(path, weights_only=True)["model_state_dict"], H).num_heads == H


def test_saved_weights_go_into_a_safetensors_file(tmp_path: Path) -> None:
    ours = clearhead.MultiHeadAttention(E, H)
    for naming in ("clearhead", "torch", "gpt2", "w_q"):
        path = write(tmp_path / f"{naming}.safetensors", save(ours, naming))
        assert torch.equal(load(path, H).v_proj.weight, ours.v_proj.weight)
