"""Measurements: traces of collectives and operators, times of modules, rates of a
machine.

May import: estimation, resharding, step and below. Begin with
`fzero.profiling.profiler`.
"""

from typing import TYPE_CHECKING

from fzero.common.doors import door

if TYPE_CHECKING:
    from fzero.profiling.chrome_trace import save_trace as save_trace
    from fzero.profiling.comm_trace import (
        CommRow as CommRow,
        CommTrace as CommTrace,
        plan_comm as plan_comm,
        trace_comm as trace_comm,
    )
    from fzero.profiling.machine import (
        MeasuredRates as MeasuredRates,
        measure_rates as measure_rates,
    )
    from fzero.profiling.measured_layers import measure_layers as measure_layers
    from fzero.profiling.profiler import profile as profile
    from fzero.profiling.reports import (
        ModuleProfile as ModuleProfile,
        Profile as Profile,
        comms_table as comms_table,
        wall_clock_table as wall_clock_table,
    )
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "chrome_trace": "save_trace",
            "comm_trace": "CommRow CommTrace plan_comm trace_comm",
            "machine": "MeasuredRates measure_rates",
            "measured_layers": "measure_layers",
            "profiler": "profile",
            "reports": "ModuleProfile Profile comms_table wall_clock_table",
        },
    )
