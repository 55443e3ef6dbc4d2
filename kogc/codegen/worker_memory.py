"""Whether what a worker keeps in its own memory leaves the ring for the weights as many slots as it needs."""

from __future__ import annotations

from kogc.codegen.layout import LINE_BYTES, numbered_stages, round_up
from kogc.errors import PlanRejected
from kogc.ir.program import Program
from kogc.targets import Target, WorkerMemory

#: The ring begins at multiples of this.
_ALIGN = 2 * LINE_BYTES


def ring_slots(memory: WorkerMemory, near_floats: int, script_words: int) -> int:
    """How many slots of weights there is room for beside near memory and a script."""
    return (memory.nbytes - memory.named - round_up(4 * (near_floats + script_words), _ALIGN)) // memory.slot


def check_worker_memory(program: Program, near_floats: int, script_words: int, target: Target) -> None:
    """Raises PlanRejected, naming the longest vector and the bytes, when there are too few."""
    memory = target.memory
    assert memory is not None
    slots = ring_slots(memory, near_floats, script_words)
    if slots >= memory.least_slots:
        return
    length, name = max((stage.parts[0].k, stage.name) for _, _, stage in numbered_stages(program) if stage.kind == "matvec")
    have = memory.nbytes - memory.named - memory.least_slots * memory.slot
    raise PlanRejected(
        f"{program.model} does not fit into a worker of {target.title}: {4 * near_floats} bytes for vectors (the longest are the {length} values that "
        f"stage {name} reads) and {4 * script_words} for its script, but {have} are left beside {memory.least_slots} chunks of weights; "
        "compile it for the cpu (--target cpu), or a model with shorter vectors"
    )
