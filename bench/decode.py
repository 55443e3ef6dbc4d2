"""Decode speed of all contestants, round by round, with plain reads before and after every measurement of kogc."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from engines import Contestant, Kogc, Run
from kogc.artifact import Artifact
from kogc.ceiling import read_rounds
from kogc.traffic import traffic

#: Plain reads on each side of a measurement; the median of both sides together counts.
READS = 3


@dataclass
class Rounds:
    """What every round gave: runs by contestant, and per round the plain read's bytes per second and kogc's share of it."""

    runs: dict[str, list[Run]] = field(default_factory=dict)
    reads: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    bytes_per_token: int = 0
    loads: list[float] = field(default_factory=list)

    def tok_s(self, name: str) -> float:
        """The median speed of a contestant."""
        return statistics.median(run.tok_s for run in self.runs[name])

    def ratio(self, name: str) -> float:
        """The median over rounds of how many times faster kogc was than ``name`` in the same round."""
        return statistics.median(ours.tok_s / theirs.tok_s for ours, theirs in zip(self.runs[Kogc.name], self.runs[name]))


def measure(
    artifact: Artifact, contestants: Sequence[Contestant], prompt: Sequence[int], tokens: int, rounds: int, tell: Callable[[str], None]
) -> Rounds:
    """``rounds`` rounds in which everybody continues ``prompt`` by ``tokens`` tokens; one more before them does not count."""
    result = Rounds({each.name: [] for each in contestants})
    stream, threads = artifact.section("stream"), artifact.manifest.workers
    middle = len(prompt) + tokens // 2
    result.bytes_per_token = stream.nbytes + traffic(artifact.program, middle).kv
    for each in contestants:
        tell(f"warming up {each.name}")
        each.run(prompt, 4)
    for index in range(rounds):
        tell(f"round {index + 1} of {rounds}")
        result.loads.append(os.getloadavg()[0])
        for each in contestants:
            if each.name != Kogc.name:
                result.runs[each.name].append(each.run(prompt, tokens))
                continue
            before = read_rounds(stream, threads, READS)
            run = each.run(prompt, tokens)
            read = statistics.median(before + read_rounds(stream, threads, READS))
            result.runs[each.name].append(run)
            result.reads.append(read)
            result.shares.append(run.tok_s * result.bytes_per_token / read)
    return result
