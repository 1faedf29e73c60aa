"""Stand-ins for names of DeepSpeed that fzero has nothing for: they can be imported,
and raise when they are used.

A function raises when it is called. A class can be named in `isinstance`, in
annotations and as a base; it raises when it is instantiated, and its attributes raise,
but for constants that are strings. An exception is an exception, which nothing raises.
Constants have DeepSpeed's values.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn

from fzero.deepspeed.names import Definition, modules

KERNELS = "fzero needs no compiled operators; leave it out"
DATA_PARALLEL = (
    "every rank has the whole model in turn: use ZeRO stage 3, and offload where memory is short"
)
SERVE = (
    "engine.module.generate generates between updates; serve exported weights (fzero export) "
    "with another program"
)
SEQUENCES = (
    "use UlyssesSPAttentionHF.register_with_transformers, DistributedAttention or "
    "fzero.sequence.ulysses, which divide sequences among ranks"
)

INSTEAD = {
    "deepspeed": "docs/deepspeed.md lists what fzero has",
    "deepspeed.accelerator": "use deepspeed.accelerator.get_accelerator() or torch",
    "deepspeed.autotuning": "use fzero tune, or fzero run --autotuning run",
    "deepspeed.checkpoint": "fzero.load reads fzero's checkpoints at any number of ranks; fzero import-deepspeed "
    "and "
    "fzero export --format deepspeed-universal convert to and from DeepSpeed's",
    "deepspeed.comm": "use torch.distributed",
    "deepspeed.compile": "use engine.compile()",
    "deepspeed.compression": (
        "use init_compression before the training and redundancy_clean after it "
        "(docs/compression.md)"
    ),
    "deepspeed.compression.basic_layer.ColumnParallelLinear_Compress": DATA_PARALLEL,
    (
        "deepspeed.compression.basic_layer.QuantAct"
    ): 'activation_quantization in the block "compression_training" quantizes inputs',
    "deepspeed.compression.basic_layer.RowParallelLinear_Compress": DATA_PARALLEL,
    "deepspeed.compression.utils": (
        "fzero.compression.formulas has quantize, ternary, binary and top_share as functions"
    ),
    "deepspeed.datastates": "use engine.save_checkpoint, or fzero.start_save in the background",
    "deepspeed.elasticity": 'use the block "elasticity" of the configuration',
    "deepspeed.env_report": "use fzero env",
    "deepspeed.inference": SERVE,
    "deepspeed.init_inference": SERVE,
    "deepspeed.io": "use engine.save_checkpoint, or fzero.start_save in the background",
    "deepspeed.launcher": "use fzero run",
    "deepspeed.linear": "use an adapter library such as peft; ZeRO stage 3 shards frozen weights",
    "deepspeed.model_implementations": "use the model of its library",
    "deepspeed.module_inject": DATA_PARALLEL,
    "deepspeed.moe": (
        "ordinary modules of experts are trained data-parallel, as all are; expert "
        "parallelism needs DeepSpeed"
    ),
    "deepspeed.monitor": 'use the blocks "csv_monitor", "tensorboard", "wandb" and "comet" of the configuration',
    "deepspeed.nebula": "use engine.save_checkpoint, or fzero.start_save in the background",
    "deepspeed.nvme": "fzero env --path measures a disk",
    "deepspeed.ops": KERNELS,
    "deepspeed.ops.adagrad": "use torch.optim.Adagrad, which becomes fzero's own",
    "deepspeed.ops.adam": "use torch.optim.AdamW, which becomes fzero's own",
    "deepspeed.ops.lamb": 'give the configuration "optimizer": {"type": "Lamb"}',
    "deepspeed.ops.lion": 'give the configuration "optimizer": {"type": "Lion"}',
    "deepspeed.ops.sparse_attention": (
        "use fzero.attention.sparse_attention, which chooses the kernel"
    ),
    "deepspeed.ops.transformer": (
        "use torch.nn.functional.scaled_dot_product_attention in an ordinary module"
    ),
    "deepspeed.profiling": 'use the block "flops_profiler" of the configuration, or fzero.profiling',
    "deepspeed.runtime": (
        "the configuration and the engine do what it is for, where fzero does it "
        "(docs/deepspeed.md)"
    ),
    "deepspeed.runtime.activation_checkpointing": "use deepspeed.checkpointing.checkpoint",
    "deepspeed.runtime.checkpoint_engine": (
        "use engine.save_checkpoint, or fzero.start_save in the background"
    ),
    "deepspeed.runtime.data_pipeline": (
        "use fzero.data, or the blocks of the configuration (docs/data.md)"
    ),
    "deepspeed.runtime.domino": DATA_PARALLEL,
    "deepspeed.runtime.fp16": 'use the block "fp16" of the configuration, and the names of optimizers in "optimizer"',
    "deepspeed.runtime.hybrid_engine": (
        "engine.module.generate generates between updates, on the engine of deepspeed.initialize"
    ),
    "deepspeed.runtime.pipe": (
        "initialize of a PipelineModule gives the engine of a pipeline, which sends by itself"
    ),
    "deepspeed.runtime.sequence_parallel": SEQUENCES,
    "deepspeed.runtime.superoffload": 'use "offload_optimizer": {"device": "cpu"} of the configuration',
    "deepspeed.runtime.swap_tensor": 'use "offload_optimizer" and "offload_param" with "device": "nvme" of the configuration',
    "deepspeed.runtime.tensor_parallel": DATA_PARALLEL,
    "deepspeed.runtime.zenflow": 'use "offload_optimizer": {"device": "cpu"} of the configuration',
    "deepspeed.runtime.zero": 'use the block "zero_optimization" of the configuration; engine.train_step.plan shows what it does',
    "deepspeed.sequence": SEQUENCES,
    "deepspeed.tp_model_init": DATA_PARALLEL,
}
"""What to do instead of a module's names, or of one name; the longest prefix counts."""


