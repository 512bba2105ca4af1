"""What ``clearhead look`` takes on long texts: tokens against seconds, peak memory and size of the page.

    python -m benchmarks.seeing.look [--docs]

Every row is a process of its own that starts from nothing, as in a terminal. *Processor* is the processor time of all
its threads. *Beyond* is the time less that of one sentence with the same model, because starting, loading the model and
drawing take the same for every text. The default model, all-MiniLM-L6-v2 (6 layers × 12 heads), reads windows of 512
tokens. Three random encoders read a text in one piece: two of 4 layers × 8 heads, for 4,096 and for 16,384 tokens, and
one of 24 layers × 32 heads for 4,096. The texts are the project's own documentation.
"""

from __future__ import annotations

import atexit
import functools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.writing import seconds, table

DOCS = Path(__file__).resolve().parents[2] / "docs"
SENTENCE = "The animal didn't cross the street because it was too tired."
TOKENS = (2_500, 10_000, 130_000)
DEFAULT, SHORT = "all-MiniLM-L6-v2", "a sentence"


class Encoder(NamedTuple):
    """A random BERT that reads a text in one piece."""

    layers: int
    heads: int
    positions: int

    def __str__(self) -> str:
        return f"random, {self.layers} × {self.heads}, {self.positions:,} positions"


ENCODERS = (Encoder(4, 8, 4096), Encoder(4, 8, 16384), Encoder(24, 32, 4096))


def write_texts(folder: Path, counts: list[int]) -> None:
    """Files of so many tokens of the documentation, from its beginning again where it ends."""
    from transformers import AutoTokenizer

    from clearhead.cli._demo import default_model_path
    from clearhead.integrations._hub import without_noise

    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.rglob("*.md")))
    with without_noise():
        tokenizer = AutoTokenizer.from_pretrained(default_model_path())
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for count in counts:
        repeats, left = divmod(count, len(found))
        part = text * repeats + text[: found[left - 1][1] if left else 0]
        (folder / f"{count}.txt").write_text(part, encoding="utf-8")


def write_encoder(folder: Path, encoder: Encoder) -> None:
    """A random encoder, with the default model's tokenizer."""
    from clearhead.integrations._hub import without_noise

    with without_noise():
        from transformers import AutoTokenizer, BertConfig, BertModel

        from clearhead.cli._demo import default_model_path

        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=32 * encoder.heads,
            num_hidden_layers=encoder.layers,
            num_attention_heads=encoder.heads,
            intermediate_size=64 * encoder.heads,
            max_position_embeddings=encoder.positions,
        )
        model = BertModel(config)
        for name, parameter in model.named_parameters():
            if ".query." in name or ".key." in name:  # heads that prefer some keys
                torch.nn.init.normal_(parameter, std=0.08)
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(default_model_path())
        tokenizer.model_max_length = encoder.positions
        tokenizer.save_pretrained(folder)


def look(text: list[str], options: list[str]) -> list[float]:
    """Seconds, processor seconds, megabytes of memory at the peak, and megabytes of the page of one run."""
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        started = time.perf_counter()
        command = [sys.executable, "-m", "clearhead_command", "look", *text, *options, "--out", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = time.perf_counter() - started
        if status:
            raise RuntimeError(f"clearhead look failed on {text}")
        processor = used.ru_utime + used.ru_stime
        return [took, processor, used.ru_maxrss * 1024 / 1e6, (Path(folder) / "attention.html").stat().st_size / 1e6]


@functools.cache
def _folder() -> Path:
    """Where texts and models lie until this process ends."""
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    return Path(folder.name)


def measure(encoder: Encoder | None, tokens: int | None, effort: Effort) -> list[float]:
    """One run of the default model, or of an encoder, on a sentence or on so many tokens: `look` and kB of text."""
    text, options, size = [SENTENCE], [], len(SENTENCE)
    if tokens is not None:
        file = _folder() / f"{tokens}.txt"
        if not file.exists():
            effort.in_a_process(write_texts, _folder(), [tokens])
        text, size = ["--file", str(file)], file.stat().st_size
    if encoder is not None:
        folder = _folder() / "-".join(map(str, encoder))
        if not folder.exists():
            effort.in_a_process(write_encoder, folder, encoder)
        options = ["--model", str(folder)]
    return [*(look_here(text, options) if effort.smallest else look(text, options)), size / 1e3]


def look_here(text: list[str], options: list[str]) -> list[float]:
    """The same in this process, whose memory at the peak is not the run's own."""
    from typer.testing import CliRunner

    from clearhead.cli import main

    with tempfile.TemporaryDirectory() as folder:
        started, used = time.perf_counter(), time.process_time()
        result = CliRunner().invoke(main, ["look", *text, *options, "--out", folder], catch_exceptions=False)
        if result.exit_code:
            raise RuntimeError(f"clearhead look failed on {text}: {result.output}")
        took, processor = time.perf_counter() - started, time.process_time() - used
        return [took, processor, 0.0, (Path(folder) / "attention.html").stat().st_size / 1e6]


def lines(effort: Effort) -> list[Line]:
    jobs: list[tuple[Encoder | None, int | None]] = [(None, None), *((None, count) for count in TOKENS)]
    for encoder in ENCODERS:
        jobs += [(encoder, None)]
        jobs += [(encoder, count) for count in TOKENS if encoder.positions // 8 <= count < encoder.positions - 1]
    if effort.smallest:  # a run starts from nothing, which takes longer than everything else here
        jobs = [(ENCODERS[0], TOKENS[0])]
    return [
        Line(
            f"{encoder or DEFAULT}: {SHORT if count is None else f'{count:,}'}",
            lambda encoder=encoder, count=count: measure(encoder, count and effort.size(count), effort),
        )
        for encoder, count in jobs
    ]


def texts(measured: Figures) -> dict[str, str]:
    rows: list[list[str]] = []
    for name, (took, processor, memory, page, size) in measured.items():
        model, tokens = name.split(": ")
        sentence = measured.get(f"{model}: {SHORT}")
        beyond = "" if sentence is None or tokens == SHORT else f"{took - sentence[0]:.1f}"
        cells = [f"{took:.1f}", f"{processor:.1f}", beyond, f"{memory:.0f}", f"{page:.2f}"]
        rows.append([model, tokens, f"{size:.0f}" if size >= 1 else "", *cells])
    heads = ("model", "tokens", "text, kB", "seconds", "processor, s", "beyond, s", "memory, MB", "page, MB")
    found = {"table": table(heads, rows)}
    for what, tokens in (("sentence", SHORT), ("longest", f"{TOKENS[-1]:,}")):
        if f"{DEFAULT}: {tokens}" in measured:
            found[what] = seconds(measured[f"{DEFAULT}: {tokens}"][0])
    return found


BENCHMARK = Benchmark("look", __doc__, lines, texts, minutes=3, peers=("transformers",))

if __name__ == "__main__":
    BENCHMARK.main()
