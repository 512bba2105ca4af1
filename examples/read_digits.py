"""A small vision transformer learns scikit-learn's handwritten digits; do its heads read where the ink is?

    python examples/read_digits.py

The digits have 8 × 8 pixels, and each pixel is a patch. After training, the class token's weights over the patches are
compared with the ink: the share of its weight that a head puts on inked pixels, beside the share of the picture that is
inked. A head that reads blindly puts exactly that share there. The same is printed for the model before training.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import clearhead

console = Console()

INK = 0.5  # of the darkest there is; paler pixels are the pen's edge
BATCH = 64
HELD_OUT = 360


def digits() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Pictures (n, 1, 8, 8) in [0, 1] and their digits (n,): to learn from, and held out."""
    data: Any = load_digits()  # declared as a `Bunch` or a tuple
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    parts = order[HELD_OUT:], order[:HELD_OUT]
    return (pictures[parts[0]], labels[parts[0]]), (pictures[parts[1]], labels[parts[1]])


def small_model() -> nn.Module:
    logging.disable(logging.WARNING)  # transformers imports torchao if it is there, which writes what it lacks
    from transformers import ViTConfig, ViTForImageClassification

    from clearhead.integrations.transformers import register

    logging.disable(logging.NOTSET)
    register()  # adds "clearhead" to the attention implementations
    config = ViTConfig(
        image_size=8,
        patch_size=1,
        num_channels=1,
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=96,
    )
    config.num_labels = 10
    model = ViTForImageClassification(config)
    model.set_attn_implementation("clearhead")
    return model


def train(model: nn.Module, pictures: Tensor, labels: Tensor, steps: int) -> None:
    """Fit the model to batches drawn at random, the learning rate falling to zero."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, steps)
    for _ in range(steps):
        chosen = torch.randint(len(labels), (BATCH,))
        loss = nn.functional.cross_entropy(model(pixel_values=pictures[chosen]).logits, labels[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    model.eval()


def accuracy(model: nn.Module, pictures: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(pixel_values=pictures).logits.argmax(-1) == labels).double().mean().item()


def looked_at(model: nn.Module, pictures: Tensor) -> Tensor:
    """What the class token reads of the picture, per layer and head: (layers, n, heads, 64), each row a share of 1."""
    with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
        model(pixel_values=pictures)
    weights = torch.stack([rec.weights(layer, queries=[0])[:, :, 0, 1:] for layer in range(len(rec))])
    return weights / weights.sum(-1, keepdim=True)  # what it gives the class token itself is left out


def on_ink(weights: Tensor, pictures: Tensor) -> Tensor:
    """The share of weight on inked pixels, (layers, heads), as a mean over pictures."""
    inked = (pictures.flatten(1) >= INK).to(weights.dtype)  # (n, 64)
    return torch.einsum("lnhs,ns->lh", weights, inked) / len(pictures)


def main(
    out: Annotated[Path, typer.Option(help="Folder for read_digits.json, .png and .html.")] = Path(),
    steps: Annotated[int, typer.Option(help="Batches to train on.")] = 600,
    seed: Annotated[int, typer.Option(help="Seed of parameters and batches.")] = 0,
) -> None:
    """Train, test, and compare where the heads read with where the ink is."""
    torch.manual_seed(seed)
    out.mkdir(parents=True, exist_ok=True)
    learning, (pictures, labels) = digits()
    untrained = small_model().eval()
    trained = deepcopy(untrained)
    began = time.perf_counter()
    train(trained, *learning, steps)
    seconds = time.perf_counter() - began

    models = {"untrained": untrained, "trained": trained}
    area = (pictures >= INK).double().mean().item()
    shares = {name: on_ink(looked_at(model, pictures), pictures) for name, model in models.items()}
    results = {
        "steps": steps,
        "seconds": round(seconds, 1),
        "accuracy": accuracy(trained, pictures, labels),
        "area": area,
        **{name: {"mean": share.mean().item(), "heads": share.tolist()} for name, share in shares.items()},
    }
    (out / "read_digits.json").write_text(json.dumps(results, indent=2), encoding="utf-8")
    report(results, shares)
    draw(trained, pictures[0], out)


def report(results: Mapping[str, object], shares: dict[str, Tensor]) -> None:
    area = float(str(results["area"]))
    console.print(
        f"{results['steps']} steps in {results['seconds']} s; {results['accuracy']:.1%} of held-out digits right"
    )
    console.print(f"ink covers {area:.1%} of the held-out pictures")
    console.print("share of the class token's weight on patches that lies on ink:")
    table = Table(box=None)
    for heading in ("", "mean of all heads", "least", "most", "mean / area"):
        table.add_column(heading, justify="right")
    for name, share in shares.items():
        numbers = [share.mean(), share.min(), share.max()]
        table.add_row(name, *(f"{number.item():.1%}" for number in numbers), f"{share.mean().item() / area:.2f}")
    console.print(table)


def draw(model: nn.Module, picture: Tensor, out: Path) -> None:
    """Every head on one digit, as a picture and as a page."""
    with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
        model(pixel_values=picture[None])
    ink = 1 - picture  # dark on white
    figure = rec.plot_image(ink).figure
    figure.savefig(out / "read_digits.png", dpi=150)  # pyright: ignore[reportAttributeAccessIssue]
    rec.page(image=ink, title="a digit").save(out / "read_digits.html")


if __name__ == "__main__":
    typer.run(main)
