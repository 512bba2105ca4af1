"""Encoders of transformers after `clearhead.upgrade(model, unpad=True)`, beside other ways to run them on a CPU.

    python -m benchmarks.encoders [--only PATTERN] [--rounds 9] [--json FILE] [--docs]
    python -m benchmarks.encoders --show FILE [FILE ...] [--docs]

32 texts of 96 tokens, and 32 texts of mixed lengths, 42 % of whose padded batch is real, in float32 and bfloat16,
through MiniLM (its trained weights) and a BERT-base of random ones. Peers are exported, converted or compiled from the
same loaded model. "Clearhead" is the model upgraded with ``unpad=True``, "Clearhead, padded" without. Results are
compared at real tokens. The time to the first batch counts from the loaded model: conversion, compilation, one batch.
Quick parts: ``--only "MiniLM, float32"``, ``--only training``, ``--only upgrade --rounds 3``.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
import statistics
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, final

import torch
import transformers
from torch import nn

import clearhead
from benchmarks.comparing import OURS, Case, Contest, Result, TimedCase, enter
from benchmarks.comparing.command import comparison_options, fail_if_wrong, measure_or_show
from benchmarks.comparing.contest import scale_difference
from benchmarks.comparing.load import with_load
from benchmarks.comparing.page import fill
from benchmarks.comparing.tables import markdown
from benchmarks.encoder_peers import PEERS, TRAINABLE, Batch, Encode
from benchmarks.peers.work import Outputs, Unsupported, Way
from benchmarks.timing import console, machine
from clearhead.cli._demo import default_model_path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "encoders.json"
PAGE = ROOT / "docs" / "encoders.md"
TEXTS = 32
MODELS = ("MiniLM", "BERT-base")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
#: Relative to the largest entry; peers approximate GELU and round in other places.
TOLERANCES = {"float32": 2e-4, "bfloat16": 1e-1}


def mixed_lengths(longest: int = 256, share: float = 0.42) -> list[int]:
    """Lengths of texts that are `share` of their padded batch: many short ones, few long ones, one of `longest`."""
    places = torch.linspace(0, 1, TEXTS, dtype=torch.float64)
    # The mean of p^k over [0, 1] is 1 / (k + 1).
    lengths = (places.pow(1 / share - 1) * (longest - 4) + 4).round().int().tolist()
    return [lengths[(7 * index) % TEXTS] for index in range(TEXTS)]  # in no order


BATCHES = {"32 × 96 tokens": [96] * TEXTS, "32 texts of mixed length": mixed_lengths()}
MIXED = "32 texts of mixed length"


def all_cases() -> list[Case]:
    """Every line of the tables; a model's first batches come before its speed, so that each peer is built once."""
    cases: list[Case] = [UpgradeCase("upgrade itself", name) for name in MODELS]
    for name in MODELS:
        for dtype in DTYPES:
            cases.append(FirstBatchCase("time to the first batch", f"{name}, {dtype}", name, dtype))
            for batch in BATCHES:
                prepare = functools.partial(_contest, name, dtype, batch)
                case = f"{name}, {dtype}, {batch}"
                cases.append(TimedCase("forward", case, prepare, "texts/s", TOLERANCES[dtype], rate_scale=1.0))
    for dropout in (0.0, 0.1):
        for batch in BATCHES:
            prepare = functools.partial(_training, dropout, batch)
            case = f"MiniLM, float32, dropout {dropout}, {batch}"
            alike: dict[str, Any] = {"tolerance": 1e-3}
            if dropout:
                alike = {"tolerance": 0.3, "difference": scale_difference}
            section = "training step (forward + backward)"
            cases.append(TimedCase(section, case, prepare, "texts/s", rate_scale=1.0, **alike))
    return cases


@functools.cache
def _model(name: str, dtype: str) -> nn.Module:
    if name == "MiniLM":
        model = transformers.AutoModel.from_pretrained(str(default_model_path()), attn_implementation="sdpa")
    else:
        torch.manual_seed(0)
        config = transformers.BertConfig(attn_implementation="sdpa")
        config.position_embedding_type = "absolute"  # as in files of models; CTranslate2's converter reads it
        model = transformers.BertModel(config)
    return model.eval().to(DTYPES[dtype])


