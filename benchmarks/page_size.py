"""Size of the page of a real text: `rec.page` beside every weight written as JSON numbers.

    python -m benchmarks.page_size [--tokens 512]

The model is all-MiniLM-L6-v2 (6 layers × 12 heads), the text docs/architecture.md. JSON is measured on the same
weights, as `json.dumps(weights.tolist())` writes them; the row for 12 × 12 heads is twice that of 6 × 12.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from rich.table import Table

import clearhead
from benchmarks.timing import console
from clearhead import plot
from clearhead.cli import _demo as demo

TEXT = Path(__file__).parent.parent / "docs" / "architecture.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=512, help="at most 512 (default)")
    loaded = demo.load_text_model()
    encoded = loaded.tokenizer(
        TEXT.read_text(encoding="utf-8"),
        truncation=True,
        max_length=min(parser.parse_args().tokens, loaded.max_tokens),
        return_tensors="pt",
    )
    with torch.no_grad(), clearhead.record(loaded.model, keep="queries_keys") as rec:
        loaded.model(**encoded)
    tokens = plot.read_tokens(loaded.tokenizer, encoded["input_ids"][0].tolist(), words=encoded.word_ids(0))
    page = rec.page(tokens, title=loaded.name)
    every_weight = sum(len(json.dumps(rec.weights(name)[0].tolist())) for name in rec)
    table = Table(title=f"{loaded.name}, {len(tokens)} tokens")
    table.add_column("what")
    table.add_column("heads", justify="right")
    table.add_column("MB", justify="right")
    table.add_row("rec.page", "6 × 12", f"{len(page.text.encode()) / 1e6:.2f}")
    table.add_row("every weight as JSON", "6 × 12", f"{every_weight / 1e6:.0f}")
    table.add_row("every weight as JSON", "12 × 12", f"{2 * every_weight / 1e6:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
