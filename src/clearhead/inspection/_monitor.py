"""`monitor`: a few numbers about a model's attention, from one training step in a hundred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._call.naming import remember_names
from .._checks import module, number, shown, size
from .._statistics.arguments import require_names
from .._torch_private import in_backward, is_compiled
from ..errors import ArgumentError, DTypeError, RecordError, in_words_of
from ._alarms import PerHead, entropy_collapse, logit_growth
from ._record import record

#: Takes the step and {name: value}.
Scalars = Callable[[int, dict[str, float]], object]

#: Statistics with one number per head, and which head is the worst.
_WORST: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": torch.argmin,
    "max_logit": torch.argmax,
    "raw_max_logit": torch.argmax,
    "sink": torch.argmax,
    "confidence": torch.argmax,
}


class ScalarWriter(Protocol):
    """What has TensorBoard's method for scalars, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int, /) -> object:
        """Write one number of one step."""
        ...


class monitor:
    """Watch the attention of a model while it trains: one step in `every` is measured, the others run as ever.

    A step is one call of the model in training mode; the first is measured, then every `every`-th. A measured call runs
    under `clearhead.record`, which sees what `record` sees: Clearhead's modules, models after `clearhead.upgrade`,
    transformers models on ``clearhead`` or ``sdpa``. On the other steps one forward pre-hook on the model counts, and
    nothing else is attached to it. Outputs and gradients are not changed.

    For every attention module and statistic there are two scalars,

    * ``attention/<module>/<statistic>``, the mean over its heads, and
    * ``attention/<module>/<statistic>/head_<h>`` of its worst head h: lowest entropy, highest of the others.

    Of statistics per query the mean over the batch's counted queries is meant; padding that the call's
    ``attention_mask`` or ``src_key_padding_mask`` marks is not counted. A model after
    `clearhead.distributed.tensor_parallel` or `context_parallel` is monitored in every process: each gets the same
    scalars, of all heads and the whole sequence.

    Args:
        model: whose calls are steps and whose submodules name the scalars. Of a model that `torch.compile` returned,
            give that one: its measured steps run uncompiled.
        every: how many steps from one measured step to the next. Default 100.
        statistics: any of ``entropy``, ``max_logit``, ``raw_max_logit``, ``sink`` and ``confidence``; see
            `attention_statistics`. Default the first, the second and ``sink``.
        to: gets the scalars of each measured step, before the call of the model returns: a function of the step (from
            0) and ``{name: value}``, or anything with ``add_scalar(name, value, step)``, such as TensorBoard's
            ``SummaryWriter``.
        entropy_threshold: nats under which the mean entropy of a head counts as collapsed. Default 0.01.
        logit_threshold: logit above which those of a head have grown too far. Default 100.

    Warns:
        AttentionHealthWarning: once if heads' entropy is below its threshold: attention so concentrated goes with
            unstable training (Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse",
            2023). Once if heads' ``max_logit`` or ``raw_max_logit`` is above its own: logits that grow make weights
            almost one-hot, and the loss diverges (Dehghani et al., "Scaling Vision Transformers to 22 Billion
            Parameters", 2023). Only what is among `statistics` is looked at. The papers give no
            thresholds; 100 is that of QK-Clip (Kimi Team, "Kimi K2", 2025).
        UnseenAttentionWarning: as `record`, at the first measured step.

    Raises:
        DTypeError, ArgumentError: for arguments that mean nothing, and for a model that was compiled in place.
        RecordError: from the first measured step, if no attention was seen; nothing is left on the model then.

    Example:
        >>> import torch, clearhead
        >>> model = torch.nn.Sequential(clearhead.MultiHeadAttention(12, 3))
        >>> def show(step, values):
        ...     print(step, *values)
        >>> with clearhead.monitor(model, every=2, statistics=("entropy",), to=show):
        ...     for _ in range(3):
        ...         _ = model(torch.zeros(2, 5, 12))
        0 attention/0/entropy attention/0/entropy/head_0
        2 attention/0/entropy attention/0/entropy/head_0
    """

    def __init__(
        self,
        model: nn.Module,
        every: int = 100,
        statistics: Sequence[str] = ("entropy", "max_logit", "sink"),
        *,
        to: Scalars | ScalarWriter,
        entropy_threshold: float = 0.01,
        logit_threshold: float = 100.0,
    ) -> None:
        self._model = _uncompiled(module("model", model))
        self._every = size("every", every)
        self._statistics = _checked(statistics)
        self._give = receiver(to)
        entropy_threshold = number("entropy_threshold", entropy_threshold, "nats ≥ 0", lambda x: x >= 0)
        logit_threshold = number("logit_threshold", logit_threshold, "a logit > 0", lambda x: x > 0)
        self._alarms = (entropy_collapse(entropy_threshold), logit_growth(logit_threshold))
        remember_names(self._model)
        self._steps = 0
        self._measured: tuple[int, record] | None = None
        self._ends: list[RemovableHandle] = []
        self._hook = model.register_forward_pre_hook(_RootHook(self), with_kwargs=True)

    def remove(self) -> None:
        """Stop watching; nothing is left on the model. A second time does nothing."""
        self._close()
        self._hook.remove()

    def __enter__(self) -> monitor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.remove()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call of the model that begins, and record it if its turn has come."""
        self._close()  # after KeyboardInterrupt modules run no hooks
        if not self._model.training or in_backward():  # where activation checkpointing repeats calls
            return
        step, self._steps = self._steps, self._steps + 1
        if step % self._every:
            return
        recording = record(self._model, self._statistics)
        recording.start_inside(args, kwargs)
        self._measured = (step, recording)
        _measuring.append(self)
        self._ends = [
            self._model.register_forward_hook(self._after),
            self._model.register_forward_hook(self._after_error, always_call=True),
        ]

    def _after(self, *_: object) -> None:
        if self._measured is None:
            return
        step, recording = self._measured
        self._close()
        if step == 0:
            try:
                recording.report_unseen()
            except RecordError as error:
                self.remove()
                raise RecordError(
                    str(in_words_of(error, {"record": "monitor"})).replace(
                        "record model._orig_mod", "monitor what torch.compile(model) returned"
                    )
                ) from None
        heads = _per_head(recording, self._statistics)
        values = _scalars(heads)
        if values:
            self._give(step, values)
        attending = {
            name.removeprefix("_orig_mod.")
            for name, calls in recording.items()
            if any(call.key_length > 1 for call in calls)
        }
        for alarm in self._alarms:
            alarm.look(step, {key: numbers for key, numbers in heads.items() if key[0] in attending})

    def _close(self) -> None:
        for handle in self._ends:
            handle.remove()
        self._ends = []
        self._stop()

    def _stop(self) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            _measuring.remove(self)
            measured[1].stop()

    def _after_error(self, *_: object) -> None:
        """Stop recording, and so do the other monitors of the model: only its last hook may change its hooks."""
        together = [other for other in _measuring if other._model is self._model]
        if together and together[-1] is self:
            for other in reversed(together):
                other._stop()


#: Monitors in the middle of a measured step, in the order in which they began.
_measuring: list[monitor] = []


class _RootHook:
    """The forward pre-hook of a monitored model; copies of the model, in memory or on disk, are not monitored."""

    def __init__(self, watching: monitor | None) -> None:
        self._watching = watching

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._watching is not None:
            self._watching.before(args, kwargs)

    def __reduce__(self) -> tuple[type[_RootHook], tuple[None]]:
        return (_RootHook, (None,))


def _per_head(recording: record, statistics: Sequence[str]) -> PerHead:
    """What was recorded of modules in which any counted query saw a key."""
    summary = recording.summary()
    return {
        (name.removeprefix("_orig_mod."), statistic): summary[statistic][name].double().cpu()
        for name, calls in recording.items()
        if any(call.sees_any for call in calls)
        for statistic in statistics
    }


def _scalars(heads: PerHead) -> dict[str, float]:
    values: dict[str, float] = {}
    for (name, statistic), numbers in heads.items():
        scalar = "/".join(part for part in ("attention", name, statistic) if part)
        head = int(_WORST[statistic](numbers))
        values[scalar] = float(numbers.mean())
        values[f"{scalar}/head_{head}"] = float(numbers[head])
    return values


def _uncompiled(model: nn.Module) -> nn.Module:
    """Raise for a model whose hooks run inside a graph, where calls cannot be observed."""
    if is_compiled(model):
        raise ArgumentError(
            "model",
            expected="a model that is not compiled in place",
            got="one after model.compile()",
            fix="Train and monitor what torch.compile(model) returns.",
        )
    return model


def _checked(statistics: Sequence[str]) -> tuple[str, ...]:
    names = require_names(statistics, has_value=True)
    others = [name for name in names if name not in _WORST]
    if others or not names:
        raise ArgumentError(
            "statistics",
            expected=f"names among {', '.join(_WORST)}, which have one number per head",
            got=", ".join(map(repr, others)) or "none",
            fix="clearhead.record gives every statistic.",
        )
    return names


def receiver(to: object) -> Scalars:
    """What gets the scalars, as a function.

    Raises:
        DTypeError: for anything that does not take them.
    """
    add_scalar: Any = getattr(to, "add_scalar", None)
    if isinstance(to, type) or not (callable(to) or callable(add_scalar)):
        expected = "a function (step, {name: value}), or something with add_scalar"
        raise DTypeError("to", expected=expected, got=shown(to))
    if not callable(add_scalar):
        return cast(Scalars, to)

    def write(step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            add_scalar(name, value, step)

    return write