def instead_of(name: str) -> str:
    """What to do instead of a name of DeepSpeed that fzero has nothing for.

    >>> instead_of("deepspeed.autotuning.autotuner.Autotuner")
    'use fzero tune, or fzero run --autotuning run'
    """
    while name not in INSTEAD:
        name = name.rpartition(".")[0]
    return INSTEAD[name]


def message(name: str) -> str:
    """The error about the use of a name."""
    return f"{name}: fzero has nothing in its place; {instead_of(name)}"


@cache
def stand_in(origin: Definition) -> Any:
    """What `from deepspeed… import name` gives for a name that fzero has nothing for:
    one object for each origin.
    """
    if origin.kind == "constants":
        return modules()[origin.module].constants[origin.name]
    make: Callable[[Definition], Any] = {
        "functions": _function,
        "classes": _class,
        "errors": _error,
    }.get(origin.kind, Missing)
    return make(origin)


def _about(origin: Definition) -> dict[str, str]:
    return {
        "__module__": origin.module,
        "__qualname__": origin.name,
        "__doc__": message(str(origin)),
    }


def _function(origin: Definition) -> Callable[..., NoReturn]:
    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message(str(origin)))

    missing.__name__ = origin.name
    for key, value in _about(origin).items():
        setattr(missing, key, value)
    return missing


class MissingClass(ABCMeta):
    """The type of classes that fzero has nothing for; the attributes of such a class
    raise.
    """

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(f"type object {cls.__name__!r} has no attribute {name!r}")
        missing = next(base for base in cls.__mro__ if "fzero_stands_in" in vars(base))
        raise AttributeError(message(f"{missing.__module__}.{missing.__qualname__}"))


def _class(origin: Definition) -> type:
    def __new__(cls: type, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(message(str(origin)))

    constants = modules()[origin.module].attributes.get(origin.name, {})
    return MissingClass(
        origin.name,
        (),
        {**constants, **_about(origin), "__new__": __new__, "fzero_stands_in": True},
    )


def _error(origin: Definition) -> type[Exception]:
    return type(origin.name, (Exception,), _about(origin))


class Missing:
    """A value that fzero has nothing for; using it raises."""

    def __init__(self, origin: Definition) -> None:
        self.__name__ = str(origin)
        self.__doc__ = message(str(origin))

    def __repr__(self) -> str:
        return f"<{self.__name__}, which fzero has nothing for>"

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        raise AttributeError(self.__doc__)

    def __or__(self, other: Any) -> Any:
        return Any  # in annotations

    __ror__ = __or__

    def _raise(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(self.__doc__)

    __call__ = __getitem__ = __setitem__ = __iter__ = __len__ = __contains__ = __bool__ = (
        __int__
    ) = __float__ = _raise
    __enter__ = __exit__ = __lt__ = __gt__ = __le__ = __ge__ = __add__ = __mul__ = _raise
