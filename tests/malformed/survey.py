"""Make many malformed calls and print what is wrong with them, by callable, argument, exception and message.

python -m tests.malformed.survey 20000 --seed 1 --only attention
"""

from __future__ import annotations

import argparse
import random
import re
import time
from collections import Counter

import torch

from tests.malformed import cases  # noqa: F401  (registers them)
from tests.malformed.calls import CASES, Outcome, malformed, outcome_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("calls", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a regular expression of names")
    parser.add_argument("--by-place", action="store_true", help="by the line that raises instead")
    parser.add_argument("--most", type=int, default=60, help="how many kinds of problem to print")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in CASES if re.search(chosen.only, name) for _ in range(CASES[name].weight)]
    buckets: Counter[tuple[str, ...]] = Counter()
    examples: dict[tuple[str, ...], Outcome] = {}
    tally: Counter[str] = Counter()
    spent: Counter[str] = Counter()
    start = time.perf_counter()
    for number in range(chosen.calls):
        torch.manual_seed(number)
        before = time.perf_counter()
        attempt = malformed(random.Random(f"{chosen.seed} {number}"), names)
        outcome = outcome_of(attempt)
        spent[attempt.case.name] += time.perf_counter() - before
        tally["unclear" if outcome.problem else "refused" if outcome.message else "computed"] += 1
        if outcome.problem:
            key = (outcome.case, "+".join(outcome.changed), outcome.problem, outcome.message[:60])
            if chosen.by_place:
                key = ("", outcome.detail.split("\n")[0], outcome.problem, "")
            buckets[key] += 1
            examples[key] = outcome
    for key, count in buckets.most_common(chosen.most):
        print(f"{count:5}  {key[0]}({key[1]})  {key[2]}: {key[3]!r}\n      {examples[key].detail}")
    print(f"{dict(tally)} of {chosen.calls} in {time.perf_counter() - start:.0f} s, {len(buckets)} kinds unclear")
    print("slowest:", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spent.most_common(6)))


if __name__ == "__main__":
    main()
