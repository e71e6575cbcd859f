"""The settings of an elastic job."""

from __future__ import annotations

from typing import Any

from horovod.runner.common.util.settings import BaseSettings
from horovod.runner.elastic.discovery import HostDiscovery


class ElasticSettings(BaseSettings):
    """The settings of an elastic job beside those of all jobs."""

    def __init__(
        self,
        discovery: HostDiscovery,
        min_num_proc: int,
        max_num_proc: int | None,
        elastic_timeout: int | None,
        reset_limit: int | None,
        cooldown_range: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(elastic=True, **kwargs)
        self.discovery = discovery
        self.min_num_proc, self.max_num_proc = min_num_proc, max_num_proc
        self.elastic_timeout, self.reset_limit, self.cooldown_range = elastic_timeout, reset_limit, cooldown_range
