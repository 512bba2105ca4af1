"""Vision transformers of timm: their fused attention is recorded, and their own attributes place the patches.

timm needs torchvision; where either is missing, or does not fit this PyTorch, nothing here runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import clearhead

from .pages import Contents
from .recorded import KEPT

try:
    import timm
except Exception as problem:  # torchvision built for another PyTorch raises a RuntimeError
    pytest.skip(f"needs timm with torchvision ({type(problem).__name__})", allow_module_level=True)

SIZES: dict[str, Any] = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3, "num_classes": 0}

KINDS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "class token": ({}, ("class",)),
    "registers": ({"reg_tokens": 2}, ("class", "register 1", "register 2")),
    "patches alone": ({"class_token": False, "global_pool": "avg"}, ()),
    "pooling": ({"class_token": False, "global_pool": "map"}, ()),
}


@pytest.mark.parametrize("kind", KINDS)
def test_patches_are_placed_by_the_model(kind: str) -> None:
    options, prefix = KINDS[kind]
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(**SIZES, **options).eval()
    pixels = torch.rand(1, 3, 32, 32)
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        model(pixels)
    layout = rec.patches("blocks.0.attn")
    assert (layout.prefix, layout.grid) == (prefix, (4, 4))
    contents = Contents(rec.page(image=pixels[0]).text)
    shown = contents.array(0, contents.layer(0, 0, 1)["map"], 3, layout.length, layout.length)
    torch.testing.assert_close(shown.float(), rec.weights("blocks.1.attn")[0], rtol=0, atol=6e-5)
    assert ("pooling" in [section["title"] for section in contents.data["sections"]]) == (kind == "pooling")


def test_a_distilled_model_has_two_tokens_before_its_patches() -> None:
    model = timm.models.deit.VisionTransformerDistilled(**SIZES).eval()
    with torch.no_grad(), clearhead.record(model, **KEPT) as rec:
        model(torch.rand(1, 3, 32, 32))
    assert rec.patches(0).prefix == ("class", "distillation")


def test_at_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import Image
    from transformers import TimmWrapperConfig, TimmWrapperModel

    from tests.cli.looking import look

    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "timm"
    config = TimmWrapperConfig(
        architecture="vit_tiny_patch16_224",
        model_args={"img_size": 32, "depth": 2},
        pretrained_cfg={"input_size": [3, 32, 32], "crop_pct": 0.5, "mean": [0.1, 0.2, 0.3], "std": [0.7, 0.8, 0.9]},
    )
    TimmWrapperModel(config).save_pretrained(folder)
    image = Image.new("RGB", (80, 80), "green")
    image.paste("red", (20, 20, 60, 60))  # all of what is seen once the edges are cut away
    image.save("photo.png")
    result = look("--image", "photo.png", "--model", "timm")
    assert "2 × 2 patches and class" in " ".join(result.stdout.split())
    page = Contents((tmp_path / "attention.html").read_text())
    pixels = page.array(0, page.data["items"][0]["picture"]["pixels"], 3, 32, 32)
    assert pixels[:, 4:-4, 4:-4].flatten(1).unique(dim=1).tolist() == [[255], [0], [0]]
