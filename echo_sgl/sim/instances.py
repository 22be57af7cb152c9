"""How work is dealt to instances that are alike: requests by chance, a job in stretches."""

from __future__ import annotations

import random
from array import array
from dataclasses import replace

from echo_sgl.sim.workload import Trace


def instance_shares(trace: Trace, num_instances: int, *, seed: int = 0) -> list[Trace]:
    """The requests of each instance: of any round of so many one each, in an order by chance.

    Every n-th request instead would give all the long ones to one instance where long and short
    take turns. The same seed deals the same.
    """
    if num_instances == 1:
        return [trace]
    rng, places = random.Random(seed), list(range(num_instances))
    numbers = [array("q") for _ in places]
    for start in range(0, len(trace), num_instances):
        rng.shuffle(places)
        in_round = range(start, min(start + num_instances, len(trace)))
        for number, place in zip(in_round, places, strict=False):
            numbers[place].append(number)
    return [trace.pick(one) for one in numbers]


def line_share(trace: Trace, num_instances: int) -> Trace:
    """The first stretch of a job, in order of prompts: lines that share a prefix stay together."""
    blocks = trace.blocks
    if num_instances == 1:
        return trace
    numbers = list(range(len(trace)))
    if blocks is not None:
        numbers.sort(key=lambda i: blocks[i])
    share = trace.pick(numbers[: -(-len(numbers) // num_instances)])
    return replace(share, at_s=array("d", sorted(share.at_s)))
