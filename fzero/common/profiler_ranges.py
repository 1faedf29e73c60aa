"""Named ranges for the parts of a step in traces of `torch.profiler`. They cost nothing
while no trace is recorded.

    with torch.profiler.profile() as trace:
        state, metrics = step(state, batch)
    trace.export_chrome_trace("trace.json")

A range is called `fzero::VERB NAME`: `forward`, `unit h.3`, `gather h.3`, `backward`,
`reduce_scatter h.3`, `update`, `all_gather h.3/bfloat16`, and
`wait reduce h.3/bfloat16` while the host waits for a collective.

Transfers between memories have the name of their tensor:

- Full shards in a forward or backward: `load h.3/bfloat16` and
  `write_back h.3/bfloat16/grads` at their start, `wait load …` and `wait write_back …`
  while the host waits.
- Sub-groups of an update, with their elements: `fetch h.3/bfloat16 0:64`, `update …`,
  `write_back …` and their waits. Those read during a backward are `prefetch …`.
- Blocks of files, in the threads that move them: `read …` and `write …`. They need a
  trace of all threads, such as that of `fzero.profiling.save_trace`.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd import profiler

_NO_RANGE = nullcontext()


def profiler_range(verb: str, what: object = "") -> AbstractContextManager[object]:
    """A context whose code has this name in a trace.

    >>> with profiler_range("gather", "blocks.0"):
    ...     torch.zeros(2).tolist()
    [0.0, 0.0]
    """
    # compiled code has ranges of its kernels
    if not profiler._is_profiler_enabled or torch.compiler.is_compiling():
        return _NO_RANGE
    return profiler.record_function(f"fzero::{verb} {what}".rstrip())


@dataclass(slots=True)
class OpenRange:
    """A range that code opens in one place and closes in another; opening one closes
    the one before.
    """

    _open: AbstractContextManager[object] | None = None

    def open(self, verb: str, what: object = "") -> None:
        self.close()
        self._open = profiler_range(verb, what)
        self._open.__enter__()

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None
