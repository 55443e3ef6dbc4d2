"""Lifting rules: what each tensor op means for symbolic values. One file per kind; importing fills ``context.RULES``."""

from kogc.ir.passes.recognize.rules import attention, cache, contraction, embedding, movement, pointwise, reduction  # noqa: F401
