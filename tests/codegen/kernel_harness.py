"""Builds, packs and runs kernels of hand-built programs through their C entry points, without the runtime package."""

import ctypes
import dataclasses

import numpy as np
from program_fixture import random_weights, rope_tables

from kogc.codegen.launch import FINISH_REASONS, LAUNCH_VERSION, MODE_GENERATE, MODE_TEACHER_FORCED, Launch, State
from kogc.codegen.pack import pack_stream
from kogc.codegen.pack_index import pack_index
from kogc.codegen.render import FAULTS, Rendered, render
from kogc.ir.passes.schedule import schedule
from kogc.ir.program import Program
from kogc.ir.types import NUMPY_DTYPES
from kogc.ir.weights import MappedWeights
from kogc.targets import load_target
from kogc.targets.cpu.toolchain import build


def rendered(program: Program, workers: int = 2, simd: str | None = None) -> Rendered:
    target = load_target("cpu", simd=simd)
    plan = schedule(program, workers, target.tile_rows)
    return render(program, plan, target, pack_index(program, plan, target.layout))


def rounded_weights(program: Program, seed: int = 0, scale: float = 0.3) -> MappedWeights:
    """Random weights that the storage dtype holds exactly; matrices and tables are small enough to keep values near 1."""
    source = random_weights(program, seed)
    dtype = NUMPY_DTYPES[program.dtype]
    small = {key: (source.get(key) * np.float32(scale)).astype(dtype).astype(np.float32) for key in source.keys()}
    return MappedWeights(small)


class Kernel:
    """A compiled kernel with packed weights. Each run starts from an empty context unless ``start`` says otherwise."""

    def __init__(self, program: Program, weights=None, workers=2, defines=(), simd=None, tile_rows=None, tables=None):
        self.program = program
        target = load_target("cpu", simd=simd)
        self.tile_rows = tile_rows or target.tile_rows
        target = dataclasses.replace(target, tile_rows=self.tile_rows)
        self.weights = weights or rounded_weights(program)
        self.tables = rope_tables(program) if tables is None else tables
        plan = schedule(program, workers, target.tile_rows)
        self.index = pack_index(program, plan, target.layout)
        self.pack = _aligned(self.index.total_bytes)
        pack_stream(program, plan, self.weights, target.layout, self.pack, self.tables)
        self.rendered = render(program, plan, target, self.index)
        self.library = ctypes.CDLL(str(build(self.rendered.source, defines)))
        self.library.kogc_query.restype = ctypes.c_int64
        self.kv = _aligned(self.rendered.kv_bytes)
        self.probe = np.zeros(self.rendered.probe_floats, np.float32)

    def query(self, number: int) -> int:
        return self.library.kogc_query(number)

    def launch(self, ids, mode=MODE_GENERATE, max_tokens=0, stop=(), start=0, spin_limit_s=20.0, fault=None) -> "Run":
        return Run(self, ids, mode, max_tokens, stop, start, spin_limit_s, fault)

    def generate(self, ids, max_tokens, **more) -> "Run":
        return self.launch(ids, MODE_GENERATE, max_tokens, **more).run()

    def logits(self, ids, **more) -> np.ndarray:
        run = self.launch(ids, MODE_TEACHER_FORCED, **more).run()
        assert run.reason == "length", run.reason
        return run.logits


class Run:
    """One launch: its memory, and what the kernel left in it."""

    def __init__(self, kernel: Kernel, ids, mode, max_tokens, stop, start, spin_limit_s, fault):
        self.kernel, self.state = kernel, State()
        self.prompt = np.array(ids, np.int32)
        self.stop = np.array(stop, np.int32)
        self.ring = np.full(max(max_tokens, 1), -1, np.int32)
        self.exchange = _aligned(kernel.rendered.exchange_bytes)
        self.plan = np.frombuffer(kernel.rendered.plan, np.int32)
        self.logits = np.full((len(ids), kernel.program.vocab), np.nan, np.float32)
        base = kernel.pack.ctypes.data
        kind, stage, worker = fault or (None, 0, 0)
        self.launch = Launch(
            version=LAUNCH_VERSION, mode=mode, n_prompt=len(ids), start_position=start, max_tokens=max_tokens, n_stop=len(stop),
            fault=FAULTS.get(kind, 0), fault_stage=stage, fault_worker=worker, spin_limit_ns=int(spin_limit_s * 1e9),
            prompt=self.prompt.ctypes.data, stop_ids=self.stop.ctypes.data, ring=self.ring.ctypes.data,
            state=ctypes.addressof(self.state), stream=base, embed=base + kernel.index.embed_offset,
            consts=base + kernel.index.const_offset, plan=self.plan.ctypes.data, kv=kernel.kv.ctypes.data,
            exchange=self.exchange.ctypes.data, logits=self.logits.ctypes.data, probe=kernel.probe.ctypes.data,
        )  # fmt: skip

    def run(self) -> "Run":
        self.result = self.kernel.library.kogc_run(ctypes.byref(self.launch))
        return self

    def wait(self, seen: int, timeout_s: float) -> bool:
        return bool(self.kernel.library.kogc_wait(ctypes.byref(self.state), seen, ctypes.c_int64(int(timeout_s * 1e9))))

    @property
    def reason(self) -> str:
        return FINISH_REASONS[self.state.finished]

    @property
    def tokens(self) -> list[int]:
        return self.ring[: self.state.produced].tolist()


def _aligned(size: int) -> np.ndarray:
    raw = np.zeros(size + 64, np.uint8)
    return raw[-raw.ctypes.data % 64 :][:size]
