"""`clearhead look`: what it prints and what it writes."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from PIL import Image
from typer.testing import CliRunner

from clearhead.cli import main
from tests.support.models import minilm

from .looking import LETTERS, SENTENCE, contents, look, run, tokens_of

pytestmark = pytest.mark.usefixtures("in_an_empty_folder", "default_model_once")


def test_shows_every_head_and_writes_both_files(tmp_path: Path) -> None:
    result = look(SENTENCE)
    assert "all-MiniLM-L6-v2 · 6 layers × 12 heads · 16 tokens" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line[:5].strip().isdigit()]
    assert [row[0] for row in rows] == [str(layer) for layer in range(6)]
    assert all(len(row) == 1 + 2 * 12 or ">" in " ".join(row) for row in rows)
    assert "layer 1, head 4: what each token looks at most" in result.stdout
    assert any(line.split()[:4] == ["was", "→", "tired", "0.65"] for line in result.stdout.splitlines())
    assert f"wrote {'attention.png'}" in result.stdout
    assert (tmp_path / "attention.html").stat().st_size < 220_000
    with Image.open("attention.png") as picture:
        assert picture.size[0] > 1000
        assert picture.size[1] > 500
    assert result.stderr == ""
    assert "\x1b" not in result.output, "there is no terminal"


def test_begins_with_the_finding_and_ends_with_the_codes(tmp_path: Path) -> None:
    result = look(SENTENCE, "--json", "numbers.json", "--no-png")
    facts, finding, reason = [line for line in result.stdout.splitlines() if line][:3]
    assert facts.startswith("all-MiniLM-L6-v2")
    assert finding == "layer 1, head 4: it → tired 0.31"
    assert reason == "Shown because it clearly links distant words; choose with --layer and --head."
    page = re.search(r'<p id="finding">(.*?)</p>', (tmp_path / "attention.html").read_text(encoding="utf-8"))
    assert page is not None
    assert re.sub(r"<[^>]+>", "", page[1]).startswith("In layer 1, head 4, it looks most at tired (0.308")
    said = " ".join(result.stdout.split())
    heads = json.loads((tmp_path / "numbers.json").read_text())["heads"]
    kinds = Counter(head["looks_at"] for head in heads)
    assert f"{kinds['special']} heads special tokens" in said
    assert "1 head the token before layer 0, head 2" in said
    assert said.index("special tokens") < said.index("layer 1, head 4: what each token looks at most")
    assert said.index("[SEP] →") < said.index("> marks layer 1, head 4, shown above. Columns: heads.")


def test_a_neighbour_is_not_called_distant() -> None:
    lines = look("Time flies like an arrow.", "--no-png", "--no-html").stdout.splitlines()
    at = lines.index("layer 1, head 4: an → arrow 0.49")
    assert lines[at + 1].startswith("Shown because different words clearly look at different words;")


def test_reads_the_standard_input(tmp_path: Path) -> None:
    result = CliRunner().invoke(main, ["look", "-", "--no-png"], input="\ufeffTime flies.\n".encode())
    assert result.exit_code == 0, result.output
    assert tokens_of(tmp_path / "attention.html") == ["[CLS]", "time", "flies", ".", "[SEP]"]


@pytest.mark.parametrize(
    ("given", "code", "said"),
    [
        (b"\xff", 1, "-: expected UTF-8 text, got other bytes at 0 of the input"),
        (b" \n", 2, "-: expected some text, got nothing but white space"),
    ],
)
def test_a_standard_input_without_text_is_refused(given: bytes, code: int, said: str) -> None:
    result = CliRunner().invoke(main, ["look", "-"], input=given)
    assert result.exit_code == code
    assert said in result.stderr


def test_layer_and_head_are_taken(tmp_path: Path) -> None:
    result = look(SENTENCE, "--layer", "3", "--head", "7", "--out", "a/new folder")
    assert "layer 3, head 7:" in result.stdout
    assert "Shown because" not in result.stdout
    data = contents(tmp_path / "a/new folder/attention.html").data
    assert (data["layer"], data["head"]) == (3, 7)
    assert "layer 5, head" in look(SENTENCE, "--layer", "5").stdout
    assert "head 2:" in look(SENTENCE, "--head", "2").stdout


def test_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\ufeffTime flies like an arrow.\n", encoding="utf-8")
    look("--file", "text.txt")
    assert tokens_of(tmp_path / "attention.html") == [
        "[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["今天天气很好。", "$x^2$ & <b>", "\x1b[31mred\x07", "word\u202eabc", "😀 ไทย"])
def test_any_script_and_any_character(text: str) -> None:
    result = look(text)
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


@pytest.mark.parametrize("statistic", ["sink", "normalized_entropy", "previous", "max_logit", "output_norm"])
def test_the_overviews_show_a_statistic(statistic: str, tmp_path: Path) -> None:
    result = look(SENTENCE, "--stat", statistic, "--json", "numbers.json", "--no-png")
    heads = json.loads((tmp_path / "numbers.json").read_text())["heads"]
    assert f"Number: {statistic}." in " ".join(result.stdout.split())
    first = next(line for line in result.stdout.splitlines() if line.startswith("    0 "))
    decimals = 1 if statistic in ("max_logit", "output_norm") else 2
    assert f"{heads[0][statistic]:.{decimals}f}".lstrip("0") in first
    page = contents(tmp_path / "attention.html")
    assert page.data["statistic"] in page.data["sections"][0]["statistics"]
    assert page.data["statistic"] == ("offset -1" if statistic == "previous" else statistic)


def test_json_alone_on_the_standard_output(tmp_path: Path) -> None:
    result = look(SENTENCE, "--json", "-", "--no-png", "--no-html", "--layer", "3", "--head", "7")
    assert list(tmp_path.iterdir()) == []
    data = json.loads(result.stdout)
    assert (data["model"], data["chosen"]) == ("all-MiniLM-L6-v2", {"layer": 3, "head": 7})
    assert "do not explain" in data["note"]
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [(r, c) for r in range(6) for c in range(12)]
    assert data["heads"][2]["looks_at"] == "previous"
    [window] = data["windows"]
    assert window["tokens"][:3] == ["[CLS]", "the", "animal"]
    assert window["special"] == [True, *[False] * 14, True]
    path = minilm()
    model = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    encoded = transformers.AutoTokenizer.from_pretrained(path)(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        weights = model(**encoded, output_attentions=True).attentions[3][0]  # transformers' own, (H, L, S)
    torch.testing.assert_close(torch.tensor(window["top_weights"]), weights[7].topk(8).values, atol=1e-5, rtol=0)
    assert window["received"] == pytest.approx(weights[7].sum(0).tolist(), abs=1e-4)
    assert window["entropy"] == pytest.approx(torch.special.entr(weights[7]).sum(-1).tolist(), abs=1e-4)
    entropy = [head["entropy"] for head in data["heads"] if head["layer"] == 3]
    assert entropy == pytest.approx(torch.special.entr(weights).sum(-1).mean(-1).tolist(), abs=1e-4)


def test_files_go_where_they_are_told(tmp_path: Path) -> None:
    result = look("Time flies.", "--html", "pages/one.html", "--png", "two.svg", "--json", "pages/three.json")
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.html", "three.json", "two.svg"]
    assert [line for line in result.stdout.splitlines() if line.startswith("wrote")] == [
        "wrote two.svg", "wrote pages/one.html", "wrote pages/three.json",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "t5", "mpnet"])
def test_takes_decoders_and_encoders_and_says_when_the_weights_are_not_clearheads(
    kind: str, model_folder: Callable[[str], Path]
) -> None:
    result = look(LETTERS, "--model", str(model_folder(kind)))
    assert "2 layers × 4 heads" in result.stdout
    assert ("does not let its attention be replaced" in result.stderr) == bool(result.stderr) == (kind == "mpnet")


def test_help_names_what_can_be_chosen() -> None:
    text = " ".join(look("--help").output.split())
    words = ("--file", "--model", "--layer", "--head", "--stat", "--html", "--no-png", "--json", "--out", "windows")
    assert [word for word in (*words, "from 0") if word not in text] == []


def test_without_a_command_there_is_help() -> None:
    result = run()
    assert result.exit_code == 0
    assert all(command in result.output for command in ("look", "walkthrough", "doctor"))
