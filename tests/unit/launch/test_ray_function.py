"""Refusals of farandole.ray.run() that need no Ray."""

from __future__ import annotations

import sys

import pytest

import farandole.ray
from farandole.errors import ConfigError


def test_without_ray_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r"pip install 'farandole\[ray\]'"):
        farandole.ray.run(lambda: None)


@pytest.mark.parametrize(("cpus", "gpus"), [(0.0, 0.0), (-1.0, 0.0), (1.0, -1.0)])
def test_resources_must_make_sense(cpus: float, gpus: float) -> None:
    with pytest.raises(ConfigError, match=f"got {cpus:g} and {gpus:g}"):
        farandole.ray.run(lambda: None, cpus_per_worker=cpus, gpus_per_worker=gpus)


def test_the_first_argument_must_be_a_function() -> None:
    with pytest.raises(TypeError, match=r"farandole\.ray\.run: the first argument must be the function"):
        farandole.ray.run(3)  # type: ignore[arg-type]
