"""The pages for users name everything that there is."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from farandole.base.env import HorovodSettings
from farandole.integrations.horovod.horovod_settings import SETTINGS
from farandole.job.launch.agent_command import agent_parser
from farandole.job.launch.run_parser import run_parser

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text()
MOVING = (DOCS / "moving-from-horovod.md").read_text()


def test_every_option_of_an_agent_is_in_the_reference() -> None:
    for action in agent_parser()._actions:
        assert action.dest == "help" or any(f"`{flag}" in REFERENCE for flag in action.option_strings), action


def test_every_option_is_in_the_reference_or_said_to_have_no_effect() -> None:
    parser, _ = run_parser("farandole run")
    pages = REFERENCE + MOVING
    for action in parser._actions:
        is_hidden = action.help == argparse.SUPPRESS or action.dest == "help" or action.dest.startswith("autotune_")
        assert is_hidden or any(f"`{flag}" in pages for flag in action.option_strings), action.option_strings


def test_every_variable_that_means_something_is_in_the_page_about_horovod() -> None:
    for setting in SETTINGS:
        assert setting.no_effect or f"`{setting.variable}`" in MOVING, setting.variable
    defaults = HorovodSettings()
    assert f"| {defaults.fusion_bytes} |" in MOVING
    assert f"| {defaults.cache_capacity} |" in MOVING
    assert f"| {defaults.stall_warning_s:g} |" in MOVING


def test_the_help_has_the_defaults_of_horovods_settings() -> None:
    defaults, text = HorovodSettings(), " ".join(run_parser("farandole run")[0].format_help().split())
    assert f"each tensor separately (default: {defaults.fusion_bytes >> 20})" in text
    assert f"announcement takes few bytes (default: {defaults.cache_capacity})" in text
    assert f"the warning about such operations (default: {defaults.stall_warning_s:g})" in text


def test_links_between_pages_lead_somewhere() -> None:
    for page in (*DOCS.rglob("*.md"), DOCS.parent / "README.md"):
        for link in re.findall(r"\]\((?!http)([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"
