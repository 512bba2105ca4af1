"""Calls of packed sequences: one call for each sequence, or one call whose mask hides the other sequences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import cast

from ..masks._base import Mask
from ..masks._bound import bind
from ..masks._combined import all_of
from ..masks._grid import Grid, Offset
from ..masks._part import part_of
from .call import Call
from .sequences import PackedSequences, within_sequences


def each_sequence(call: Call) -> Iterator[Call]:
    """The sequences of a call that has `sequences`, as calls of their own.

    Each is an item of a batch to dropout, so that they drop what a kernel drops that computes the call at once.
    """
    mask = call.mask
    # Rules about positions count within a sequence as they do within a call; tensors line up with all sequences.
    is_cut = mask is not None and not mask.has_no_sizes
    # Its positions take a pass over all tokens.
    all_sequences = bind(mask, as_one_sequence(call).grid) if is_cut else None
    start = call.offset or Offset(call.query.shape[1])
    for number, (queries, keys) in enumerate(cast(PackedSequences, call.sequences).slices()):
        operands = call.query[:, :, queries], call.key[:, :, keys], call.value[:, :, keys]
        sequence_mask = mask
        if all_sequences is not None:
            place = Offset(all_sequences.grid.num_heads, 0, queries.start, keys.start)
            bounds = [(each, cast(Mask, each.mask)) for each in all_sequences.parts]
            sequence_mask = all_of([mask if mask.has_no_sizes else part_of(each, place) for each, mask in bounds])
        sequence = call.changed(*operands, mask=sequence_mask, sequences=None, offset=start._replace(item=number))
        if is_cut:  # its place keeps the plan from serving another call, so that no cache needs it
            sequence.plan_key = None
        yield sequence


def as_one_sequence(call: Call) -> Call:
    """A call of packed sequences as one of T × Tk scores whose mask hides other sequences. It is made once per call."""
    sequences = call.sequences
    if sequences is None:
        return call
    if call.as_one_ is None:
        # Rules about positions count within a sequence, whose first token is at 0.
        call.as_one_ = call.changed(
            mask=within_sequences(sequences, call.mask),
            query_positions=sequences.query_positions[None],
            key_positions=sequences.key_positions[None],
            sequences=None,
        )
    return call.as_one_


def in_one_call(call: Call) -> Call:
    """`as_one_sequence` for a kernel.

    Between tokens of one sequence rows and columns differ as positions do. Without positions a mask that compares them
    is a band, and ALiBi a list of slopes.
    """
    sequences, one = cast(PackedSequences, call.sequences), as_one_sequence(call)
    if sequences.cu_seqlens_q is not sequences.cu_seqlens_k:
        return one
    rows = replace(one.grid, query_positions=None, key_positions=None)
    if not all(_needs_no_positions(part, rows) for part in (() if call.mask is None else call.mask.parts())):
        return one
    return one.changed(query_positions=None, key_positions=None)


def _needs_no_positions(mask: Mask, rows: Grid) -> bool:
    """Whether a mask compares positions, or lines up with rows and columns."""
    structure = mask.structure(rows)
    tensors = structure.exact and bool(structure.tensors or structure.biases)
    return mask.is_relative or structure.slopes is not None or tensors


def validate_mask_of_packed(call: Call) -> None:
    """Raise unless the mask, if any, fits the packed sequences of a call, and its values are valid."""
    if call.mask is not None and not call.mask.has_no_sizes:
        as_one_sequence(call).bound.validate()
