"""The faults that are chosen for `mutants.py`: each breaks one rule of ZeRO in a way
that a person could.
"""

from __future__ import annotations

from typing import NamedTuple


class Fault(NamedTuple):
    """A text in a function, and what stands there instead.

    Attributes:
        room: the folder or file, from the root of the repository; functions may move
            within it.
        function: its name, without its class.
        old: occurs once in the function.
        new: the fault.
        why: what is wrong with it.
    """

    room: str
    function: str
    old: str
    new: str
    why: str


LAYOUT, COMMS, OPTIM, PLANS, MODEL, RUNTIME, STORAGE, GRAPH, PIPES = (
    "sharding", "fzero/comms", "fzero/optim", "fzero/plans", "fzero/model",
    "fzero/runtime", "fzero/storage", "fzero/graph", "fzero/pipeline",
)  # fmt: skip

CHOSEN = (
    # layouts
    Fault(
        LAYOUT,
        "within",
        "offset + first - start",
        "offset + first",
        "offsets in a shard count from the buffer's start",
    ),
    Fault(LAYOUT, "within", "if first < last:", "if first <= last:", "fragments without elements"),
    Fault(
        LAYOUT,
        "num_within",
        "bisect_left(self.offsets, stop)",
        "bisect_right(self.offsets, stop)",
        "one fragment more",
    ),
    Fault(
        LAYOUT,
        "sizes",
        "(size + 1,) * num_larger",
        "(size + 1,) * (num_larger + 1)",
        "one rank more gets the rest",
    ),
    Fault(
        LAYOUT,
        "round_robin",
        "range(first, length, num_lists)",
        "range(first, length - 1, num_lists)",
        "an item is lost",
    ),
    Fault(
        LAYOUT,
        "pad",
        "x_N.new_zeros(partition.padding)",
        "x_N.new_empty(partition.padding)",
        "padding is not zeroed",
    ),
    Fault(
        LAYOUT,
        "unflatten",
        "*layout.numels, ",
        "*layout.numels[::-1], ",
        "the order of the parameters",
    ),
    # collectives
    Fault(
        COMMS,
        "start_reduce_scatter",
        "in summands[2:-1]:",
        "in summands[3:-1]:",
        "a rank is not added",
    ),
    Fault(
        COMMS,
        "start_reduce_scatter",
        "torch.add(summands[0], summands[1], out=total_S)",
        "torch.add(summands[1], summands[0], out=total_S).mul_(1 + 1e-7)",
        "the last bits of a sum",
    ),
    Fault(
        COMMS,
        "start_all_to_all",
        "arrived_WN[axis.rank].copy_(rows_WN[axis.rank])",
        "pass",
        "a rank's own row",
    ),
    Fault(
        COMMS,
        "start_all_reduce",
        "after=None if is_in_order else reduction",
        "after=None",
        "the gather does not wait for the sum",
    ),
    Fault(
        COMMS,
        "start_all_gather",
        "for axis in reversed(axes):",
        "for axis in axes:",
        "the order of the axes of a mesh",
    ),
    Fault(
        COMMS,
        "_own",
        "full[axis.rank * numel : (axis.rank + 1) * numel]",
        "full[(axis.size - 1 - axis.rank) * numel : (axis.size - axis.rank) * numel]",
        "ranks in the opposite order",
    ),
    Fault(
        COMMS,
        "_plus",
        "result.copy_(x.add_(result))",
        "result.add_(x)",
        "the held shard does not become the sum",
    ),
    Fault(
        COMMS,
        "now",
        "return {**self.before, **",
        "return {**self.before} or {**",
        "a hook's new state is not kept",
    ),
    Fault(
        COMMS,
        "corrected",
        "lost = sent - hook.lossy(parts(sent)).reshape(sent.shape)",
        "lost = x - hook.lossy(parts(sent)).reshape(sent.shape)",
        "the old error is forgotten",
    ),
    Fault(
        COMMS,
        "corrected",
        "decay * error + (1 - decay) * lost",
        "decay * lost + (1 - decay) * error",
        "the two weights",
    ),
    Fault(
        COMMS,
        "present",
        "state.num_rounds % every == 0",
        "state.num_rounds % every == 1",
        "the reset is one round late",
    ),
    Fault(
        COMMS,
        "quantize",
        "most = 2 ** (bits - 1) - 1",
        "most = 2 ** (bits - 1)",
        "the largest integer overflows",
    ),
    # loss, norm and overflow
    Fault(
        RUNTIME,
        "multiple",
        "return multiple * scale if self.scales_loss else multiple",
        "return multiple",
        "gradients keep the loss scale",
    ),
    Fault(
        RUNTIME,
        "_over",
        "return self.world_size if",
        "return self.world_size - 1 if",
        "a mean over one rank too few",
    ),
    Fault(
        RUNTIME,
        "factor",
        "self.clip / (norm + 1e-6)",
        "self.clip / norm",
        "the epsilon of clipping",
    ),
    Fault(RUNTIME, "factor", ".clamp(max=1.0)", "", "small gradients grow to the clipping norm"),
    Fault(
        RUNTIME,
        "norm_parts",
        "norms.max() if rules.is_inf else norms.square().sum()",
        "norms[-1].square()",
        "the norm is that of the last buffer",
    ),
    Fault(
        RUNTIME,
        "norm_parts",
        "return stack(part)",
        "return part[None]",
        "every rank clips with its own norm",
    ),
    Fault(RUNTIME, "mean_of", "weight * rows_M2.shape[0]", "weight", "the weights of other ranks"),
    Fault(
        RUNTIME,
        "finish",
        "~(norm + loss).isfinite()",
        "~norm.isfinite()",
        "an infinite loss is no overflow",
    ),
    Fault(
        RUNTIME,
        "next_state",
        "num_updates.sub_(overflow.to(num_updates.dtype))",
        "pass",
        "a skipped update is counted",
    ),
    Fault(
        RUNTIME,
        "next_state",
        "buffers = _chosen(overflow, state.buffers, buffers)",
        "pass",
        "a skipped update changes the module's buffers",
    ),
    Fault(
        OPTIM,
        "update",
        "shrinks = overflow & (hysteresis <= 1)",
        "shrinks = overflow & (hysteresis <= 0)",
        "the loss scale shrinks one overflow late",
    ),
    Fault(
        OPTIM,
        "update",
        "torch.where(overflow, torch.zeros_like(num_good), num_good + 1)",
        "num_good + 1",
        "an overflow does not reset the window",
    ),
    # optimizers
    Fault(
        OPTIM,
        "_adam_by_element",
        "param.mul_(1 - lr * weight_decay)",
        "grad = grad.add(param, alpha=weight_decay)",
        "AdamW with the weight decay of Adam",
    ),
    Fault(
        OPTIM,
        "_adam_by_element",
        "state.step.double()",
        "(state.step.double() - 1)",
        "bias correction one step late",
    ),
    Fault(
        OPTIM,
        "calls",
        "new_param.copy_(narrow_param)",
        "pass",
        "the parameters do not become the master's",
    ),
    Fault(
        OPTIM,
        "_tiles",
        "(*(x.clone() for _ in range(num_tiles - 1)), x)",
        "(x,) * num_tiles",
        "counters advance once a tile",
    ),
    Fault(
        OPTIM,
        "stochastic",
        'zlib.crc32(f"{seed}/{index}".encode())',
        'zlib.crc32(f"{index}".encode())',
        "each update rounds with the same bits",
    ),
    # plans
    Fault(
        PLANS,
        "may_start_early",
        "<= self.max_live",
        "<= 2 * self.max_live",
        "a prefetch beyond the live limit",
    ),
    Fault(
        PLANS,
        "early",
        'passed != index - 1 and before.kind == "reduce"',
        "passed != index - 1",
        "a gather moves across the forward-backward boundary",
    ),
    Fault(
        PLANS,
        "_reduce",
        "self._end_reduce(out)  # the next reduction needs the state of its comm hook",
        "break",
        "a hook's state is read before it is written",
    ),
    Fault(
        PLANS,
        "serve",
        "(-row[1], row[0])",
        "(row[1], row[0])",
        "the backward serves the first unit, not the last",
    ),
    Fault(
        PLANS,
        "_go_on",
        'out.append(Event("wait_gather", event.unit))',
        "pass",
        "a gather is not waited for",
    ),
    Fault(
        PLANS,
        "_is_early",
        "and not self._ready[reduction.unit]",
        "and False",
        "a unit is reduced before its gradients",
    ),
    # the eager step
    Fault(
        RUNTIME,
        "cut",
        "flat_P[buffer.layout.numel :].zero_()",
        "pass",
        "the padding of a gradient is not zeroed",
    ),
    Fault(
        RUNTIME,
        "begin",
        "any(leaf._backward_hooks for leaf in visit.leaves.values())",
        "False",
        "a hook of one forward is one of the next",
    ),
    Fault(
        RUNTIME,
        "begin",
        "not (self._gathers or is_first or self._is_last)",
        "not (self._gathers or is_first)",
        "the last backward reduces nothing",
    ),
    Fault(
        RUNTIME,
        "_write",
        "if adds:",
        "if False:",
        "the second gradient of a parameter replaces the first",
    ),
    Fault(
        PLANS,
        "home",
        'adds_late = holds == "result" or ',
        "adds_late = ",
        "a second visit overwrites the first",
    ),
    Fault(
        PLANS,
        "carried",
        '"nothing" if is_first else ',
        "",
        "gradients of the step before are added",
    ),
    Fault(
        RUNTIME,
        "wait",
        "flats = self._gathered[unit.name] = self._end(unit.name)",
        "flats = self._gathered[unit.name] = {g.buffer.key: g.pending.finish() for g in "
        "self._under_way.pop(unit.name) if not g.pending.works or True}",
        "a gather is not waited for",
    ),
    Fault(
        MODEL,
        "random_state",
        "after |= {kind: state for kind, state in random_states(device).items() if kind in rng}",
        "after |= rng",
        "every step draws the same dropout",
    ),
    Fault(
        RUNTIME,
        "begin",
        "self.no_grad_names & no_grad_names",
        "self.no_grad_names | no_grad_names",
        "a parameter that one forward leaves out gets no update",
    ),
    Fault(RUNTIME, "collect", "work.close()", "pass", "a graph outlives its step"),
    Fault(RUNTIME, "rng", "* 1_000_003 + rank", "* 1_000_003", "all ranks draw the same dropout"),
    Fault(
        RUNTIME,
        "_buffer",
        "_from_rank_0(flat_P, world, buffer.key)",
        "flat_P",
        "ranks begin with their own values",
    ),
    Fault(
        RUNTIME,
        "_check_state",
        "run.flags.check()",
        "pass",
        "a parameter frozen later is not noticed",
    ),
    # pipelines
    Fault(
        PIPES,
        "norm_parts",
        "by_stage[stage, place]",
        "by_stage[0, place]",
        "the norm is that of the first stage",
    ),
    Fault(
        PIPES,
        "_check_progress",
        "and event not in sent",
        "and False",
        "an order that hangs passes the checker",
    ),
    Fault(
        PIPES,
        "first_name",
        "min(found, key",
        "max(found, key",
        "the last parameter with an overflow, not the first",
    ),
    # storage
    Fault(
        STORAGE,
        "write",
        "self._checksums[index] = found",
        "pass",
        "the checksum of what is written is not kept",
    ),
    Fault(STORAGE, "settle", "os.fdatasync(self._fd)", "pass", "failed writes are not noticed"),
    Fault(
        STORAGE,
        "_move",
        "[memory[done:]], at + done)",
        "[memory[done:]], at)",
        "a short write goes on at the wrong place",
    ),
    Fault(
        STORAGE,
        "stream_update",
        "if len(written) > write_behind:",
        "if len(written) > write_behind + 1:",
        "one sub-group more is written behind than there is room for",
    ),
    Fault(
        STORAGE,
        "arrive",
        "self._update.wait(self._name)",
        "pass",
        "a tensor is read while an update writes it",
    ),
    Fault(
        STORAGE,
        "start_read",
        "self.wait(name)",
        "pass",
        "a file is read while an update writes it",
    ),
    Fault(
        STORAGE,
        "divided",
        "and not any(map(is_lent, _tensors(update)))",
        "",
        "memory of which there are views is written while the next step runs",
    ),
    Fault(
        STORAGE,
        "agree_on",
        "error=error_of(tree)",
        "error=None",
        "an update that failed later is not reported on other ranks",
    ),
    Fault(
        RUNTIME,
        "of",
        "home._version == version",
        "True",
        "the norm of a gradient that was changed meanwhile is the old one",
    ),
    # the captured step
    Fault(
        GRAPH,
        "bucket_updates",
        "all(_is_written(user, roots) for wait",
        "any(_is_written(user, roots) for wait",
        "a reduction with another use is joined",
    ),
)
