"""``python -m docs.draw.vision``: train a small ViT to name shapes, and take the picture of its heads again.

The class token of the model says which of an ellipse, a triangle and a rectangle an image holds. Training takes a
minute on a CPU. The picture depends on the computer's rounding, so no test compares it.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from PIL import Image, ImageDraw
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from docs.draw import IMAGES

SIZE, PATCH = 64, 8
#: Draws shapes that lie apart.
SEED = 290
SKY, RED, YELLOW, GREEN = (200, 219, 235), (211, 60, 42), (240, 200, 20), (31, 122, 60)
#: Shapes are drawn this many times larger, and then made smaller, so that their edges are smooth.
DETAIL = 4


def drawn(ellipse: bool, triangle: bool, rectangle: bool, draws: random.Random) -> Image.Image:
    """An image of `SIZE` × `SIZE` pixels with these shapes, at places that `draws` chooses."""
    canvas = Image.new("RGB", (SIZE * DETAIL, SIZE * DETAIL), SKY)
    pen = ImageDraw.Draw(canvas)
    for wanted, shape in ((ellipse, "ellipse"), (rectangle, "rectangle"), (triangle, "triangle")):
        width, height = (draws.randint(SIZE // 4, SIZE // 2) * DETAIL for _ in range(2))
        left, top = draws.randint(0, SIZE * DETAIL - width), draws.randint(0, SIZE * DETAIL - height)
        box = (left, top, left + width, top + height)
        if wanted and shape == "ellipse":
            pen.ellipse(box, fill=RED)
        elif wanted and shape == "rectangle":
            pen.rectangle(box, fill=GREEN)
        elif wanted:
            pen.polygon([(left, top + height), (left + width // 2, top), (left + width, top + height)], fill=YELLOW)
    return canvas.resize((SIZE, SIZE), Image.Resampling.BOX)


def trained(processor: ViTImageProcessorPil, steps: int) -> ViTForImageClassification:
    """A ViT of 3 layers × 4 heads after this many steps of 64 images."""
    torch.manual_seed(0)
    draws = random.Random(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 128}
    config = ViTConfig(image_size=SIZE, patch_size=PATCH, num_labels=3, **sizes)
    config.problem_type = "multi_label_classification"
    model = ViTForImageClassification(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        labels = [[draws.random() < 0.5 for _ in range(3)] for _ in range(64)]
        images = [drawn(*label, draws) for label in labels]
        batch = processor(images=images, return_tensors="pt")
        optimizer.zero_grad()
        model(**batch, labels=torch.tensor(labels).float()).loss.backward()
        optimizer.step()
    return model.eval()


def draw(folder: Path, steps: int = 1200) -> None:
    """Write ``vision.png`` into a folder."""
    processor = ViTImageProcessorPil(size={"height": SIZE, "width": SIZE})
    with tempfile.TemporaryDirectory() as work:
        model, photo = Path(work) / "vit", Path(work) / "photo.png"
        trained(processor, steps).save_pretrained(model)
        processor.save_pretrained(model)
        drawn(True, True, True, random.Random(SEED)).save(photo)
        look = [sys.executable, "-m", "clearhead", "look", "--image", str(photo), "--model", str(model)]
        subprocess.run([*look, "--out", work], check=True)
        shutil.copy(Path(work) / "attention.png", folder / "vision.png")


if __name__ == "__main__":
    draw(IMAGES)
