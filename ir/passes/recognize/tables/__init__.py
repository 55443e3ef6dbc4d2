"""The rewriting tables, in the order in which they run on a lifted graph."""

from kogc.ir.passes.recognize.tables.fold import FOLD
from kogc.ir.passes.recognize.tables.functions import FUNCTIONS
from kogc.ir.passes.recognize.tables.lanes import LANES, SPREAD
from kogc.ir.passes.recognize.tables.norms import NORMS

# Norms first, so that one norm is one op when lanes are begun before it; and again, for scales that each lane has of its own.
TABLES = (NORMS, (*SPREAD, *NORMS), FUNCTIONS, LANES, FOLD)
