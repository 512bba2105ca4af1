"""Records of any size whose heads do what heads of trained models do, to make pages from."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

import clearhead
from clearhead.plot import Tokens


class Structured(nn.Module):
    """Layers whose heads read neighbours, special tokens, parts of the text, tokens further away, or all alike.

    An input has 2 · FREQUENCIES features for its position, one for special tokens and one for each part of the text.
    A head reads the token `shift` places away where its scores are cos(ω(i − shift − j)), summed over frequencies ω.
    """

    FREQUENCIES, PARTS = 12, 7
    WIDTH = 2 * FREQUENCIES + PARTS + 1

    def __init__(self, layers: int, heads: int) -> None:
        super().__init__()
        made = [
            clearhead.MultiHeadAttention(self.WIDTH, heads, head_dim=self.WIDTH, scale=1.0, bias=False)
            for _ in range(layers)
        ]
        self.layers = nn.ModuleList(made)
        for number, layer in enumerate(made):
            kinds = torch.cat([self._query(5 * number + head) for head in range(heads)])
            # No head of a trained model is exactly like another.
            weights = {
                "q_proj": kinds + 0.1 * torch.randn(kinds.shape),
                "k_proj": torch.eye(self.WIDTH).repeat(heads, 1),
            }
            for name, weight in weights.items():
                layer.get_parameter(f"{name}.weight").data.copy_(weight)

    def _query(self, number: int) -> Tensor:
        """(WIDTH, WIDTH): what a head's queries are made of."""
        weight = torch.zeros(self.WIDTH, self.WIDTH)
        strength = 1 + number % 4
        if number % 5 == 0:
            weight[-1, -1 - self.PARTS : -1] = 2 * strength  # special tokens: a stripe
        elif number % 5 == 1:
            weight[-1 - self.PARTS : -1, -1 - self.PARTS : -1] = strength * torch.eye(self.PARTS)  # blocks
        elif number % 5 < 4:
            shift = (1, -1, 0, 9, 31)[number // 5 % 5]
            for place, omega in enumerate(self.omegas()):
                turn = torch.tensor([[math.cos(omega * shift), math.sin(omega * shift)]])
                turn = torch.cat([turn, turn.flip(1) * torch.tensor([-1.0, 1.0])])
                weight[2 * place : 2 * place + 2, 2 * place : 2 * place + 2] = strength * turn
        return weight

    @classmethod
    def omegas(cls) -> list[float]:
        return [math.pi * 0.7**place for place in range(cls.FREQUENCIES)]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer(x)
        return x


def structured(layers: int, heads: int, length: int) -> tuple[Any, Tokens]:
    """A record of `Structured` on a text of `length` tokens, and the tokens: [CLS] first, [SEP] last, words between."""
    words = "the animal did not cross the street because it was too tired to go on and so we went home"
    words = words.split(" ")
    tokens = Tokens(["[CLS]", *(words[place % len(words)] for place in range(length - 2)), "[SEP]"])
    places = torch.arange(length)[:, None] * torch.tensor(Structured.omegas())
    part = torch.nn.functional.one_hot(torch.arange(length) * Structured.PARTS // length, Structured.PARTS)
    special = torch.tensor(tokens.special)[:, None]
    waves = torch.stack([places.cos(), places.sin()], -1).flatten(1)
    x = torch.cat([waves, part, special], -1).float()[None]  # (1, L, WIDTH)
    model = Structured(layers, heads)
    with torch.no_grad(), clearhead.record(model, keep="queries_keys") as rec:
        model(x)
    return rec, tokens
