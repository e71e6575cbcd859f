"""The jobs of Horovod's executors on Ray, as far as they can be seen without Ray."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(("cooldown", "on_failure"), [(None, "slot"), ((10, 20), "host")])
def test_a_lost_worker_costs_its_host_only_where_that_is_asked_for(
    cooldown: tuple[int, int] | None, on_failure: str
) -> None:
    from horovod.ray.runner import elastic_config

    config = elastic_config(1, 2, None, cooldown, None, 60.0)
    assert config.on_failure == on_failure
    assert not config.waits_for_newcomers
