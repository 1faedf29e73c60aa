"""`sent_in`: the collectives of a step's graph as records, under the labels that the
step gave them.

A node keeps its label when passes move or copy it. A collective that passes join from
several keeps all labels, with the elements of each. It becomes one `CommRecord` per
flat buffer, so that the records equal those of an eager step. An all-reduce that
consists of two collectives (on gloo) becomes one record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch.fx import Graph, Node

from fzero.comms.records import CommRecord, Phase, Purpose
from fzero.graph.analysis import contents_of
from fzero.graph.nodes import GATHERS, is_collective
from fzero.graph.remat import is_again, is_backward
from fzero.graph.timeline import Along, group_of, kind_of, sent_by

_UPDATE: tuple[Purpose, ...] = ("all_gather_params", "norm", "buffers", "optimizer", "owners")


def sent_in(graph: Graph, axes: Mapping[str, Along]) -> list[CommRecord]:
    """The records of one run of a graph, in the order of its collectives.

    Args:
        graph: a training step's, before or after the passes.
        axes: the axis of each process group, by the group's name in the graph; records
            of other groups use that name.
    """
    records: list[CommRecord] = []
    phase: Phase = "forward" if any(map(is_backward, graph.nodes)) else "update"
    for node in graph.nodes:
        if is_backward(node) or is_again(node):
            phase = "backward"
        if is_collective(node):
            for record in _records(node, axes, phase):
                first = _first_half(node, record, records)
                if first is None:
                    records.append(record)
                else:
                    records[first] = _both(records[first], record)
    return records


def _records(node: Node, axes: Mapping[str, Along], phase: Phase) -> list[CommRecord]:
    """One record per flat buffer of a collective."""
    group = group_of(node)
    # A process group that is not the step's is the model's own.
    name, size = (axes[group].name, axes[group].size) if group in axes else (group, None)
    nbytes, itemsize = sent_by(node, size), node.all_input_nodes[0].meta["val"].element_size()
    contents = contents_of(node)
    total, is_joined = sum(content.numel for content in contents) or 1, len(contents) > 1
    records = []
    for label, numel, (before, after) in contents:
        label, sent = replace(label, phase=_phase_of(label.purpose, phase)), nbytes * numel // total
        records.append(
            CommRecord(
                kind_of(node), name, label, sent // itemsize // after * before, sent, is_joined
            )
        )
    return records


def _phase_of(purpose: Purpose, phase: Phase) -> Phase:
    if purpose == "loss_stats":
        return "boundary"
    if purpose == "gather" and phase == "update":  # an evaluation has no backward
        return "forward"
    return "update" if purpose in _UPDATE else phase


def _first_half(node: Node, record: CommRecord, records: list[CommRecord]) -> int | None:
    """The index of the reduce-scatter whose sums `node` all-gathers, the two being an
    all-reduce; None if none, or if encoded.
    """
    if record.label.purpose != "reduce" or not _is_gather(node):
        return None
    halves = [
        index
        for index, sent in enumerate(records)
        if (sent.axis, sent.label.purpose, sent.label.buffer)
        == (record.axis, "reduce", record.label.buffer)
    ]
    return halves[-1] if halves and records[halves[-1]].nbytes == record.nbytes else None


def _is_gather(node: Node) -> bool:
    """Whether every rank sends one tensor to all ranks."""
    source = node.all_input_nodes[0]
    return node.target in GATHERS and (
        kind_of(node) != "all_to_all" or source.target is torch.ops.aten.repeat.default
    )


def _both(first: CommRecord, second: CommRecord) -> CommRecord:
    return first._replace(
        collective="all_reduce",
        num_elements=first.num_elements + second.num_elements,
        nbytes=first.nbytes + second.nbytes,
        is_joined=first.is_joined or second.is_joined,
    )
