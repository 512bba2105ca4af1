"""Encoders of transformers after `clearhead.upgrade(model, unpad=True)`, beside other ways to run them on a CPU.

    python -m benchmarks.encoders [--only PATTERN] [--rounds 5] [--docs]

32 texts of 96 tokens, and 32 texts of mixed lengths, 42 % of whose padded batch is real, in float32 and bfloat16,
through MiniLM (its trained weights) and a BERT-base of random ones. Peers are exported, converted or compiled from the
same loaded model. "Clearhead" is the model upgraded with ``unpad=True``, "Clearhead, padded" without. Results are
compared at real tokens. The time to the first batch counts from the loaded model: conversion, compilation, one batch.
Quick parts: ``--only "MiniLM, float32"``, ``--only training``, ``--only upgrade --rounds 3``.
"""

from __future__ import annotations

import copy
import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import nn

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.comparing import (
    OURS,
    Case,
    Contest,
    Result,
    TimedCase,
    enter,
    lines_of,
    markdown,
    read_results,
    scale_difference,
    wrong_results,
)
from benchmarks.comparing.load import with_load
from benchmarks.encoders.batches import BATCHES, EQUAL, FEW, MIXED, TEXTS, Batch
from benchmarks.encoders.converted import Encode
from benchmarks.encoders.models import DTYPES, load_model
from benchmarks.encoders.peers import PADDED, PEERS, SDPA, TRAINABLE, Eager, quiet
from benchmarks.figures import Figures
from benchmarks.peers.work import Outputs, Unsupported, Way
from benchmarks.writing import milliseconds, percent, ratio

T = TypeVar("T")
MODELS = ("MiniLM", "BERT-base")
#: Relative to the largest entry; peers approximate GELU and round in other places.
TOLERANCES = {"float32": 2e-4, "bfloat16": 1e-1}
#: What runs the loaded model itself: neither exported nor compiled.
EAGER = (OURS, PADDED, SDPA)


def all_cases(effort: Effort) -> list[Case]:
    """Every line of the tables; a model's first batches come before its speed, so that each peer is built once."""
    peers, trainable = _taking_part(PEERS, effort), _taking_part(TRAINABLE, effort)
    batches = {name: Batch.of(lengths) for name, lengths in (FEW if effort.smallest else BATCHES).items()}
    cases: list[Case] = [UpgradeCase("upgrade itself", name) for name in MODELS]
    for name in MODELS:
        for dtype in DTYPES:
            model = functools.partial(_model, name, dtype, effort.smallest)
            built = _Built(model, peers)
            section = "time to the first batch"
            cases.append(FirstBatchCase(section, f"{name}, {dtype}", built, batches[MIXED]))
            for batch, given in batches.items():
                prepare = functools.partial(_contest, built, given)
                case = f"{name}, {dtype}, {batch}"
                cases.append(TimedCase("forward", case, prepare, "texts/s", TOLERANCES[dtype], rate_scale=1.0))
    for dropout in (0.0, 0.1):
        for batch, given in batches.items():
            prepare = functools.partial(_training, dropout, given, trainable)
            case = f"MiniLM, float32, dropout {dropout}, {batch}"
            alike: dict[str, Any] = {"tolerance": 1e-3}
            if dropout:
                # The distribution of three short texts is a wide one.
                alike = {"tolerance": 3.0 if effort.smallest else 0.3, "difference": scale_difference}
            section = "training step (forward + backward)"
            cases.append(TimedCase(section, case, prepare, "texts/s", rate_scale=1.0, **alike))
    return cases


def _taking_part(ways: dict[str, T], effort: Effort) -> dict[str, T]:
    return {name: way for name, way in ways.items() if effort.peers or name in EAGER}


_model = functools.cache(load_model)


