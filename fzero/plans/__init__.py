"""The plan of a step, as values without tensors: units, flat buffers, placements, the
mesh, the order of gathers.

May import: config, comms and below. Begin with `fzero.plans.plan`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.plans.plan import Plan as Plan
    from fzero.plans.plan_spec import PlanSpec as PlanSpec
    from fzero.plans.unit_orders import Event as Event, ScheduleError as ScheduleError
else:
    __getattr__, __dir__, __all__ = door(
        __name__, {"plan": "Plan", "plan_spec": "PlanSpec", "unit_orders": "Event ScheduleError"}
    )
