"""Options that several commands have, with one text each."""

from __future__ import annotations

import argparse

from farandole.job.launch.job_spec import PROGRESS

PREEMPTION_HELP = (
    "watch the notices by which a cloud announces that this machine will be taken away: aws, gcp, azure; auto: the "
    "cloud that the firmware names; CLOUD=URL: another address of its metadata service (default: none)"
)


def add_page(group: argparse._ActionsContainer) -> None:
    """Add --page, --traces and --progress."""
    group.add_argument(
        "--page",
        nargs="?",
        const="",
        metavar="HOST:PORT",
        help="serve the live page of the job, and metrics for Prometheus; --page=HOST:PORT: at that address (default: "
        "127.0.0.1:8470, or the next port that is free); needs the extra farandole[page]",
    )
    group.add_argument(
        "--traces",
        nargs="?",
        const="",
        metavar="URL",
        help="export regroups and checkpoints as spans of OpenTelemetry, over HTTP to the collector that its "
        "environment variables name (default: http://localhost:4318/v1/traces); --traces=URL: to that address. The "
        "process of the page does it, so the page is served, too; needs the extra farandole[traces]",
    )
    group.add_argument(
        "--progress",
        choices=PROGRESS,
        default=PROGRESS[0],
        help="a line at the bottom of the terminal with epoch, step, samples per second and workers; auto: where "
        "standard error is a terminal that can redraw it, and standard output is not a pipe, unless -q is given "
        "(default: auto)",
    )


def add_loudness(group: argparse._ActionsContainer, every_event: str = "show every event of the job") -> None:
    """Add --quiet and --verbose. `every_event`: the text of --verbose."""
    loudness = group.add_mutually_exclusive_group()
    group.set_defaults(loudness="NORMAL")
    for flags, name, text in (
        (("-q", "--quiet"), "QUIET", "show only warnings and the result"),
        (("--verbose",), "VERBOSE", every_event),
    ):
        loudness.add_argument(*flags, dest="loudness", action="store_const", const=name, help=text)
