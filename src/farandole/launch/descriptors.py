"""The descriptors that a job needs, from its start to its last regroup. Used by local.py and agent_command.py.

A launcher has some 11 descriptors, and 6 for each of its workers: two pipes, the connection, two for its status page,
and one that signals its exit. A lost worker's descriptors are closed before its replacement's are opened, except pipes
that a process that escaped from the worker holds open for a moment. A worker has some 20 of its own, however many
workers there are, and a few more while one generation ends and the next one begins. The limits below hold for the peak
of a regroup, so that a job that starts does not fail later for lack of descriptors.
"""

from __future__ import annotations

import resource

from farandole.errors import ConfigError

_OF_THE_LAUNCHER = 64
_FOR_EACH_WORKER = 12
_OF_A_WORKER = 128  # which inherits the limit: most of it for the script's files and its loader workers


def descriptors_needed(workers: int) -> int:
    """Return the limit of descriptors that a launcher of `workers` workers, and each of them, needs."""
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
