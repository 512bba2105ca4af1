"""`monitor`: a few numbers about a model's attention during training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from .._call.naming import remember_names
from .._checks import module, number, shown, size
from .._statistics.arguments import require_names
from .._torch_private import in_backward, is_compiled
from ..errors import ArgumentError, DTypeError, RecordError, in_words_of
from ._alarms import PerHead, entropy_collapse, logit_growth
from ._census._during import TakeCensus, values_during
from ._receiver import Scalars, ScalarWriter, receiver
from ._record import record

#: Statistics with one number per head, and the choice of the worst head.
_WORST: dict[str, Callable[[Tensor], Tensor]] = {
    "entropy": torch.argmin,
    "max_logit": torch.argmax,
    "raw_max_logit": torch.argmax,
    "sink": torch.argmax,
    "confidence": torch.argmax,
}


class monitor:
    """Monitor the attention of a model in training: one step in `every` is measured.

    A step is one call of the model in training mode. The first is measured, then every `every`-th. A measured call runs
    under `clearhead.record`, and covers the same attention: Clearhead's modules, models after `clearhead.upgrade`,
    transformers models on ``clearhead`` or ``sdpa``. On the other steps the model only has one forward pre-hook, which
    counts. Outputs and gradients do not change.

    Each attention module and statistic has two scalars:

    * ``attention/<module>/<statistic>`` is the mean over the heads.
    * ``attention/<module>/<statistic>/head_<h>`` is the number of the worst head h, with the lowest entropy, or the
      highest value of another statistic.

    Per-query statistics are averaged over the counted queries of the batch. Padding in the ``attention_mask`` or
    ``src_key_padding_mask`` of the model's call does not count. After `clearhead.distributed.tensor_parallel` or
    `context_parallel`, every process monitors the model, and receives the same scalars of all heads and the full
    sequence.

    Args:
        model: the model. Its calls are the steps. The scalars have the names of its submodules. If `torch.compile`
            returned a compiled model, pass that one. Its measured steps run uncompiled.
        every: the number of steps from one measured step to the next. Default 100.
        statistics: any of ``entropy``, ``max_logit``, ``raw_max_logit``, ``sink`` and ``confidence`` (see
            `attention_statistics`). Default ``entropy``, ``max_logit`` and ``sink``.
        to: receives the scalars of each measured step, before the call of the model returns. On a CUDA device that
            would wait for the device, so there they come when the next call starts, or in `remove`. It is a function
            of the step (from 0) and ``{name: value}``, or has ``add_scalar(name, value, step)``, as TensorBoard's
            ``SummaryWriter``.
        census: a function of the model that takes a census, such as ``lambda model: clearhead.census(model, batches)``
            with the same few batches each time. Before each measured step it runs in evaluation mode, without drawing
            random numbers from the training's. Then `to` also receives, for each kind of head, ``census/<kind>`` (the
            largest mean of any head) and ``census/<kind>/heads`` (the number of heads of that kind), and the matplotlib
            figure ``census/heads``, which a writer gets by ``add_figure(name, figure, step)``. Other hooks of the
            model, and a record around the step, see these calls too. If the model is a data-parallel wrapper, take the
            census of the module inside. Default none.
        entropy_threshold: the mean entropy of a head, in nats, below which it has collapsed. Default 0.01.
        logit_threshold: the largest logit of a head that causes no warning. Default 100.

    Warns:
        AttentionHealthWarning: once if the entropy of heads is below its threshold. Such attention goes with unstable
            training (Zhai et al., "Stabilizing Transformer Training by Preventing Attention Entropy Collapse", 2023).
            Once if ``max_logit`` or ``raw_max_logit`` of heads is above its threshold. Growing logits make weights
            almost one-hot, and the loss diverges (Dehghani et al., "Scaling Vision Transformers to 22 Billion
            Parameters", 2023). Only the chosen `statistics` are checked. The papers contain no thresholds. QK-Clip uses
            100 (Kimi Team, "Kimi K2", 2025).
        UnseenAttentionWarning: as `record`, at the first measured step.

    Raises:
        DTypeError, ArgumentError: for invalid arguments, and for a model that was compiled in place.
        RecordError: from the first measured step, if no attention was recorded. The model then has no hooks left.

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
        census: TakeCensus | None = None,
        entropy_threshold: float = 0.01,
        logit_threshold: float = 100.0,
    ) -> None:
        self._model = module("model", model)
        if is_compiled(model):  # its hooks run inside a graph, where calls cannot be observed
            expected, got = "a model that is not compiled in place", "one after model.compile()"
            fix = "Train and monitor what torch.compile(model) returns."
            raise ArgumentError("model", expected=expected, got=got, fix=fix)
        self._every = size("every", every)
        self._statistics = _checked(statistics)
        if census is not None and not callable(census):
            raise DTypeError("census", expected="a function of the model that returns a Census", got=shown(census))
        self._write = receiver(to, figures=census is not None)
        self._take_census, self._census = census, dict[str, Any]()
        entropy_threshold = number("entropy_threshold", entropy_threshold, "nats ≥ 0", lambda x: x >= 0)
        logit_threshold = number("logit_threshold", logit_threshold, "a logit > 0", lambda x: x > 0)
        self._alarms = (entropy_collapse(entropy_threshold), logit_growth(logit_threshold))
        remember_names(self._model)
        self._steps = 0
        self._measured: tuple[int, record] | None = None
        self._pending: _HeadNumbers | None = None
        self._end_hooks: list[RemovableHandle] = []
        hook = model.register_forward_pre_hook
        self._hooks = [hook(_RootHook(self.before), with_kwargs=True)]
        if census is not None:  # before any monitor of the model records, which would record the census too
            self._hooks.append(hook(_RootHook(self.take_census), prepend=True, with_kwargs=True))

    def remove(self) -> None:
        """Stop monitoring, remove all hooks and pass the last scalars on. A second call has no effect."""
        self._close()
        for hook in self._hooks:
            hook.remove()
        self._deliver()

    def __enter__(self) -> monitor:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def take_census(self, *_: object) -> None:
        """Take the census of a step that will be measured."""
        if self._take_census is not None and self._counts and self._steps % self._every == 0:
            self._census = values_during(self._take_census, self._model)

    @property
    def _counts(self) -> bool:
        """Whether a call is a step. Activation checkpointing repeats calls in the backward pass."""
        return self._model.training and not in_backward()

    def before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Count a call of the model that starts, and record every `every`-th."""
        self._close()  # a step that KeyboardInterrupt ended ran no hooks
        self._deliver()
        if not self._counts:
            return
        step, self._steps = self._steps, self._steps + 1
        if step % self._every:
            return
        recording = record(self._model, self._statistics)
        recording.start_inside(args, kwargs)
        self._measured = (step, recording)
        _measuring.append(self)
        self._end_hooks = [
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
                text = str(in_words_of(error, {"record": "monitor"}))
                compiled = "monitor what torch.compile(model) returned"
                raise RecordError(text.replace("record model._orig_mod", compiled)) from None
        self._pending = _HeadNumbers(step, recording, self._statistics, self._census)
        if self._pending.copied is None:
            self._deliver()

    def _deliver(self) -> None:
        """Pass the numbers of the last measured step on, if it has not happened yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        values = _scalars(pending.read(1)) | pending.census
        if values:
            self._write(pending.step, values)
        heads = pending.read(2)  # with one key, the entropy is always 0
        for alarm in self._alarms:
            alarm.check(pending.step, heads)

    def _close(self) -> None:
        for handle in self._end_hooks:
            handle.remove()
        self._end_hooks = []
        self._stop()

    def _stop(self) -> None:
        measured, self._measured = self._measured, None
        if measured is not None:
            _measuring.remove(self)
            measured[1].stop()

    def _after_error(self, *_: object) -> None:
        """Stop all recordings of the model in the hook that runs last, because stopping one changes the hooks."""
        monitors = [measuring for measuring in _measuring if measuring._model is self._model]
        if monitors and monitors[-1] is self:
            for measuring in reversed(monitors):
                measuring._stop()


