"""`clearhead look` on a long text: each window shows what a look at its tokens alone shows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from clearhead.cli import _demo as demo
from clearhead.cli._choice import Choice
from clearhead.cli._look_text import see
from clearhead.cli._windows import cut_into_windows, overlap_of
from tests.plot.pages import Contents

from .looking import contents, look

pytestmark = pytest.mark.usefixtures("in_an_empty_folder")
SOME = ["the", "animal", "did", "not", "cross", "the", "street", ",", "it", "was", "too", "tired"]


def text_of(count: int) -> str:
    return " ".join(SOME[(n * n + n // 5) % 12] for n in range(count))


@pytest.mark.parametrize(("head", "lang"), [((0, 2), "zh"), ((1, 3), "en")])
def test_a_window_is_a_look_at_its_tokens(
    head: tuple[int, int], lang: str, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """Three windows, of which the last is shorter, with one head chosen: pages and numbers."""
    layer, number = map(str, head)
    options = ["--model", str(model_folder("llama")), "--layer", layer, "--head", number, "--no-png", "--lang", lang]
    look(text_of(150), *options, "--json", "all.json")
    whole, page = json.loads((tmp_path / "all.json").read_text()), contents(tmp_path / "attention.html")
    assert len(whole["windows"]) == len(page.data["items"]) == 3
    for item, window in enumerate(whole["windows"]):
        count = 1 + window["last"] - window["first"]
        assert len(window["tokens"]) == count + 1
        look(" ".join(window["tokens"][1:]), *options, "--json", "one.json")
        alone = json.loads((tmp_path / "one.json").read_text())["windows"]
        assert len(alone) == 1
        (only,) = alone
        assert (only["tokens"], only["special"]) == (window["tokens"], window["special"])
        for name in ("entropy", "received", "top_weights"):
            ours, theirs = (torch.tensor(each[name]) for each in (window, only))
            torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        require_same_item(page, contents(tmp_path / "attention.html"), item)


def require_same_item(page: Contents, alone: Contents, item: int) -> None:
    assert page.text(item, 0, "queries")["names"] == alone.text(0, 0, "queries")["names"]
    for layer in range(2):
        ours, theirs = page.layer(item, 0, layer), alone.layer(0, 0, layer)
        assert ours["grid"] == theirs["grid"]
        shape = len(page.data["sections"][0]["layers"][layer]["heads"]), *ours["grid"]
        found, expected = page.array(item, ours["map"], *shape), alone.array(0, theirs["map"], *shape)
        torch.testing.assert_close(found, expected, rtol=0, atol=2e-2)
        assert ours["crops"].keys() == theirs["crops"].keys()
        for at, crop in ours["crops"].items():
            count = crop["queries"][1] - crop["queries"][0], crop["keys"][1] - crop["keys"][0]
            found = page.array(item, crop["weights"], *count)
            torch.testing.assert_close(found, alone.array(0, theirs["crops"][at]["weights"], *count), rtol=0, atol=2e-4)


class Splitting:
    """A tokenizer that is not fast, with as many special tokens as asked for, which splits at spaces."""

    is_fast = False
    unk_token_id = 3

    def __init__(self, before: int, after: int) -> None:
        self.before, self.after = [1] * before, [2] * after
        self.all_special_ids = (1, 2)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    def num_special_tokens_to_add(self) -> int:
        return len(self.before) + len(self.after)

    def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
        return [int(number in (1, 2)) for number in ids]

    def convert_ids_to_tokens(self, ids: Any) -> Any:
        return str(ids) if isinstance(ids, int) else [str(number) for number in ids]

    def decode(self, ids: list[int], **options: object) -> str:
        return str(ids[0])


@pytest.mark.parametrize("size", [16, 23, 40])
@pytest.mark.parametrize("special", [(1, 1), (0, 0), (1, 0), (0, 2)], ids=str)
@pytest.mark.parametrize("count", [5, 16, 17, 41, 97])
def test_windows_of_a_tokenizer_that_is_not_fast(size: int, special: tuple[int, int], count: int) -> None:
    """Every token is in a window at its place, neighbours share an eighth, and no window is too long for the model."""
    loaded = demo.PretrainedModel("slow", None, Splitting(*special), True, expected="", max_tokens=size)
    ids = list(range(10, 10 + count))
    windows = cut_into_windows(loaded, " ".join(map(str, ids)))
    before, after = [1] * special[0], [2] * special[1]
    for n, window in enumerate(windows):
        own = ids[window.first : window.last + 1]
        assert window.inputs["input_ids"].tolist() == [[*before, *own, *after]]
        assert window.inputs["attention_mask"].tolist() == [[1] * len(window.tokens)]
        assert window.tokens.names == tuple(map(str, (*before, *own, *after)))
        assert window.tokens.special == (*[True] * special[0], *[False] * len(own), *[True] * special[1])
        assert len(window.tokens) <= size
        assert window.first == (0 if n == 0 else windows[n - 1].last + 1 - overlap_of(size))
    assert (windows[0].first, windows[-1].last) == (0, count - 1)
    assert len(windows) == 1 or all(len(each.tokens) == size for each in windows[:-1])


def test_arguments_of_every_window_are_its_own(default_model_once: demo.PretrainedModel) -> None:
    """Ids, marks and types of tokens, window by window, as the tokenizer gives them for the window's own tokens."""
    loaded = default_model_once
    windows = cut_into_windows(loaded, "one two three four " * 300)
    assert len(windows) == 3
    assert len({window.inputs["input_ids"].shape[1] for window in windows}) == 2
    for window in windows:
        shapes = {name: tuple(x.shape) for name, x in window.inputs.items()}
        assert set(shapes.values()) == {(1, len(window.tokens))}
        words = loaded.reader.convert_tokens_to_string(list(window.tokens.names[1:-1]))
        again = cut_into_windows(loaded, words)[0]
        assert torch.equal(window.inputs["input_ids"], again.inputs["input_ids"])
        assert all(torch.equal(window.inputs[name], again.inputs[name]) for name in window.inputs)


def test_windows_that_run_together_keep_their_places(model_folder: Callable[[str], Path]) -> None:
    """Windows of one length run in one batch: the numbers of each are those that it has when it runs alone."""
    loaded = demo.load_text_model(str(model_folder("llama")), notify=lambda _: None)
    windows = cut_into_windows(loaded, text_of(300))
    choice = Choice(layer=1, head=2)
    seen = see(loaded, windows, choice)
    for n, window in enumerate(windows):
        alone = see(loaded, [window], choice)
        assert (seen.chosen[n]["first"], seen.chosen[n]["last"]) == (window.first, window.last)
        for name in ("entropy", "received", "top_weights"):
            torch.testing.assert_close(seen.chosen[n][name], alone.chosen[0][name], rtol=0, atol=2e-5)
    lengths = [len(window.tokens) for window in windows]
    for name, layers in seen.numbers.items():
        each = [see(loaded, [window], choice).numbers[name] for window in windows]
        for layer, found in enumerate(layers):
            rows = torch.stack([numbers[layer] for numbers in each])
            weights = torch.tensor(lengths, dtype=rows.dtype)[:, None] / sum(lengths)
            wanted = rows.amax(0) if "logit" in name else (rows * weights).sum(0)
            torch.testing.assert_close(found, wanted, rtol=0, atol=2e-5)
