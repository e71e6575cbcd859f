"""The states and their handlers, under Horovod's path."""

from farandole.elastic import (
    ModelStateHandler as ModelStateHandler,
    OptimizerStateHandler as OptimizerStateHandler,
    SamplerStateHandler as SamplerStateHandler,
    StateHandler as StateHandler,
    TorchState as TorchState,
    get_handler_registry as get_handler_registry,
    set_handler_registry as set_handler_registry,
)
