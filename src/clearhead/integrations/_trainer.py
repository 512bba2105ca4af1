"""`AttentionMonitorCallback`: `clearhead.monitor` in the `Trainer` of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers.trainer_callback import TrainerCallback, TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from ..errors import ArgumentError
from ..inspection._monitor import Scalars, ScalarWriter, monitor, receiver


class AttentionMonitorCallback(TrainerCallback):
    """Watch the attention of a model that a transformers `Trainer` trains, as `clearhead.monitor` does.

    The model is watched from the begin to the end of ``trainer.train()``, in the main process only. Scalars are handed
    on at the end of the optimizer's step, with the Trainer's ``global_step``; with gradient accumulation `every` counts
    the forward passes, and the last that was measured in a step is handed on.

    Args:
        every, statistics, entropy_threshold, logit_threshold: as for `clearhead.monitor`.
        to: as for `clearhead.monitor`; or a `Trainer`, whose ``log`` gets the scalars, so that they are wherever its
            losses are: in what ``report_to`` names (TensorBoard, …) and in ``trainer.state.log_history``. It is made
            before the callback, which then comes in with ``trainer.add_callback``. Default: ``state.log_history``
            alone.

    Raises:
        ArgumentError: when training begins with ``torch_compile=True``.
        And warns: what `clearhead.monitor` does.

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
        self._thresholds = {"entropy_threshold": entropy_threshold, "logit_threshold": logit_threshold}
        self._every, self._statistics = every, statistics
        self._trainer: Any = to if _is_trainer(to) else None
        self._give = None if to is None or self._trainer is not None else receiver(to)
        self._found: dict[str, float] = {}
        self._watching: monitor | None = None
        self._watch(nn.Module()).remove()  # arguments that mean nothing are refused here, not when training begins

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Begin to watch the model."""
        self._stop()  # a training that an error ended does not say so
        if args.torch_compile:
            raise ArgumentError(
                "torch_compile",
                expected="TrainingArguments that leave the model uncompiled: calls in a graph cannot be observed",
                got="torch_compile=True",
                fix="Leave it out, or train without this callback.",
            )
        if state.is_world_process_zero:
            self._watching = self._watch(kwargs["model"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Hand on what was measured in this step."""
        found, self._found = self._found, {}
        if not found:
            return
        if self._give is not None:
            self._give(state.global_step, found)
        elif self._trainer is None:
            state.log_history.append({**found, "epoch": state.epoch, "step": state.global_step})
        else:
            logs_loss = control.should_log
            self._trainer.log(found)
            control.should_log = logs_loss  # `log` takes it for done

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Leave nothing on the model."""
        self._stop()

    def _watch(self, model: nn.Module) -> monitor:
        return monitor(model, self._every, self._statistics, to=self._keep, **self._thresholds)

    def _keep(self, step: int, values: dict[str, float]) -> None:
        self._found = values

    def _stop(self) -> None:
        if self._watching is not None:
            self._watching.remove()
        self._watching, self._found = None, {}


def _is_trainer(to: object) -> bool:
    return callable(getattr(to, "log", None)) and hasattr(to, "callback_handler") and not isinstance(to, type)
