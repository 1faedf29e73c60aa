"""Pipelines: orders of micro-batches as values, the partition of layers into stages,
and models as lists of layers.

May import: sharding to runtime. Begin with `fzero.pipeline.orders`, then
`fzero.pipeline.module`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.pipeline.layers import (
        LayerSpec as LayerSpec,
        StageLayers as StageLayers,
        TiedLayerSpec as TiedLayerSpec,
    )
    from fzero.pipeline.module import (
        PipelineError as PipelineError,
        PipelineModule as PipelineModule,
    )
    from fzero.pipeline.order_check import check_order as check_order, plan_order as plan_order
    from fzero.pipeline.orders import (
        ORDERS as ORDERS,
        B as B,
        F as F,
        I as I,
        OrderError as OrderError,
        PipeEvent as PipeEvent,
        PipeOrder as PipeOrder,
        W as W,
        forward_only as forward_only,
        gpipe as gpipe,
        interleaved as interleaved,
        one_f_one_b as one_f_one_b,
        zero_bubble as zero_bubble,
    )
    from fzero.pipeline.partition import (
        LayerCost as LayerCost,
        balanced as balanced,
        partition_by_cost as partition_by_cost,
        uniform as uniform,
    )
    from fzero.pipeline.pipeline import Pipeline as Pipeline
    from fzero.pipeline.timeline import (
        PipelineTimeline as PipelineTimeline,
        chunk_costs as chunk_costs,
        predict as predict,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "layers": "LayerSpec StageLayers TiedLayerSpec",
            "module": "PipelineError PipelineModule",
            "order_check": "check_order plan_order",
            "orders": (
                "B F I ORDERS OrderError PipeEvent PipeOrder W forward_only gpipe "
                "interleaved one_f_one_b zero_bubble"
            ),
            "partition": "LayerCost balanced partition_by_cost uniform",
            "pipeline": "Pipeline",
            "timeline": "PipelineTimeline chunk_costs predict",
        },
    )
