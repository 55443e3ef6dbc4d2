"""The kernel's entry: one launch struct, rendered for C and for ctypes from the same list."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

#: Raised whenever a field is added, removed or moved; kernel and runtime compare it before anything runs.
LAUNCH_VERSION = 3

MODE_GENERATE = 0
MODE_TEACHER_FORCED = 1
MODE_SAMPLE = 2  # generate, each token as launch.sampling says

#: Set in ``history`` for tokens of the prompt; the other bits count how often a token was generated.
IN_PROMPT = 1 << 31

FINISH_REASONS = {0: "running", 1: "stop", 2: "length", 3: "context", 4: "cancelled", 5: "stalled", 6: "nan"}


@dataclass(frozen=True)
class Field:
    """One struct member: C declaration type, ctypes type, meaning."""

    name: str
    c: str
    ctype: type
    doc: str


_P = ctypes.c_void_p

LAUNCH_FIELDS = (
    Field("version", "uint32_t", ctypes.c_uint32, "LAUNCH_VERSION of the host"),
    Field("mode", "int32_t", ctypes.c_int32, "0 generate, 1 teacher-forced"),
    Field("rank", "int32_t", ctypes.c_int32, "this rank"),
    Field("n_prompt", "int32_t", ctypes.c_int32, "ids in prompt"),
    Field("start_position", "int32_t", ctypes.c_int32, "context position of prompt[0]; the KV cache holds what lies before"),
    Field("max_tokens", "int32_t", ctypes.c_int32, "tokens to generate at most (ring capacity)"),
    Field("n_stop", "int32_t", ctypes.c_int32, "ids in stop_ids"),
    Field("fault", "int32_t", ctypes.c_int32, "fault injection (fault build only): 0 none, 1 dropped publish, 2 wrong slot, 3 stuck worker"),
    Field("fault_stage", "int32_t", ctypes.c_int32, "global stage number the fault hits"),
    Field("fault_worker", "int32_t", ctypes.c_int32, "worker the fault hits"),
    Field("spin_limit_ns", "int64_t", ctypes.c_int64, "longest wait for another worker before the launch is aborted"),
    Field("prompt", "const int32_t*", _P, "prompt ids (teacher-forced: all ids)"),
    Field("stop_ids", "const int32_t*", _P, "generation ends after one of these"),
    Field("ring", "int32_t*", _P, "generated ids, max_tokens of them"),
    Field("state", "kogc_state*", _P, "progress, cancel flag and abort word, shared with the host"),
    Field("stream", "const uint8_t*", _P, "packed weight streams of all workers"),
    Field("embed", "const uint8_t*", _P, "embedding tables, row-major in the storage dtype"),
    Field("consts", "const float*", _P, "norm scales, biases, rope tables (fp32)"),
    Field("plan", "const int32_t*", _P, "schedule tables"),
    Field("kv", "uint8_t*", _P, "KV caches"),
    Field("exchange", "uint8_t*", _P, "exchange buffers and flags; zeroed by the host before every launch"),
    Field("logits", "float*", _P, "teacher-forced: [n_prompt, vocab] fp32; else may be null"),
    Field("probe", "float*", _P, "probe build only: every stage's outputs; else null"),
    Field("control", "uint32_t*", _P, "GPUs: 64 bytes zeroed before every launch; word 0: leave, set by the host to cancel; else null"),
)

#: How tokens are drawn. Memory of the host that all ranks share; the arrays are [vocab].
SAMPLING_FIELDS = (
    Field("seed", "uint64_t", ctypes.c_uint64, "key of the random numbers; their counter is the token's context position"),
    Field("top_p", "double", ctypes.c_double, "keep the likeliest tokens that have this share together; 1: all"),
    Field("min_p", "double", ctypes.c_double, "keep tokens at least so likely, the likeliest one counted as 1; 0: all"),
    Field("temperature", "float", ctypes.c_float, "0: the likeliest token"),
    Field("repetition_penalty", "float", ctypes.c_float, "divides what is above 0, multiplies what is below, of all tokens seen"),
    Field("presence_penalty", "float", ctypes.c_float, "taken from tokens generated before"),
    Field("frequency_penalty", "float", ctypes.c_float, "taken from them for every time"),
    Field("top_k", "int32_t", ctypes.c_int32, "keep so many tokens; 0: all"),
    Field("top_logprobs", "int32_t", ctypes.c_int32, "likeliest tokens to report; -1: no log-probabilities at all"),
    Field("history", "uint32_t*", _P, "IN_PROMPT and how often generated; null: no penalties"),
    Field("bias", "const float*", _P, "added to the logits after penalties; may be null"),
    Field("logprobs", "float*", _P, "[max_tokens][2 + 2 top_logprobs]: logits less the largest (see report_logprobs)"),
)

#: Behind the others, in kernels that sample only.
SAMPLE_FIELDS = (Field("sampling", "const kogc_sampling*", _P, "how tokens are drawn (mode 2 only)"),)

#: Behind these, in kernels of several ranks only: those of one rank never look there.
RANK_FIELDS = (
    Field("peers", "uint8_t* const*", _P, "the exchange buffers of all ranks as this rank reaches them, its own among them"),
)

STATE_FIELDS = (
    Field("produced", "int32_t", ctypes.c_int32, "tokens in the ring (generate) or positions done (teacher-forced); release-stored"),
    Field("finished", "int32_t", ctypes.c_int32, "FINISH_REASONS key; 0 while running; release-stored last"),
    Field("cancel", "int32_t", ctypes.c_int32, "set by the host: leave at the next wait or step"),
    Field("abort", "int32_t", ctypes.c_int32, "1 once a worker gave up; the fields below tell of the wait that comes first in the program"),
    Field("abort_stage", "int32_t", ctypes.c_int32, "global stage number (segment stages counted in source order)"),
    Field("abort_iteration", "int32_t", ctypes.c_int32, "iteration of its segment"),
    Field("abort_worker", "int32_t", ctypes.c_int32, "the worker that waited"),
    Field("abort_peer", "int32_t", ctypes.c_int32, "the worker it waited for"),
    Field("abort_step", "int32_t", ctypes.c_int32, "step of the launch"),
    Field("nan_position", "int32_t", ctypes.c_int32, "position whose logits held a NaN"),
    Field("abort_expected", "int64_t", ctypes.c_int64, "write index waited for; -1: nobody can tell"),
    Field("abort_seen", "int64_t", ctypes.c_int64, "write index found"),
    Field("first_token_ns", "int64_t", ctypes.c_int64, "monotonic clock when the first token was in the ring"),
    Field("start_ns", "int64_t", ctypes.c_int64, "monotonic clock when all workers had checked in"),
    Field("end_ns", "int64_t", ctypes.c_int64, "monotonic clock when the last token was in the ring"),
)


class Launch(ctypes.Structure):
    """Host view of the launch struct. A launch of several ranks has one for each, one behind the other."""

    _fields_ = [(field.name, field.ctype) for field in (*LAUNCH_FIELDS, *SAMPLE_FIELDS, *RANK_FIELDS)]


class Sampling(ctypes.Structure):
    """Host view of how tokens are drawn."""

    _fields_ = [(field.name, field.ctype) for field in SAMPLING_FIELDS]


class State(ctypes.Structure):
    """Host view of the state the kernel and the host share."""

    _fields_ = [(field.name, field.ctype) for field in STATE_FIELDS]


def launch_fields(ranks: int, samples: bool) -> tuple[Field, ...]:
    """The launch struct of a kernel of ``ranks`` ranks that ``samples``, or does not."""
    return (*LAUNCH_FIELDS, *(SAMPLE_FIELDS if samples else ()), *(RANK_FIELDS if ranks > 1 else ()))


def c_struct(name: str, fields: tuple[Field, ...]) -> str:
    """The struct as C text, one commented member a line."""
    members = "\n".join(f"  {field.c} {field.name};  // {field.doc}" for field in fields)
    return f"struct {name} {{\n{members}\n}};"
