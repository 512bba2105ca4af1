"""A small language model on real sentences, through transformers, with each of its attention implementations."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import torch

import clearhead
from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, TimedCase, enter
from benchmarks.peers import EAGER
from benchmarks.peers.work import Outputs, Unsupported, Way

__all__ = ["TRANSFORMERS_SDPA", "text_cases"]

TRANSFORMERS_SDPA = "transformers sdpa"
#: The implementation of transformers behind each name.
IMPLEMENTATIONS = {OURS: "clearhead", TRANSFORMERS_SDPA: "sdpa", EAGER: "eager"}
SOURCE = Path(__file__).resolve().parents[3] / "docs" / "extending.md"
SENTENCES = 32


def text_cases(effort: Effort) -> Iterator[TimedCase]:
    name = f"all-MiniLM-L6-v2, {SENTENCES} sentences"
    yield TimedCase("transformers, end to end", name, lambda: _contest(effort.size(SENTENCES, 2)))


def sentences(count: int) -> list[str]:
    """The first sentences of the project's own guide, without its code, its headings and its tables."""
    text = re.sub(r"```.*?```", "", SOURCE.read_text(encoding="utf-8"), flags=re.DOTALL)
    prose = " ".join(line.lstrip("- ") for line in text.splitlines() if not re.match(r"\s*[#|]", line))
    found = [part.strip() for part in re.split(r"(?<=[.:?])\s+", prose) if len(part.split()) > 3]
    return found[:count]


def _contest(count: int) -> Contest:
    contest = Contest()
    real: dict[str, torch.Tensor] = {}

    def build(implementation: str) -> Way:
        from clearhead.cli._demo import default_model_path
        from clearhead.errors import ArgumentError
        from clearhead.integrations._hub import read_model, without_noise
        from clearhead.integrations.transformers import register

        register()
        try:
            model, tokenizer = read_model(str(default_model_path()), "AutoTokenizer", notify=lambda message: None)
        except ArgumentError as error:
            raise Unsupported(str(error)) from error
        with without_noise():
            model.eval().set_attn_implementation(implementation)
        batch = tokenizer(sentences(count), padding=True, truncation=True, return_tensors="pt")
        real["tokens"] = batch["attention_mask"].bool()  # (B, L)

        def run() -> Outputs:
            with torch.no_grad():
                return (model(**batch).last_hidden_state,)

        return run

    contest.compared = lambda outputs: tuple(tensor[real["tokens"]] for tensor in outputs)
    for name, implementation in IMPLEMENTATIONS.items():
        enter(contest, name, lambda implementation=implementation: build(implementation))
    contest.kernel = _kernel(real["tokens"]) if real else ""
    return contest


def _kernel(tokens: torch.Tensor) -> str:
    """The kernel for MiniLM's 12 heads of 32 under the batch's padding."""
    head = torch.zeros(tokens.shape[0], 12, tokens.shape[1], 32)
    return clearhead.explain(head, head, head, clearhead.masks.keep(tokens[:, None, None])).kernel or "none"
