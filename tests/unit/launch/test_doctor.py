"""What `farandole doctor` makes of what it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.membership import Address
from farandole.job.launch import machine_check
from farandole.job.launch.doctor_command import doctor_command, format_examined, reaches, same_versions
from farandole.job.launch.machine_check import Examined, Finding

GB = 1 << 30


@pytest.mark.parametrize(
    ("finding", "state", "text"),
    [
        (machine_check.software({"error": "No module named 'torch'"}), "error", "No module named 'torch'"),
        (machine_check.software({"torch": "2.13.0"}), "ok", "torch 2.13.0"),
        (machine_check.commands_python(None, "/venv/bin/python", str), "warning", "there is no `python` in PATH"),
        (machine_check.commands_python("/venv/bin/python", "/venv/bin/python3", str), "ok", "/venv/bin/python"),
        (
            machine_check.commands_python("/usr/bin/python", "/venv/bin/python", lambda _: "torch and farandole"),
            "warning",
            "`python` is /usr/bin/python, which lacks torch and farandole",
        ),
        (
            machine_check.commands_python("/usr/bin/python", "/venv/bin/python", lambda _: ""),
            "ok",
            "`python` is /usr/bin/python, and Farandole runs under /venv/bin/python",
        ),
        (machine_check.devices({"devices": 2, "nccl": True}, True), "ok", "2 CUDA devices, NCCL"),
        (machine_check.devices({"devices": 1, "nccl": False}, True), "warning", "1 CUDA device, no NCCL"),
        (machine_check.devices({"devices": 0, "cuda": True}, True), "warning", "torch finds none of them"),
        (machine_check.devices({"torch": "2.13.0+cpu"}, True), "warning", "torch 2.13.0+cpu has no CUDA"),
        (machine_check.devices({"torch": "2.13.0+cpu"}, False), "ok", "on the CPU"),
        (machine_check.cores(2, 2, 8), "ok", "2 usable of 8 (a CPU quota)"),
        (machine_check.cores(3, 2, 2), "warning", "2 usable, for 3 workers"),
        (machine_check.memory(4, GB), "warning", "1.0 GB available"),
        (machine_check.memory(4, 8 * GB), "ok", "8.0 GB available"),
        (machine_check.shared_memory(64 << 20, 64 << 20), "warning", "0.06 of 0.06 GB free"),
        (machine_check.shared_memory(0, 0), "warning", "there is none"),
        (machine_check.shared_memory(2 * GB, 4 * GB), "ok", "2.00 of 4.00 GB free"),
        (machine_check.descriptors(100, 1024), "error", "at most 1024, and 100 workers need 1664"),
        (machine_check.descriptors(1, 1024), "ok", "at most 1024"),
        (machine_check.kernel("darwin", {}), "error", "darwin is not Linux"),
        (machine_check.kernel("linux", {"this": False, "that": True}), "warning", "lacks: this"),
        (machine_check.scratch("/tmp", 1 << 20), "warning", "/tmp: 0.0 GB free"),
        (machine_check.network(["10.0.0.1"], {"10.0.0.1": "timed out"}), "error", "10.0.0.1 (timed out)"),
        (machine_check.network([], {}), "ok", "loopback only"),
        (machine_check.network(["10.0.0.1"], {"10.0.0.1": ""}), "ok", "10.0.0.1 for other machines"),
        (same_versions({"torch": "2.13.0"}, {"torch": "2.12.0"}), "error", "torch 2.12.0 instead of 2.13.0"),
        (same_versions({"torch": "2.13.0"}, {}), "error", "torch missing instead of 2.13.0"),
        (same_versions({"torch": "2.13.0"}, {"torch": "2.13.0"}), "ok", "torch 2.13.0"),
        (reaches([Address("10.0.0.1", 5)], []), "error", "at none of 10.0.0.1:5"),
        (reaches([Address("10.0.0.1", 5)], [Address("10.0.0.1", 5)]), "ok", "at 10.0.0.1:5"),
    ],
)
def test_a_finding_has_the_values_and_advice_where_it_is_not_fine(finding: Finding, state: str, text: str) -> None:
    assert (finding.state, text in finding.text, bool(finding.advice)) == (state, True, state != "ok")


def test_the_report_aligns_the_topics_and_puts_advice_below() -> None:
    findings = [Finding("cores", "ok", "2 usable"), Finding("open files", "error", "at most 8", "raise it")]
    assert format_examined(Examined("here", {}, findings, [])) == [
        "here",
        "  ok       cores       2 usable",
        "  error    open files  at most 8",
        "                       -> raise it",
    ]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["-np", "0"], "-np must be between 1 and 65536, got 0"),
        (["-H", "a:x"], "the hosts 'a:x' cannot be read"),
        (["-H", "a:1", "--hostfile", "f"], "not both"),
    ],
)
def test_wrong_options_are_errors(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor_command(words) == 2
    assert error in capsys.readouterr().err


def test_this_machine_reaches_its_own_listeners_and_no_others() -> None:
    found = machine_check.examine(1, [Address("127.0.0.1", 1)])
    assert found.reached == []
    assert {each.topic: each.state for each in found.findings}["network"] == "ok"
    assert found.versions["torch"]


def test_an_interpreter_is_asked_what_it_lacks(tmp_path: Path) -> None:
    other = tmp_path / "python"
    for said, lacks in (("torch farandole", "torch and farandole"), ("", "")):
        other.write_text(f"#!/bin/sh\necho {said}\n")
        other.chmod(0o755)
        assert machine_check.ask_python(str(other)) == lacks
    assert "an answer" in machine_check.ask_python(str(tmp_path / "none"))
