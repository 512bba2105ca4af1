"""A census of MiniLM over a million tokens: its time and memory beside a plain pass, and its exactness.

    python -m benchmarks.seeing.census [--docs]

The texts are those of the repository and of Python's own library, cut into windows without padding. Each batch runs
without and with a census, in turn; the ratio is the median over the batches. The plain pass is the same model with the
same attention. Every eighth batch also runs with transformers' ``sdpa``.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import ROOT, Figures
from benchmarks.memory import growth_of_peak
from benchmarks.writing import megabytes, ratio, seconds, table
from clearhead.cli._demo import load_text_model

TOKENS, AT_ONCE = 1 << 20, 4096
BARS = {128: 1.3, 512: 1.4}


def corpus() -> Iterator[str]:
    """The texts of this repository, then Python's own."""
    for folder in (ROOT, Path(sysconfig.get_path("stdlib"))):
        for path in sorted((*folder.glob("**/*.md"), *folder.glob("**/*.py"))):
            if "site-packages" not in path.parts:
                yield path.read_text(encoding="utf-8", errors="ignore")


def batches(tokenizer: Any, length: int, at_once: int) -> Iterator[dict[str, torch.Tensor]]:
    """Windows of `length` tokens with their special tokens, `at_once` tokens together."""
    inner, waiting = length - 2, []
    rows: list[list[int]] = []
    for text in corpus():
        waiting += tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        while len(waiting) >= inner:
            rows.append([tokenizer.cls_token_id, *waiting[:inner], tokenizer.sep_token_id])
            waiting = waiting[inner:]
            if len(rows) * length >= at_once:
                ids = torch.tensor(rows)
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
                rows = []


@torch.no_grad()
def timed(length: int, tokens: int, at_once: int) -> dict[str, Any]:
    loaded = load_text_model()
    model, special = loaded.model, loaded.reader.all_special_ids
    spent: dict[str, list[float]] = {"plain": [], "census": [], "sdpa": []}
    found: list[clearhead.Census] = []

    def clock(name: str, work: Any) -> Any:
        start = time.perf_counter()
        result = work()
        spent[name].append(time.perf_counter() - start)
        return result

    for place, batch in enumerate(islice(batches(loaded.reader, length, at_once), max(1, tokens // at_once))):
        if place % 8 == 0:
            model.set_attn_implementation("sdpa")
            model(**batch)
            clock("sdpa", lambda batch=batch: model(**batch))
            model.set_attn_implementation("clearhead")
            model(**batch)
        clock("plain", lambda batch=batch: model(**batch))
        found.append(clock("census", lambda batch=batch: clearhead.census(model, [batch], special=special)))
    every = found[0].merged(*found[1:])
    of_sdpa = [census / plain for census, plain in zip(spent["census"][::8], spent["sdpa"], strict=True)]
    return {
        "tokens": every.tokens,
        "texts": every.texts,
        "plain": sum(spent["plain"]),
        "census": sum(spent["census"]),
        "ratio": statistics.median(a / b for a, b in zip(spent["census"], spent["plain"], strict=True)),
        "ratio to sdpa": statistics.median(of_sdpa),
        "previous": every.rank_heads("previous")[0].weight,
    }


@torch.no_grad()
def memory(length: int, count: int, counted: bool, at_once: int) -> float:
    """Megabytes by which the passes over `count` batches raise the peak, above the model and one warm pass."""
    loaded = load_text_model()
    corpus = list(islice(batches(loaded.reader, length, at_once), count))
    loaded.model(**corpus[0])

    def run() -> None:
        if counted:
            clearhead.census(loaded.model, corpus, special=loaded.reader.all_special_ids)
            return
        for batch in corpus:
            loaded.model(**batch)

    growth, _ = growth_of_peak(run)
    return growth


@torch.no_grad()
def errors(length: int) -> dict[str, float]:
    """The largest difference of any head's mean from that of exact weights in float64."""
    loaded = load_text_model()
    batch = next(batches(loaded.reader, length, 4 * length))
    ids, special = batch["input_ids"], torch.tensor(loaded.reader.all_special_ids)
    census = clearhead.census(loaded.model, [batch], special=special.tolist())
    with clearhead.record(loaded.model, ("entropy",), keep="queries_keys") as rec:
        loaded.model(**batch)
    away = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    same = ids[:, :, None] == ids[:, None]
    after = torch.zeros_like(same)
    after[:, :, 1:] = same[:, :, :-1]
    keys = {
        "special": torch.isin(ids, special)[:, None].expand_as(same),
        "previous": (away == -1).expand_as(same),
        "window": (away.abs() <= 5).expand_as(same),
        "duplicate": same & (away < 0),
        "duplicate_later": same & (away > 0),
        "induction": after & (away <= 0),
    }
    worst = dict.fromkeys(("entropy", *keys), 0.0)
    for layer in rec:
        call = rec.kept_call(layer)
        query, key = call.query.double(), call.key.double()
        weights = (query @ key.transpose(-2, -1) * call.layout.scale).softmax(-1)  # (B, H, L, S)
        exact = {"entropy": -(weights * weights.clamp(min=1e-300).log()).sum(-1).mean((0, 2))}
        for name, inside in keys.items():
            masses, has = (weights * inside[:, None]).sum(-1), inside.any(-1)[:, None]
            exact[name] = (masses * has).sum((0, 2)) / has.sum()
        for name, expected in exact.items():
            worst[name] = max(worst[name], float((census.mean(name)[layer] - expected).abs().max()))
    return worst


def lines(effort: Effort) -> Iterator[Line]:
    at_once = effort.size(AT_ONCE, 256)
    for length in BARS:
        yield Line(f"{length} tokens", lambda length=length: timed(length, effort.size(TOKENS, 1), at_once))
    for count in (8, 32):
        for counted in (False, True):
            name = f"memory, {count} batches, {'census' if counted else 'plain'}"
            work = (memory, 512, effort.size(count, 1), counted, at_once)
            yield Line(name, lambda work=work: effort.in_a_process(*work))
    yield Line("errors", lambda: errors(effort.size(512, 64)))


def texts(measured: Figures) -> dict[str, str]:
    rows = []
    for length, bar in BARS.items():
        found = measured[f"{length} tokens"]
        times = [seconds(found["plain"]), seconds(found["census"])]
        rows.append([f"{length}", f"{found['tokens']:,}", *times, ratio(found["ratio"]), ratio(found["ratio to sdpa"])])
        rows[-1].append(f"≤ {bar}×")
    above = max(
        measured[f"memory, {count} batches, census"] - measured[f"memory, {count} batches, plain"] for count in (8, 32)
    )
    header = ("tokens a text", "tokens", "plain pass", "census", "ratio", "ratio to `sdpa`", "bar")
    return {
        "table": table(header, rows),
        "above": megabytes(max(0.0, above)),
        "error": f"{max(measured['errors'].values()):.0e}",
        "ratio-128": ratio(measured["128 tokens"]["ratio"]),
        "ratio-512": ratio(measured["512 tokens"]["ratio"]),
    }


def wrong(measured: Figures) -> list[str]:
    """Masses that differ from those of exact weights."""
    worst = max(measured.get("errors", {"none": 0.0}).values())
    return [] if worst <= 1e-5 else [f"a mean differs from exact weights by {worst:.1e}"]


BENCHMARK = Benchmark("census", __doc__, lines, texts, minutes=25, rounds=3, wrong=wrong)

if __name__ == "__main__":
    BENCHMARK.main()
