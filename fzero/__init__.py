"""fzero: ZeRO stages 0–3 as pure functions on PyTorch.

cfg = fzero.Config.load("config.json")
step = fzero.make_train_step(model, cfg)
state = step.init()
for batch in loader:
    state, metrics = step(state, batch)
"""

from fzero.checkpoint import Loaded, Saving, load, save, start_save
from fzero.checkpoint_files import CheckpointError
from fzero.chrome_trace import save_trace
from fzero.codecs import Codec, cast, quantize
from fzero.collectives import CollectiveError, Fake, Real, Sim, join, shutdown
from fzero.comm import Comm, CommRow, plan_comm, trace_comm
from fzero.config import Config, ConfigError, ConfigWarning
from fzero.deepspeed_checkpoint import convert_deepspeed, import_deepspeed
from fzero.deepspeed_checkpoint_export import export_deepspeed
from fzero.elasticity import ElasticBatch, elastic_batch, elastic_batch_of_nodes
from fzero.engine import Engine
from fzero.file_store import StoreError
from fzero.file_tensors import FileTensor
from fzero.fit import Fit, fit
from fzero.graph_schedule import CompileError
from fzero.initialize import initialize
from fzero.launched import Launched, launched
from fzero.loss_scaling import LossScale, LossScaling
from fzero.machine_report import Rates, measure_rates
from fzero.matrix_transforms import adafactor, lamb, muon
from fzero.pieces import Pieces
from fzero.place import place
from fzero.plan import Plan, plan
from fzero.planner import Column, Comparison, compare_plans
from fzero.precision import Precision, widened
from fzero.profile_reports import ModuleProfile, Profile, comms_table, wall_clock_table
from fzero.profiler import profile
from fzero.recipe import MismatchError
from fzero.reshard import reshard, reshard_all
from fzero.reshard_plan import Place, ReshardPlan, plan_reshard
from fzero.schedule import Event, ScheduleError
from fzero.sent import Label, Sent
from fzero.simulate import LockstepRanks, VmapRanks, simulate, stacked, unstacked
from fzero.stacked import VmapError
from fzero.state import Metrics, TrainState
from fzero.step import Round, TrainStep, make_train_step
from fzero.tables import print_report
from fzero.timeline import Machine, Timeline
from fzero.torch_optimizers import torch_optimizer
from fzero.transforms import Transform, adagrad, adam, adamw, chain, check_elementwise, lion, scale, sgd, unless
from fzero.verbs import gather, optimizer_update, reduce_scatter_grads, shard, specs_of
from fzero.weights import export, load_weights
from fzero.wires import Sending, Wire, coded, ended, error_feedback, exact, restarted
from sharding import Placement

__all__ = [
    "CheckpointError",
    "Codec",
    "CollectiveError",
    "Column",
    "Comm",
    "CommRow",
    "Comparison",
    "CompileError",
    "Config",
    "ConfigError",
    "ConfigWarning",
    "ElasticBatch",
    "Engine",
    "Event",
    "Fake",
    "FileTensor",
    "Fit",
    "Label",
    "Launched",
    "Loaded",
    "LockstepRanks",
    "LossScale",
    "LossScaling",
    "Machine",
    "Metrics",
    "MismatchError",
    "ModuleProfile",
    "Pieces",
    "Place",
    "Placement",
    "Plan",
    "Precision",
    "Profile",
    "Rates",
    "Real",
    "ReshardPlan",
    "Round",
    "Saving",
    "ScheduleError",
    "Sending",
    "Sent",
    "Sim",
    "StoreError",
    "Timeline",
    "TrainState",
    "TrainStep",
    "Transform",
    "VmapError",
    "VmapRanks",
    "Wire",
    "adafactor",
    "adagrad",
    "adam",
    "adamw",
    "cast",
    "chain",
    "check_elementwise",
    "coded",
    "comms_table",
    "compare_plans",
    "convert_deepspeed",
    "elastic_batch",
    "elastic_batch_of_nodes",
    "ended",
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
    "reshard",
    "reshard_all",
    "restarted",
    "save",
    "save_trace",
    "scale",
    "sgd",
    "shard",
    "shutdown",
    "simulate",
    "specs_of",
    "stacked",
    "start_save",
    "torch_optimizer",
    "trace_comm",
    "unless",
    "unstacked",
    "wall_clock_table",
    "widened",
]
