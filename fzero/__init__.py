"""fzero: ZeRO stages 0–3 as pure functions on PyTorch.

cfg = fzero.Config.load("config.json")
step = fzero.make_train_step(model, cfg)
state = step.init()
for batch in loader:
    state, metrics = step(state, batch)
"""

import os
from typing import TYPE_CHECKING, Any

from fzero.checkpoint.readers import read_also
from fzero.common.doors import door
from fzero.common.version import __version__ as __version__
from fzero.runtime.hooks import observe_steps

if TYPE_CHECKING:
    from fzero.checkpoint.folders import CheckpointError as CheckpointError
    from fzero.checkpoint.loading import load as load
    from fzero.checkpoint.saving import save as save, start_save as start_save
    from fzero.checkpoint.weights import load_weights as load_weights
    from fzero.comms.axes import CollectiveError as CollectiveError
    from fzero.comms.process_group import join as join, shutdown as shutdown
    from fzero.comms.rendezvous import launched as launched
    from fzero.config.config import (
        Config as Config,
        ConfigError as ConfigError,
        ConfigWarning as ConfigWarning,
    )
    from fzero.deepspeed.engine.engine import Engine as Engine
    from fzero.deepspeed.engine.initialize import initialize as initialize
    from fzero.digests.recorder import record as record
    from fzero.digests.replaying import ReplayError as ReplayError, replay as replay
    from fzero.generation.gathered_model import generating as generating
    from fzero.graph.schedule import CompileError as CompileError
    from fzero.launch.notebook import notebook_launch as notebook_launch
    from fzero.optim.adam_kernels import adamw as adamw
    from fzero.optim.optimizers import sgd as sgd
    from fzero.optim.transforms import Transform as Transform, chain as chain
    from fzero.plans.plan import Plan as Plan
    from fzero.plans.plan_spec import plan as plan
    from fzero.plans.unit_orders import ScheduleError as ScheduleError
    from fzero.profiling.run_log import log as log
    from fzero.resharding.place import place as place
    from fzero.resharding.reshard import reshard as reshard
    from fzero.simulation import simulate as simulate
    from fzero.state import Metrics as Metrics, TrainState as TrainState
    from fzero.step import TrainStep as TrainStep, make_train_step as make_train_step
    from fzero.storage.file_tensor import StoreError as StoreError
    from fzero.tiling.cross_entropy import linear_cross_entropy as linear_cross_entropy
    from fzero.tiling.tiles import tiled as tiled
    from fzero.tiling.transforms import tiled_head as tiled_head, tiled_mlp as tiled_mlp
    from fzero.verbs import (
        gather as gather,
        optimizer_update as optimizer_update,
        reduce_scatter_grads as reduce_scatter_grads,
        shard as shard,
        specs_of as specs_of,
    )
    from sharding import Placement as Placement
else:
    __getattr__, __dir__, __all__ = door(
        __name__,
        {
            "checkpoint.folders": "CheckpointError",
            "checkpoint.loading": "load",
            "checkpoint.saving": "save start_save",
            "checkpoint.weights": "load_weights",
            "comms.axes": "CollectiveError",
            "comms.process_group": "join shutdown",
            "comms.rendezvous": "launched",
            "config.config": "Config ConfigError ConfigWarning",
            "deepspeed.engine.engine": "Engine",
            "deepspeed.engine.initialize": "initialize",
            "digests.recorder": "record",
            "digests.replaying": "ReplayError replay",
            "generation.gathered_model": "generating",
            "graph.schedule": "CompileError",
            "launch.notebook": "notebook_launch",
            "optim.adam_kernels": "adamw",
            "optim.optimizers": "sgd",
            "optim.transforms": "Transform chain",
            "plans.placements": "Placement",
            "plans.plan": "Plan",
            "plans.plan_spec": "plan",
            "plans.unit_orders": "ScheduleError",
            "profiling.run_log": "log",
            "resharding.place": "place",
            "resharding.reshard": "reshard",
            "simulation": "simulate",
            "state": "Metrics TrainState",
            "step": "TrainStep make_train_step",
            "storage.file_tensor": "StoreError",
            "tiling.cross_entropy": "linear_cross_entropy",
            "tiling.tiles": "tiled",
            "tiling.transforms": "tiled_head tiled_mlp",
            "verbs": "gather optimizer_update reduce_scatter_grads shard specs_of",
            "": "checkpoint comms common config curvature deepspeed digests engine estimation generation graph "
            "integrations launch optim "
            "per_sample plans profiling resharding runtime sequence simulation state step storage testing tiling tuning verbs",
        },
    )


def _probe_of(*of_step: Any) -> Any:
    """The observer of a step in a job that `fzero tune` started; the tuner is loaded
    there only.
    """
    if "FZERO_TUNE" not in os.environ:
        return None
    from fzero.tuning.probe import probe_of

    return probe_of(*of_step)


observe_steps(_probe_of)


def _deepspeeds(path: Any) -> Any:
    """A checkpoint of DeepSpeed as a source of weights; its formats are loaded at the
    first question only.
    """
    from fzero.deepspeed.formats.source import source_of

    return source_of(path)


read_also(_deepspeeds)
