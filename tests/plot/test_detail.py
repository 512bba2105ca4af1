"""Pages stay below their limit: what is pooled, what stays exact, and which items are left out."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import clearhead
from clearhead.plot import _page_maker as pages
from clearhead.plot import page
from clearhead.plot._detail import Detail, pooled_map, pooled_rows
from clearhead.plot._page_maker import PageMaker

from .pages import Contents
from .recorded import Two, collect, record_two

LENGTH = 300


def streams(text: str) -> int:
    return sum(len(part.split("</script>")[0]) * 3 // 4 for part in text.split('octet-stream" id="stream-')[1:])


@pytest.mark.parametrize("room", [120_000, 90_000, 60_000])
def test_a_page_keeps_to_its_room_and_the_chosen_head_stays_exact(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    _, rec = record_two(LENGTH)
    whole = streams(page(rec, layer=1, head=2).text)
    assert whole > 120_000
    monkeypatch.setattr(pages, "ROOM", room)
    text = page(rec, layer=1, head=2).text
    assert streams(text) <= room
    contents, exact = Contents(text), rec.weights(1)[0]
    found = contents.layer(0, 0, 1)
    own = found["own"]["2"]
    assert list(contents.layer(0, 0, 0)["own"]) == []
    assert own["count"] == 8
    weights = contents.array(0, own["weights"], LENGTH, 8)
    torch.testing.assert_close(exact[2].topk(8).values, weights.float(), rtol=0, atol=6e-5)
    entropy = contents.array(0, own["entropy"], LENGTH).double()
    torch.testing.assert_close(entropy, torch.special.entr(exact[2].double()).sum(-1), rtol=0, atol=6e-4)
    crop = contents.array(0, found["crops"]["2"]["weights"], LENGTH, LENGTH)
    torch.testing.assert_close(crop.float(), exact[2], rtol=0, atol=6e-5)
    rows, columns = found["grid"]
    tiles = contents.array(0, found["map"], 3, rows, columns)
    torch.testing.assert_close(tiles.sum(-1).mean(-1), torch.ones(3), rtol=0, atol=0.05)
    queries, keys = found["bins"]
    received = contents.array(0, found["received"], 3, keys)[:, torch.arange(LENGTH) * keys // LENGTH]
    torch.testing.assert_close(received.sum(-1), torch.ones(3), rtol=0, atol=0.01)
    assert contents.array(0, found["entropy"], 3, queries).shape == (3, queries)


def test_requested_crops_stay_however_small_the_room(monkeypatch: pytest.MonkeyPatch) -> None:
    _, rec = record_two(LENGTH)
    monkeypatch.setattr(pages, "ROOM", 1000)
    contents = Contents(page(rec, crops=[(0, 1)]).text)
    crop = contents.array(0, contents.layer(0, 0, 0)["crops"]["1"]["weights"], LENGTH, LENGTH)
    torch.testing.assert_close(crop.float(), rec.weights(0, 1)[0], rtol=0, atol=6e-5)


@pytest.mark.parametrize(("count", "held"), [(2, 2), (7, 3), (20, 9), (21, 21)])
def test_items_are_left_out_evenly(count: int, held: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Two()
    with clearhead.record(model, keep="queries_keys") as rec:
        model(torch.randn(count, 5, 12))
    items = collect(rec)
    monkeypatch.setattr(pages, "least_bytes", lambda item, chosen: pages.ROOM / (held + 0.5))
    maker = PageMaker(count)
    taken: list[bool] = []
    for item in items:
        taken.append(maker.takes_next)
        maker.add(item)
    shown = [number for number, takes in enumerate(taken) if takes]
    assert len(shown) == held
    assert (shown[0], shown[-1]) == (0, count - 1)
    steps = {after - before for before, after in pairwise(shown)}
    assert max(steps) - min(steps) <= 1
    contents = Contents(maker.page((0, 0, 0), title="").text)
    assert [item["label"] for item in contents.data["items"]] == [f"item {number}" for number in shown]
    said = f"Of {count} parts of the text this page holds {held}, evenly spread."
    assert contents.data["notes"] == ([said] if held < count else [])


@pytest.mark.parametrize("pooling", ["mass", "max"])
def test_coarser_maps_are_those_of_fewer_tiles(pooling: str) -> None:
    """128 tiles pooled to 32 are what a record of 32 tiles has."""
    torch.manual_seed(3)
    model = Two()
    x = torch.randn(1, LENGTH, 12)
    layers = []
    for size in (128, 32):
        with clearhead.record(
            model, ("entropy", "received", "top_k", "map"), map_size=size, map_pooling=pooling
        ) as rec:
            model(x)
        layers.append(collect(rec)[0].sections[0].layers[1])
    torch.testing.assert_close(pooled_map(layers[0], 32), layers[1].map, rtol=1e-5, atol=1e-6)
    assert pooled_map(layers[0], Detail().side) is layers[0].map


def test_rows_are_pooled_to_means() -> None:
    values = torch.arange(10.0)[None]
    assert pooled_rows(values, 4).tolist() == [[1.0, 3.5, 6.0, 8.5]]  # 0 1 2 | 3 4 | 5 6 7 | 8 9
    assert pooled_rows(values, 10) is values
