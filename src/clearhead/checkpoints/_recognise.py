"""Finding attention in a state dict by its names: which naming, at which prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from difflib import SequenceMatcher

from torch import Tensor

from .._checks import text
from ..errors import CheckpointError
from ._finding import Finding, describe
from ._namings import Naming
from ._unpack import Projections, unpack


def recognise(
    tensors: Mapping[str, Tensor], namings: tuple[Naming, ...], prefix: str = ""
) -> tuple[Finding, Projections]:
    """Find the one attention block under `prefix`, and its projections as views of the tensors.

    Raises:
        CheckpointError: if there is none, more than one, or one whose tensors do not fit together.
    """
    prefix = text("prefix", prefix)
    prefix = prefix if not prefix or prefix.endswith(".") else f"{prefix}."
    places = {(at, naming): None for naming in namings for at in _places(tensors, naming) if at.startswith(prefix)}
    prefixes = list(dict.fromkeys(at for at, _ in places))
    if not prefixes:
        raise _nothing_found(tensors, namings, prefix)
    if prefix in prefixes:
        prefixes = [prefix]
    if len(prefixes) > 1:
        raise CheckpointError(
            "source",
            expected="one attention block",
            got=f"{len(prefixes)}, under " + ", ".join(repr(at) for at in sorted(prefixes, key=_natural)),
            fix="Choose one with prefix=.",
        )
    return _only_fit(tensors, [naming for at, naming in places if at == prefixes[0]], prefixes[0])


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key under which layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _places(tensors: Mapping[str, Tensor], naming: Naming) -> Iterable[str]:
    """The prefixes under which every weight of a naming is there."""
    anchor = naming.weights[0].key
    for key in tensors:
        if _ends(key, anchor):
            prefix = key.removesuffix(anchor)
            if all(prefix + entry.key in tensors for entry in naming.weights):
                yield prefix


def _ends(name: str, key: str) -> bool:
    return name == key or name.endswith(f".{key}")


def _only_fit(tensors: Mapping[str, Tensor], namings: list[Naming], prefix: str) -> tuple[Finding, Projections]:
    """Where several namings have the same keys, as GPT-2's and nanoGPT's, the shapes decide."""
    fits: list[tuple[Finding, Projections]] = []
    errors: list[CheckpointError] = []
    for naming in namings:
        try:
            projections = unpack(tensors, naming, prefix)
        except CheckpointError as error:
            errors.append(error)
        else:
            fits.append((describe(tensors, naming, prefix, projections), projections))
    if len(fits) > 1:
        raise CheckpointError(
            "source",
            expected="one naming",
            got=f"keys under {prefix!r} that fit " + ", ".join(found.naming.name for found, _ in fits),
            fix="Choose one with naming=.",
        )
    if not fits:
        raise errors[0]
    return fits[0]


def _nothing_found(tensors: Mapping[str, Tensor], namings: tuple[Naming, ...], prefix: str) -> CheckpointError:
    """Describe what is there, what is missing, and which naming comes nearest."""
    names = [name.removeprefix(prefix) for name in tensors if name.startswith(prefix)]
    elsewhere = sorted({at for naming in namings for at in _places(tensors, naming)}, key=_natural)
    fix = f"There is attention under {', '.join(repr(at) for at in elsewhere)}. " if elsewhere else ""
    if names:
        nearest = max(namings, key=lambda naming: _nearness(naming, names))
        at = _best_place(nearest, names)
        missing = (at + key for key in nearest.keys if at + key not in names)
        fix += (
            f"The nearest known naming is {nearest.name} ({', '.join(nearest.keys)}); missing for it: "
            f"{', '.join(missing)}. Projections of other names are given as "
            '{"query": linear, "key": linear, "value": linear, "output": linear}.'
        )
    return CheckpointError(
        "source",
        expected="the names of an attention block" + (f" under {prefix!r}" if prefix else ""),
        got=", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "no names",
        fix=fix.strip(),
    )


def _nearness(naming: Naming, names: list[str]) -> tuple[int, int, float]:
    """How many keys of a naming are there, how specific these are, and how much the others look like what is there."""
    at = _best_place(naming, names)
    there = [key for key in naming.keys if at + key in names]
    likeness = sum(_likeness(key, names) for key in naming.keys) / len(naming.keys)
    return len(there), sum(key.count(".") for key in there), likeness


def _best_place(naming: Naming, names: list[str]) -> str:
    """The prefix under which most keys of a naming are."""
    places = Counter(name.removesuffix(key) for key in naming.keys for name in names if _ends(name, key))
    return max(places, key=lambda place: places[place], default="")


def _likeness(key: str, names: list[str]) -> float:
    lengths = (key.count(".") + 1, key.count(".") + 2)
    endings = {".".join(name.split(".")[-length:]).lower() for name in names for length in lengths}
    return max((SequenceMatcher(None, key.lower(), ending).ratio() for ending in endings), default=0.0)