#: Monitors inside a measured step, in starting order.
_measuring: list[monitor] = []


class _RootHook:
    """The forward pre-hook of a monitored model. Copies of the model, in memory or on disk, are not monitored."""

    def __init__(self, begin: Callable[[tuple[Any, ...], dict[str, Any]], None] | None) -> None:
        self._begin = begin

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._begin is not None:
            self._begin(args, kwargs)

    def __reduce__(self) -> tuple[type[_RootHook], tuple[None]]:
        return (_RootHook, (None,))


class _HeadNumbers:
    """The recorded numbers of all modules in one tensor, which is copied from a device without waiting."""

    def __init__(self, step: int, recording: record, statistics: Sequence[str], census: dict[str, Any]) -> None:
        self.step, self.census = step, census
        self._statistics, summary = statistics, recording.summary()
        self._layers: list[tuple[str, int]] = []  # name, number of keys
        numbers: list[Tensor] = []
        for name, calls in recording.items():
            self._layers.append((name.removeprefix("_orig_mod."), max(call.key_length for call in calls)))
            sees_any = torch.stack([call.sees_any for call in calls]).any()
            numbers += [sees_any.double()[None], *(summary[each][name].double() for each in statistics)]
        device = next((each.device for each in numbers if each.is_cuda), torch.device("cpu"))
        joined = torch.cat([each.to(device) for each in numbers])
        self._sizes, self._numbers = list(map(len, numbers)), joined.to("cpu", non_blocking=joined.is_cuda)
        self.copied = torch.accelerator.current_stream(device).record_event() if joined.is_cuda else None

    def read(self, least_keys: int) -> PerHead:
        """The numbers of modules with a call of `least_keys` keys, and a counted query that sees a key."""
        if self.copied is not None:
            self.copied.synchronize()
        per_head: dict[tuple[str, str], Tensor] = {}
        numbers = iter(self._numbers.split(self._sizes))
        for name, keys in self._layers:
            sees_any, *heads = (next(numbers) for _ in range(1 + len(self._statistics)))
            if keys >= least_keys and bool(sees_any):
                per_head |= {(name, each): values for each, values in zip(self._statistics, heads, strict=True)}
        return per_head


def _scalars(heads: PerHead) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for (name, statistic), numbers in heads.items():
        scalar = "/".join(filter(None, ("attention", name, statistic)))
        head = int(_WORST[statistic](numbers))
        values[scalar] = float(numbers.mean())
        values[f"{scalar}/head_{head}"] = float(numbers[head])
    return values


def _checked(statistics: Sequence[str]) -> tuple[str, ...]:
    names = require_names(statistics, has_value=True)
    unsupported = [name for name in names if name not in _WORST]
    if unsupported or not names:
        expected = f"names among {', '.join(_WORST)}, which have one number per head"
        got = ", ".join(map(repr, unsupported)) or "none"
        raise ArgumentError("statistics", expected=expected, got=got, fix="clearhead.record gives every statistic.")
    return names
