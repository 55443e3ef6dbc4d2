"""What the sanitizer watches. usage: sanitize_child.py FILE.kog TOKENS SECONDS

Generates TOKENS tokens twice, once in the two turns of a session, and computes logits; everything is many times slower here than usual, so
workers wait SECONDS for one another before they call it a stall.
"""

from __future__ import annotations

import sys

import kogc

path, tokens, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
prompt = [1, 2, 3, 5, 8]
with kogc.load(path).engine(stall_timeout=seconds) as engine:
    made = [token.id for token in engine.generate(prompt, max_tokens=tokens, ignore_eos=True)]
    with engine.session() as session:
        halves = (tokens // 2, tokens - tokens // 2)
        behind = [token.id for half in halves for token in engine.generate(prompt, max_tokens=half, session=session, ignore_eos=True)]
    logits = engine.logits(prompt + made[:-1])
if not (len(made) == len(behind) == tokens and logits[len(prompt) - 1 :].argmax(1).tolist() == made):
    sys.exit(f"something else came out under the sanitizer: {made} {behind}")
print("all tokens are there")
