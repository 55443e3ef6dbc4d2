"""Seconds from an artifact's path to an engine that is ready, in a fresh process. usage: start_child.py FILE.kog"""

from __future__ import annotations

import sys
import time

import kogc

began = time.perf_counter()
engine = kogc.load(sys.argv[1]).engine()
print(time.perf_counter() - began)
engine.close()
