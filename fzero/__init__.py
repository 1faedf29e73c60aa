"""fzero: ZeRO stages 0–3 as pure functions on PyTorch.

cfg = fzero.Config.load("config.json")
step = fzero.make_train_step(model, cfg)
state = step.init()
for batch in loader:
    state, metrics = step(state, batch)
"""

import os
from typing import Any

from fzero.checkpoint.deepspeed.export import export_deepspeed
from fzero.checkpoint.deepspeed.load import convert_deepspeed, import_deepspeed
from fzero.checkpoint.folders import CheckpointError
from fzero.checkpoint.save_load import Loaded, Saving, load, save, start_save
from fzero.checkpoint.weights import export, load_weights
from fzero.common.text_tables import print_report
from fzero.comms.codecs import Codec, cast, quantize
from fzero.comms.collectives import AbstractAxis, CollectiveError, ProcessAxis, Sim, join, shutdown
from fzero.comms.comm_hooks import CommHook, Sending, completed, compressed, error_feedback, exact, reset_every
from fzero.comms.records import CommRecord, Label
from fzero.comms.rendezvous import RankInfo, launched
from fzero.comms.stacked import VmapError
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.elastic_batch import ElasticBatch, elastic_batch, elastic_batch_of_nodes
from fzero.engine.engine import Engine
from fzero.engine.initialize import initialize
from fzero.estimation.compare import Candidate, Comparison, compare_plans
from fzero.estimation.fit import Fit, fit
from fzero.graph.schedule import CompileError
from fzero.graph.timeline import MachineModel, Timeline
from fzero.optim.fragments import ShardContents
from fzero.optim.loss_scale import LossScale, LossScaling
from fzero.optim.matrix import adafactor, lamb, muon
from fzero.optim.mixed_precision import Precision, mixed_precision
from fzero.optim.torch_optim import torch_optimizer
from fzero.optim.transforms import Transform, adagrad, adam, adamw, chain, check_elementwise, lion, scale, sgd, skip_if
from fzero.plans.plan import Plan, plan
from fzero.plans.unit_scheduler import Event, ScheduleError
from fzero.profiling.chrome_trace import save_trace
from fzero.profiling.comm_trace import CommRow, CommTrace, plan_comm, trace_comm
from fzero.profiling.machine import MeasuredRates, measure_rates
from fzero.profiling.profiler import profile
from fzero.profiling.reports import ModuleProfile, Profile, comms_table, wall_clock_table
from fzero.resharding.place import place
from fzero.resharding.plan import JobRank, ReshardPlan, plan_reshard
from fzero.resharding.reshard import reshard, reshard_all
from fzero.runtime.hooks import observe_steps
from fzero.runtime.step_spec import MismatchError
from fzero.simulation import LockstepRanks, VmapRanks, simulate, stacked, unstacked
from fzero.state import Metrics, TrainState
from fzero.step import AccumulationWindow, TrainStep, make_train_step
from fzero.storage.file_store import StoreError
from fzero.storage.file_tensor import FileTensor
from fzero.verbs import gather, optimizer_update, reduce_scatter_grads, shard, specs_of
from sharding import Placement


def _probe_of(*of_step: Any) -> Any:
    """The observer of a step in a job that `fzero tune` started; the tuner is loaded there only."""
    if "FZERO_TUNE" not in os.environ:
        return None
    from fzero.tuning.probe import probe_of

    return probe_of(*of_step)


observe_steps(_probe_of)

__all__ = [
    "AbstractAxis",
    "AccumulationWindow",
    "Candidate",
    "CheckpointError",
    "Codec",
    "CollectiveError",
    "CommHook",
    "CommRecord",
    "CommRow",
    "CommTrace",
    "Comparison",
    "CompileError",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "ElasticBatch",
    "Engine",
    "Event",
    "FileTensor",
    "Fit",
    "JobRank",
    "Label",
    "Loaded",
    "LockstepRanks",
    "LossScale",
    "LossScaling",
    "MachineModel",
    "MeasuredRates",
    "Metrics",
    "MismatchError",
    "ModuleProfile",
    "Placement",
    "Plan",
    "Precision",
    "ProcessAxis",
    "Profile",
    "RankInfo",
    "ReshardPlan",
    "Saving",
    "ScheduleError",
    "Sending",
    "ShardContents",
    "Sim",
    "StoreError",
    "Timeline",
    "TrainState",
    "TrainStep",
    "Transform",
    "VmapError",
    "VmapRanks",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "cast",
    "chain",
    "check_elementwise",
    "comms_table",
    "compare_plans",
    "completed",
    "compressed",
    "convert_deepspeed",
    "elastic_batch",
    "elastic_batch_of_nodes",
    "error_feedback",
    "exact",
    "export",
    "export_deepspeed",
    "fit",
    "gather",
    "import_deepspeed",
    "initialize",
    "join",
    "lamb",
    "launched",
    "lion",
    "load",
    "load_weights",
    "make_train_step",
    "measure_rates",
    "mixed_precision",
    "muon",
    "optimizer_update",
    "place",
    "plan",
    "plan_comm",
    "plan_reshard",
    "print_report",
    "profile",
    "quantize",
    "reduce_scatter_grads",
    "reset_every",
    "reshard",
    "reshard_all",
    "save",
    "save_trace",
    "scale",
    "sgd",
    "shard",
    "shutdown",
    "simulate",
    "skip_if",
    "specs_of",
    "stacked",
    "start_save",
    "torch_optimizer",
    "trace_comm",
    "unstacked",
    "wall_clock_table",
]
