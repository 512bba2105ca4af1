"""A real case: a Transformer learns to read digits, is upgraded half-way, and learns on as if nothing had happened."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import clearhead

STEPS, BATCH = 20, 64


class DigitReader(nn.Module):
    """Eight rows of eight pixels as eight tokens; ten classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 32)
        self.positions = nn.Parameter(torch.randn(8, 32) * 0.1)
        layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.classify = nn.Linear(32, 10)

    def forward(self, rows: Tensor) -> Tensor:
        return self.classify(self.encoder(self.embed(rows) + self.positions).mean(1))  # (N, 8, 8) -> (N, 10)


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bundled = load_digits()
    return torch.tensor(bundled.images, dtype=torch.float32) / 16, torch.tensor(bundled.target)


def train(model: nn.Module, digits: tuple[Tensor, Tensor], upgrade_at: int | None, steps: int = STEPS) -> list[float]:
    images, targets = digits
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    order = torch.Generator().manual_seed(3)
    losses = []
    model.train()
    for step in range(steps):
        if step == upgrade_at:
            assert len(clearhead.upgrade(model).changed) == 2
        batch = torch.randint(len(images), (BATCH,), generator=order)
        loss = F.cross_entropy(model(images[batch]), targets[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_upgrading_half_way_does_not_change_the_losses(digits: tuple[Tensor, Tensor]) -> None:
    model = DigitReader()
    other = copy.deepcopy(model)
    expected = train(model, digits, upgrade_at=None)
    losses = train(other, digits, upgrade_at=STEPS // 2)
    difference = max(abs(one - two) for one, two in zip(losses, expected, strict=True))
    assert difference <= 1e-4
    assert expected[-1] < expected[0] - 0.3  # it did learn


def test_downgrade_gives_the_same_answers_and_pytorchs_own_model(digits: tuple[Tensor, Tensor]) -> None:
    images = digits[0]
    model = DigitReader()
    train(model, digits, upgrade_at=STEPS // 2)
    model.eval()
    with torch.no_grad():
        upgraded = model(images)
        clearhead.downgrade(model)
        downgraded = model(images)
    torch.testing.assert_close(downgraded, upgraded, atol=1e-5, rtol=0)
    assert torch.equal(downgraded.argmax(-1), upgraded.argmax(-1))
    assert all(type(layer.self_attn) is nn.MultiheadAttention for layer in model.encoder.layers)
    assert not any(part._forward_pre_hooks for part in model.modules())
    fresh = DigitReader()
    fresh.load_state_dict(model.state_dict(), strict=True)
    torch.testing.assert_close(fresh(images), downgraded, atol=1e-5, rtol=0)


def test_a_model_trained_while_upgraded_reads_the_digits(digits: tuple[Tensor, Tensor]) -> None:
    images, targets = digits
    model = DigitReader()
    train(model, (images[:1400], targets[:1400]), upgrade_at=0, steps=150)
    model.eval()
    with torch.no_grad():
        right = (model(images[1400:]).argmax(-1) == targets[1400:]).float().mean().item()
    assert right > 0.8
