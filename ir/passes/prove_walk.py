"""Walking a sync plan through several steps with vector clocks: what each worker provably knows of every other.

Time is counted in ticks, two per stage instance: a worker has stored and published its prologue's outputs (1), and is
done with the stage, all reads and stores included (2). ``knows[a, b]`` is the latest tick of worker b that happened
before the present point of worker a; a wait takes over all that its producer knew when it published.

All workers run the same instances in the same order. So when every wait is for a value that its producer publishes in an
earlier instance, the first worker to be stuck would wait for one that is further ahead: nobody is ever stuck. The walk
therefore goes through the instances once, all workers together, and deadlock freedom is that one condition.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from kogc.ir.passes.exchange import Instance, Publish, Read, SyncPlan, Wait
from kogc.ir.passes.spans import PlanError, Spans, missing, needs

EARLY, DONE = 1, 2


@dataclass(frozen=True)
class _Source:
    """Where a write of a buffer comes from: instance number, tick at which it is stored, who publishes which elements."""

    instance: int
    tick: int
    publish: Publish
    publishers: np.ndarray  # bool [workers]


@dataclass(frozen=True)
class _Merge:
    """A wait prepared for the walk: distinct producer sets as flat lists, and which set each waiting worker has."""

    wait: Wait
    source: _Source
    flat: np.ndarray
    starts: np.ndarray
    readers: np.ndarray
    which: np.ndarray


@dataclass(frozen=True)
class _Heard:
    """Of the step under way, by (buffer, write): what each maker knew when it published, and who has waited for whom."""

    clocks: dict[tuple[str, int], np.ndarray]
    waited: dict[tuple[str, int], np.ndarray]


@dataclass(frozen=True)
class Overwrite:
    """A write into a slot whose old value somebody may still need: ``old`` and ``new`` are write numbers in their steps."""

    instance: Instance
    buffer: str
    step: int
    old: int
    new: int
    writer: int
    reader: int
    read_by: Instance

    def __str__(self) -> str:
        return (
            f"{self.instance}: worker {self.writer} overwrites write {self.old} of buffer {self.buffer} with write {self.new} in "
            f"step {self.step}, but worker {self.reader} may not be done with it in {self.read_by}: give the buffer more slots"
        )


class Walk:
    """A plan prepared once, to be walked through any sequence of steps with any number of slots."""

    def __init__(self, plan: SyncPlan, tagged: bool) -> None:
        """``tagged``: values carry their own flags and are seen one by one, as soon as a unit is finished. Then a value tells
        that its maker had done the stages before, and nothing of the other values it makes in the same stage."""
        self.plan, self.tagged = plan, tagged
        self.sources = _sources(plan)
        if tagged:
            _check_tags(plan)
        self.merges = [[self._merge(i, wait) for wait in instance.waits] for i, instance in enumerate(plan.instances)]
        self.needed = [[self._needed(i, read) for read in instance.reads] for i, instance in enumerate(plan.instances)]
        self.readers: dict[tuple[str, int], list[tuple[int, int, Spans]]] = {}
        for number, instance in enumerate(plan.instances):
            for publish in instance.publishes:
                at = self.sources[publish.buffer, publish.write]
                self.readers.setdefault((publish.buffer, publish.write), []).append((number, at.tick, publish.spans))
            for read in instance.reads:
                self.readers.setdefault((read.buffer, read.write), []).append((number, DONE, read.spans))
        self._meeting: dict[tuple[str, int, int], list[tuple[int, int, np.ndarray]]] = {}

    def run(self, heads: Sequence[bool], slots: dict[str, int], found: Callable[[Overwrite], None]) -> int:
        """Walk ``len(heads)`` steps from the first use on; ``heads[s]`` tells whether step s makes logits. Calls ``found``
        for every unsafe overwrite and returns the number of overwrites looked at. Raises PlanError for anything else."""
        workers = self.plan.workers
        knows = np.zeros((workers, workers), np.int32)
        checked = 0
        for step, head in enumerate(heads):
            heard = _Heard({}, {})
            for number, instance in enumerate(self.plan.instances):
                if head or not instance.head:
                    checked += self._instance(number, knows, heard, heads, step, slots, found)
        return checked

    def _instance(self, number: int, knows: np.ndarray, heard: _Heard, heads, step: int, slots, found) -> int:
        own = np.arange(self.plan.workers)
        now = DONE * (step * len(self.plan.instances) + number)
        knows[own, own] = now
        checked, before = 0, knows
        for early in (True, False):
            self._take(number, early, knows, heard)
            self._check_reads(number, early, knows, heard, step)
            # A tagged value may be out before its maker has waited for what other epilogues of the stage need.
            before = knows.copy() if early and self.tagged else before
            for publish in (p for p in self.plan.instances[number].publishes if p.early == early):
                checked += self._check_slot(number, publish, before, heads, step, slots, found)
                clock = before.copy()
                clock[own, own] = now + (0 if self.tagged else EARLY if early else DONE)
                heard.clocks[publish.buffer, publish.write] = clock
        knows[own, own] = now + DONE
        return checked

    # ── waits and reads ──

    def _merge(self, number: int, wait: Wait) -> _Merge | None:
        if not wait.producers.any():
            return None
        instance, source = self.plan.instances[number], self.sources.get((wait.buffer, wait.write))
        if source is None or source.instance >= number:
            who = int(np.flatnonzero(wait.producers.any(1))[0])
            raise PlanError(
                f"{instance}: worker {who} waits for write {wait.write} of buffer {wait.buffer}, which no earlier stage of the "
                "step publishes: it would wait forever. Correct the write number"
            )
        for reader, producer in np.argwhere(wait.producers & ~source.publishers)[:1]:
            raise PlanError(
                f"{instance}: worker {reader} waits for worker {producer} to publish write {wait.write} of buffer {wait.buffer}, "
                f"but it owns nothing of it in {self.plan.instances[source.instance]}: it would wait forever"
            )
        for reader, producer in np.argwhere(self.plan.unsent(source.publish, wait.producers))[:1]:
            raise PlanError(
                f"{instance}: worker {reader} waits for worker {producer} of another rank to publish write {wait.write} of buffer "
                f"{wait.buffer}, which {self.plan.instances[source.instance]} does not send to its rank: it would wait forever"
            )
        readers = np.flatnonzero(wait.producers.any(1))
        # A worker may count among its own producers without knowing more for it; then most rows are alike.
        rows = wait.producers[readers].copy()
        rows[np.arange(len(readers)), readers] = source.publishers[readers]
        _, first, which = np.unique(np.packbits(rows, axis=1), axis=0, return_index=True, return_inverse=True)
        sets = rows[first]
        starts = np.r_[0, np.cumsum(sets.sum(1))[:-1]]
        return _Merge(wait, source, np.nonzero(sets)[1], starts, readers, which.reshape(-1))

    def _take(self, number: int, early: bool, knows: np.ndarray, heard: _Heard) -> None:
        for merge in self.merges[number]:
            if merge is None or merge.wait.early != early:
                continue
            key = (merge.wait.buffer, merge.wait.write)
            if key not in heard.clocks:
                raise PlanError(
                    f"{self.plan.instances[number]} waits for write {key[1]} of buffer {key[0]}, which steps without logits "
                    "leave out: it would wait forever"
                )
            learned = np.maximum.reduceat(heard.clocks[key][merge.flat], merge.starts)
            knows[merge.readers] = np.maximum(knows[merge.readers], learned[merge.which])
            heard.waited[key] = heard.waited.get(key, False) | merge.wait.producers

    def _needed(self, number: int, read: Read) -> np.ndarray:
        """bool [reader, owner] of a read. Raises PlanError when it touches what nobody makes."""
        instance, source = self.plan.instances[number], self.sources.get((read.buffer, read.write))
        hole = 0 if source is None else missing(read.spans, source.publish.spans)
        if len(read.spans) and (source is None or source.instance >= number or hole is not None):
            worker, low, high = (int(getattr(read.spans, name)[hole or 0]) for name in ("worker", "low", "high"))
            raise PlanError(
                f"{instance}: worker {worker} reads elements {low} … {high} of buffer {read.buffer}, write {read.write}, which no "
                "earlier stage of the step publishes in full"
            )
        needed = needs(read.spans, source.publish.spans, self.plan.workers)
        for reader, owner in np.argwhere(self.plan.unsent(source.publish, needed))[:1]:
            raise PlanError(
                f"{instance}: worker {reader} reads write {read.write} of buffer {read.buffer}, whose part by worker {owner} lies in "
                f"another rank's memory: {self.plan.instances[source.instance]} does not send it"
            )
        return needed

    def _check_reads(self, number: int, early: bool, knows: np.ndarray, heard: _Heard, step: int) -> None:
        instance = self.plan.instances[number]
        for read, needed in zip(instance.reads, self.needed[number], strict=True):
            if read.early != early:
                continue
            key = (read.buffer, read.write)
            source = self.sources[key]
            stored = knows >= DONE * (step * len(self.plan.instances) + source.instance) + source.tick
            for reader, owner in np.argwhere(needed & ~(stored | heard.waited.get(key, False)))[:1]:
                raise PlanError(
                    f"{instance}: worker {reader} reads write {read.write} of buffer {read.buffer} in step {step}, but no wait "
                    f"covers what worker {owner} makes of it in {self.plan.instances[source.instance]}: let it await worker {owner}"
                )

    # ── overwrites ──

    def _check_slot(self, number, publish: Publish, knows, heads, step: int, slots: dict[str, int], found) -> int:
        buffer = self.plan.buffers[publish.buffer]
        if buffer.payload == "cache":  # carries no data; a position of a cache is written once in a launch
            return 0
        old = self._old_write(publish, heads, step, slots[publish.buffer])
        if old is None:
            return 0
        old_step, old_write = old
        for reader_number, tick, meet in self._meets(publish, old_write):
            if self.plan.instances[reader_number].head and not heads[old_step]:
                continue
            tick += DONE * (old_step * len(self.plan.instances) + reader_number)
            for reader, writer in np.argwhere(meet & (knows.T < tick))[:1]:
                instance, user = self.plan.instances[number], self.plan.instances[reader_number]
                found(Overwrite(instance, publish.buffer, step, old_write, publish.write, int(writer), int(reader), user))
                return 1
        return 1

    def _old_write(self, publish: Publish, heads, step: int, slots: int) -> tuple[int, int] | None:
        """(step, write) of the value that lies in the slot, or None on first use."""
        per_step = self.plan.buffers[publish.buffer].writes_per_step
        index = step * per_step + publish.write - slots
        while index >= 0:
            old_step, old_write = divmod(index, per_step)
            source = self.sources.get((publish.buffer, old_write))
            if source and (heads[old_step] or not self.plan.instances[source.instance].head):
                return old_step, old_write
            index -= slots
        return None

    def _meets(self, publish: Publish, old_write: int) -> list[tuple[int, int, np.ndarray]]:
        """(instance, tick, bool [user, writer]) of everybody who made or reads elements that ``publish`` replaces."""
        key = (publish.buffer, old_write, publish.write)
        if key not in self._meeting:
            users = self.readers.get((publish.buffer, old_write), [])
            self._meeting[key] = [(n, tick, needs(spans, publish.spans, self.plan.workers)) for n, tick, spans in users]
        return self._meeting[key]


def _sources(plan: SyncPlan) -> dict[tuple[str, int], _Source]:
    """Every write of the step. Raises PlanError unless each is made once, within the step's count and in rising order:
    a flag that holds the highest write published so far means nothing otherwise."""
    sources: dict[tuple[str, int], _Source] = {}
    latest: dict[str, int] = {}
    for number, instance in enumerate(plan.instances):
        for publish in sorted(instance.publishes, key=lambda p: not p.early):
            buffer = plan.buffers[publish.buffer]
            before = latest.get(buffer.name, -1)
            if not before < publish.write < buffer.writes_per_step:
                raise PlanError(
                    f"{instance} publishes write {publish.write} of buffer {buffer.name}, which has {buffer.writes_per_step} in a "
                    f"step, after write {before}: the writes of a buffer rise through the step, each made once"
                )
            latest[buffer.name] = publish.write
            publishers = np.zeros(plan.workers, bool)
            publishers[publish.spans.worker] = True
            sources[buffer.name, publish.write] = _Source(number, EARLY if publish.early else DONE, publish, publishers)
    return sources


def _check_tags(plan: SyncPlan) -> None:
    """Raises PlanError unless a rank that gets one write of a buffer gets them all: tags are few, and a word that was not replaced
    would some day carry the tag that is awaited."""
    first: dict[str, Publish] = {}
    for instance in plan.instances:
        for publish in instance.publishes:
            other = first.setdefault(publish.buffer, publish)
            if publish.sent_to != other.sent_to:
                raise PlanError(
                    f"{instance} does not send write {publish.write} of buffer {publish.buffer} where write {other.write} goes, or the other "
                    "way round: words that carry their own flags are told from older ones only where all writes arrive"
                )
