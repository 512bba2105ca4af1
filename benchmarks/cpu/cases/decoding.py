"""One query row over many keys, bound by the rate of reading memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from benchmarks.command import Effort
from benchmarks.comparing import OURS, Contest, TimedCase, enter
from benchmarks.peers.work import AttentionWork, Operands, Way, draw

from .attention import kernel_of, ours, peers
from .ceilings import READERS, cache_bytes, in_turn

__all__ = ["decoding_cases"]

#: Keys and values of 256 MiB together.
WORK = AttentionWork(1, key_length=16384, heads=32)


def decoding_cases(effort: Effort) -> Iterator[TimedCase]:
    yield TimedCase("decoding, one row", "keys and values of 256 MiB", lambda: _contest(effort), "GB/s")


def _contest(effort: Effort) -> Contest:
    work = replace(WORK, key_length=effort.size(WORK.keys))
    size = 2.0 * work.heads * work.keys * work.head_dim * 4
    # Every call takes another set of operands than those before, and none is still in the cache when its turn comes.
    sets = [draw(work) for _ in range(2 if effort.smallest else 2 + int(2 * cache_bytes() // size))]
    contest = Contest(kernel=kernel_of(work, sets[0]))

    def in_all(peer: Callable[[AttentionWork, Operands], Way]) -> Callable[[], Way]:
        first = len(contest.ways) % len(sets)
        return lambda: in_turn([peer(work, operands) for operands in sets], first)

    enter(contest, OURS, in_all(ours), size)
    for name, peer in peers(effort).items():
        enter(contest, name, in_all(peer), size)
    for name, read in READERS.items():
        enter(contest, name, in_all(lambda _, operands, read=read: read(operands.key, operands.value)), size)
    return contest
