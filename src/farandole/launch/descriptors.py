"""Enough descriptors for a job, from its start to its last regroup. Used by local.py and agent_command.py.

A launcher has some 11 descriptors, and 6 for each of its workers: two pipes, the connection, two for the page where the
worker is seen, and one that tells of its exit. A lost worker's go before its replacement's come, but for pipes that a
process which escaped from the worker holds open for a moment. A worker has some 20 of its own, however many workers
there are, and a few more while one generation ends and the next one begins. Limits below hold for the height of a
regroup, so that a job which starts does not fail later for want of descriptors.
"""

from __future__ import annotations

import resource

from farandole.errors import ConfigError

_OF_THE_LAUNCHER = 64
_FOR_EACH_WORKER = 12
_OF_A_WORKER = 128  # which inherits the limit: most of it for the script's files and its loader workers


def descriptors_needed(workers: int) -> int:
    """Return the limit of descriptors that a launcher of `workers` workers, and each of them, can work with."""
    return max(_OF_A_WORKER, _OF_THE_LAUNCHER + _FOR_EACH_WORKER * workers)


def reserve_descriptors(workers: int) -> None:
    """Raise this process's soft limit of open files to what a job of `workers` workers on this machine needs, unless it
    is as high already. The workers inherit it.

    Raises:
        ConfigError: the hard limit is lower than that.
    """
    needed = descriptors_needed(workers)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"a job of {workers} workers needs {needed} open files in one process, and no more than {hard} are allowed "
            f"here (ulimit -Hn): raise the limit (ulimit -n, limits.conf, LimitNOFILE=, docker run --ulimit nofile=), "
            f"or start fewer workers on this machine"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
