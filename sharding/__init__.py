"""The division of a model's state among ranks, in integers and names.

Specs say how a tensor relates to a mesh and where it lives. A partition cuts a flat
buffer into shards. An order and a layout say where each parameter is in it. Buckets and
transfers are plans made from these. Importing this package does not load torch. The
modules that cut tensors (`sharding.views`), simulate collectives (`sharding.reference`)
and generate test inputs (`sharding.testing`) are imported by name.
"""

from sharding.buckets import plan_buckets
from sharding.dtypes import itemsize
from sharding.flat_runs import Box, boxes
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
