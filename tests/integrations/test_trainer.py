"""`AttentionMonitorCallback` in a `Trainer` that trains, and what its TensorBoard file then holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import clearhead
from clearhead.errors import ArgumentError
from clearhead.integrations.transformers import AttentionMonitorCallback
from tests.integrations.conftest import Rows

pytest.importorskip("accelerate")
# Of transformers and TensorBoard, about their own settings.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*logging_dir.*"),
    pytest.mark.filterwarnings("ignore:.*pin_memory.*:UserWarning"),
]

LENGTH, TEXTS = 7, 24
SIZES = {"vocab_size": 31, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 16}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
LAYERS = [f"bert.encoder.layer.{number}.attention.self" for number in range(2)]
NAMES = {f"attention/{layer}/{statistic}" for layer in LAYERS for statistic in ("entropy", "max_logit", "sink")}


def texts() -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(5, 31, (TEXTS, LENGTH))
    mask = torch.ones(TEXTS, LENGTH).long()
    mask[::2, -2:] = 0
    return [{"input_ids": i, "attention_mask": m, "labels": i[0] % 2} for i, m in zip(ids, mask, strict=True)]


def make_trainer(
    folder: Path, *callbacks: transformers.TrainerCallback, unpad: bool = False, **options: Any
) -> transformers.Trainer:
    torch.manual_seed(1)
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **NO_DROPOUT))
    model.set_attn_implementation("clearhead")
    if unpad:
        clearhead.upgrade(model, unpad=True)
    settings = {"report_to": "none", "save_strategy": "no", "logging_steps": 2, "disable_tqdm": True, "use_cpu": True}
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=1, **(settings | options)
    )
    return transformers.Trainer(model, arguments, train_dataset=texts(), callbacks=list(callbacks))


def means(values: dict[str, float]) -> set[str]:
    return {name for name in values if name.startswith("attention/") and "/head_" not in name}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of TensorBoard's own dependencies
def test_the_trainer_reports_them_where_it_reports_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    trainer = make_trainer(tmp_path, report_to="tensorboard", logging_steps=1)
    trainer.add_callback(AttentionMonitorCallback(every=4, to=trainer))
    trainer.train()
    (written,) = (path.parent for path in tmp_path.rglob("events.out.tfevents*"))
    events = EventAccumulator(str(written)).Reload()
    history = [entry for entry in trainer.state.log_history if means(entry)]
    assert [entry["step"] for entry in history] == [1, 5]
    for name in NAMES:
        read = {event.step: event.value for event in events.Scalars(f"train/{name}")}
        assert read == pytest.approx({entry["step"]: entry[name] for entry in history})
    assert [event.step for event in events.Scalars("train/loss")] == [1, 2, 3, 4, 5, 6]  # none is lost


def test_with_gradient_accumulation_forward_passes_are_counted_and_the_last_of_a_step_is_handed_on(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(tmp_path, AttentionMonitorCallback(every=2), gradient_accumulation_steps=3)
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if means(entry)]
    assert [entry["step"] for entry in entries] == [1, 2]
    for entry in entries:  # one mean and one worst head each
        assert sum("attention/" in name for name in entry) == 2 * len(NAMES)


def test_an_upgraded_model_learns_the_same_without_padding(tmp_path: Path, rows: Rows) -> None:
    losses = []
    for unpad in (False, True):
        trainer = make_trainer(tmp_path, unpad=unpad, logging_steps=1, learning_rate=1e-3)
        trainer.train()
        losses.append(torch.tensor([entry["loss"] for entry in trainer.state.log_history if "loss" in entry]))
    assert rows.batches[-1] == 1
    assert losses[0][-1] != losses[0][0]
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-3, atol=1e-4)


def test_after_a_training_that_failed_the_next_is_watched_once(tmp_path: Path) -> None:
    class Stop(transformers.TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise InterruptedError

    scalars: dict[int, dict[str, float]] = {}
    trainer = make_trainer(tmp_path, AttentionMonitorCallback(every=100, to=scalars.__setitem__), Stop())
    with pytest.raises(InterruptedError):
        trainer.train()
    trainer.remove_callback(Stop)
    trainer.train()
    assert list(scalars) == [1]
    assert means(scalars[1]) == NAMES
    assert all(not module._forward_pre_hooks for module in trainer.model.modules())


def test_a_compiled_training_is_refused_when_it_begins(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, AttentionMonitorCallback(), torch_compile=True, torch_compile_backend="eager")
    with pytest.raises(ArgumentError, match=r"^torch_compile: expected .* cannot be observed, got torch_compile=True"):
        trainer.train()
    assert all(not module._forward_pre_hooks for module in trainer.model.modules())
