"""The page as text: complete, safe, small and alone. How it behaves is in test_page_in_browser.py."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoTokenizer

import clearhead
from clearhead.plot import Tokens, given, page
from tests.support.models import minilm

from .pages import Contents, Elements
from .recorded import KEPT, Two, record_pair, record_two

HOSTILE = ["</script><script>alert(1)</script>", "<img src=x onerror=alert(2)>", "a & b", "\u2028", "\u202eabc", "'\"`"]
TWO = given([torch.eye(2)[None]])
FOUR = ("entropy", "received", "top_k", "map")


def test_carries_tiles_largest_weights_and_marginals_of_long_texts() -> None:
    rec = record_two(300, keep="queries_keys", top_k=4)
    contents = Contents(page(rec, layer=1, head=2).text)
    layer, exact = contents.layer(0, 0, 1), rec.weights(1)[0]
    call = rec.kept_call(1)
    statistics = clearhead.attention_statistics(call.query, call.key, statistics=FOUR)
    tiles = contents.array(0, layer["map"], 3, 128, 128)
    torch.testing.assert_close(tiles.sqrt().float(), statistics.map[0].sqrt(), rtol=0, atol=0.5 / 255 + 1e-6)
    indices = contents.array(0, layer["indices"], 3, 300, 4)
    contents.require(0, layer["weights"], exact.gather(-1, indices), 0.5e-4 + 1e-6)
    contents.require(0, layer["weights"], exact.topk(4, -1).values, 0.5e-4 + 1e-6)
    contents.require(0, layer["entropy"], torch.special.entr(exact.double()).sum(-1), 6e-4)
    received = contents.array(0, layer["received"], 3, 300) * 300
    torch.testing.assert_close(received.float(), exact.sum(1), rtol=2e-3, atol=1e-3)
    assert list(layer["crops"]) == ["2"], "the head that is large at first is exact"
    contents.require(0, layer["crops"]["2"]["weights"], exact[2], 0.5e-4 + 1e-6)


def test_crops_are_what_is_asked_for() -> None:
    rec = record_two(150)
    contents = Contents(page(rec, crops=[(0, 1, slice(20, 33), slice(-11, None)), ("blocks.1", 0)]).text)
    cut = contents.layer(0, 0, 0)["crops"]["1"]
    assert (cut["queries"], cut["keys"]) == ([20, 33], [139, 150])
    contents.require(0, cut["weights"], rec.weights(0, 1)[0, 20:33, 139:])
    assert list(contents.layer(0, 0, 1)["crops"]) == ["0"]


def test_statistics_alone_are_enough() -> None:
    assert Contents(page(record_two(150, statistics=FOUR)).text).layer(0, 0, 0)["crops"] == {}


def test_heads_keep_their_numbers() -> None:
    rec = record_two(5, layers=[1], heads=[2, 0], **KEPT)
    contents = Contents(page(rec, head=2).text)
    assert contents.data["sections"][0]["layers"] == [{"label": "1", "name": "blocks.1", "heads": [2, 0]}]
    assert contents.data["head"] == 0
    assert contents.layer(0, 0, 0)["crops"] == {}
    contents.require(0, contents.layer(0, 0, 0)["map"], rec.weights(1)[0, [2, 0]])


def test_padding_is_not_shown_and_items_are_named() -> None:
    rec = record_two(5, 3, torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]]))
    tokens = [list("abcde"), ["x", "y", "z", "[PAD]", "[PAD]"], ["p", "q", "r"]]
    contents = Contents(page(rec, tokens, labels=["one", "two", "three"]).text)
    assert [item["label"] for item in contents.data["items"]] == ["one", "two", "three"]
    assert contents.text(1, 0, "queries")["names"] == ["x", "y", "z"]
    assert contents.text(2, 0, "keys")["names"] == ["p", "q", "r"]
    assert contents.layer(2, 0, 0)["origin"] == [2, 2]
    entropy = torch.special.entr(rec.weights(1)[2, :, 2:].double()).sum(-1)
    contents.require(2, contents.layer(2, 0, 1)["entropy"], entropy, 6e-4)


def test_encoder_decoder_and_cross_attention_are_sections() -> None:
    rec = record_pair()
    contents = Contents(
        page(rec, list("abcde"), key_tokens=list("stuvwxy"), layer="decoder.layers.0.multihead_attn").text
    )
    titles = [section["title"] for section in contents.data["sections"]]
    assert titles == ["encoder self-attention", "decoder self-attention", "cross-attention"]
    assert contents.data["section"] == 2
    names = [[len(contents.text(0, section, side)["names"]) for side in ("queries", "keys")] for section in range(3)]
    assert names == [[7, 7], [5, 5], [5, 7]]
    contents.require(0, contents.layer(0, 2, 0)["map"], rec.weights("decoder.layers.0.multihead_attn")[0])


def test_calls_are_items() -> None:
    model = Two()
    with clearhead.record(model, **KEPT) as rec:
        model(torch.randn(2, 3, 12))
        model(torch.randn(1, 4, 12))
    contents = Contents(page(rec).text)
    assert [len(contents.text(item, 0, "keys")["names"]) for item in range(3)] == [3, 3, 4]
    contents.require(2, contents.layer(2, 0, 0)["map"], rec.weights(0, call=1)[0])


def test_words_come_with_their_own_entropy() -> None:
    weights = torch.tensor([[0.5, 0.25, 0.25], [0.0, 0.25, 0.75], [0.0, 0.0, 1.0]])
    contents = Contents(page(given([weights[None]]), Tokens(["play", "##ing", "chess"])).text)
    text = contents.text(0, 0, "keys")
    assert (text["words"], text["wordNames"]) == ([0, 0, 1], ["playing", "chess"])
    entropy = contents.array(0, contents.layer(0, 0, 0)["wordEntropy"], 1, 2)
    assert entropy[0].tolist() == pytest.approx([0.693, 0.0])


def test_tokens_cannot_leave_the_data_and_are_no_placeholders() -> None:
    rec = given([torch.full((1, 6, 6), 1 / 6)])
    text = page(rec, HOSTILE, title="</title><script>alert(3)</script>", labels=["</script><b>"]).text
    elements = Elements(text)
    assert [tag for tag, _ in elements.tags].count("script") == 3
    assert not {"img", "b"} & {tag for tag, _ in elements.tags}
    known = ("\\u003cscript\\u003ealert", "onerror=alert", "&lt;script&gt;alert")
    assert "alert" not in re.sub("|".join(map(re.escape, known)), "", text)
    names = Contents(text).text(0, 0, "queries")["names"]
    assert names[:3] == HOSTILE[:3]
    assert names[3:] == ["\\u2028", "\\u202eabc", "'\"`"]
    contents = Contents(page(TWO, ["@script@", "@data@"], title="@style@").text)
    assert contents.text(0, 0, "queries")["names"] == ["@script@", "@data@"]
    assert contents.data["title"] == "@style@"
    for language in ("en", "zh"):
        assert "[[" not in TWO.page(language=language).text.split("<script")[0], "a text of page.html stays"


def test_refers_to_nothing_outside_and_the_policy_names_its_own_script_and_style() -> None:
    text = page(TWO, ["a", "b"]).text
    elements = Elements(text)
    for tag, attributes in elements.tags:
        assert tag not in ("link", "iframe", "object", "base", "form", "img")
        assert not {"src", "href", "action", "style", "srcset"} & set(attributes)
        assert not any(name.startswith("on") for name in attributes)
    for forbidden in ("http:", "https:", "url(", "@import"):
        assert forbidden not in text
    for forbidden in ("fetch(", "XMLHttpRequest", "WebSocket", "innerHTML", "eval(", "document.write", "import("):
        assert forbidden not in text
    [policy] = [attributes["content"] for _, attributes in elements.tags if "http-equiv" in attributes]
    assert policy is not None
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    for rule, element in (("script-src", "script"), ("style-src", "style")):
        digest = hashlib.sha256(elements.texts[element].encode()).digest()
        assert rules[rule] == f"'sha256-{base64.b64encode(digest).decode()}'"
    assert set(rules) == {"default-src", "script-src", "style-src", "base-uri", "form-action"}
    assert "Attention weights show where a head reads from. They are not explanations" in " ".join(text.split())


def test_saves_utf8_and_shows_itself_in_notebooks(tmp_path: Path) -> None:
    made = page(TWO, ["街", "\udce9"], title="街")
    path = made.save(tmp_path / "page.html")
    text = path.read_text(encoding="utf-8")
    assert "<title>街</title>" in text
    assert Contents(text).text(0, 0, "keys")["names"] == ["街", "\\udce9"]
    [(tag, frame), (beside, _)] = Elements(made._repr_html_()).tags
    assert (tag, frame["sandbox"], frame["srcdoc"]) == ("iframe", "allow-scripts", made.text)
    assert beside == "script"
    assert html.escape(made.text) in made._repr_html_()


def test_all_of_minilm_at_512_tokens_is_below_three_megabytes(record_property: Any) -> None:
    """72 heads; every weight of all of them at four decimals in JSON would be about 150 MB."""
    tokenizer, model = AutoTokenizer.from_pretrained(minilm()), AutoModel.from_pretrained(minilm()).eval()
    text = (Path(__file__).parent.parent.parent / "docs" / "architecture.md").read_text(encoding="utf-8")
    encoded = tokenizer(text, truncation=True, max_length=512, return_tensors="pt")
    with torch.no_grad(), clearhead.record(model, statistics=FOUR, **KEPT) as rec:
        model(**encoded)
    made = page(rec, tokenizer.convert_ids_to_tokens(encoded["input_ids"][0].tolist()))
    contents = Contents(made.text)
    assert [len(layer["heads"]) for layer in contents.data["sections"][0]["layers"]] == [12] * 6
    assert len(contents.text(0, 0, "keys")["names"]) == 512
    assert sum(len(layer["crops"]) for layer in contents.data["items"][0]["sections"][0]["layers"]) == 1
    size = len(made.text.encode())
    record_property("bytes", size)
    assert 1_000_000 < size < 3_000_000


def peaked(*rows: int) -> torch.Tensor:
    """(1, L, L): weights of a head whose query i looks most at key rows[i]."""
    weights = torch.full((1, len(rows), len(rows)), 0.1)
    weights[0, range(len(rows)), rows] = 1.0
    return weights / weights.sum(-1, keepdim=True)


def test_the_first_query_is_a_word_that_looks_at_another_word() -> None:
    names = ["[CLS]", "play", "##ing", "chess", ",", "now", "[SEP]"]
    looks = {
        (0, 0, 1, 4, 0, 6, 0): 3,  # only at special tokens, their own word and punctuation: the word near the middle
        (0, 3, 1, 4, 1, 6, 1): 1,
        (0, 3, 3, 4, 1, 1, 1): 5,  # of several the one that is nearest to the middle
    }
    for rows, query in looks.items():
        made = page(given([peaked(*rows)]), names).text
        assert Contents(made).data["items"][0]["sections"][0]["start"] == query
        assert f'<strong dir="auto">{names[query]}</strong> looks most at' in made
    other = torch.cat([peaked(0, 3, 1, 4, 1, 6, 1), peaked(0, 0, 0, 1, 0, 0, 0)])
    starts = [Contents(page(given([other]), names, layer=0, head=head).text).data["items"][0] for head in (0, 1)]
    assert [item["sections"][0]["start"] for item in starts] == [1, 3], "of the head that is shown first"
