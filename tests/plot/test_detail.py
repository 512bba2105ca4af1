"""Pages stay below their limit: what is pooled, what stays exact, and which items are left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

import clearhead
from clearhead.plot import page

from .pages import Contents
from .recorded import record_two

LENGTH = 300


def streams(text: str) -> int:
    return sum(len(part.split("</script>")[0]) * 3 // 4 for part in text.split('octet-stream" id="stream-')[1:])


def means(values: Tensor, bins: int) -> Tensor:
    """Of neighbours, (H, bins)."""
    places = torch.arange(values.shape[1]) * bins // values.shape[1]
    return torch.stack([values[:, places == place].mean(1) for place in range(bins)], 1)


@pytest.mark.parametrize(
    ("room", "pooling"), [(120_000, "mass"), (90_000, "max"), (90_000, "mass"), (60_000, "mass"), (60_000, "max")]
)
def test_a_page_keeps_to_its_room_and_the_chosen_head_stays_exact(
    room: int, pooling: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rec = record_two(LENGTH, keep="queries_keys", map_pooling=pooling)
    assert streams(page(rec, layer=1, head=2).text) > 120_000
    monkeypatch.setattr("clearhead.plot._page_maker.ROOM", room)
    text = page(rec, layer=1, head=2).text
    assert streams(text) <= room
    contents, exact = Contents(text), rec.weights(1)[0]
    entropy = torch.special.entr(exact.double()).sum(-1)
    layer = contents.layer(0, 0, 1)
    chosen = layer["finer"]["2"]
    assert list(contents.layer(0, 0, 0)["finer"]) == []
    assert chosen["count"] == 8
    contents.require(0, chosen["weights"], exact[2].topk(8).values)
    contents.require(0, chosen["entropy"], entropy[2], 6e-4)
    contents.require(0, layer["crops"]["2"]["weights"], exact[2])
    side, columns = layer["grid"]
    assert side == columns <= 128
    call = rec.kept_call(1)
    tiles = clearhead.attention_statistics(
        call.query, call.key, statistics=("map",), map_size=side, map_pooling=pooling
    ).map[0]
    drawn = contents.array(0, layer["map"], 3, side, side).float()
    torch.testing.assert_close(drawn.sqrt(), tiles.sqrt(), rtol=0, atol=0.5 / 63 + 1e-6)
    queries, keys = layer["bins"]
    shares = contents.array(0, layer["received"], 3, keys).float()
    torch.testing.assert_close(shares, means(exact.mean(1), keys), rtol=2e-3, atol=1e-5)
    contents.require(0, layer["entropy"], means(entropy, queries), 6e-4)


def test_requested_crops_stay_however_small_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    rec = record_two(LENGTH)
    monkeypatch.setattr("clearhead.plot._page_maker.ROOM", 1000)
    contents = Contents(page(rec, crops=[(0, 1)]).text)
    contents.require(0, contents.layer(0, 0, 0)["crops"]["1"]["weights"], rec.weights(0, 1)[0])


@pytest.mark.parametrize(("count", "kept"), [(2, 2), (7, 3), (20, 9), (21, 21)])
def test_items_are_left_out_evenly(count: int, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rec = record_two(5, batch=count)
    monkeypatch.setattr("clearhead.plot._page_maker.ROOM", 3_600_000)
    monkeypatch.setattr("clearhead.plot._page_maker.least_bytes", lambda item, chosen: 3_600_000 / (kept + 0.5))
    data = Contents(page(rec).text).data
    shown = [int(item["label"].removeprefix("item ")) for item in data["items"]]
    assert len(shown) == kept
    assert (shown[0], shown[-1]) == (0, count - 1)
    steps = {after - before for before, after in pairwise(shown)}
    assert max(steps) - min(steps) <= 1
    said = f"Of {count} parts of the text this page holds {kept}, evenly spread."
    assert data["notes"] == ([said] if kept < count else [])
