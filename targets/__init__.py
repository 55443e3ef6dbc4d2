"""Targets: machines as data (``target.toml``) plus the device code that the templates call.

Each folder is one target. Its machine layer implements this list; templates use nothing else of a machine and never ask
which one it is. A *worker* is whatever holds a whole vector and its own weight stream: a thread on a CPU, a block on a GPU.

=====================  ================================================================================================
qualifiers             ``DEVICE``, ``DEVICE_MEMBER``, ``DEVICE_STAGE``; ``PROBE(statement)`` (probe builds only); storage types
                       ``fp16``, ``bf16``, ``fp32``; ``NOTHING`` (−∞)
``vec``                TILE_ROWS rows of fp32 as one value in each of a worker's lanes: ``+ − · /``, ``broadcast``, ``fma``,
                       ``load_at<WIDTH>``, ``store_at<WIDTH>``, comparisons with ``? :``
math                   ``exp``, ``tanh``, ``erfc`` of a vec; ``exp``, ``rsqrt`` of a float
walk                   ``walk_begin``, ``walk_step`` (a vector shared out over the worker's lanes), ``worker_sum``, ``worker_sync``
``Worker``             the launch, its id, scratch, stream and what the columns of the step hold; ``Best``; ``Place``
leave                  ``enter`` (a stage begins), ``leaving`` (cancelled or aborted)
stream                 ``prepare`` (a vector made ready for dots: an ``Activation``), ``for_units<ARITY, T>`` (take units, dot them
                       with T columns, hand each to an epilogue, release; false: leave), ``skip_units``, ``rewind_stream``
own flags              where words carry their own flags: ``take_in``, ``take_in_normed``, ``take_in_and_dot`` (a vector received and
                       made ready by each warp for itself), ``position_row``; ``Batch``, ``Mine``, ``plan_units``, ``begin_units``,
                       ``meet``, ``end_unit`` (``for_units`` of several parts at once)
exchange               ``Buffer``, ``View``, ``await`` (bounded, aborting), ``received`` (all that was awaited is here),
                       ``Outgoing``, ``outgoing`` (a write begins), ``publish``, ``publish_best``, ``best_of``
ranks                  kernels of several ranks only: ``Sending``, ``sending`` (a write that other ranks read begins), and
                       ``store_rows``, ``copy_rows``, ``publish``, ``publish_best`` of such a write
rows                   ``load_rows``, ``store_rows``, ``append_rows``, ``rope_angles``, ``for_rows`` (an embedding's rows), ``each_row``,
                       ``copy_rows``, ``take_logits``
``attend``             attention of one key/value head over a span of the cache
``combine_rows``       rows of heads whose splits are brought together, tile by tile; called by combine stages only, which a
                       target asks for in its facts (docs/add-a-target.md)
sampling               machines that draw tokens only: ``sample`` (chooses in the place of ``best_of``, from all logits of the step, which
                       ``take_logits`` has kept)
host                   ``report``, ``report_token``, ``report_nan``, and the entry points
=====================  ================================================================================================
"""

from __future__ import annotations

import importlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class MachineLayer:
    """Device code as text: what must stand before the launch structs and sizes, the layer itself, and the entry points."""

    before: tuple[str, ...]
    layer: tuple[str, ...]
    entry: tuple[str, ...]


@dataclass(frozen=True)
class DotRules:
    """How the warps of a worker share dots of length k (kogc/codegen/intake.py).

    ``sharing(k, units)``: how many warps share a unit when a worker has so many; ``packed_floats(k, warps)``: what a packed vector
    takes, and whether every team of warps holds it; ``holds(k, warps, dtype)``: whether a warp's part fits into its registers;
    ``drains(k, warps, dtype)``: whether a warp can take weights before the vector is there; ``batch_units``: units between two
    meetings; ``short_bytes``: weights of a worker from which on a stage is long.
    """

    batch_units: int
    sharing: Callable[[int, int], int]
    packed_floats: Callable[[int, int], tuple[int, bool]]
    holds: Callable[[int, int, str], bool]
    drains: Callable[[int, int, str], bool]
    short_bytes: int


@dataclass(frozen=True)
class WorkerMemory:
    """A worker's own memory, in bytes: ``nbytes`` in all. Its machine layer takes ``named`` of them; then come near memory and the
    worker's script, and what is left is a ring for the weights, with slots of ``slot``, of which it needs ``least_slots``."""

    nbytes: int
    named: int
    slot: int
    least_slots: int


@dataclass(frozen=True)
class Target:
    """One machine, ready to render for.

    ``tile_rows``: rows of a tile. ``layout``: [units, arity, tile_rows, k] → the order in the stream. ``constants``: (name,
    value, meaning) that the machine layer needs. ``facts``: the whole target.toml. ``near_floats``: exchanged words carry
    their own flags, and a worker keeps what it receives in memory of its own, of which so many floats are near. Then ``dots`` tell how
    its warps take in vectors, and ``memory`` what else lies in that memory. ``ranks_machine``: the machine layer of kernels of several
    ranks; None: there are none.
    """

    name: str
    title: str
    tile_rows: int
    machine: MachineLayer
    constants: tuple[tuple[str, int, str], ...]
    layout: Callable[[np.ndarray], np.ndarray]
    facts: Mapping[str, Any]
    near_floats: int | None = None
    dots: DotRules | None = None
    memory: WorkerMemory | None = None
    ranks_machine: MachineLayer | None = None

    @property
    def samples(self) -> bool:
        """Whether its kernels draw tokens, or choose the likeliest one only."""
        return self.facts.get("samples", False)

    def machine_for(self, ranks: int) -> MachineLayer:
        """The machine layer of a kernel of ``ranks`` ranks. Raises ValueError where the target has no such kernels."""
        machine = self.machine if ranks == 1 else self.ranks_machine
        if machine is None:
            raise ValueError(f"kernels for {self.title} run on one rank, not on {ranks}")
        return machine


def target_names() -> tuple[str, ...]:
    """Targets that exist: folders with a ``target.toml``."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/target.toml")))


@cache
def target_facts(name: str) -> Mapping[str, Any]:
    """The machine as data. Raises KeyError naming the targets that exist."""
    if name not in target_names():
        raise KeyError(f"unknown target {name!r}; known: {', '.join(target_names())}")
    return tomllib.loads((FOLDER / name / "target.toml").read_text())


def load_target(name: str, **options: Any) -> Target:
    """The target of folder ``name``; ``options`` are its own (cpu: ``simd``). Raises KeyError for an unknown one."""
    facts = target_facts(name)
    return importlib.import_module(f"kogc.targets.{name}").make_target(facts, **options)


def with_values(target: Target, values: Mapping[str, int]) -> Target:
    """``target`` with other values for some of the constants in its target.toml, or for numbers that stand there beside them.
    Raises KeyError for a name that is neither."""
    facts, constants = {**target.facts}, {**target.facts["constants"]}
    for name, value in values.items():
        if name in constants:
            constants[name] = {**constants[name], "value": value}
        elif isinstance(facts[name], int):
            facts[name] = value
        else:
            raise KeyError(f"{name} in the target.toml of {target.name} is no number")
    return importlib.import_module(f"kogc.targets.{target.name}").make_target({**facts, "constants": constants})


def read_sections(name: str, files: tuple[str, ...]) -> tuple[str, ...]:
    """Texts of a target's device code files, without trailing blank lines."""
    return tuple((FOLDER / name / file).read_text().rstrip() for file in files)
