"""A valid call of a public callable, the same with arguments replaced, and the judgement of what comes of it."""

from __future__ import annotations

import inspect
import random
import re
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from clearhead.caches import Cache
from clearhead.errors import ClearheadError
from clearhead.masks import Mask
from tests.malformed.values import OwnError, any_value, changed_tensor
from tests.support.snapshots import snapshot, surroundings


class Call:
    """A valid call of a function with arguments by name."""

    def __init__(self, function: Callable[..., Any], /, **arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def reached(self) -> list[Any]:
        """Modules, caches, masks and tensors that the call reads or belongs to."""
        closed = [cell.cell_contents for cell in getattr(self.function, "__closure__", None) or ()]
        result = [self.function, getattr(self.function, "__self__", None), *closed, *self.arguments.values()]
        result += [item for one in result if isinstance(one, (list, tuple)) for item in one]
        return [item for item in result if isinstance(item, (nn.Module, Cache, Mask, Tensor))]


@dataclass(frozen=True)
class Case:
    """A public callable.

    Args:
        name: of the callable.
        make: makes a fresh valid call.
        weight: how often it is drawn, relative to others.
        aliases: for arguments which messages call by other names.
        arguments: their names, where the signature does not list them.
    """

    name: str
    make: Callable[[], Call]
    weight: int = 4
    aliases: dict[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()


_SEED = 20170612
#: Values that can each be right and not fit together: the error may then be said of the other argument.
_FITTING = (Tensor, np.ndarray, Mask, Cache, int, str, list, tuple, dict, nn.Module)
CASES: dict[str, Case] = {}


def case(name: str, /, *, weight: int = 4, arguments: tuple[str, ...] = (), **aliases: str | tuple[str, ...]) -> Any:
    """Register a maker of valid calls under the name of what it calls."""

    def registered(make: Callable[[], Call]) -> Callable[[], Call]:
        known = {key: (value,) if isinstance(value, str) else value for key, value in aliases.items()}
        CASES[name] = Case(name, make, weight, known, arguments)
        return make

    return registered


@dataclass(frozen=True)
class Malformed:
    """A case's call with some of its arguments replaced."""

    case: Case
    call: Call
    changed: tuple[str, ...]
    signature_changed: bool

    def __repr__(self) -> str:
        shown = {name: self.call.arguments[name] for name in self.changed if name in self.call.arguments}
        return f"{self.case.name} with {', '.join(f'{name}={_shown(value)}' for name, value in shown.items())}"


def malformed(rng: random.Random, names: list[str]) -> Malformed:
    """A call of one of the named cases with one or two arguments replaced, dropped or added."""
    known = CASES[rng.choice(names)]
    torch.manual_seed(_SEED)
    call = known.make()
    parameters = _parameters(known, call)
    changed: list[str] = []
    signature_changed = False
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(parameters or ["unexpected"])
        changed.append(name)
        given = call.arguments.get(name)
        if rng.random() < 0.04:
            signature_changed = True
            call.arguments.pop(name, None)
        elif isinstance(given, Tensor) and rng.random() < 0.6:
            call.arguments[name] = changed_tensor(rng, given)
        else:
            call.arguments[name] = any_value(rng)
    if not parameters or rng.random() < 0.02:
        signature_changed = True
        call.arguments["unexpected"] = any_value(rng)
        changed.append("unexpected")
    return Malformed(known, call, tuple(dict.fromkeys(changed)), signature_changed)


def problem_of(attempt: Malformed) -> str:
    """The problem of a call that neither computes nor names the argument, or that changes what it reaches; else empty.

    A call that is refused leaves what it was given, and what surrounds it, as it was.
    """
    with warnings.catch_warnings(action="ignore"):
        reached, around = attempt.call.reached(), surroundings()
        before = [snapshot(item) for item in reached]
    problem, refused = _outcome(attempt)
    with warnings.catch_warnings(action="ignore"):
        if not problem and refused and [snapshot(item) for item in reached] != before:
            problem = "a refused call changed what it reaches"
    return problem or ("" if surroundings() == around else "it changed what surrounds it")


def _outcome(attempt: Malformed) -> tuple[str, bool]:
    """A problem, and whether the call raised."""
    given = attempt.call.arguments
    conflict = any(isinstance(given.get(name), _FITTING) for name in attempt.changed)
    about = {*attempt.changed, *given} if conflict else set(attempt.changed)
    named = {alias for name in about for alias in (name, *attempt.case.aliases.get(name, ()))}
    with warnings.catch_warnings(record=True, action="always") as warned:
        try:
            attempt.call.function(**attempt.call.arguments)
        except ClearheadError as error:
            message = str(error)
            is_named = any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", message) for name in named)
            return "" if is_named else f"it does not name the argument: {_raised(error)}", True
        except OwnError:
            return "", True
        except Exception as error:
            is_binding = isinstance(error, TypeError) and re.search(_BINDING, str(error))
            return "" if attempt.signature_changed and is_binding else _raised(error), True
    for warning in warned:
        if not any(re.search(known, str(warning.message)) for known in _WARNINGS):
            return f"{warning.filename}:{warning.lineno} warns {warning.category.__name__}: {warning.message}", False
    return "", False


_BINDING = r"missing \d+ required|unexpected keyword argument|positional arguments? but|multiple values for argument"
#: Warnings that are meant: the record's own about what it cannot see, and PyTorch's about layers of size 0.
_WARNINGS = (r"^record: ", r"Initializing zero-element tensors is a no-op")


def _raised(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/clearhead/" in frame.filename] or list(frames)
    places = (f"{frame.filename.rsplit('clearhead/', 1)[-1]}:{frame.lineno}" for frame in reversed(ours[-3:]))
    return f"{type(error).__name__}: {error}\n{' < '.join(places)}"


def _parameters(known: Case, call: Call) -> list[str]:
    if known.arguments:
        return list(known.arguments)
    function = call.function.forward if isinstance(call.function, nn.Module) else call.function
    try:
        found = inspect.signature(function).parameters.values()
    except ValueError:
        return list(call.arguments)
    return [p.name for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        shape = "nested" if value.is_nested else tuple(value.shape)
        learned = ", requires_grad" if value.requires_grad else ""
        return f"{type(value).__name__}({shape}, {value.dtype}, {value.layout}, {value.device}{learned})"
    try:
        return repr(value)[:150]
    except Exception as error:
        return f"{type(value).__name__} ({type(error).__name__} in its repr)"
