"""Queries of Horovod's tests and some scripts about an installation, and two small tools."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from importlib import util
from typing import Any, ParamSpec, TypeVar

from farandole.base.env import changed_environment

P = ParamSpec("P")
T = TypeVar("T")

env = changed_environment
"""Change the environment inside `with env(NAME="value"):`; names whose value is None are left unchanged."""


def extension_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether `horovod.<name>` works here: "torch" does, if torch is installed; nothing else."""
    return ext_base_name == "torch" and util.find_spec("torch") is not None


def check_extension(ext_name: str, ext_env_var: str, pkg_path: str, *args: str) -> None:
    """Raise ImportError unless extension_available() for the last word of `ext_name`, as in "horovod.torch". The other
    arguments give the place of Horovod's compiled code, and its build flags."""
    if not extension_available(ext_name.rpartition(".")[2]):
        raise ImportError(f"{ext_name} is not available: Farandole works with PyTorch only, which must be installed")


def gloo_built(verbose: bool = False) -> bool:
    """Return True: Farandole itself does what scripts reach through Gloo, elastic jobs above all."""
    return True


def mpi_built(verbose: bool = False) -> bool:
    """Return False: Farandole needs no MPI."""
    return False


def nccl_built(verbose: bool = False) -> int:
    """Return farandole.nccl_built(): the version of NCCL in the installed torch; 0: none, or no torch."""
    if not extension_available("torch"):
        return 0
    import farandole

    return farandole.nccl_built(verbose)


def ddl_built(verbose: bool = False) -> bool:
    """Return False: there is no IBM DDL in Farandole."""
    return False


def ccl_built(verbose: bool = False) -> bool:
    """Return False: there is no Intel oneCCL in Farandole."""
    return False


def gpu_available(ext_base_name: str, verbose: bool = False) -> bool:
    """Return whether torch can use a GPU here."""
    if not extension_available(ext_base_name):
        return False
    import torch

    return torch.cuda.is_available()


def num_rank_is_power_2(num_rank: int) -> bool:
    """Return whether `num_rank` is 1, 2, 4, 8, ..."""
    return num_rank > 0 and num_rank.bit_count() == 1


def split_list(values: Sequence[T], n: int) -> list[Sequence[T]]:
    """Split `values` into `n` consecutive parts whose lengths differ by one at most, the longer ones first."""
    size, longer = divmod(len(values), n)
    starts = [part * size + min(part, longer) for part in range(n + 1)]
    return [values[start:stop] for start, stop in itertools.pairwise(starts)]


def is_iterable(value: object) -> bool:
    """Return whether `iter(value)` works."""
    return isinstance(value, Iterable) or hasattr(value, "__getitem__")


def _cache(function: Callable[P, T]) -> Callable[P, T]:
    """Cache `function`, so that it is called once for each set of arguments."""
    cached: Any = functools.cache(function)
    return functools.wraps(function)(lambda *args, **kwargs: cached(*args, **kwargs))
