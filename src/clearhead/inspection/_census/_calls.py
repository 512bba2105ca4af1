"""The masses of one call, and the queries that see a key of each; packed sequences as a padded batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..._call.call import Call, build_call
from ..._call.sequences import SameSequence
from ..._statistics.masses import Mass, Masses
from ...masks import lengths
from ...masks._combined import all_of
from ...masks._grid import Block
from ._metrics import Counted

_CELLS = 1 << 24  # of all masses that are looked at together


@dataclass(frozen=True)
class Tokens:
    """The tokens of one call.

    Args:
        keys: ids (B, S), or ``None`` if they are unknown.
        is_self: whether queries and keys are the same tokens.
        is_line: whether they follow each other in a line, as words do and patches of an image do not.
    """

    keys: Tensor | None
    is_self: bool = True
    is_line: bool = True


class Padded(NamedTuple):
    """A call as a padded batch.

    Args:
        call: the call.
        counted: bool (B, L), the queries that count, or ``None`` for all.
        places: int64 (B, L), the number of each query among the packed ones; ``None`` if they were not packed.
        key_places: the same of the keys.
    """

    call: Call
    counted: Tensor | None
    places: Tensor | None = None
    key_places: Tensor | None = None

    def tokens(self, ids: Tensor | None, *, of_keys: bool = False) -> Tensor | None:
        """Ids (B, L) of packed ids (1, T) or (T,)."""
        places = self.key_places if of_keys else self.places
        return ids if ids is None or places is None else ids.flatten()[places.clamp(min=0)]


def as_padded(call: Call, counted: Tensor | None) -> Padded:
    """A call of packed sequences as a padded batch, of which the fast forms compute statistics."""
    parts = [part.mask for part in call.bound.parts]
    same = next((mask for mask in parts if isinstance(mask, SameSequence)), None)
    others = [mask for mask in parts if mask is not same]
    if same is None or not all(mask is None or mask.has_no_sizes for mask in others):
        return Padded(call, counted)
    sequences = same.sequences
    sides = (sequences.cu_seqlens_q, sequences.cu_seqlens_k)
    places, key_places = (_places(starts) for starts in sides)
    mask = all_of([lengths(sides[1].diff(), sides[0].diff()), *others])
    query = call.query[0][:, places.clamp(min=0)].transpose(0, 1)  # (n, H, L, D)
    key, value = (x[0][:, key_places.clamp(min=0)].transpose(0, 1) for x in (call.key, call.value))
    real = places >= 0
    if counted is not None:
        real = real & counted[0][places.clamp(min=0)]
    padded = build_call(Call(query, key, value, mask, call.layout.scale, call.layout.softcap, call.sinks))
    return Padded(padded, real, places, key_places)


def _places(starts: Tensor) -> Tensor:
    """The numbers of the tokens of each sequence, padded with −1, (n, longest)."""
    every = torch.arange(int(starts[-1]), device=starts.device)
    return pad_sequence(list(every.split(starts.diff().tolist())), batch_first=True, padding_value=-1)


def masses_of(call: Call, tokens: Tokens, counted: Counted) -> Masses:
    """The masses in the order of `MASSES`, then pairs. Those that the tokens do not have are masses of no key."""
    none, ids, window = Mass(key_labels=torch.full((call.grid.key_length,), -1)), tokens.keys, counted.window
    line = tokens.is_self and tokens.is_line
    pairs = [
        none
        if ids is None or not tokens.is_self
        else Mass(None, None, _among(ids, pair.queries), _among(ids, pair.keys))
        for pair in counted.pairs
    ]
    return Masses(
        (
            none if ids is None else Mass(key_labels=_among(ids, counted.special)),
            Mass(key_labels=_first(call).int() - 1),
            Mass(-1, -1) if line else none,
            Mass(0, 0) if tokens.is_self else none,
            Mass(1, 1) if line else none,
            Mass(-window, window) if line else none,
            *(_repeats(ids) if line and ids is not None else (none, none, none)),
            *pairs,
        )
    )


def _among(tokens: Tensor, ids: tuple[int, ...]) -> Tensor:
    """0 for tokens that are among some ids, and −1 for others."""
    return torch.isin(tokens, torch.tensor(ids, dtype=torch.int64, device=tokens.device)).int() - 1


def _repeats(tokens: Tensor) -> tuple[Mass, Mass, Mass]:
    """The same token before and after, and the token after an earlier occurrence."""
    before = tokens.roll(1, dims=1)
    before[:, 0] = -1  # the first token follows none
    earlier, later = Mass(None, -1, tokens, tokens), Mass(1, None, tokens, tokens)
    return earlier, later, Mass(None, 0, tokens, before)


def _first(call: Call) -> Tensor:
    """The first key of each batch item that any query sees, bool (1 or B, S)."""
    seen = call.coverage.keys  # (1 or B, 1 or H, S, 1)
    if seen is None:
        return torch.arange(call.grid.key_length, device=call.query.device)[None] == 0
    marks = seen.any(1)[..., 0]
    return marks & (marks.cumsum(1) == 1)


def having(call: Call, masses: Masses) -> Tensor:
    """The queries that see a key of each mass, bool (M, 1 or B, 1 or H, L)."""
    grid = call.grid
    step = max(1, _CELLS // max(1, grid.batch_size * grid.key_length * len(masses.each)))
    chunks: list[Tensor] = []
    for start in range(0, grid.query_length, step):
        block = Block(grid, rows=slice(start, min(start + step, grid.query_length)))
        visible = call.bound.visible(block)
        cells = [inside if visible is None else inside & visible for inside in masses.inside(block)]
        shape = torch.broadcast_shapes(*(each.shape[:3] for each in cells))
        chunks.append(torch.stack([each.any(-1).expand(shape) for each in cells]))
    return torch.cat(chunks, -1) if chunks else torch.zeros(len(masses.each), 1, 1, 0, dtype=torch.bool)
