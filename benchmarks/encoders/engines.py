"""Embeddings of real texts on a CPU, by engines in float32, bfloat16 and int8.

    python -m benchmarks.encoders.engines [--only PATTERN] [--rounds 5] [--docs]

The texts are cut from Python's own documentation strings: 32 of 96 tokens, 32 of mixed lengths, one of 16 and one of
200. With MiniLM (its trained weights) the mixed ones are also sorted into four batches, and given one at a time.
BERT-base, DeBERTa-v3-small and MPNet have random weights. Each engine runs alone in a process of its own, each work in
blocks. For MiniLM the engines are timed a second time, in turn in one process. int8 is calibrated on other such texts.

Embeddings are means over real tokens. Their cosine is that with transformers' float32 ones. Memory is what a converted
or loaded model and its first batch of mixed lengths add to the process, parameters included and libraries not. The time
to the first batch is conversion, loading and that batch.
Quick parts: ``--only "MiniLM, Clearhead"``, ``--only "MiniLM, .*float32"``.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import OURS
from benchmarks.comparing.contest import REST
from benchmarks.comparing.load import with_load
from benchmarks.encoders import standings
from benchmarks.encoders.batches import BATCHES, EQUAL, FEW, MIXED, Batch, mixed_lengths, read_texts
from benchmarks.encoders.converted import CTRANSLATE2, ONNX_RUNTIME, OPENVINO, Converted, Encode
from benchmarks.encoders.models import DTYPES, MODELS, RANDOM, load_model
from benchmarks.encoders.peers import Eager, quiet
from benchmarks.encoders.standings import IN_TURN, LONG, SHORT, SINGLY, SORTED, THEIRS
from benchmarks.memory import growth_of_peak, resident
from benchmarks.peers.work import Unsupported
from benchmarks.timing import samples
from clearhead.errors import ArgumentError

_BLOCK = 0.4  #: seconds of one figure, at least
_BUDGET = 10.0  #: seconds after which one work gets no further figure, if it has three
_CALIBRATION = 4  #: batches of mixed lengths whose texts int8 is calibrated on

Works = dict[str, list[Batch]]


def ours(model: nn.Module, precision: str) -> Encode:
    options: dict[str, Any] = {} if precision == "float32" else {"dtype": DTYPES[precision]}
    if not options.keys() <= inspect.signature(clearhead.upgrade).parameters.keys():
        raise Unsupported("`clearhead.upgrade` has no argument `dtype` yet")
    try:
        clearhead.upgrade(model, unpad=True, **options)
    except ArgumentError as refusal:
        raise Unsupported.because_of(refusal) from refusal
    return Eager(model)


def theirs(model: nn.Module, precision: str) -> Encode:
    return Eager(model.to(DTYPES[precision]))


#: What runs the loaded model, which it may change, and what runs files of its own; each with its precisions.
ENGINES: dict[str, tuple[Converted | Callable[[nn.Module, str], Encode], tuple[str, ...]]] = {
    OURS: (ours, ("float32", "bfloat16")),
    THEIRS: (theirs, ("float32", "bfloat16")),
    "ONNX Runtime": (ONNX_RUNTIME, ("float32", "int8")),
    "OpenVINO": (OPENVINO, ("float32", "bfloat16", "int8")),
    "CTranslate2": (CTRANSLATE2, ("float32", "bfloat16", "int8")),
}


@final
@dataclass(frozen=True)
class Task:
    """A model that an engine runs in a precision."""

    model: str
    engine: str
    precision: str
    smallest: bool

    @property
    def name(self) -> str:
        return f"{self.model}, {self.engine}, {self.precision}"

    @property
    def way(self) -> Converted | Callable[[nn.Module, str], Encode]:
        return ENGINES[self.engine][0]


def tasks_of(model: str, effort: Effort) -> list[Task]:
    return [
        Task(model, engine, precision, effort.smallest)
        for engine, (way, precisions) in ENGINES.items()
        if effort.peers or not isinstance(way, Converted)
        for precision in precisions
    ]


def works_of(model: str, smallest: bool) -> Works:
    """The batches of each work; only those of MiniLM are cut up in other ways too."""
    lengths = FEW if smallest else BATCHES
    mixed = read_texts(lengths[MIXED])
    works = {EQUAL: [read_texts(lengths[EQUAL])], MIXED: [mixed], SHORT: [read_texts([16])], LONG: [read_texts([200])]}
    if model not in RANDOM:
        by_length = sorted(mixed, key=len)
        step = -(-len(mixed) // 4)
        works[SORTED] = [by_length[start : start + step] for start in range(0, len(mixed), step)]
        works[SINGLY] = [[text] for text in mixed]
    return {name: [Batch.padded(texts) for texts in batches] for name, batches in works.items()}


def alone(task: Task, effort: Effort) -> dict[str, Any]:
    """One engine in processes of its own."""
    try:
        with tempfile.TemporaryDirectory() as folder:
            converting = _converted(task, Path(folder), effort)
            found = effort.in_a_process(run, task, Path(folder), effort)
    except Exception as error:
        return {"skipped": _reason(task, error)}
    return found | {"first": converting + found["first"]}


def in_turn(effort: Effort) -> dict[str, Any]:
    """All engines in one process, after each has been converted in another."""
    tasks, skipped = tasks_of(MODELS[0], effort), {}
    with tempfile.TemporaryDirectory() as folder:
        places = {task: Path(folder) / task.name for task in tasks}
        for task, place in list(places.items()):
            place.mkdir()
            try:
                _converted(task, place, effort)
            except Exception as error:
                skipped[task.name] = _reason(task, error)
                del places[task]
        found = effort.in_a_process(run_in_turn, places, effort)
    return found | {"skipped": skipped | found["skipped"]}


def _reason(task: Task, error: Exception) -> str:
    """Why an engine takes no part; PyTorch's own ways fail the line unless they say that they do not support it."""
    if not isinstance(task.way, Converted) and not isinstance(error, Unsupported):
        raise error
    return str(Unsupported.because_of(error))


