"""A decoder-only model learns to write Python's own documentation, character by character.

    python examples/character_model.py                                      # trains, measures, writes
    python examples/character_model.py --weights out/character_model.pt     # keeps what it learned in a file

Its parts are those of Llama: rotary positions, several query heads for every key and value head, RMSNorm, SwiGLU. The
text is `pydoc_data.topics`, which every Python carries; a tenth of its topics is held out. It is trained on passages of
one length and then reads and writes far beyond that length with sliding caches, whose memory stays the same.
"""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

import clearhead
from clearhead import masks
from clearhead.caches import Cache, SlidingKVCache
from clearhead.positions import Rotary
from clearhead.transformer import Encoder, EncoderLayer, SwiGLU

console = Console()

LENGTH = 128  # characters in a training passage


# The text.


@dataclass(frozen=True)
class Corpus:
    """A text in two parts, as numbers.

    Args:
        characters: the character of each number.
        training, held_out: (T,) numbers; no paragraph is in both.
    """

    characters: str
    training: Tensor
    held_out: Tensor

    def numbers(self, text: str) -> Tensor:
        """A text as numbers, (T,)."""
        return torch.tensor([self.characters.index(character) for character in text])

    def text(self, numbers: Tensor) -> str:
        """Numbers (T,) as a text."""
        return "".join(self.characters[number] for number in numbers.tolist())


def read_corpus(seed: int = 0, held_out: float = 0.1) -> Corpus:
    """The topics of Python's help; about the share `held_out` of the text, in whole topics, is kept for testing.

    Some topics repeat what others say. A paragraph counts where it first occurs, so that none is held out that
    training has seen.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    texts: list[str] = []
    for name in sorted(topics):
        new = [part for part in topics[name].strip().split("\n\n") if part.strip() not in seen]
        seen.update(part.strip() for part in new)
        texts.append("\n\n".join(new) + "\n\n\n")
    random.Random(seed).shuffle(texts)
    characters = "".join(sorted(set("".join(texts))))
    parts: tuple[list[str], list[str]] = [], []
    wanted = held_out * sum(map(len, texts))
    for text in texts:
        parts[sum(map(len, parts[1])) < wanted].append(text)
    numbers = {character: number for number, character in enumerate(characters)}
    training, tested = (torch.tensor([numbers[one] for text in part for one in text]) for part in parts)
    return Corpus(characters, training, tested)


def bigram_bits(corpus: Corpus, smoothing: float = 0.1) -> float:
    """Bits per held-out character if only the one before is known, counted in the training text."""
    size = len(corpus.characters)
    pairs = Counter(zip(corpus.training[:-1].tolist(), corpus.training[1:].tolist(), strict=True))
    counts = torch.full((size, size), smoothing, dtype=torch.float64)
    for (before, after), count in pairs.items():
        counts[before, after] += count
    logs = (counts / counts.sum(1, keepdim=True)).log2()
    return -logs[corpus.held_out[:-1], corpus.held_out[1:]].mean().item()


# The model.


class CharacterModel(nn.Module):
    """Scores of the next character, from all those before.

    Args:
        characters: how many different ones there are.
        size: E.
        heads, kv_heads: query heads, and key and value heads that groups of them share.
        layers: how many.
    """

    def __init__(self, characters: int, size: int = 96, heads: int = 4, kv_heads: int = 2, layers: int = 3) -> None:
        super().__init__()
        self.sizes = {"characters": characters, "size": size, "heads": heads, "kv_heads": kv_heads, "layers": layers}
        self.embed = nn.Embedding(characters, size)
        self.decoder = Encoder((self.layer(size, heads, kv_heads) for _ in range(layers)), norm=nn.RMSNorm(size))
        self.head = nn.Linear(size, characters, bias=False)

    def layer(self, size: int, heads: int, kv_heads: int) -> EncoderLayer:
        position = Rotary(size // heads)
        attention = clearhead.MultiHeadAttention(
            size, heads, num_kv_heads=kv_heads, bias=False, position=position, k_norm=nn.RMSNorm(size // heads)
        )
        feed_forward = SwiGLU(size, 8 * size // 3)
        return EncoderLayer(size, attention, feed_forward, norm=nn.RMSNorm, norm_first=True)

    def forward(self, text: Tensor, cache: Sequence[Cache] | None = None) -> Tensor:
        """(B, L) → (B, L, characters); with caches, `text` is what is new."""
        return self.head(self.decoder(self.embed(text), mask=masks.causal(), cache=cache))

    def sliding_caches(self, batch_size: int, window: int = LENGTH) -> list[Cache]:
        """A cache for each layer that holds the last `window` characters, however long the text."""
        kv_heads, head_dim = self.sizes["kv_heads"], self.sizes["size"] // self.sizes["heads"]
        dtype = self.embed.weight.dtype
        return [SlidingKVCache(batch_size, kv_heads, window, head_dim, dtype=dtype) for _ in self.decoder.layers]


# Learning.


def passages(text: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches without end of passages of LENGTH characters and the one after, (count, LENGTH + 1)."""
    every = text.unfold(0, LENGTH + 1, 1)  # (T − LENGTH, LENGTH + 1), a view
    while True:
        yield every[torch.randint(len(every), (count,), generator=generator)]


