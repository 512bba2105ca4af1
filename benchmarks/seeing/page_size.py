"""Size of the page of a real text: `rec.page` beside every weight written as JSON numbers.

    python -m benchmarks.seeing.page_size [--docs]

The model is all-MiniLM-L6-v2 (6 layers × 12 heads), the text docs/architecture.md. JSON is measured on the same
weights, as `json.dumps(weights.tolist())` writes them; the row for 12 × 12 heads is twice that of 6 × 12.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures
from benchmarks.writing import table
from clearhead import plot
from clearhead.cli import _demo as demo

TEXT = Path(__file__).parents[2] / "docs" / "architecture.md"


def sizes(tokens: int) -> dict[str, float]:
    """Megabytes of the page and of every weight as JSON, and the number of tokens."""
    loaded = demo.load_text_model()
    encoded = loaded.reader(
        TEXT.read_text(encoding="utf-8"),
        truncation=True,
        max_length=min(tokens, loaded.max_tokens),
        return_tensors="pt",
    )
    with torch.no_grad(), clearhead.record(loaded.model, keep="queries_keys") as rec:
        loaded.model(**encoded)
    read = plot.read_tokens(loaded.reader, encoded["input_ids"][0].tolist(), words=encoded.word_ids(0))
    page = rec.page(read, title=loaded.name)
    every_weight = sum(len(json.dumps(rec.weights(name)[0].tolist())) for name in rec)
    return {"page": len(page.text.encode()) / 1e6, "json": every_weight / 1e6, "tokens": len(read)}


def lines(effort: Effort) -> list[Line]:
    return [Line("all-MiniLM-L6-v2", lambda: sizes(effort.size(512)))]


def texts(measured: Figures) -> dict[str, str]:
    found = measured["all-MiniLM-L6-v2"]
    page, every, twice = f"{found['page']:.1f}", f"{found['json']:,.0f}", f"{2 * found['json']:,.0f}"
    rows = [
        ["`rec.page`", "6 × 12", page],
        *(["every weight as JSON", *one] for one in (("6 × 12", every), ("12 × 12", twice))),
    ]
    return {
        "table": table(("what", "heads", "MB"), rows),
        "page": f"{page} MB",
        "json": f"{every} MB",
        "json-twelve": f"{twice} MB",
    }


BENCHMARK = Benchmark("page_size", __doc__, lines, texts, minutes=0.5)

if __name__ == "__main__":
    BENCHMARK.main()