def _converted(task: Task, folder: Path, effort: Effort) -> float:
    """Seconds that it took to fill the folder with the engine's files."""
    return effort.in_a_process(convert, task.way, task, folder) if isinstance(task.way, Converted) else 0.0


@quiet()
def convert(way: Converted, task: Task, folder: Path) -> float:
    """Seconds that the conversion of the loaded model takes."""
    model = load_model(task.model, "float32", task.smallest)
    lengths = FEW[MIXED] if task.smallest else mixed_lengths() * _CALIBRATION
    calibration = [Batch.padded([text]) for text in read_texts(lengths)] if task.precision == "int8" else []
    start = time.perf_counter()
    way.convert(model, task.precision, calibration, folder)
    return time.perf_counter() - start


def _build(task: Task, folder: Path) -> Callable[[], Encode]:
    """What gives the engine from the files in the folder or the loaded model."""
    if isinstance(task.way, Converted):
        return functools.partial(task.way.load, task.precision, folder)
    return functools.partial(task.way, load_model(task.model, "float32", task.smallest), task.precision)


@quiet()
def run(task: Task, folder: Path, effort: Effort) -> dict[str, Any]:
    """Times, memory and embeddings of an engine."""
    works = works_of(task.model, task.smallest)
    _import_library(task)
    before = resident()
    peak, (encode, first) = growth_of_peak(lambda: _started(task, folder, works[MIXED][0]))
    memory = resident() - before
    with torch.inference_mode():
        times, load = with_load(lambda: {name: _seconds(encode, batches, effort) for name, batches in works.items()})
        reference = Eager(load_model(task.model, "float32", task.smallest))
        cosines = torch.cosine_similarity(embeddings(encode, works), embeddings(reference, works))
    lost = {"worst": 1 - cosines.min().item(), "mean": 1 - cosines.mean().item()}
    return {"times": times, "lost": lost, "memory": memory, "peak": peak, "first": first, "load": load}


def _started(task: Task, folder: Path, batch: Batch) -> tuple[Encode, float]:
    """The engine, and the seconds from the files or the loaded model to the end of a first batch."""
    build = _build(task, folder)
    start = time.perf_counter()
    encode = build()
    with torch.inference_mode():
        encode(batch)
    return encode, time.perf_counter() - start


def _import_library(task: Task) -> None:
    """So that it is no part of the engine's memory: PyTorch's threads and buffers belong to it."""
    if isinstance(task.way, Converted):
        importlib.import_module(task.way.package)
        return
    similar = task.model if task.model in RANDOM else "BERT-base"
    with torch.inference_mode():
        Eager(load_model(similar, "float32", smallest=True))(Batch.of(FEW[MIXED]))


@quiet()
def run_in_turn(places: dict[Task, Path], effort: Effort) -> dict[str, Any]:
    """Median seconds of each engine by work, timed in turn, and the reasons of those that take no part."""
    batches = {name: batches[0] for name, batches in works_of(MODELS[0], effort.smallest).items()}
    engines: dict[str, Encode] = {}
    skipped: dict[str, str] = {}
    for task, place in places.items():
        try:
            engines[task.name] = _build(task, place)()
        except Exception as error:
            skipped[task.name] = _reason(task, error)
    times: dict[str, dict[str, float]] = {name: {} for name in engines}

    def measure() -> None:
        for work in (EQUAL, MIXED):
            ways = {name: functools.partial(encode, batches[work]) for name, encode in engines.items()}
            found = samples(ways, rounds=effort.rounds, budget=12 * _BUDGET, rest=effort.least(REST))
            for name, values in found.items():
                times[name][work] = statistics.median(values)

    with torch.inference_mode():
        _, load = with_load(measure)
    return {"times": times, "skipped": skipped, "load": load}


def _seconds(encode: Encode, batches: list[Batch], effort: Effort) -> float:
    """Median seconds of all batches, over blocks of calls."""

    def every() -> None:
        for batch in batches:
            encode(batch)

    every()  # of new shapes
    start = time.perf_counter()
    every()
    repeats = max(1, int(effort.least(_BLOCK) / (time.perf_counter() - start)))
    values = samples({"": every}, rounds=effort.rounds, budget=effort.least(_BUDGET), repeats=repeats)
    return statistics.median(values[""])


def embeddings(encode: Encode, works: Works) -> Tensor:
    """Means over the real tokens of each text, (T, E) in float64."""
    return torch.cat([_means(encode(works[name][0]), works[name][0]) for name in (EQUAL, MIXED, SHORT, LONG)])


def _means(states: Tensor, batch: Batch) -> Tensor:
    real = states.double().masked_fill(~batch.real[..., None], 0)  # (B, L, E)
    return real.sum(1) / batch.mask.sum(1, keepdim=True)  # (B, E)


def lines(effort: Effort) -> Iterator[Line]:
    for model in MODELS:
        for task in tasks_of(model, effort):
            yield Line(task.name, functools.partial(alone, task, effort))
    yield Line(IN_TURN, functools.partial(in_turn, effort))


RUNTIMES = ("transformers", "onnxruntime", "openvino", "nncf", "ctranslate2")
texts, pictures = standings.texts, standings.pictures
BENCHMARK = Benchmark("engines", __doc__, lines, texts, minutes=60, peers=RUNTIMES, wrong=standings.wrong)

if __name__ == "__main__":
    BENCHMARK.main()
