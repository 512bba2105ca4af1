"""A census against the weights that `record` keeps, in float64, and what is done with it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import clearhead
from clearhead import Census, masks
from clearhead.errors import ArgumentError, CheckpointError, ShapeError, UnknownNameError
from clearhead.inspection._census._metrics import MASSES

VOCABULARY, HEADS, WIDTH = 7, 3, 12
SPECIAL = (0, 1)


class Reader(nn.Module):
    """Two layers with different numbers of heads, causal or not, with padding."""

    def __init__(self, *, causal: bool, shared: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.first = clearhead.MultiHeadAttention(WIDTH, HEADS)
        self.second = self.first if shared else clearhead.MultiHeadAttention(WIDTH, 2)
        self.causal = causal

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        mask = masks.causal() if self.causal else None
        if attention_mask is not None:
            padding = masks.keep(keys=attention_mask != 0)
            mask = padding if mask is None else mask & padding
        x = self.embed(input_ids)  # (B, L, E)
        x = x + self.first(x, mask=mask)
        return x + self.second(x, mask=mask)


@pytest.fixture(params=[False, True], ids=["both ways", "causal"], name="model")
def _model(request: pytest.FixtureRequest) -> Reader:
    torch.manual_seed(0)
    model = Reader(causal=request.param).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.7)
    return model


def batches(*, padded: bool = True) -> list[dict[str, Tensor]]:
    """Batches of different sizes; tokens repeat, and some texts are shorter."""
    torch.manual_seed(1)
    made: list[dict[str, Tensor]] = []
    for batch, length in ((2, 11), (3, 5), (1, 13)):
        ids = torch.randint(VOCABULARY, (batch, length))
        real = torch.ones_like(ids)
        if padded and batch > 1:
            real[1, length - 2 :] = 0
        made.append({"input_ids": ids, "attention_mask": real})
    return made


def cells(name: str, ids: Tensor, seen: Tensor) -> Tensor:
    """The keys of one mass by its definition, bool (L, L), of those that are seen."""
    length = len(ids)
    i, j = torch.arange(length)[:, None], torch.arange(length)[None]
    same = ids[:, None] == ids[None]
    before = torch.zeros_like(same)
    before[:, 1:] = same[:, :-1]
    first = int(seen.any(0).int().argmax())
    return (
        seen
        & {
            "special": torch.isin(ids, torch.tensor(SPECIAL))[None].expand_as(same),
            "first": (j == first).expand_as(same),
            "previous": j == i - 1,
            "same": i == j,
            "next": j == i + 1,
            "window": (i - j).abs() <= 2,
            "duplicate": same & (j < i),
            "duplicate_later": same & (j > i),
            "induction": before & (j <= i),
        }[name]
    )


def by_hand(model: Reader, layer: str, metric: str, texts: list[dict[str, Tensor]]) -> list[Tensor]:
    """The metric of every query that counts, text by text, (H, n) each, from all weights."""
    found: list[Tensor] = []
    for batch in texts:
        with clearhead.record(model, ("entropy",), keep="queries_keys") as rec, torch.no_grad():
            model(**batch)
        weights = rec.weights(layer).double()  # (B, H, L, S)
        for item, (ids, real) in enumerate(zip(batch["input_ids"], batch["attention_mask"].bool(), strict=True)):
            p, seen = weights[item], real[None].expand(len(ids), -1)
            if model.causal:
                seen = seen & torch.ones(len(ids), len(ids), dtype=torch.bool).tril()
            counts = real & seen.any(1)
            away = (torch.arange(len(ids))[:, None] - torch.arange(len(ids))[None]).abs()
            if metric == "entropy":
                values = -torch.xlogy(p, p).sum(-1)
            elif metric == "confidence":
                values = p.amax(-1)
            elif metric == "distance":
                values = (p * away).sum(-1)
            else:
                inside = cells(metric, ids, seen)
                values, counts = (p * inside).sum(-1), counts & inside.any(1)
            found.append(values[:, counts])
    return found


METRICS = ("entropy", "confidence", "distance", *(metric.name for metric in MASSES))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("layer", ["first", "second"])
def test_numbers_are_those_of_the_weights(model: Reader, layer: str, metric: str) -> None:
    texts = batches()
    census = clearhead.census(model, texts, special=SPECIAL, window=2)
    expected = torch.cat(by_hand(model, layer, metric, texts), 1)  # (H, n)
    assert census.count(metric)[layer].tolist() == [expected.shape[1]] * len(expected)
    if expected.shape[1] == 0:
        assert census.mean(metric)[layer].isnan().all()
        return
    torch.testing.assert_close(census.mean(metric)[layer], expected.mean(1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(census.spread(metric)[layer], expected.std(1, correction=0), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(census.lowest(metric)[layer], expected.amin(1), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(census.highest(metric)[layer], expected.amax(1), atol=1e-6, rtol=1e-5)


def test_strongest_texts_are_those_with_the_largest_queries(model: Reader) -> None:
    texts = batches()
    census = clearhead.census(model, texts, window=2, strongest=3)
    largest = torch.stack([values.amax(1) for values in by_hand(model, "first", "confidence", texts)], 1)  # (H, texts)
    for head in range(HEADS):
        found = census.strongest("confidence", "first", head)
        order = largest[head].argsort(descending=True)[:3]
        assert [each.text for each in found] == order.tolist()
        torch.testing.assert_close(torch.tensor([each.value for each in found]).double(), largest[head][order])


def test_texts_of_one_batch_are_those_of_many(model: Reader) -> None:
    texts = batches(padded=False)
    whole = clearhead.census(model, texts)
    parts = [clearhead.census(model, [batch]) for batch in texts]
    joined = parts[0].merged(*parts[1:])
    assert (joined.texts, joined.tokens, joined.batches) == (whole.texts, whole.tokens, whole.batches) == (6, 50, 3)
    for metric in whole.metrics:
        for layer in whole.layers:
            torch.testing.assert_close(joined.mean(metric)[layer], whole.mean(metric)[layer], equal_nan=True)
            assert joined.strongest(metric, layer, 1) == whole.strongest(metric, layer, 1)


def test_padding_changes_nothing(model: Reader) -> None:
    ids = torch.tensor([[2, 3, 2, 4, 3]])
    plain = clearhead.census(model, [{"input_ids": ids}])
    longer = {"input_ids": torch.cat((ids, ids[:, :2]), 1), "attention_mask": torch.tensor([[1] * 5 + [0] * 2])}
    padded = clearhead.census(model, [longer])
    for metric in plain.metrics:
        torch.testing.assert_close(padded.mean(metric)["second"], plain.mean(metric)["second"], equal_nan=True)


def test_a_module_that_runs_twice_is_two_layers() -> None:
    model = Reader(causal=True, shared=True).eval()
    assert list(clearhead.census(model, batches()).layers) == ["first/0", "first/1"]


def test_cross_attention_counts_no_distances() -> None:
    model = nn.Transformer(WIDTH, 4, 1, 1, 16, batch_first=True).eval()
    source, target = torch.randn(2, 5, WIDTH), torch.randn(2, 7, WIDTH)
    census = clearhead.census(model, [(source, target)])
    cross = "decoder.layers.0.multihead_attn"
    assert census.count("entropy")[cross].tolist() == [14] * 4
    assert census.count("first")[cross].tolist() == [14] * 4
    for metric in ("distance", "previous", "window", "duplicate", "special"):
        assert census.count(metric)[cross].tolist() == [0] * 4
    assert census.count("distance")["decoder.layers.0.self_attn"].tolist() == [14] * 4


class Packed(nn.Module):
    """Attention of packed sequences, or of one sequence."""

    def forward(self, tokens: Tensor, starts: Tensor) -> Tensor:
        torch.manual_seed(0)
        x = torch.randn(8, 2, 4)[tokens[0]]  # (T, H, D)
        return clearhead.attention_varlen(x, x, x, starts, starts, mask=masks.causal())


def test_a_packed_batch_is_its_sequences() -> None:
    texts = torch.tensor([2, 3, 2, 3, 1, 4, 4, 4, 5, 6, 5, 6]).split((5, 3, 4))
    starts = torch.tensor([0, 5, 8, 12])
    packed = clearhead.census(Packed(), [(torch.cat(texts)[None], starts)])
    single = clearhead.census(Packed(), [(text[None], torch.tensor([0, len(text)])) for text in texts])
    assert (packed.texts, packed.tokens) == (single.texts, single.tokens) == (3, 12)
    for metric in packed.metrics:
        torch.testing.assert_close(packed.mean(metric)[""], single.mean(metric)[""], equal_nan=True)
        assert packed.count(metric)[""].tolist() == single.count(metric)[""].tolist()
    assert packed.count("duplicate")[""].tolist() == [6, 6]


def test_saved_and_loaded_it_is_the_same(model: Reader, tmp_path: Path) -> None:
    census = clearhead.census(model, batches(), special=SPECIAL).with_column("loss", {"first": torch.arange(3.0)})
    census.save(tmp_path / "census.safetensors")
    loaded = Census.load(tmp_path / "census.safetensors")
    assert loaded.as_json() == census.as_json()
    assert loaded.strongest("same", 0, 0) == census.strongest("same", 0, 0)
    torch.save({}, tmp_path / "other.safetensors")
    with pytest.raises(CheckpointError, match="a file that Census"):
        Census.load(tmp_path / "other.safetensors")


@pytest.mark.parametrize("stop", [0, 1, 2])
def test_an_interrupted_census_continues(model: Reader, tmp_path: Path, stop: int) -> None:
    path = tmp_path / "census.safetensors"

    def interrupted() -> Iterator[dict[str, Tensor]]:
        for place, batch in enumerate(batches()):
            if place == stop:
                raise KeyboardInterrupt
            yield batch

    with pytest.raises(KeyboardInterrupt):
        clearhead.census(model, interrupted(), checkpoint=path)
    found = clearhead.census(model, batches(), checkpoint=path)
    whole = clearhead.census(model, batches())
    assert found.texts == whole.texts
    torch.testing.assert_close(found.mean("entropy")["second"], whole.mean("entropy")["second"])
    assert found.strongest("same", 1, 0) == whole.strongest("same", 1, 0)
    with pytest.raises(ArgumentError, match="one with the settings"):
        clearhead.census(model, batches(), checkpoint=path, window=9)


def test_a_batch_that_fails_counts_nothing(model: Reader, tmp_path: Path) -> None:
    path = tmp_path / "census.safetensors"

    def run(model: nn.Module, batch: dict[str, Tensor]) -> None:
        model(**batch)
        if batch["input_ids"].shape[0] == 3:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        clearhead.census(model, batches(), run=run, checkpoint=path)
    assert Census.load(path).texts == 2


def test_files_for_readers(model: Reader, tmp_path: Path) -> None:
    census = clearhead.census(model, batches(), special=SPECIAL)
    census.write(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    assert (index["texts"], index["special"], len(index["heads"])) == (6, list(SPECIAL), 5)
    head = json.loads((tmp_path / index["heads"][4]["file"]).read_text())
    assert (head["layer"], head["head"]) == (1, 1)
    assert head["strongest"]["same"][0] == census.strongest("same", 1, 1)[0]._asdict()


def test_columns_are_ranked_with_the_metrics(model: Reader) -> None:
    census = clearhead.census(model, batches()).with_column("importance", {"second": torch.tensor([0.1, 0.9])})
    assert [(head.layer, head.head) for head in census.rank_heads("importance")] == [("second", 1), ("second", 0)]
    with pytest.raises(ShapeError, match="second"):
        census.with_column("other", {"second": torch.zeros(3)})
    with pytest.raises(ArgumentError, match="a name that is no metric"):
        census.with_column("same", {})
    with pytest.raises(UnknownNameError, match="metric"):
        census.mean("none")


def test_kinds_are_heads_above_their_threshold(model: Reader) -> None:
    census = clearhead.census(model, batches())
    for kind, heads in census.kinds(0.3).items():
        means = {(layer, head): x for layer, row in census.mean(kind).items() for head, x in enumerate(row.tolist())}
        assert {(head.layer, head.head) for head in heads} == {place for place, mean in means.items() if mean >= 0.3}


REFUSED: dict[str, tuple[Callable[[Reader], object], str]] = {
    "tensor": (lambda model: clearhead.census(model, torch.zeros(2, 3)), "batches"),  # type: ignore[arg-type]
    "window": (lambda model: clearhead.census(model, [], window=-1), "window"),
    "name": (lambda model: clearhead.census(model, [], checkpoint="census.json"), "checkpoint"),
    "a pair of one list": (lambda model: clearhead.census(model, [], pairs={"a": [1]}), "pairs"),  # type: ignore[dict-item]
    "a pair with the name of a metric": (
        lambda model: clearhead.census(model, [], pairs={"same": ([1], [2])}),
        "pairs",
    ),
    "nothing": (lambda model: clearhead.census(model, []), "no attention was seen"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(model: Reader, name: str) -> None:
    call, text = REFUSED[name]
    with pytest.raises(clearhead.errors.ClearheadError, match=text):
        call(model)


def test_a_page_names_texts_and_positions(model: Reader) -> None:
    found = clearhead.census(model, batches(), special=SPECIAL)
    made = found.page(title="Two layers", threshold=0.2, language="zh").text
    assert "<h1>Two layers</h1>" in made
    assert "不小于 0.2 的头" in made
    named = sorted({each[:2] for ranked in found.kinds(0.2).values() for each in ranked})
    assert f"5 个头里有 {len(named)} 个" in made
    with pytest.raises(ArgumentError, match="threshold"):
        found.page(threshold=2)
