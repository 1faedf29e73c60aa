"""The division of a model's state among ranks, in integers and names.

Specs say how a tensor relates to a mesh and where it lives. A partition cuts a flat
buffer into shards. An order and a layout say where each parameter is in it. Buckets and
transfers are plans made from these. Importing this package does not load torch. The
modules that cut tensors (`sharding.views`), simulate collectives (`sharding.reference`)
and generate test inputs (`sharding.testing`) are imported by name.
"""

from typing import TYPE_CHECKING, Any

from sharding.buckets import plan_buckets
from sharding.dtypes import itemsize
from sharding.layout import FlatLayout, Fragment
from sharding.order import Order, declaration, round_robin
from sharding.partition import NearEqualSplit, Partition
from sharding.specs import (
    DATA,
    DEVICE,
    Mesh,
    Partial,
    Placement,
    Replicated,
    Sharded,
    Spec,
    TensorSpec,
)

if TYPE_CHECKING:
    from sharding.flat_runs import Box, boxes
    from sharding.transfer import Move, moves_between, moves_from, moves_to, plan_transfer

__all__ = [
    "DATA",
    "DEVICE",
    "Box",
    "FlatLayout",
    "Fragment",
    "Mesh",
    "Move",
    "NearEqualSplit",
    "Order",
    "Partial",
    "Partition",
    "Placement",
    "Replicated",
    "Sharded",
    "Spec",
    "TensorSpec",
    "boxes",
    "declaration",
    "itemsize",
    "moves_between",
    "moves_from",
    "moves_to",
    "plan_buckets",
    "plan_transfer",
    "round_robin",
]


def __getattr__(name: str) -> Any:
    """The names of two modules that a step does not need: boxes are for checkpoints,
    transfers for a change of the layout.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sharding import flat_runs, transfer

    return getattr(flat_runs if hasattr(flat_runs, name) else transfer, name)
