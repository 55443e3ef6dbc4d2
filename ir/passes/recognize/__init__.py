"""Recognition: a tensor graph (ATen ops of one decoder step) becomes a decode graph."""

from kogc.ir.passes.recognize.errors import UnrecognizedOp
from kogc.ir.passes.recognize.problems import find_problems
from kogc.ir.passes.recognize.recognizer import recognize

__all__ = ["UnrecognizedOp", "find_problems", "recognize"]