@final
class _Built:
    """Peers of one model, built when they are first needed.

    Args:
        model: gives the loaded model.
        peers: ways to run it, by name.
    """

    def __init__(self, model: Callable[[], nn.Module], peers: dict[str, Callable[[nn.Module], Encode]]) -> None:
        self.model = model
        self.peers = peers
        self._ways: dict[str, Encode] = {}
        self._reasons: dict[str, Unsupported] = {}

    def get(self, name: str) -> Encode:
        if name in self._reasons:
            raise self._reasons[name]
        if name not in self._ways:
            try:
                self._ways[name] = self.peers[name](self.model())
            except Exception as error:  # of the peer's exporter or converter
                self._reasons[name] = Unsupported.because_of(error)
                raise self._reasons[name] from error
        return self._ways[name]


def _contest(built: _Built, batch: Batch) -> Contest:
    contest = Contest()
    for name in built.peers:
        enter(contest, name, lambda name=name: _way(built.get(name), batch), len(batch.ids))
    return contest


def _way(encode: Encode, batch: Batch) -> Way:
    real = batch.real

    def run() -> Outputs:
        with torch.inference_mode():
            return (encode(batch)[real].float().clone(),)  # (T, E)

    return run


def _training(dropout: float, batch: Batch, peers: dict[str, Callable[[nn.Module], Eager]]) -> Contest:
    contest = Contest()
    for name, peer in peers.items():
        enter(contest, name, lambda peer=peer: _step(peer, dropout, batch), len(batch.ids))
    return contest


def _step(peer: Callable[[nn.Module], Eager], dropout: float, batch: Batch) -> Way:
    """Mean embeddings of the texts against a random direction: forward, loss, backward."""
    model = copy.deepcopy(_model("MiniLM", "float32")).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
    model.pooler = None
    encode = peer(model)
    owner: nn.Module = getattr(encode.model, "_orig_mod", encode.model)
    parts = [owner.get_parameter(each) for each in COMPARED]
    direction = torch.randn(384, generator=torch.Generator().manual_seed(0))

    def run() -> Outputs:
        for parameter in owner.parameters():
            parameter.grad = None
        states = encode(batch) * batch.mask[..., None]
        (states.sum(1) / batch.mask.sum(1, keepdim=True) @ direction).mean().backward()
        return tuple(parameter.grad for parameter in parts if parameter.grad is not None)

    return run


#: Gradients that are compared.
COMPARED = (
    "embeddings.word_embeddings.weight",
    "encoder.layer.0.attention.self.value.weight",
    "encoder.layer.5.intermediate.dense.weight",
)


@final
@dataclass(frozen=True)
class UpgradeCase(Case):
    """How long `clearhead.upgrade` takes, and that no parameter is copied."""

    section: str
    name: str

    def measure(self, effort: Effort) -> Result:
        times: list[float] = []
        for _ in range(max(3, effort.rounds)):
            model = copy.deepcopy(_model(self.name, "float32", effort.smallest))
            places = [parameter.data_ptr() for parameter in model.parameters()]
            start = time.perf_counter()
            clearhead.upgrade(model, unpad=True)
            times.append(time.perf_counter() - start)
            if places != [parameter.data_ptr() for parameter in model.parameters()]:
                raise RuntimeError("clearhead.upgrade has copied a parameter")
        return Result(self.section, self.name, "ms", {OURS: statistics.median(times) * 1e3})


@final
@dataclass(frozen=True)
class FirstBatchCase(Case):
    """Milliseconds from the loaded model to the end of its first batch, once."""

    section: str
    name: str
    built: _Built
    batch: Batch

    def measure(self, effort: Effort) -> Result:
        self.built.model()  # loaded before the clock starts
        figures: dict[str, float] = {}
        contest = Contest()

        def all_of_them() -> None:
            for name in self.built.peers:
                start = time.perf_counter()
                enter(contest, name, lambda name=name: _way(self.built.get(name), self.batch))
                if name in contest.ways:
                    try:
                        contest.ways[name]()
                    except Exception as error:  # of the peer
                        if name == OURS:
                            raise
                        contest.skipped[name] = str(Unsupported.because_of(error))
                        continue
                    figures[name] = (time.perf_counter() - start) * 1e3

        _, load = with_load(all_of_them)
        return Result(self.section, self.name, "ms", figures, skipped=contest.skipped, load=load)