def learning_rate(step: int, steps: int, most: float = 4e-3) -> float:
    """Up in a tenth of the steps, then down along a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return most * (step + 1) / warm
    return most * (0.51 + 0.49 * math.cos(math.pi * (step - warm) / (steps - warm)))


def train(model: CharacterModel, text: Tensor, steps: int, seed: int, batch: int = 16) -> None:
    """Learn to guess the next character of random passages."""
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.99), weight_decay=0.1)
    given = passages(text, batch, torch.Generator().manual_seed(seed))
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}")
    model.train()
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console) as progress:
        task, mean = progress.add_task("training", total=steps), 0.0
        for step, passage in zip(range(steps), given, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps)
            scores = model(passage[:, :-1])  # (B, LENGTH, characters)
            loss = nn.functional.cross_entropy(scores.flatten(0, 1), passage[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            bits = loss.item() / math.log(2)
            mean = bits if step == 0 else 0.95 * mean + 0.05 * bits
            progress.update(task, advance=1, description=f"training, {mean:.2f} bits per character")
    model.eval()


def trained(corpus: Corpus, steps: int, seed: int, weights: Path | None = None, **sizes: int) -> CharacterModel:
    """A model from the file `weights` if there is one; else a new one, trained, and saved there if a file is named."""
    if weights is not None and weights.exists():
        saved = torch.load(weights, weights_only=True)
        model = CharacterModel(**saved["sizes"])
        model.load_state_dict(saved["state"])
        return model.eval()
    torch.manual_seed(seed)
    model = CharacterModel(len(corpus.characters), **sizes)
    train(model, corpus.training, steps, seed)
    if weights is not None:
        weights.parent.mkdir(parents=True, exist_ok=True)
        torch.save({"sizes": model.sizes, "state": model.state_dict()}, weights)
    return model


# Reading and writing.


@torch.no_grad()
def bits_read(model: CharacterModel, text: Tensor, caches: Sequence[Cache], chunk: int = 64) -> Tensor:
    """Bits that each character but the first of texts (B, L) costs, read in chunks with caches: (B, L − 1)."""
    parts = [model(part, caches).log_softmax(-1) for part in text[:, :-1].split(chunk, 1)]
    logs = torch.cat(parts, 1)  # (B, L − 1, characters)
    return -logs.gather(2, text[:, 1:, None])[..., 0] / math.log(2)


@torch.no_grad()
def write(model: CharacterModel, prompt: Tensor, count: int, generator: torch.Generator, heat: float = 0.7) -> Tensor:
    """Go on from `prompt` (L,) for `count` characters, drawn one by one, with sliding caches: (count,)."""
    caches, new, written = model.sliding_caches(1), prompt[None], []
    for _ in range(count):
        scores = model(new, caches)[:, -1] / heat  # (1, characters)
        new = torch.multinomial(scores.softmax(-1), 1, generator=generator)  # (1, 1)
        written.append(new[0])
    return torch.cat(written)


# The whole.


def measure(model: CharacterModel, corpus: Corpus, rows: int = 8) -> dict[str, float]:
    """Bits per held-out character: read on and on with sliding caches, in passages of the training length, by bigrams.

    Passages begin in the middle of a text, of which the model then knows nothing: reading on must cost less.
    """
    texts = corpus.held_out[: len(corpus.held_out) // rows * rows].view(rows, -1)  # (rows, L), each read on its own
    passages = corpus.held_out.unfold(0, LENGTH + 1, LENGTH)  # (T // LENGTH, LENGTH + 1)
    read_on = bits_read(model, texts, model.sliding_caches(rows))
    return {
        "bits": read_on.mean().item(),
        "bits_beyond_training_length": read_on[:, LENGTH:].mean().item(),
        "bits_in_passages": bits_read(model, passages, model.sliding_caches(len(passages))).mean().item(),
        "bits_bigram": bigram_bits(corpus),
    }


def main(
    seed: Annotated[int, typer.Option(help="Of the held-out topics, the model and what it writes.")] = 0,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 400,
    count: Annotated[int, typer.Option(help="How many characters to write.")] = 1200,
    prompt: Annotated[str, typer.Option(help="What the text begins with.")] = 'The "for" statement',
    weights: Annotated[Path | None, typer.Option(help="Load from this file; if it is not there, save to it.")] = None,
    held_out: Annotated[int | None, typer.Option(help="How many held-out characters to read; all by default.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the figures and the text.")] = Path("out"),
) -> None:
    """Learn Python's documentation by heart and go on writing it; report bits per held-out character."""
    started = time.perf_counter()
    corpus = read_corpus(seed)
    corpus = replace(corpus, held_out=corpus.held_out[:held_out])
    model = trained(corpus, steps, seed, weights)
    learned = time.perf_counter()
    results: dict[str, Any] = {"seed": seed, "steps": steps, "characters_held_out": len(corpus.held_out)}
    results |= measure(model, corpus)
    before = time.perf_counter()
    written = corpus.text(write(model, corpus.numbers(prompt), count, torch.Generator().manual_seed(seed)))
    results["ms_per_character_written"] = round((time.perf_counter() - before) / max(count, 1) * 1000, 2)
    results["seconds_of_training"] = round(learned - started, 1)
    results["text"] = prompt + written
    out.mkdir(parents=True, exist_ok=True)
    path = out / "character_model.json"
    path.write_text(json.dumps(results, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    console.print(prompt + written, markup=False, highlight=False, soft_wrap=True)
    console.rule()
    console.print(
        f"bits per held-out character: {results['bits']:.3f}, read on and on with sliding caches; "
        f"{results['bits_in_passages']:.3f} in passages of {LENGTH}, the training length; "
        f"{results['bits_bigram']:.3f} by a bigram table"
    )
    seconds, learning = time.perf_counter() - started, results["seconds_of_training"]
    console.print(f"{seconds:.0f} s in all, {learning:.0f} of them training. Saved {path}")


if __name__ == "__main__":
    typer.run(main)
