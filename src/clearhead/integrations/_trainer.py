"""`AttentionMonitorCallback`: `clearhead.monitor` in the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..errors import ArgumentError
from ..inspection._monitor import monitor
from ..inspection._receiver import Scalars, ScalarWriter, receiver


class AttentionMonitorCallback(TrainerCallback):
    """Monitor the attention of a model that a transformers `Trainer` trains, as `clearhead.monitor` does.

    The model is monitored from the begin to the end of ``trainer.train()``, in the main process only. Scalars are
    written at the end of the optimizer's step, with the Trainer's ``global_step``. With gradient accumulation, `every`
    counts forward passes, and each step writes its last measurement.

    Args:
        every, statistics, entropy_threshold, logit_threshold: as for `clearhead.monitor`.
        to: as for `clearhead.monitor`, or a `Trainer`. The trainer logs the scalars with its losses, in
            ``trainer.state.log_history`` and where ``report_to`` sends them (TensorBoard, …). Make the trainer first,
            and pass the callback to ``trainer.add_callback``. Default only ``state.log_history``.

    Raises:
        ArgumentError: when training begins with ``torch_compile=True``.
        And warns: as `clearhead.monitor`.

    Example:
        >>> from clearhead.integrations.transformers import AttentionMonitorCallback
        >>> callback = AttentionMonitorCallback(every=50, statistics=("entropy",), to=print)
        >>> # Trainer(model, arguments, train_dataset=texts, callbacks=[callback]).train()
    """

    def __init__(
        self,
        every: int = 100,
        statistics: Sequence[str] = ("entropy", "max_logit", "sink"),
        *,
        to: Scalars | ScalarWriter | Any | None = None,
        entropy_threshold: float = 0.01,
        logit_threshold: float = 100.0,
    ) -> None:
        self._thresholds: dict[str, Any] = {"entropy_threshold": entropy_threshold, "logit_threshold": logit_threshold}
        self._every, self._statistics = every, statistics
        self._trainer: Any = to if _is_trainer(to) else None
        self._write = None if to is None or self._trainer is not None else receiver(to)
        self._scalars: dict[str, float] = {}
        self._monitor: monitor | None = None
        self._start(nn.Module()).remove()  # invalid arguments raise here, not when training begins

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Start the monitor."""
        self._stop()  # a training that ended with an error did not call `on_train_end`
        if args.torch_compile:
            expected = "TrainingArguments that leave the model uncompiled: calls in a graph cannot be observed"
            fix = "Leave it out, or train without this callback."
            raise ArgumentError("torch_compile", expected=expected, got="torch_compile=True", fix=fix)
        if state.is_world_process_zero:
            self._monitor = self._start(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Write the scalars of this step."""
        scalars, self._scalars = self._scalars, {}
        if not scalars:
            return
        if self._write is not None:
            self._write(state.global_step, scalars)
        elif self._trainer is None:
            state.log_history.append({**scalars, "epoch": state.epoch, "step": state.global_step})
        else:
            logs_loss = control.should_log
            self._trainer.log(scalars)
            control.should_log = logs_loss  # `log` resets it

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        """Remove the monitor from the model."""
        self._stop()

    def _start(self, model: nn.Module) -> monitor:
        return monitor(model, self._every, self._statistics, to=self._keep, **self._thresholds)

    def _keep(self, step: int, values: dict[str, float]) -> None:
        self._scalars = values

    def _stop(self) -> None:
        if self._monitor is not None:
            self._monitor.remove()
        self._monitor, self._scalars = None, {}


def _is_trainer(to: object) -> bool:
    return callable(getattr(to, "log", None)) and hasattr(to, "callback_handler") and not isinstance(to, type)
