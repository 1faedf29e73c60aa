"""`initialize`: DeepSpeed's entry point, which makes an engine from the arguments of a
DeepSpeed script.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer as TorchOptimizer
from torch.utils.data import Dataset

from fzero.common.arguments import check_model, check_no_inference, shown
from fzero.comms.process_group import is_joined
from fzero.comms.rendezvous import DEFAULT_PORT, launched
from fzero.compression.plan import CompressionPlan, plan_of
from fzero.config.config import Config, ConfigError, ConfigWarning
from fzero.config.fields import compared
from fzero.config.files import read
from fzero.data.loader import CurriculumLoader
from fzero.data.token_dropping import dropping_of
from fzero.deepspeed.engine import config_keys as engine_keys, sequences
from fzero.deepspeed.engine.client_optimizers import Groups, of_optimizer, of_parameters
from fzero.deepspeed.engine.config_keys import EngineKeys
from fzero.deepspeed.engine.data_efficiency import sampler_of
from fzero.deepspeed.engine.dataloader import ResumableLoader, check_indexed
from fzero.deepspeed.engine.divided_params import check_not_foreign, taken_over
from fzero.deepspeed.engine.division_rules import check_mpu, own_device
from fzero.deepspeed.engine.engine import Engine
from fzero.deepspeed.engine.fp32_buffers import keep_buffers_in_fp32, keep_in_fp32_pattern
from fzero.deepspeed.engine.optimizer import ConfiguredScheduler, make_optimizer
from fzero.deepspeed.engine.pipeline_engine import PipelineEngine, prepare
from fzero.model.model_check import listed
from fzero.model.transforms import Choice
from fzero.pipeline.module import PipelineModule
from fzero.pipeline.pipeline import Pipeline
from fzero.runtime.step_spec import StepSpec, bind, check_same
from fzero.step import TrainStep
from fzero.transforms.configured import configured
from sharding import Mesh
from sharding.views import torch_dtype

Source = Mapping[str, Any] | str | os.PathLike[str] | Config


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: TorchOptimizer | Callable[[Any], TorchOptimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Source | None = None,
    mesh_param: tuple[int, int] | None = None,
    config_params: Source | None = None,
    *,
    units: Sequence[str] | None = None,
    schedule: Literal["learned", "negotiated"] = "learned",
    checkpoint: Choice | None = None,
    seed: int = 0,
) -> tuple[Engine, Any, ResumableLoader | CurriculumLoader | None, Any]:
    """DeepSpeed's entry point: an engine that trains a model under a configuration.

    *Collective:* every rank of the job; initialises the process group if necessary.

    Args:
        args: command-line arguments, whose `deepspeed_config` is the configuration if
            `config` is not given.
        model: any module. From here on its parameters are those of the engine's state
            (`engine.param_views`). On CUDA it is moved to this rank's device. One that
            `zero.Init` has divided is taken over one unit at a time.
        optimizer: a new optimizer of torch.optim with these parameters, or a function
            of the parameters that makes one. None takes the configuration's; without
            that the engine does not train. Parameters outside the optimizer are not
            trained.
        model_parameters: the parameters of the configuration's optimizer, in the form
            of torch.optim; None is all of the model's. They are trained while they
            require gradients.
        training_data: a dataset, for which a loader is made
            (`fzero.deepspeed.engine.dataloader`).
        lr_scheduler: a scheduler of the optimizer, or a function of the optimizer that
            makes one; stepped after each update. None takes the configuration's.
        distributed_port: the port of rank 0, if the launcher does not set one.
        mpu: must have no model parallelism; may be that of
            `UlyssesSPAttentionHF.register_with_transformers`.
        dist_init_required: False raises where the process group is not initialised yet.
        collate_fn: the collate function of the loader.
        config, config_params: a mapping in DeepSpeed's schema, the path of a file, a
            base64 string, or a `Config`. The keys `sequence_parallel_size` and
            `data_parallel_size` are a `mesh_param`.
        mesh_param: (data-parallel ranks, ranks that share a sequence).
        units, schedule, checkpoint, seed: as for `make_train_step`; fzero's own.

    Returns:
        (engine, optimizer, loader of `training_data`, scheduler), each None where there
        is none. Optimizer and scheduler are to read and write.

    Raises:
        ConfigError: the configuration is invalid, or requests an unsupported feature.
        MismatchError: on every rank, when ranks differ.
    """
    source = _source(args, config, config_params)
    source = read(source) if isinstance(source, str | os.PathLike) else source
    if model is None:
        raise ConfigError("model: must be a torch.nn.Module, got None; pass the model to train")
    check_model(model)
    assert isinstance(model, nn.Module)
    check_no_inference("initialize")
    _check_makers(optimizer, lr_scheduler)
    _, shared = sequences.without_keys(source)
    cfg, keys = engine_keys.read(source)
    trains = optimizer is not None or "optimizer" in cfg.model_fields_set
    prepare(model, keys, mpu)
    check_not_foreign(model.parameters())
    model = _on_own_device(model, distributed_port, dist_init_required)
    with taken_over(model):
        theirs = optimizer
        if callable(optimizer) and not isinstance(optimizer, TorchOptimizer):
            trained = [param for param in model.parameters() if param.requires_grad]
            optimizer, model_parameters = (
                optimizer(trained if model_parameters is None else model_parameters),
                None,
            )
        if not trains:
            model.requires_grad_(False)
        cfg, groups = _groups(cfg, model, optimizer, model_parameters, trains=trains)
        if lr_scheduler is not None and cfg.scheduler is not None:
            both = "scheduler: is also in the configuration; the script's lr_scheduler is used"
            warnings.warn(both, ConfigWarning, stacklevel=2)
            cfg = cfg.model_copy(update={"scheduler": None})
        cfg.warn_of_no_effect(model)
        _keep_in_fp32(model, cfg)
        how: dict[str, Any] = {"units": units, "schedule": schedule, "seed": seed}
        seq_size = sequences.check_asked(mpu, mesh_param, shared)
        step = _step(model, cfg, groups, checkpoint=checkpoint, seq_size=seq_size, **how)
        check_same(step.runtime.world, {"configuration": compared(keys)})
        check_mpu(mpu, step.world_size // seq_size)
        rates, momentum = step.runtime.updater.rates, step.runtime.updater.momentum
        loader = None if training_data is None else _loader(training_data, step, keys, collate_fn)
        state = step.init()
        engine: Engine
        given = step.spec.cfg.model_dump() if isinstance(source, Config) else dict(source)
        live = make_optimizer(step, groups, optimizer, given, lambda: engine) if trains else None
        engine = (PipelineEngine if isinstance(model, PipelineModule) else Engine)(
            step,
            state,
            keys=keys,
            optimizer=live,
            training_dataloader=loader,
            config=given,
            held=groups.held,
        )
    engine.engine_tools.client_optimizer = theirs
    engine.lr_scheduler = _scheduler(cfg, engine.optimizer, lr_scheduler, rates, momentum)
    if keys.dump_state:
        engine.log_line(str(engine.cfg))
    if keys.dump_state or keys.memory_breakdown:
        engine.log_line(str(engine.train_step.plan))
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _keep_in_fp32(model: nn.Module, cfg: Config) -> None:
    """Makes the module buffers fp32 that `data_types.keep_in_fp32_modules` names."""
    dtype = cfg.precision.param_dtype
    names, of_params = (
        cfg.data_types.keep_in_fp32_modules,
        None if dtype is None else torch_dtype(dtype),
    )
    if (pattern := keep_in_fp32_pattern(model, names, of_params)) is not None:
        keep_buffers_in_fp32(model, pattern)


def _scheduler(
    cfg: Config, seen: TorchOptimizer | None, given: Any, rates: Any, momentum: Any
) -> Any:
    """The script's scheduler, or else the configuration's; None for an engine that does
    not train.
    """
    if seen is None or (given is None and cfg.scheduler is None):
        return None
    if given is None:
        return ConfiguredScheduler(seen, rates, momentum, kind=cfg.scheduler.type)  # type: ignore[union-attr]
    return given(seen) if callable(given) else given


def _step(
    model: nn.Module,
    cfg: Config,
    groups: Groups,
    *,
    checkpoint: Choice | None,
    seq_size: int,
    **how: Any,
) -> TrainStep:
    divides = () if seq_size == 1 else (sequences.NOW.transform,)
    spec = StepSpec(
        model=model,
        cfg=cfg,
        param_groups=groups.param_groups,
        transform=groups.transform,
        transforms=configured(
            cfg,
            divides,
            compress=_compression(cfg, model),
            drop=dropping_of(model),
            checkpoint=checkpoint,
        ),
        trained=frozenset(n for n, p in model.named_parameters() if p.requires_grad) & groups.held,
        **how,
    )
    if not isinstance(model, PipelineModule):
        mesh = None if seq_size == 1 else sequences.mesh_of(seq_size)
        return TrainStep(spec, bind(mesh, spec.device))
    num_data = model.num_data_ranks
    mesh = Mesh.of(pipe=model.num_stages, data=num_data)
    return TrainStep(replace(spec, parallelism=Pipeline()), bind(mesh, spec.device))


def _compression(cfg: Config, model: nn.Module) -> CompressionPlan | None:
    """The plan of a model after `init_compression`. Warns if only the configuration
    asks for compression.
    """
    plan = plan_of(model)
    if plan is None and cfg.compresses:
        warnings.warn(
            "compression_training: compresses nothing here, as in DeepSpeed, because "
            "init_compression was not called; call "
            "deepspeed.compression.compress.init_compression(model, config) before initialize, or "
            "leave the block out",
            ConfigWarning,
            stacklevel=4,
        )
    return plan


def _check_makers(optimizer: object, lr_scheduler: object) -> None:
    """Raises unless optimizer and scheduler have the right types, or are functions."""
    if (
        optimizer is not None
        and not isinstance(optimizer, TorchOptimizer)
        and not callable(optimizer)
    ):
        raise ConfigError(
            f"optimizer: must be one of torch.optim or a function of parameters that makes one, "
            f"got {shown(optimizer)}; pass one, or name it in the configuration: {{'optimizer': "
            f"{{'type': 'AdamW'}}}}"
        )
    if (
        lr_scheduler is not None
        and not callable(lr_scheduler)
        and not hasattr(lr_scheduler, "step")
    ):
        raise ConfigError(
            f"lr_scheduler: must have a method step(), or be a function of the optimizer that "
            f"makes one, got {shown(lr_scheduler)}; pass one, or name it in the configuration: "
            f"{{'scheduler': {{'type': 'WarmupLR'}}}}"
        )


def _source(args: Any, config: Source | None, config_params: Source | None) -> Source:
    """The only configuration that was passed."""
    of_args = getattr(args, "deepspeed_config", None) or getattr(args, "deepscale_config", None)
    given = {"config": config, "config_params": config_params, "args.deepspeed_config": of_args}
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise ConfigError(
            f"config: must be given once, as config, config_params or args.deepspeed_config, got "
            f"{', '.join(found) or 'none'}; pass one of them"
        )
    return next(iter(found.values()))


def check_may_join(required: bool | None) -> None:
    """Raises a ConfigError where ranks of a launcher have no process group yet, and
    must not initialise it here.

    Args:
        required: DeepSpeed's `dist_init_required`; False forbids to initialise it.
    """
    me = launched()
    if required is False and me is not None and not is_joined():
        raise ConfigError(
            f"dist_init_required: must not be False where {me.by} has started {me.world_size} "
            f"ranks that have not joined; call fzero.deepspeed.init_distributed() first, or leave "
            f"it out"
        )


def _loader(
    data: Dataset[Any],
    step: TrainStep,
    keys: EngineKeys,
    collate_fn: Callable[[list[Any]], Any] | None,
) -> ResumableLoader | CurriculumLoader:
    cfg = step.spec.cfg
    num_data_ranks = step.runtime.batches.world_size
    _, micro, num_micro = cfg.batch_sizes(num_data_ranks)
    if micro is None:
        raise ConfigError(
            "train_micro_batch_size_per_gpu: must be given for the loader of training_data, and "
            "neither it nor train_batch_size is given; give one"
        )
    how: dict[str, Any] = {
        "batch_size": micro,
        "rank": step.data_rank // step.plan.seq_size,
        "world_size": num_data_ranks,
        "collate_fn": collate_fn,
    }
    if cfg.data_efficiency is not None and cfg.samples:
        check_indexed(data)
        sampling = cfg.data_efficiency.data_sampling
        return CurriculumLoader(
            data,
            sampler_of(cfg, len(data)),  # type: ignore[arg-type]
            num_micro=num_micro,
            num_epochs=sampling.num_epochs,
            num_workers=sampling.num_workers,
            pin_memory=sampling.pin_memory and step.device.type == "cuda",
            **how,
        )
    drop_last, pin_memory = bool(keys.dataloader_drop_last), step.device.type == "cuda"
    # as in DeepSpeed; otherwise all stages would need one order
    in_order = isinstance(step.spec.model, PipelineModule)
    return ResumableLoader(
        data, drop_last=drop_last, shuffle=not in_order, pin_memory=pin_memory, **how
    )


def _on_own_device(model: nn.Module, port: int, required: bool | None) -> nn.Module:
    """Checks that the job may be joined, and moves the model to this rank's device."""
    me = launched()
    check_may_join(required)
    if me is not None and me.by != "torchrun":
        os.environ.setdefault("MASTER_PORT", str(port))
    if (device := own_device()).type == "cpu" or any(p.is_meta for p in model.parameters()):
        return model
    return model.to(device)


def _groups(
    cfg: Config,
    model: nn.Module,
    optimizer: TorchOptimizer | None,
    model_parameters: Iterable[Any] | None,
    *,
    trains: bool,
) -> tuple[Config, Groups]:
    """The param groups, and the configuration with their optimizer."""
    if not trains:
        return cfg, Groups([], [], frozenset())
    if optimizer is None:
        groups = of_parameters(model_parameters, cfg.optimizer, model)
    else:
        if "optimizer" in cfg.model_fields_set:
            warnings.warn(
                "optimizer: is also in the configuration; the script's is used",
                ConfigWarning,
                stacklevel=3,
            )
        groups = of_optimizer(optimizer, model)
    left = [
        name
        for name, param in model.named_parameters()
        if param.requires_grad and name not in groups.held
    ]
    if left:
        warnings.warn(
            f"{'model_parameters' if optimizer is None else 'optimizer'}: does not hold "
            f"{listed(left)}, which require gradients and are not trained; add them, or freeze "
            f"them with requires_grad_(False)",
            ConfigWarning,
            stacklevel=3,
        )
    if groups.optimizer is not None:
        cfg = cfg.model_copy(update={"optimizer": groups.optimizer})
    return cfg, groups
