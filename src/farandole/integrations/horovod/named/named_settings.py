"""The settings of named operations."""

from __future__ import annotations

from dataclasses import dataclass

from farandole.errors import ConfigError


@dataclass(frozen=True)
class NamedSettings:
    """Horovod's settings, under Farandole's names. Raises ConfigError for invalid values.

    Attributes:
        cache_capacity: The number of cached requests; repeating one costs a byte or two. 0 for none.
        fusion_bytes: Up to this size several allreduces share one flat buffer; 0 for none.
        stall_warning_s: After this time, in seconds, a warning names the operations that some ranks have not submitted;
            0 for never.
        stall_abort_s: After this time, in seconds, such an operation fails with an error; 0 for never.
        dynamic_process_sets: Whether add_process_set and remove_process_set are allowed.
    """

    cache_capacity: int = 1024
    fusion_bytes: int = 64 << 20
    stall_warning_s: float = 60.0
    stall_abort_s: float = 0.0
    dynamic_process_sets: bool = False

    def __post_init__(self) -> None:
        for name in ("cache_capacity", "fusion_bytes", "stall_warning_s", "stall_abort_s"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigError(f"{name} must not be negative, got {value}")
