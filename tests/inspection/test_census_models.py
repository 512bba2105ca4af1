"""A census of models of other libraries: pictures, encoder and decoder, padding that is removed, several runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead.errors import ArgumentError
from tests.integrations.architectures import GROUPED, VOCABULARY, padding, token_ids
from tests.integrations.encoders import build, inputs_of, pair
from tests.support.models import VISION, two_sided, vision_model
from tests.support.models import build as build_any
from tests.support.randomised import randomised

from .small_models import small

SPECIAL = (3, 4)


def recorded(model: nn.Module, batch: dict[str, Any]) -> clearhead.record:
    with clearhead.record(model, ("entropy",), keep="queries_keys") as rec, torch.no_grad():
        model(**batch)
    return rec


def require_near(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected.double(), atol=1e-6, rtol=1e-5)


def patch_distances(weights: Tensor, prefix: int, side: int) -> Tensor:
    """Of weights (B, H, L, L): the mean distance of the patches that each patch attends to, (B, H, side²)."""
    places = torch.tensor([[row, column] for row in range(side) for column in range(side)]).double()
    apart = (places[:, None] - places[None]).square().sum(-1).sqrt()
    patches = weights[..., prefix:, prefix:].double()
    return (patches * apart).sum(-1) / patches.sum(-1)


@pytest.mark.parametrize("kind", ["vit", "registers", "siglip"])
def test_pictures_have_distances_between_patches_and_no_line(kind: str) -> None:
    model, prefix = randomised(vision_model(kind), 0.3), len(VISION[kind][2])
    batch = {"pixel_values": torch.randn(2, 3, 12, 12)}
    census, rec = clearhead.census(model, [batch]), recorded(model, batch)
    assert list(census.layers) == list(rec)
    own = [layer for layer in rec if "head" not in layer.split(".")]  # SigLIP pools by queries of its own
    assert len(own) == 2
    for layer in own:
        weights = rec.weights(layer)  # (B, H, L, L)
        expected = patch_distances(weights, prefix, 3)
        assert census.count("distance")[layer].tolist() == [2 * 9] * weights.shape[1]
        require_near(census.mean("distance")[layer], expected.mean((0, 2)))
        require_near(census.highest("distance")[layer], expected.amax((0, 2)))
        require_near(census.mean("same")[layer], weights.diagonal(dim1=2, dim2=3).mean((0, 2)))
        for metric in ("previous", "next", "window", "duplicate", "induction", "special"):
            assert census.count(metric)[layer].tolist() == [0] * weights.shape[1]
    for layer in set(rec) - set(own):
        assert census.count("distance")[layer].unique().tolist() == [0]


def test_pictures_of_two_sizes() -> None:
    model = randomised(vision_model("vit"), 0.3)
    batches = [{"pixel_values": torch.randn(1, 3, n, n), "interpolate_pos_encoding": True} for n in (12, 16)]
    census = clearhead.census(model, batches)
    for layer in census.layers:
        found = [patch_distances(recorded(model, x).weights(layer), 1, n) for x, n in zip(batches, (3, 4), strict=True)]
        require_near(census.mean("distance")[layer], torch.cat(found, -1).mean((0, 2)))


class UnknownPatches(nn.Module):
    """Attention between patches whose places nothing tells."""

    def __init__(self) -> None:
        super().__init__()
        self.cut, self.attend = nn.Conv2d(3, 12, 4, 4), clearhead.MultiHeadAttention(12, 3)

    def forward(self, pixel_values: Tensor) -> Tensor:
        return self.attend(self.cut(pixel_values).flatten(2).transpose(1, 2))


def test_patches_of_unknown_places_are_no_line() -> None:
    census = clearhead.census(UnknownPatches(), [torch.randn(2, 3, 12, 12)])
    counts = {metric: census.count(metric)["attend"].tolist() for metric in census.metrics}
    assert counts["entropy"] == counts["same"] == counts["first"] == [18] * 3
    assert counts["distance"] == counts["previous"] == counts["window"] == counts["duplicate"] == [0] * 3


def test_both_sides_of_clip() -> None:
    model = randomised(two_sided("CLIP"), 0.3)
    ids = torch.tensor([[1, 5, 6, 5, 2], [1, 7, 7, 7, 2]])
    census = clearhead.census(model, [{"input_ids": ids, "pixel_values": torch.randn(2, 3, 12, 12)}])
    text, picture = (next(layer for layer in census.layers if side in layer) for side in ("text", "vision"))
    assert census.count("duplicate")[text].unique().tolist() == [3]
    assert census.count("distance")[text].unique().tolist() == [10]
    assert census.count("duplicate")[picture].unique().tolist() == [0]
    assert census.count("distance")[picture].unique().tolist() == [2 * 9]


def test_cross_attention_counts_the_tokens_of_its_keys() -> None:
    model = small("bart")
    batch = {"input_ids": token_ids(9), "attention_mask": padding("right", 9), "decoder_input_ids": token_ids(6)}
    batch["input_ids"][0, 2] = SPECIAL[0]
    census, rec = clearhead.census(model, [batch], special=SPECIAL), recorded(model, batch)
    cross = "model.decoder.layers.1.encoder_attn"
    inside = torch.isin(batch["input_ids"], torch.tensor(SPECIAL)) & batch["attention_mask"].bool()  # (B, S)
    masses = (rec.weights(cross) * inside[:, None, None]).sum(-1)  # (B, H, L)
    seen = masses[inside.any(1)]
    assert census.count("special")[cross].tolist() == [6 * len(seen)] * 3
    require_near(census.mean("special")[cross], seen.mean((0, 2)))
    require_near(census.share("special")[cross], masses.mean((0, 2)))
    own = "model.decoder.layers.1.self_attn"
    ids = batch["decoder_input_ids"]
    earlier = (ids[:, :, None] == ids[:, None]).tril(-1)  # (B, L, L)
    require_near(census.share("duplicate")[own], (rec.weights(own) * earlier[:, None]).sum(-1).mean((0, 2)))


@pytest.mark.parametrize("name", ["BertModel", "ModernBertModel"])
@pytest.mark.parametrize("side", ["right", "left"])
def test_a_model_that_removes_padding_has_the_same_census(name: str, side: str) -> None:
    plain, unpadded = pair(build(name))
    batches = [inputs_of(side) for _ in range(2)]
    expected, found = (clearhead.census(model, batches, special=SPECIAL) for model in (plain, unpadded))
    assert (found.texts, found.tokens) == (expected.texts, expected.tokens)
    assert found.heads == expected.heads
    for metric in expected.metrics:
        for layer, mean in expected.mean(metric).items():
            assert found.count(metric)[layer].tolist() == expected.count(metric)[layer].tolist()
            torch.testing.assert_close(found.mean(metric)[layer], mean, atol=2e-5, rtol=1e-4, equal_nan=True)


def test_weights_between_chosen_tokens(tmp_path: Path) -> None:
    """From 5 or 6 to 3, over two texts; what `record.rank_heads` finds for one place in one text."""
    model, texts = (
        randomised(build_any("Llama", "Model", GROUPED), 0.3),
        torch.tensor([[3, 9, 5, 8, 6], [5, 3, 9, 3, 5]]),
    )
    census = clearhead.census(model, [texts], pairs={"5, 6 → 3": ([5, 6], [3])})
    rec = recorded(model, {"input_ids": texts})
    for layer, found in census.mean("5, 6 → 3").items():
        weights = rec.weights(layer)  # (B, H, L, L)
        places = [weights[0, :, 2, 0], weights[0, :, 4, 0], weights[1, :, 4, [1, 3]].sum(-1)]
        assert census.count("5, 6 → 3")[layer].tolist() == [3] * 4
        require_near(found, torch.stack(places).double().mean(0))
    assert len(census.rank_heads("5, 6 → 3")) == 8
    census.save(tmp_path / "census.safetensors")
    assert clearhead.Census.load(tmp_path / "census.safetensors").as_json() == census.as_json()
    with pytest.raises(ArgumentError, match="others: expected the settings"):
        census.merged(clearhead.census(model, [texts]))


def test_layers_that_share_a_module_are_counted_apart() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 40}
    model = randomised(build_any("Albert", "Model", {**sizes, "embedding_size": 16, "vocab_size": VOCABULARY}), 0.3)
    batch = {"input_ids": token_ids(9), "attention_mask": padding("right", 9)}
    census, rec = clearhead.census(model, [batch, batch]), recorded(model, batch)
    real = batch["attention_mask"].bool()
    assert list(census.layers) == list(rec)
    assert len(census.layers) == 3
    for layer in census.layers:
        before = rec.weights(layer).diagonal(-1, 2, 3).transpose(1, 2)[real[:, 1:]]  # (queries, H)
        require_near(census.mean("previous")[layer], before.mean(0))
        assert census.count("previous")[layer].tolist() == [2 * len(before)] * 4


def test_grouped_heads_are_query_heads() -> None:
    model, batch = randomised(build_any("Llama", "Model", GROUPED), 0.3), {"input_ids": token_ids(9)}
    census, rec = clearhead.census(model, [batch]), recorded(model, batch)
    assert census.heads == dict.fromkeys(rec, 4)
    for layer in rec:
        require_near(census.mean("previous")[layer], rec.weights(layer).diagonal(-1, 2, 3).mean((0, 2)))
