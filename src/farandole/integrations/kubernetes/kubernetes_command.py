"""`farandole kubernetes manifest`: prints the objects of a job on Kubernetes."""

from __future__ import annotations

import argparse
import json
import re
import secrets
import shlex
import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from farandole.base.command_parser import USAGE_ERROR, Parser, add_json, value_counts
from farandole.errors import ConfigError
from farandole.integrations.kubernetes.kubernetes_manifests import KINDS, ManifestOptions, manifests
from farandole.job.launch.arguments import split_command

_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_LONGEST_NAME = 40  # with what is added, names of pods stay below the 63 characters of a label


def kubernetes_command(arguments: Sequence[str]) -> int:
    """Run the command and return the exit code. Raises SystemExit as argparse does."""
    if not arguments or arguments[0] != "manifest":
        overview = _overview_parser()
        overview.parse_args(arguments)
        overview.print_help()
        return USAGE_ERROR
    parser = manifest_parser()
    ours, command = split_command(arguments[1:], value_counts(parser))
    given = parser.parse_args(ours)
    try:
        options = _options(given, command)
    except ConfigError as error:
        parser.error(str(error))
    sys.stdout.write(_json(options) if given.json else _text(options))
    return 0


def _overview_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="farandole kubernetes",
        usage="farandole kubernetes manifest --image IMAGE -np N [options] command ...",
        description="Run jobs on Kubernetes; see 'farandole kubernetes manifest --help'.",
        allow_abbrev=False,
    )
    parser.add_argument("command", choices=["manifest"], nargs="?", help=argparse.SUPPRESS)
    return parser


def manifest_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole kubernetes manifest",
        usage="farandole kubernetes manifest --image IMAGE -np N [options] command ...",
        description="Print the objects of a job on Kubernetes: access to the pods for its coordinator, the Secret with "
        "the job's token, the coordinator, and the workers. Pipe it into `kubectl apply -f -`.",
        epilog="Example: farandole kubernetes manifest --image registry/train:1 -np 4 --min-np 2 --max-np 8 --gpus 1 "
        "python train.py",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--image", required=True, help="container image with Farandole, the script and its packages")
    add("-np", "-n", "--num-proc", type=int, required=True, metavar="N", help="number of workers")
    add("--min-np", type=int, default=1, metavar="N", help="minimum number of workers to continue (default: 1)")
    add("--max-np", type=int, metavar="N", help="maximum number of workers (default: the value of -np)")
    add("--name", default="train", help="name of the job (default: %(default)s)")
    add("--namespace", default="default", metavar="NAME", help="namespace of all objects (default: %(default)s)")
    add(
        "--kind",
        choices=KINDS,
        default="job",
        help="job: two Jobs, of which the workers' can be scaled; jobset: a JobSet; trainingruntime: a TrainingRuntime "
        "of Kubeflow Trainer, and a TrainJob (default: %(default)s)",
    )
    add("--slots", type=int, metavar="N", help="workers in one pod (default: the value of --gpus, or 1)")
    add("--gpus", type=int, default=0, metavar="N", help="NVIDIA GPUs of one pod (default: none)")
    add("--cpu", default="", metavar="AMOUNT", help="cores of one worker pod, such as 4 (default: not set)")
    add("--memory", default="", metavar="AMOUNT", help="memory of one worker pod, such as 16Gi (default: not set)")
    add(
        "--shared-memory",
        default="",
        metavar="AMOUNT",
        help="size limit of /dev/shm, which counts as memory of the pod (default: that of the pod)",
    )
    add("--queue", default="", metavar="NAME", help="LocalQueue of Kueue (default: the job is not queued)")
    add(
        "--secret",
        default="",
        metavar="NAME",
        help="an existing Secret with the job's token under the key `token` (default: print one with a new token)",
    )
    add(
        "--tls-secret",
        default="",
        metavar="NAME",
        help="an existing Secret with the files of `farandole certificates` (default: connections are not encrypted)",
    )
    add(
        "--run-options",
        default="",
        metavar="TEXT",
        help="further options of `farandole run`, such as '--checkpoint s3://bucket/job'",
    )
    add_json(parser)
    return parser


def _options(given: argparse.Namespace, command: Sequence[str]) -> ManifestOptions:
    if not _NAME.fullmatch(given.name) or len(given.name) > _LONGEST_NAME:
        raise ConfigError(
            f"--name {given.name!r}: it needs small letters, digits and '-', begins with a letter, and has at most "
            f"{_LONGEST_NAME} characters"
        )
    try:
        run_options = shlex.split(given.run_options)
    except ValueError as error:
        raise ConfigError(f"--run-options {given.run_options!r}: {error}") from None
    if given.gpus < 0:
        raise ConfigError(f"--gpus must not be negative, got {given.gpus}")
    names = {each.name for each in fields(ManifestOptions)}
    given.slots = (given.gpus or 1) if given.slots is None else given.slots
    given.command, given.run_options, given.token = tuple(command), tuple(run_options), secrets.token_hex(32)
    return ManifestOptions(**{name: value for name, value in vars(given).items() if name in names})


def _json(options: ManifestOptions) -> str:
    """Return the objects as one list, as kubectl reads and prints it."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests(options))}, indent=2) + "\n"


def _text(options: ManifestOptions) -> str:
    import yaml  # here: few command lines need it

    class Dumper(yaml.SafeDumper):
        """Writes each value in full: an object that occurs twice would become a reference."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    if options.secret:
        secret = (
            f"The Secret {options.secret} must exist:\n"
            f"#   kubectl -n {options.namespace} create secret generic {options.secret} "
            "--from-literal=token=$(openssl rand -hex 32)"
        )
    else:
        secret = (
            "The token in the Secret is new and lets processes join the job: keep it out of version control.\n"
            "# With --secret NAME an existing Secret is used, and none is printed."
        )
    if options.tls_secret:
        secret += (
            f"\n# The Secret {options.tls_secret} must exist, made from a folder of `farandole certificates`:\n"
            f"#   kubectl -n {options.namespace} create secret generic {options.tls_secret} "
            "--from-file=ca.pem --from-file=certificate.pem --from-file=key.pem"
        )
    header = f"# Printed by `farandole kubernetes manifest`; apply it with `kubectl apply -f FILE`.\n# {secret}\n"
    if options.kind == "job":
        patch = '{"spec":{"completions":N,"parallelism":N}}'
        command = f"kubectl -n {options.namespace} patch job {options.name}-worker -p '{patch}'"
        header += f"# Change the number of worker pods: {command}\n"
    documents = yaml.dump_all(
        manifests(options), Dumper=Dumper, sort_keys=False, explicit_start=True, width=120, allow_unicode=True
    )
    return header + documents
