"""The captured step: capture, passes on the graph, backends, timeline. The only user of torch._dynamo and
torch._inductor.

May import: runtime and below. Begin with `fzero.graph.capture`.
"""

__all__ = [
    "analysis",
    "backends",
    "blocks",
    "buckets",
    "capture",
    "exchange",
    "remat",
    "reuse",
    "schedule",
    "timeline",
    "traffic",
    "weight_grads",
]
