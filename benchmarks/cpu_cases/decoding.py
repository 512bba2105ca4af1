"""One query row over many keys, bound by the rate of reading memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from benchmarks.comparing import OURS, Contest, TimedCase, enter
from benchmarks.peers import PEERS
from benchmarks.peers.work import AttentionWork, Operands, Way, draw

from .attention import kernel_of, ours
from .ceilings import READERS, cache_bytes, in_turn

__all__ = ["decoding_cases"]

#: Keys and values of 256 MiB together.
WORK = AttentionWork(1, key_length=16384, heads=32)
BYTES = 2.0 * WORK.heads * WORK.keys * WORK.head_dim * 4


def decoding_cases() -> Iterator[TimedCase]:
    yield TimedCase("decoding, one row", "keys and values of 256 MiB", _contest, "GB/s")


def _contest() -> Contest:
    # Every call takes another set of operands than those before, and none is still in the cache when its turn comes.
    sets = [draw(WORK) for _ in range(1 + int(2 * cache_bytes() // BYTES + 1))]
    contest = Contest(kernel=kernel_of(WORK, sets[0]))

    def in_all(peer: Callable[[AttentionWork, Operands], Way]) -> Callable[[], Way]:
        first = len(contest.ways) % len(sets)
        return lambda: in_turn([peer(WORK, operands) for operands in sets], first)

    enter(contest, OURS, in_all(ours), BYTES)
    for name, peer in PEERS.items():
        enter(contest, name, in_all(peer), BYTES)
    for name, read in READERS.items():
        enter(contest, name, in_all(lambda _, operands, read=read: read(operands.key, operands.value)), BYTES)
    return contest
