"""The parser of the options of `farandole torchrun`: those of torchrun (torch/distributed/run.py of torch 2.13)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farandole import __version__
from farandole.base.command_parser import Parser
from farandole.job.launch.run_parser import add_loudness, add_page

PROGRAM = "farandole torchrun"
STATIC_PORT = 29500
GRACE_S = 30.0
"""Seconds from SIGTERM to SIGKILL: torch/distributed/elastic/multiprocessing/api.py, _get_default_shutdown_timeout."""

_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
_METHODS = ["spawn", "fork", "forkserver"]

WITHOUT_EFFECT: tuple[tuple[str, Any, str | list[str], str], ...] = (
    ("monitor_interval", 0.1, "S", "the end of a worker is detected at once, not by looking at intervals"),
    ("start_method", "spawn", _METHODS, "workers are commands, not functions; --fork-server determines how they start"),
    ("event_log_handler", "null", "NAME", "--events FILE writes the events of the job"),
    ("logs_specs", None, "NAME", "plug-ins for logs are not loaded"),
    ("numa_binding", None, "MODE", "workers are not bound to cores; numactl in front of the command does that"),
    ("signals_to_handle", _SIGNALS, "NAME,...", "SIGTERM, SIGINT and SIGHUP end the job"),
    ("duplicate_stdout_filters", "", "TEXT,...", "lines are not filtered; --tee writes all of them"),
    ("duplicate_stderr_filters", "", "TEXT,...", "lines are not filtered; --tee writes all of them"),
    ("local_addr", None, "HOST", "other nodes reach this one at the address at which the coordinator reaches it"),
    ("virtual_local_rank", False, "", "LOCAL_RANK is the real one, and all devices are visible to each worker"),
)
"""Options that are accepted without effect: the option's name, its default, its value's name or choices, the reason."""


def torchrun_parser(defaults: Mapping[str, str] | None = None) -> argparse.ArgumentParser:
    """Return the parser of the options. `defaults`: PET_ variables by the name of the option, as in torchrun."""
    parser = Parser(
        prog=PROGRAM,
        usage=f"{PROGRAM} [torchrun's options] script.py ...",
        description="Run a script as torchrun does, with torchrun's options. When a worker fails, all workers are "
        "started again, up to --max-restarts times; a script with an elastic function continues without that.",
        epilog=f"Example: {PROGRAM} --standalone --nproc-per-node 4 --max-restarts 3 train.py --epochs 10",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"farandole {__version__}")
    given = _Adder(parser, defaults or {})
    _sizes(given)
    _rendezvous(given)
    _script(given)
    _logs(given)
    _unused(given)
    _ours(parser)
    return parser


class _Adder:
    """Adds options in both spellings, with - and with _, and takes the default from a PET_ variable."""

    def __init__(self, parser: argparse.ArgumentParser, defaults: Mapping[str, str]) -> None:
        self._parser, self._defaults = parser, defaults
        self._group: argparse._ArgumentGroup | None = None

    def group(self, title: str) -> None:
        self._group = self._parser.add_argument_group(title)

    def option(self, flag: str, *short: str, default: object, help: str, **kwargs: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        spellings = dict.fromkeys((*short, flag, f"--{name}"))
        assert self._group is not None
        # argparse converts a default that is a text like a given value, and reports it in the same way.
        value = self._defaults.get(name, default)
        self._group.add_argument(*spellings, dest=name, default=value, help=help, **kwargs)

    def switch(self, flag: str, *short: str, help: str) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        text = self._defaults.get(name, "0")
        if not text.strip().lstrip("-").isdigit():
            self._parser.error(f"PET_{name.upper()} must be 0 or 1, got {text!r}")
        assert self._group is not None
        spellings = dict.fromkeys((*short, flag, f"--{name}"))
        self._group.add_argument(*spellings, dest=name, action="store_true", default=bool(int(text)), help=help)


def _sizes(given: _Adder) -> None:
    given.group("number of workers")
    given.option("--nnodes", default="1:1", metavar="N", help="number of nodes, or MIN:MAX (default: 1)")
    given.option(
        "--nproc-per-node",
        default="1",
        metavar="N",
        help="number of workers on each node: a number, gpu or cpu for one per device, auto for gpu where there is "
        "one and cpu elsewhere, or xpu (default: %(default)s)",
    )
    given.option(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often all workers are started again after a failure (default: %(default)s)",
    )
    given.switch("--standalone", help="one node (default for one node)")


def _rendezvous(given: _Adder) -> None:
    given.group("several nodes")
    given.option("--rdzv-backend", default="static", metavar="NAME", help="static or c10d (default: %(default)s)")
    given.option(
        "--rdzv-endpoint",
        default="",
        metavar="HOST:PORT",
        help="address at which the node that has it runs the coordinator, and the others join",
    )
    given.option("--rdzv-id", default="none", metavar="ID", help="name of the job, for its log folder")
    given.option(
        "--rdzv-conf",
        default="",
        metavar="K=V,...",
        help="token_file=FILE: the job's token, a copy on each node (or FARANDOLE_TOKEN); join_timeout=SECONDS; "
        "last_call_timeout=SECONDS, for further nodes when there are MIN; "
        "is_host=1: this node runs the coordinator",
    )
    given.option("--node-rank", type=int, default=0, metavar="N", help="number of this node (static)")
    given.option("--master-addr", default="127.0.0.1", metavar="HOST", help="address of node 0 (static)")
    given.option("--master-port", type=int, default=None, metavar="PORT", help=f"its port (default: {STATIC_PORT})")


def _script(given: _Adder) -> None:
    given.group("script")
    given.switch("--module", "-m", help="the script is the name of a module, as with python -m")
    given.switch("--no-python", help="the script is a program: it is run without python")
    given.switch("--run-path", help="run the script with Python, whatever --no-python says")
    given.option("--role", default="default", metavar="NAME", help="name of the role, in the prefix of lines")


def _logs(given: _Adder) -> None:
    given.group("logs (0 none, 1 stdout, 2 stderr, 3 both; for all workers, or for each local rank: 0:3,1:2)")
    given.option(
        "--log-dir",
        default=None,
        metavar="DIR",
        help="folder for the files ID_x/attempt_N/RANK/stdout.log, stderr.log and error.json",
    )
    given.option("--redirects", "-r", default="0", metavar="S", help="output that goes to files only")
    given.option("--tee", "-t", default="0", metavar="S", help="output that goes to files and to the console")
    given.option("--local-ranks-filter", default="", metavar="N,...", help="show only the output of these local ranks")


def _unused(given: _Adder) -> None:
    given.group("options of torchrun that are accepted without effect")
    for name, default, value, reason in WITHOUT_EFFECT:
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            given.switch(flag, help=reason)
        elif isinstance(value, list):
            given.option(flag, default=default, choices=value, help=reason)
        else:
            kind = float if isinstance(default, float) else str
            given.option(flag, default=default, type=kind, metavar=value, help=reason)
    given.group("time limits, in seconds")
    given.option(
        "--shutdown-timeout",
        type=int,
        default=None,
        metavar="S",
        help=f"from SIGTERM to SIGKILL when a worker is stopped (default: {GRACE_S:g})",
    )


def _ours(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("options of Farandole")
    group.add_argument(
        "--fork-server",
        choices=("auto", "on", "off"),
        default=None,
        help="start workers by forking a process that has imported torch (default: on with --max-restarts, else auto)",
    )
    group.add_argument(
        "--tls",
        type=Path,
        metavar="DIR",
        help="encrypt TCP connections with the certificates in DIR, which `farandole certificates DIR` makes; "
        "each node needs a copy",
    )
    group.add_argument("--events", type=Path, metavar="FILE", help="append every event of the job to FILE, as JSON")
    add_page(group)
    add_loudness(group)
