"""Names of horovod.ray that need no cluster."""

from __future__ import annotations

import itertools
import sys
import warnings
from types import SimpleNamespace

import pytest


def test_values_are_put_into_the_queue_of_the_script_and_otherwise_a_warning_says_that_they_are_lost() -> None:
    from horovod.ray import ray_logger

    with pytest.warns(UserWarning, match="has no effect"):
        ray_logger.log({"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ray_logger.log({"loss": 1.0})
        values: list[object] = []
        ray_logger.configure(SimpleNamespace(put=values.append))
        ray_logger.log({"loss": 0.5})
    assert values == [{"loss": 0.5}]


def test_hosts_are_hidden_and_shown_again(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from horovod.ray import elastic

    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=list))
    hosts = [SimpleNamespace(name=name, slots=2) for name in "abc"]
    monkeypatch.setattr(elastic, "hosts_of", lambda *_: hosts)
    discovery = elastic.TestDiscovery(1, 3, change_frequency_s=0.0)
    seen = [len(discovery.find_available_hosts_and_slots()) for _ in range(50)]
    assert set(seen) <= {1, 2, 3}
    assert all(abs(one - next_) <= 1 for one, next_ in itertools.pairwise(seen))
    assert seen[0] == 2
    assert "hosts: 3, of which 2 can be used" in capsys.readouterr().out
    slow = elastic.TestDiscovery(1, 3, change_frequency_s=1e9, verbose=False)
    assert slow.find_available_hosts_and_slots() == {"a": 2, "b": 2, "c": 2}