@final
class _Built:
    """Peers of one model, built when they are first needed, and the seconds that it took."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._ways: dict[str, Encode] = {}
        self._reasons: dict[str, Exception] = {}

    def get(self, name: str) -> Encode:
        if name in self._reasons:
            raise self._reasons[name]
        if name not in self._ways:
            try:
                self._ways[name] = PEERS[name](self._model)
            except (Unsupported, ModuleNotFoundError) as reason:
                self._reasons[name] = reason
                raise
            except Exception as error:  # of the peer's exporter or converter
                text = " ".join(str(error).split())[:140]
                self._reasons[name] = Unsupported(f"{type(error).__name__}: {text}")
                raise self._reasons[name] from error
        return self._ways[name]


@functools.cache
def _built(name: str, dtype: str) -> _Built:
    return _Built(_model(name, dtype))


def _contest(model: str, dtype: str, batch: str) -> Contest:
    given = Batch.of(BATCHES[batch])
    contest = Contest()
    for name in PEERS:
        enter(contest, name, lambda name=name: _way(_built(model, dtype).get(name), given), len(BATCHES[batch]))
    return contest


def _way(encode: Encode, batch: Batch) -> Way:
    real = batch.real

    def run() -> Outputs:
        with torch.inference_mode():
            return (encode(batch)[real].float().clone(),)  # (T, E)

    return run


def _training(dropout: float, batch: str) -> Contest:
    given = Batch.of(BATCHES[batch])
    contest = Contest()
    for name in TRAINABLE:
        enter(contest, name, lambda name=name: _step(name, dropout, given), len(BATCHES[batch]))
    return contest


def _step(name: str, dropout: float, batch: Batch) -> Way:
    """Mean embeddings of the texts against a random direction: forward, loss, backward."""
    model = copy.deepcopy(_model("MiniLM", "float32")).train()
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = dropout
    model.pooler = None
    encode = TRAINABLE[name](model)
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

    def measure(self, rounds: int) -> Result:
        times: list[float] = []
        for _ in range(max(3, rounds)):
            model = copy.deepcopy(_model(self.name, "float32"))
            places = [parameter.data_ptr() for parameter in model.parameters()]
            start = time.perf_counter()
            clearhead.upgrade(model, unpad=True)
            times.append(time.perf_counter() - start)
            if places != [parameter.data_ptr() for parameter in model.parameters()]:
                raise SystemExit("clearhead.upgrade has copied a parameter")
        return Result(self.section, self.name, "ms", {OURS: statistics.median(times) * 1e3})


@final
@dataclass(frozen=True)
class FirstBatchCase(Case):
    """Seconds from the loaded model to the end of its first batch, once."""

    section: str
    name: str
    model: str
    dtype: str

    def measure(self, rounds: int) -> Result:
        _built.cache_clear()
        _model(self.model, self.dtype)  # loaded before the clock starts
        batch = Batch.of(BATCHES[MIXED])
        figures: dict[str, float] = {}
        contest = Contest()

        def all_of_them() -> None:
            for name in PEERS:
                start = time.perf_counter()
                enter(contest, name, lambda name=name: _way(_built(self.model, self.dtype).get(name), batch))
                if name in contest.ways:
                    contest.ways[name]()
                    figures[name] = (time.perf_counter() - start) * 1e3

        _, load = with_load(all_of_them)
        return Result(self.section, self.name, "ms", figures, skipped=contest.skipped, load=load)


def main() -> None:
    writes = f"write the tables into {PAGE.relative_to(ROOT)}"
    parser = comparison_options(__doc__.splitlines()[0], rounds=9, results=RESULTS, writes=writes)
    chosen = parser.parse_args()
    os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # the first batch is one on a machine that never saw it
    torch._dynamo.config.recompile_limit = 64  # one for each model, dtype and batch
    warnings.simplefilter("ignore")  # of exporters and converters
    logging.disable(logging.WARNING)
    where, results = measure_or_show(chosen, all_cases(), machine_and_peers(), RESULTS)
    if chosen.docs:
        fill(PAGE, "encoders", markdown(where, results))
        console.print(f"written: {PAGE}")
    fail_if_wrong(results)


def machine_and_peers() -> str:
    """What the figures were measured on, and the versions of the peers that are installed."""
    versions = [f"transformers {transformers.__version__}"]
    for name in ("onnxruntime", "openvino", "ctranslate2", "zentorch"):
        with suppress(PackageNotFoundError):
            versions.append(f"{name} {version(name)}")
    return ", ".join([machine(), *versions])


if __name__ == "__main__":
    main()
