"""`farandole ledger check DIR`: prints the findings about a sample ledger. It starts without torch."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from farandole.base.command_parser import USAGE_ERROR, Parser
from farandole.errors import ConfigError

EXACT, NOT_EXACT = 0, 1


def ledger_command(arguments: Sequence[str]) -> int:
    """Run the command. Return EXACT, NOT_EXACT, or USAGE_ERROR where there is no ledger to check. Raises SystemExit as
    argparse does."""
    options = ledger_parser().parse_args(arguments)
    # Here: both import numpy, for which `farandole run --help` should not wait.
    from farandole.training.ledger.findings import as_json, compare, format_comparison, format_findings
    from farandole.training.ledger.proving import Folder, prove

    try:
        findings = prove(Folder(options.folder))
        comparison = None if options.against is None else compare(findings, prove(Folder(options.against)))
    except (ConfigError, OSError) as error:
        print(f"farandole ledger check: {error}", file=sys.stderr)
        return USAGE_ERROR
    for line in [as_json(findings, comparison)] if options.json else format_findings(findings):
        print(line)
    if comparison is not None and not options.json:
        print(format_comparison(comparison))
    is_proved = findings.is_exact and (comparison is None or comparison.is_equal)
    return EXACT if is_proved else NOT_EXACT


def ledger_parser() -> argparse.ArgumentParser:
    """Return the parser of its options."""
    parser = Parser(
        prog="farandole ledger",
        description="Prove from a sample ledger that each epoch trained every sample once, or name those that it did "
        "not. Exit code 0: proved; 1: not; 2: there is no ledger to read.",
        allow_abbrev=False,
    )
    parser.add_argument("action", choices=["check"])
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="folder that was given to farandole run --sample-ledger"
    )
    parser.add_argument(
        "--against",
        type=Path,
        metavar="DIR",
        help="ledger of another strict job, whose state must have the same hash after each epoch that both have ended",
    )
    parser.add_argument("--json", action="store_true", help="print all findings as JSON")
    return parser
