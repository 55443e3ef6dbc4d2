"""Runs one built model on every level: decode graph, stage plan, rolled program."""

import numpy as np
from decode_builder import Built

from kogc.ir.interpret import interpret, run_sequence, zero_caches
from kogc.ir.passes.fuse import fuse
from kogc.ir.passes.fuse_interpret import interpret_plan
from kogc.ir.passes.roll import roll
from kogc.ir.passes.roll_interpret import interpret_program
from kogc.ir.program import Program
from kogc.ir.stages import StagePlan
from kogc.ir.verify import verify

TOLERANCE = 1e-9
TOKENS = [3, 11, 7, 0, 19, 2, 2]


def expected_logits(built: Built, tokens=TOKENS) -> np.ndarray:
    """Logits of the decode graph, all tokens in one step."""
    return run_sequence(verify(built.graph), tokens, built.weights)


def plan_logits(plan: StagePlan, built: Built, step_tokens: int, tokens=TOKENS) -> np.ndarray:
    caches, logits = zero_caches(plan.graph), []
    for start in range(0, len(tokens), step_tokens):
        part = tokens[start : start + step_tokens]
        result = interpret_plan(plan, part, np.arange(start, start + len(part)), built.weights, caches)
        caches = result.caches
        logits.append(result.output)
    return np.concatenate(logits)


def rolled(built: Built, splits: int = 1, dtype: str = "fp32") -> Program:
    return roll(fuse(built.graph, splits), capacity=24, dtype=dtype, step_tokens=(1, 4))


def assert_levels_agree(built: Built, step_tokens: int = 2, splits: int = 1) -> Program:
    """Plan and program give the decode graph's logits; returns the program."""
    expected = expected_logits(built)
    plan = fuse(built.graph, splits)
    verify(plan.graph)
    np.testing.assert_allclose(plan_logits(plan, built, step_tokens), expected, atol=TOLERANCE)
    program = roll(plan, capacity=24, dtype="fp32", step_tokens=(1, 4))
    found = interpret_program(program, built.weights, built.graph.tables, TOKENS, step_tokens)
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)
    return program


def caches_after(built: Built, tokens=TOKENS):
    graph = built.graph
    return interpret(graph, tokens, np.arange(len(tokens)), built.weights, zero_caches(graph)).caches
