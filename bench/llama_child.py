"""llama.cpp's side of the comparison, run by the Python of a venv that has llama-cpp-python.

usage: llama_child.py MODEL.gguf THREADS CONTEXT. Reads ``{"ids": [...], "tokens": N}`` per line and answers each with
``{"tok_s": ..., "ids": [...]}``: greedy decoding from an empty context, timed from the first token to the last.
"""

from __future__ import annotations

import json
import sys
import time

import llama_cpp
import numpy as np


def best(model: llama_cpp.Llama) -> int:
    """The token with the largest logit behind the last one evaluated."""
    logits = llama_cpp.llama_get_logits_ith(model.ctx, -1)
    return int(np.ctypeslib.as_array(logits, shape=(model.n_vocab(),)).argmax())


def decode(model: llama_cpp.Llama, prompt: list[int], tokens: int) -> dict:
    """Continue ``prompt`` greedily by ``tokens`` tokens."""
    model.reset()
    model.eval(prompt)
    made = [best(model)]
    began = time.perf_counter()
    while len(made) < tokens:
        model.eval(made[-1:])
        made.append(best(model))
    return {"tok_s": (tokens - 1) / (time.perf_counter() - began), "ids": made}


def main() -> None:
    path, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model = llama_cpp.Llama(path, n_ctx=context, n_threads=threads, n_threads_batch=threads, verbose=False)
    print(json.dumps({"version": llama_cpp.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(decode(model, request["ids"], request["tokens"])), flush=True)


if __name__ == "__main__":
    main()
