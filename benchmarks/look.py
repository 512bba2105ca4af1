"""What ``clearhead look`` takes on long texts: tokens against seconds, peak memory and size of the page.

    python -m benchmarks.look [--tokens 2500 10000 100000] [--threads 2]

Every row is a process of its own that starts from nothing, as in a terminal. *Beyond* is the time less that of one
sentence with the same model, because starting, loading the model and drawing take the same for every text. The default
model, all-MiniLM-L6-v2 (6 layers × 12 heads), reads windows of 512 tokens. Two random encoders, 4 layers × 8 heads, one
for 4,096 and one for 16,384 tokens, read a text in one piece. The texts are the project's own documentation.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.table import Table

from benchmarks.memory import in_a_process
from benchmarks.timing import console, machine, progress

DOCS = Path(__file__).resolve().parent.parent / "docs"
SENTENCE = "The animal didn't cross the street because it was too tired."
IN_ONE_PIECE = (4096, 16384)


def write_texts(folder: Path, counts: list[int]) -> None:
    """Files of so many tokens of the documentation, from its beginning again where it ends."""
    from transformers import AutoTokenizer

    from clearhead.cli._demo import default_model_path
    from clearhead.integrations._hub import without_noise

    text = "".join(path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md")))
    with without_noise():
        tokenizer = AutoTokenizer.from_pretrained(default_model_path())
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
    for count in counts:
        repeats, left = divmod(count, len(found))
        part = text * repeats + text[: found[left - 1][1] if left else 0]
        (folder / f"{count}.txt").write_text(part, encoding="utf-8")


def write_encoder(folder: Path, positions: int) -> None:
    """A random BERT that takes so many tokens, with the default model's tokenizer."""
    import torch

    from clearhead.integrations._hub import without_noise

    with without_noise():
        from transformers import AutoTokenizer, BertConfig, BertModel

        from clearhead.cli._demo import default_model_path

        torch.manual_seed(0)
        config = BertConfig(
            hidden_size=256,
            num_hidden_layers=4,
            num_attention_heads=8,
            intermediate_size=512,
            max_position_embeddings=positions,
        )
        model = BertModel(config)
        for name, parameter in model.named_parameters():
            if ".query." in name or ".key." in name:  # heads that prefer some keys
                torch.nn.init.normal_(parameter, std=0.08)
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(default_model_path())
        tokenizer.model_max_length = positions
        tokenizer.save_pretrained(folder)


def look(file: Path | None, options: list[str], threads: int) -> tuple[float, float, float]:
    """Seconds, megabytes of memory at the peak, and megabytes of the page of one run, on a file or one sentence."""
    with tempfile.TemporaryDirectory() as folder:
        text = [SENTENCE] if file is None else ["--file", str(file)]
        program = [sys.executable, "-m", "clearhead_command", "look"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        started = time.perf_counter()
        command = [*program, *text, *options, "--out", folder]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
        _, status, used = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - started
        if status:
            raise RuntimeError(f"clearhead look failed on {file or SENTENCE}")
        return seconds, used.ru_maxrss * 1024 / 1e6, (Path(folder) / "attention.html").stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_500, 10_000, 100_000], help="of each text")
    parser.add_argument("--threads", type=int, default=2, help="default 2")
    arguments = parser.parse_args()
    table = Table(title="clearhead look", caption=f"{machine()}; {arguments.threads} threads")
    for column in ("model", "tokens", "seconds", "beyond", "memory, MB", "page, MB"):
        table.add_column(column, justify="left" if column == "model" else "right")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        in_a_process(write_texts, folder, arguments.tokens)
        models: dict[str, tuple[list[str], range]] = {"all-MiniLM-L6-v2": ([], range(1 << 40))}
        for positions in IN_ONE_PIECE:
            in_a_process(write_encoder, folder / str(positions), positions)
            fitting = range(positions // 8, positions - 1)
            models[f"random, {positions:,} positions"] = (["--model", str(folder / str(positions))], fitting)
        jobs = [(model, None) for model in models]
        jobs += [(model, count) for model in models for count in arguments.tokens if count in models[model][1]]
        found = {
            (model, count): look(count and folder / f"{count}.txt", models[model][0], arguments.threads)
            for model, count in progress(jobs, "looking")
        }
        for model, count in sorted(jobs, key=lambda job: list(models).index(job[0])):
            seconds, memory, page = found[model, count]
            beyond = "" if count is None else f"{seconds - found[model, None][0]:.1f}"
            tokens = "a sentence" if count is None else f"{count:,}"
            table.add_row(model, tokens, f"{seconds:.1f}", beyond, f"{memory:.0f}", f"{page:.2f}")
    console.print(table)


if __name__ == "__main__":
    main()
