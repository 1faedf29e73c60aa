"""Which part of a step is this? Named ranges in the traces of `torch.profiler`, which cost nothing where none is recorded.

    with torch.profiler.profile() as trace:
        state, metrics = step(state, batch)
    trace.export_chrome_trace("trace.json")

Each is called `fzero::VERB WHAT`: `forward`, `unit h.3`, `gather h.3`, `backward`, `reduce_scatter h.3`, `update`,
`join h.3/bfloat16`, and `wait reduce h.3/bfloat16` where the host waits for one.

What moves between memories is called by its tensor. Whole shards of a pass: `bring h.3/bfloat16`, `put h.3/bfloat16/grads`, where
they start, and `wait bring …`, `wait put …` where the host waits. Sub-groups of an update, with their elements: `fetch
h.3/bfloat16 0:64`, `update …`, `put …`, with the waits; `ahead …` of what is read beside a backward. The blocks of files, in the
threads that move them: `read …` and `write …`; a trace of all threads has them, such as that of `fzero.profiling.save_trace`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler


def is_recording() -> bool:
    """Whether a trace is recorded here. Not in code that is compiled, whose ranges are those of its kernels."""
    return profiler._is_profiler_enabled and not torch.compiler.is_compiling()


def profiler_range(verb: str, what: object = "") -> AbstractContextManager[object]:
    """What runs inside goes by this name in a trace.

    >>> with profiler_range("gather", "blocks.0"):
    ...     torch.zeros(2).tolist()
    [0.0, 0.0]
    """
    return profiler.record_function(f"fzero::{verb} {what}".rstrip()) if is_recording() else nullcontext()