def lines(effort: Effort) -> list[Line]:
    return [Line(line.name, quiet()(line.measure)) for line in lines_of(all_cases(effort), effort)]


def texts(measured: Figures) -> dict[str, str]:
    results = {result.work: result for result in read_results(measured)}
    found = {"tables": markdown(list(results.values()))}
    for model, prefix in (("MiniLM", ""), ("BERT-base", "base-")):
        for batch, what in ((MIXED, "mixed"), (EQUAL, "equal")):
            result = results[f"forward: {model}, float32, {batch}"]
            runtimes = {name: each for name, each in result.ratios.items() if name not in EAGER}
            best = min(runtimes, key=lambda name: runtimes[name], default=SDPA)
            found |= {
                f"{prefix}{what}": ratio(result.ratios[SDPA]),
                f"{prefix}{what}-best": ratio(result.ratios[best]),
                f"{prefix}{what}-best-name": best,
            }
    found["base-equal-half"] = ratio(results[f"forward: BERT-base, bfloat16, {EQUAL}"].ratios[SDPA])
    for batch, what in ((MIXED, "train-mixed"), (EQUAL, "train-equal")):
        for dropout, ending in ((0.1, ""), (0.0, "-plain")):
            result = results[f"training step (forward + backward): MiniLM, float32, dropout {dropout}, {batch}"]
            found[what + ending] = ratio(result.ratios[SDPA])
    found["padding"] = percent(1 - sum(BATCHES[MIXED]) / (TEXTS * max(BATCHES[MIXED])))
    found |= _chance(results) | _half(results)
    found["upgrade"] = milliseconds(results["upgrade itself: MiniLM"].figures[OURS] / 1e3)
    found["first"] = milliseconds(results["time to the first batch: MiniLM, float32"].figures[OURS] / 1e3)
    return found


def _chance(results: dict[str, Result]) -> dict[str, str]:
    """The least and most ratio of two models that run the same code, because nothing is padded, in each dtype.

    And where the ratios to `sdpa` on equal lengths lie: below, within or above this range.
    """
    same: dict[str, list[float]] = {"float": [], "half": []}
    for work, result in results.items():
        if EQUAL in work and PADDED in result.ratios:
            same["half" if "bfloat16" in work else "float"].append(result.ratios[PADDED])
    ends = {"least": min, "most": max}
    found = {f"same-{end}-{kind}": ratio(pick(same[kind])) for end, pick in ends.items() for kind in same}
    for name, model, dtype, kind in (
        ("equal", "MiniLM", "float32", "float"),
        ("base-equal", "BERT-base", "float32", "float"),
        ("base-equal-half", "BERT-base", "bfloat16", "half"),
    ):
        found[f"{name}-place"] = _place(results[f"forward: {model}, {dtype}, {EQUAL}"].ratios[SDPA], same[kind])
    return found


def _place(value: float, chance: list[float]) -> str:
    """Where a ratio lies, as words of a sentence."""
    return "below" if value < min(chance) else "above" if value > max(chance) else "within"


def _half(results: dict[str, Result]) -> dict[str, str]:
    """The time of bfloat16 relative to float32: Clearhead's on mixed lengths, and the least and most of any runtime."""
    slower: dict[tuple[str, str, str], float] = {}
    for model in MODELS:
        for batch in BATCHES:
            half, full = (results[f"forward: {model}, {dtype}, {batch}"].figures for dtype in ("bfloat16", "float32"))
            slower |= {(model, batch, name): half[name] / full[name] for name in half.keys() & full.keys()}
    return {
        "bfloat16": ratio(slower["MiniLM", MIXED, OURS]),
        "base-bfloat16": ratio(slower["BERT-base", MIXED, OURS]),
        "bfloat16-least": ratio(min(slower.values())),
        "bfloat16-most": ratio(max(slower.values())),
    }


RUNTIMES = ("transformers", "onnxruntime", "openvino", "ctranslate2", "zentorch")
BENCHMARK = Benchmark("encoders", __doc__, lines, texts, minutes=11, peers=RUNTIMES, wrong=wrong_results)

if __name__ == "__main__":
    BENCHMARK.main()
