"""A model of DeBERTa-v3-small's size after ``clearhead.upgrade``, beside transformers' own code.

    python -m benchmarks.encoders.deberta [--only PATTERN] [--rounds 5] [--docs]

Random weights, no dropout. Attention is the whole attention module of one layer, with its projections, forward and
backward; *projections* are its three products with parameters alone. Models run forward and backward. Peak memory is
that of a process of its own. Errors are those of the output and of the gradients of one attention module against
float64, relative to the largest number. The programs are timed in turn, by the wall clock.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

import clearhead
from benchmarks.command import Benchmark, Effort, Line
from benchmarks.figures import Figures, differing
from benchmarks.memory import growth_of_peak
from benchmarks.timing import interleaved
from benchmarks.writing import megabytes, milliseconds, ratio, table

THEIRS, OURS = "eager", "Clearhead"
LENGTHS = {512: 4, 2048: 1}  # and texts of this length
MEMORY, MIXED, TRAIN = "memory, L = 2,048", "16 texts of mixed length", "training, 16 texts of mixed length"

_ROUNDS_SECONDS = 60.0  #: after which no further round of a line starts
_TOLERANCE = 1e-5

Program = Callable[[], Any]


def model_of(effort: Effort, layers: int = 6) -> Any:
    from transformers import DebertaV2Config, DebertaV2Model

    width = effort.size(768, 24)
    torch.manual_seed(0)
    return DebertaV2Model(
        DebertaV2Config(
            vocab_size=effort.size(32_000, 100),
            hidden_size=width,
            num_attention_heads=effort.size(12, 3),
            num_hidden_layers=effort.size(layers, 1),
            intermediate_size=4 * width,
            relative_attention=True,
            position_buckets=256,
            share_att_key=True,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            position_biased_input=False,
            type_vocab_size=0,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    ).eval()


def models_of(effort: Effort, layers: int = 6) -> dict[str, Any]:
    models = {name: model_of(effort, layers) for name in (THEIRS, OURS)}
    clearhead.upgrade(models[OURS], unpad=True)
    return models


def ids_of(model: Any, count: int, length: int) -> Tensor:
    return torch.randint(3, model.config.vocab_size, (count, length))


def attention(length: int, count: int, effort: Effort) -> dict[str, float]:
    """Seconds of one attention module, forward and backward, and its errors against float64."""
    models, length = models_of(effort, layers=1), effort.size(length)
    states = torch.randn(count, length, models[THEIRS].config.hidden_size)
    programs = {name: _attention_step(model, states) for name, model in models.items()}
    module = models[THEIRS].encoder.layer[0].attention.self
    programs["projections"] = _step([module.query_proj, module.key_proj, module.value_proj], states)
    times = interleaved(programs, rounds=effort.rounds, budget=_ROUNDS_SECONDS)
    one = states[:1]
    expected = _attention_step(model_of(effort, layers=1).double(), one.double())()
    errors = [
        float((actual - exact).abs().max() / exact.abs().max())
        for exact, actual in zip(expected, _attention_step(models[OURS], one)(), strict=True)
    ]
    return times | {"difference": max(errors)}


def _attention_step(model: Any, states: Tensor) -> Callable[[], list[Tensor]]:
    """One forward and backward pass; its output, and the gradients of its input, projections and positions."""
    encoder, module = model.encoder, model.encoder.layer[0].attention.self
    leaf, positions = states.clone().requires_grad_(), encoder.get_rel_embedding().detach().requires_grad_()
    mask, relative = encoder.get_attention_mask(torch.ones(states.shape[:2])), encoder.get_rel_pos(states)
    direction = torch.linspace(-1, 1, states.numel(), dtype=states.dtype).view_as(states)
    projections = [each.weight for each in (module.query_proj, module.key_proj, module.value_proj)]

    def step() -> list[Tensor]:
        output = module(leaf, mask, relative_pos=relative, rel_embeddings=positions)[0]
        return [output.detach(), *torch.autograd.grad(output, [leaf, positions, *projections], direction)]

    return step


def _step(projections: list[Any], states: Tensor) -> Program:
    leaf = states.clone().requires_grad_()

    def step() -> None:
        outputs = [projection(leaf) for projection in projections]
        torch.autograd.grad(outputs, [leaf, *(each.weight for each in projections)], outputs)

    return step


def _training(model: Any, **given: Tensor) -> Program:
    def step() -> None:
        model.zero_grad()
        model(**given).last_hidden_state.square().mean().backward()

    return step


def _inference(model: Any, **given: Tensor) -> Program:
    @torch.no_grad()
    def run() -> Tensor:
        return model(**given).last_hidden_state

    return run


def whole(length: int, count: int, effort: Effort) -> dict[str, float]:
    models = models_of(effort)
    given = {"input_ids": ids_of(models[THEIRS], count, effort.size(length))}
    times = interleaved(
        {name: _training(model, **given) for name, model in models.items()},
        rounds=effort.rounds,
        budget=_ROUNDS_SECONDS,
    )
    theirs, ours = (_inference(model, **given)() for model in models.values())
    return times | {"difference": float((theirs - ours).abs().max() / theirs.abs().max())}


def mixed(training: bool, effort: Effort) -> dict[str, float]:
    """16 texts of 5 to 512 tokens; most are short."""
    models, length, draw = models_of(effort), effort.size(512), random.Random(0)
    lengths = [min(length, 5 + int(draw.lognormvariate(4.0, 1.0))) for _ in range(effort.size(15, 3))] + [length]
    mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
    given = {"input_ids": ids_of(models[THEIRS], len(lengths), length) * mask, "attention_mask": mask}
    program = _training if training else _inference
    programs = {name: program(model, **given) for name, model in models.items()}
    times = interleaved(programs, rounds=effort.rounds, budget=_ROUNDS_SECONDS)
    theirs, ours = (_inference(model, **given)()[mask.bool()] for model in models.values())
    return times | {
        "difference": float((theirs - ours).abs().max() / theirs.abs().max()),
        "real": sum(lengths) / mask.numel(),
    }


def memory(effort: Effort) -> dict[str, float]:
    """Megabytes by which one forward and backward pass raises the peak."""
    return {name: effort.in_a_process(_peak, name, effort) for name in (THEIRS, OURS)} | {"difference": 0.0}


def _peak(name: str, effort: Effort) -> float:
    if not effort.smallest:  # in a process of its own
        torch.set_num_threads(2)
    model = models_of(effort, layers=2)[name]
    _training(model, input_ids=ids_of(model, 1, 16))()
    return growth_of_peak(_training(model, input_ids=ids_of(model, 1, effort.size(2048))))[0]


def lines(effort: Effort) -> Iterator[Line]:
    for length, count in LENGTHS.items():
        yield Line(f"attention, L = {length:,}", lambda size=(length, count): attention(*size, effort))
    for length, count in LENGTHS.items():
        yield Line(f"model, L = {length:,}", lambda size=(length, count): whole(*size, effort))
    yield Line(MIXED, lambda: mixed(False, effort))
    yield Line(TRAIN, lambda: mixed(True, effort))
    yield Line(MEMORY, lambda: memory(effort))


def texts(figures: Figures) -> dict[str, str]:
    rows = [
        (name, *map(megabytes if name == MEMORY else milliseconds, (found[THEIRS], found[OURS])), _gain(found))
        for name, found in figures.items()
    ]
    return {
        "table": table(("DeBERTa-v3-small's size", "transformers", "Clearhead", "ratio"), rows),
        "short": _gain(figures["model, L = 512"]),
        "long": _gain(figures["model, L = 2,048"]),
        "mixed": _gain(figures[MIXED]),
        "memory": _gain(figures[MEMORY]),
    }


def _gain(found: dict[str, float]) -> str:
    least = 1e-9  # the smallest work may need no memory
    return ratio(found[THEIRS] / max(found[OURS], least))


def wrong(figures: Figures) -> list[str]:
    """Outputs and gradients that differ by more than rounding."""
    return differing(figures, lambda _: _TOLERANCE)


BENCHMARK = Benchmark("deberta", __doc__, lines, texts, minutes=12, peers=("transformers",), wrong=wrong)

if __name__ == "__main__":
    BENCHMARK.main()
