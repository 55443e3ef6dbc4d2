"""A second, slow opinion on sync plans: the graph of all events of some steps, and reachability in it.

Shares nothing with the prover but the plan's event lists.
"""

from __future__ import annotations

from collections.abc import Sequence

import networkx as nx

from kogc.ir.passes.exchange import SyncPlan


def accepts(plan: SyncPlan, kinds: Sequence[str], tagged: bool = False) -> bool:
    """Whether the plan is safe over the steps ``kinds`` (``token`` or ``prompt``)."""
    return _Events(plan, kinds, tagged).safe()


class _Events:
    """Nodes are events; every instance of a worker also has ``write`` nodes, before it stores its prologue's and its units'
    values, and a ``done`` node, after its last read and store. Flags are set after what they guard; a tagged value may be
    out at any time once the prologue is computed, so its node hangs beside the worker's line of events."""

    def __init__(self, plan: SyncPlan, kinds: Sequence[str], tagged: bool) -> None:
        self.plan, self.kinds, self.tagged = plan, kinds, tagged
        self.graph = nx.DiGraph()
        self.awaits, self.reads, self.publishes, self.sent = [], [], {}, {}
        self.broken = False
        for worker in range(plan.workers):
            self.last, self.awaited = None, {}
            for step, kind in enumerate(kinds):
                self._step(worker, step, kind)

    def _step(self, worker: int, step: int, kind: str) -> None:
        for number, instance in enumerate(self.plan.instances):
            if instance.head and kind == "prompt":
                continue
            done = (step, worker, number, "done")
            prologue = None
            for early in (True, False):
                for kind_of, group in (("await", instance.waits), ("read", instance.reads)):
                    for one in (one for one in group if one.early == early):
                        self._event(kind_of, one, worker, step, done)
                write = self._next((step, worker, number, "write", early))
                prologue = prologue or write
                if not early:
                    self._next(done)
                begun, stored = (prologue, done) if self.tagged else (write, write if early else done)
                for one in (one for one in instance.publishes if one.early == early):
                    self._publish(one, worker, step, begun, stored)

    def _next(self, node):
        self.graph.add_node(node)
        if self.last is not None:
            self.graph.add_edge(self.last, node)
        self.last = node
        return node

    def _event(self, kind, one, worker, step, done) -> None:
        node = self._next((step, worker, len(self.graph), kind))
        index = step * self.plan.buffers[one.buffer].writes_per_step + one.write
        if kind == "await":
            self.awaits += [(node, one.buffer, index, p) for p in one.producers[worker].nonzero()[0].tolist()]
            self.awaited.update({(one.buffer, index, p): True for p in one.producers[worker].nonzero()[0].tolist()})
        else:
            elements = {e for low, high in one.spans.of_worker(worker) for e in range(low, high)}
            if elements:
                self.reads.append((node, done, one.buffer, index, elements, dict(self.awaited)))

    def _publish(self, one, worker, step, write, stored) -> None:
        elements = {e for low, high in one.spans.of_worker(worker) for e in range(low, high)}
        if elements:
            per_step = self.plan.buffers[one.buffer].writes_per_step
            self.broken |= not 0 <= one.write < per_step
            key = (one.buffer, step * per_step + one.write, worker)
            self.broken |= key in self.publishes
            node = (step, worker, len(self.graph), "publish")
            if self.tagged:
                self.graph.add_edge(write, node)
            else:
                self._next(node)
            self.publishes[key] = (node, write, stored, elements)
            self.sent[key] = one.sent_to

    def safe(self) -> bool:
        for node, buffer, index, producer in self.awaits:
            if (buffer, index, producer) not in self.publishes or not self._reaches(node[1], (buffer, index, producer)):
                return False
            self.graph.add_edge(self.publishes[buffer, index, producer][0], node)
        if self.broken or not nx.is_directed_acyclic_graph(self.graph):
            return False
        self.before = self._before()
        written = all(self._written(*read) for read in self.reads)
        return written and all(self._free(*key, *made) for key, made in self.publishes.items())

    def _reaches(self, reader: int, key: tuple[str, int, int]) -> bool:
        """Whether what a producer publishes gets into the memory of the reader's rank."""
        size = self.plan.workers // self.plan.ranks
        rank = reader // size
        return key[2] // size == rank or bool(self.sent[key] >> rank & 1)

    def _before(self) -> dict:
        """Node → bit set of everything that happened before it."""
        self.bit = {node: 1 << i for i, node in enumerate(nx.topological_sort(self.graph))}
        before = {}
        for node in self.bit:
            before[node] = 0
            for earlier in self.graph.predecessors(node):
                before[node] |= before[earlier] | self.bit[earlier]
        return before

    def _written(self, node, done, buffer, index, elements, awaited) -> bool:
        missing = set(elements)
        for producer in range(self.plan.workers):
            made = self.publishes.get((buffer, index, producer))
            if made and elements & made[3]:
                if not self._reaches(node[1], (buffer, index, producer)):
                    return False
                if (buffer, index, producer) not in awaited and not self.before[node] & self.bit[made[2]]:
                    return False
                missing -= made[3]
        return not missing

    def _free(self, buffer, index, worker, published, write, stored, elements) -> bool:
        """Everybody who made or reads what lies in the slot is done before ``worker`` stores into it."""
        form = self.plan.buffers[buffer]
        if form.payload == "cache":
            return True
        old = index - form.slots
        while old >= 0 and not any((buffer, old, w) in self.publishes for w in range(self.plan.workers)):
            old -= form.slots
        users = [done for _, done, b, i, read, _ in self.reads if (b, i) == (buffer, old) and read & elements]
        makers = [self.publishes.get((buffer, old, other)) for other in range(self.plan.workers) if other != worker]
        users += [made[2] for made in makers if made and made[3] & elements]
        return all(self.before[write] & self.bit[user] for user in users)
