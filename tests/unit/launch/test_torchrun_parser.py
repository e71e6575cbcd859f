"""The arguments of `farandole torchrun` are those of torchrun."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from farandole.base.env import TorchrunSettings, read_torchrun_settings
from farandole.integrations.torchrun.torchrun_options import Streams, TorchrunOptions, count_gpus, parse_torchrun
from farandole.integrations.torchrun.torchrun_parser import torchrun_parser

SCRIPT = __file__
NO_SETTINGS = TorchrunSettings({})


def parsed(*arguments: str, **settings: object) -> TorchrunOptions:
    return parse_torchrun([*arguments, SCRIPT], TorchrunSettings(**{"defaults": {}, **settings}))  # type: ignore[arg-type]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, **settings: object) -> str:
    with pytest.raises(SystemExit) as end:
        parsed(*arguments, **settings)
    assert end.value.code == 2
    return capsys.readouterr().err


def test_every_flag_of_torchrun_is_known_in_both_spellings_and_takes_as_many_values() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {flag: action for action in get_args_parser()._actions for flag in action.option_strings}
    ours = {flag: action for action in torchrun_parser()._actions for flag in action.option_strings}
    assert sorted(theirs.keys() - ours.keys()) == []
    assert [flag for flag in theirs if ours[flag].nargs != theirs[flag].nargs] == []
    assert [flag for flag in theirs if ours[flag].dest != theirs[flag].dest] == []


def test_the_defaults_are_those_of_torchrun() -> None:
    from torch.distributed.run import get_args_parser

    theirs = vars(get_args_parser().parse_args([SCRIPT]))
    ours = vars(torchrun_parser().parse_args([]))
    other = {"duplicate_stdout_filters", "duplicate_stderr_filters"}  # lists of theirs, texts of ours
    names = (theirs.keys() & ours.keys()) - other
    assert len(names) > 25
    assert {name: ours[name] for name in names} == {name: theirs[name] for name in names}


def test_a_script_keeps_its_own_arguments() -> None:
    options = parse_torchrun(["--nproc-per-node", "2", SCRIPT, "--nnodes", "7", "-m"], NO_SETTINGS)
    assert options.job.command == (sys.executable, "-u", SCRIPT, "--nnodes", "7", "-m")
    assert (options.workers, options.nodes, options.name) == (2, 1, SCRIPT)


def test_the_progress_line_is_chosen_as_for_farandole_run() -> None:
    assert (parsed().job.progress, parsed("--progress", "always").job.progress) == ("auto", "always")


def test_a_module_and_a_program_are_run_as_torchrun_does() -> None:
    module = parse_torchrun(["-m", "json.tool", "x"], NO_SETTINGS)
    assert module.job.command == (sys.executable, "-u", "-m", "json.tool", "x")
    assert parse_torchrun(["--no-python", "true", "-x"], NO_SETTINGS).job.command == ("true", "-x")
    assert parse_torchrun(["--run-path", "--no-python", SCRIPT], NO_SETTINGS).job.command == (
        sys.executable,
        "-u",
        SCRIPT,
    )


def test_pet_variables_are_defaults_and_arguments_override_them() -> None:
    settings = read_torchrun_settings({"PET_NPROC_PER_NODE": "3", "PET_MAX_RESTARTS": "4", "PET_STANDALONE": "1"})
    assert settings.defaults["standalone"] == "1"
    options = parse_torchrun(["--max-restarts", "1", SCRIPT], settings)
    assert (options.workers, options.job.config.max_restarts) == (3, 1)


def test_a_wrong_pet_variable_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "invalid int value: 'many'" in refused(capsys, defaults={"max_restarts": "many"})
    assert "PET_STANDALONE must be 0 or 1, got 'yes'" in refused(capsys, defaults={"standalone": "yes"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nproc-per-node", "0"], "--nproc-per-node must be a number above 0, auto, gpu, cpu or xpu, got '0'"),
        (["--nproc-per-node", "two"], "got 'two'"),
        (["--nproc-per-node", "gpu"], "has no NVIDIA GPU"),
        (["--nnodes", "0"], "0 < MIN <= MAX"),
        (["--nnodes", "2:1"], "0 < MIN <= MAX"),
        (["--nnodes", "a"], "must be a number, or MIN:MAX"),
        (["--max-restarts", "-1"], "must not be negative"),
        (["--max-restarts", "x"], "invalid int value"),
        (["-r", "4"], "--redirects must be 0, 1, 2 or 3"),
        (["-t", "0:1,2"], "--tee must be 0, 1, 2 or 3"),
        (["--local-ranks-filter", "0;1"], "--local-ranks-filter must be numbers"),
        (["--log-dir", SCRIPT], "is a file; give a folder"),
        (["--start-method", "thread"], "invalid choice: 'thread'"),
        (["--shutdown-timeout", "-1"], "must not be negative"),
        (["-m", "--no-python"], "--no-python and --module contradict"),
        (["--max-restart", "1"], "did you mean --max-restarts?"),
        (["--nnodes", "2"], "--rdzv-conf token_file=FILE"),
        (["--nnodes", "2", "--rdzv-conf", "token_file"], "KEY=VALUE"),
    ],
)
def test_a_wrong_value_is_refused_with_torchrun_s_exit_code_and_advice(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
) -> None:
    monkeypatch.setattr("farandole.integrations.torchrun.torchrun_options.count_gpus", lambda visible: 0)
    assert message in refused(capsys, *arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rdzv-backend", "etcd-v2"], "Farandole's coordinator takes the place of the rendezvous"),
        (["--rdzv-backend", "c10d"], "need --rdzv-endpoint HOST:PORT"),
        (["--rdzv-endpoint", "host:0"], "a port between 1 and 65535"),
        (["--nnodes", "2:4"], "only with --rdzv-backend c10d"),
        (["--node-rank", "2"], "--node-rank must be below --nnodes 2"),
        (["--rdzv-conf", "join_timeout=soon"], "join_timeout must be a positive number"),
    ],
)
def test_wrong_addresses_of_several_nodes_are_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert message in refused(capsys, "--nnodes", "2", *arguments, has_token=True)


def test_a_missing_script_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in ([], "the script is missing"), (["no.py"], "no.py: no such file"):
        with pytest.raises(SystemExit) as end:
            parse_torchrun(arguments, NO_SETTINGS)
        assert end.value.code == 2
        assert message in capsys.readouterr().err


def test_node_0_runs_the_coordinator_at_the_master_s_address() -> None:
    first = parsed("--nnodes", "2", "--master-addr", "10.0.0.1", "--rdzv-conf", "token_file=t,join_timeout=9").node
    assert first is not None
    assert (first.is_first, first.host, first.port, first.wait_s) == (True, "10.0.0.1", 29500, 9.0)
    assert first.token_file == Path("t")
    second = parsed("--nnodes=2", "--node-rank=1", "--master-addr=[::1]", "--master-port=7", has_token=True).node
    assert second is not None
    assert (second.is_first, second.host, second.port, second.token_file) == (False, "::1", 7, None)


def test_with_c10d_the_node_that_has_the_endpoint_is_the_first_unless_it_is_said() -> None:
    given = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1")
    node = parsed(*given, has_token=True).node
    assert node is not None
    assert (node.is_first, node.rank, node.host, node.port) == (None, None, "node1", 29400)
    node = parsed(*given, "--rdzv-conf", "is_host=0", has_token=True).node
    assert node is not None
    assert node.is_first is False


def test_a_number_of_nodes_that_may_change_makes_a_job_that_fills_its_slots() -> None:
    given = ("--nnodes", "1:3", "--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "node1:9")
    options = parsed(*given, "--rdzv-conf", "last_call_timeout=7", has_token=True)
    config = options.job.config
    assert (config.num_proc, config.min_np, config.max_np) == (2, 2, 6)
    assert (config.fills_slots, config.last_call_s, config.takes_agents) == (True, 7.0, True)
    fixed = parsed("--nnodes", "2:2", *given[2:], has_token=True).job.config
    assert (fixed.num_proc, fixed.max_np, fixed.fills_slots, fixed.last_call_s) == (4, 4, False, 0.0)


def test_standalone_needs_no_address() -> None:
    assert parsed("--standalone", "--nnodes", "1", "--rdzv-backend", "etcd").node is None


def test_the_job_is_restarted_as_a_whole_and_has_a_fixed_size() -> None:
    config = parsed("--nproc-per-node", "3", "--max-restarts", "2").job.config
    assert (config.num_proc, config.max_np, config.max_restarts, config.grace_s) == (3, 3, 2, 30.0)
    assert parsed("--shutdown-timeout", "4").job.config.grace_s == 4.0
    assert parsed(shutdown_timeout_s=6.0).job.config.grace_s == 6.0


def test_several_workers_compute_with_one_thread_unless_the_user_says_otherwise() -> None:
    assert "OMP_NUM_THREADS" not in parsed().job.environment
    several = parsed("--nproc-per-node", "2")
    assert several.job.environment["OMP_NUM_THREADS"] == "1"
    assert any("OMP_NUM_THREADS=1" in note for note in several.job.notes)
    assert "OMP_NUM_THREADS" not in parsed("--nproc-per-node", "2", has_threads=True).job.environment


def test_options_without_a_meaning_are_noted_once_with_the_reason() -> None:
    [note] = parsed("--monitor-interval", "5").job.notes
    assert note == (
        "--monitor-interval 5.0 has no effect: the end of a worker is detected at once, not by looking at intervals"
    )
    assert parsed("--monitor-interval", "0.1", "--start-method", "spawn").job.notes == ()


def test_streams_are_chosen_for_all_workers_or_by_local_rank() -> None:
    assert parsed("-r", "3").redirects == Streams(3)
    tee = parsed("-t", "0:1,11:2").tee
    assert [tee.has(0, "stdout"), tee.has(0, "stderr"), tee.has(11, "stderr"), tee.has(1, "stdout")] == [
        True,
        False,
        True,
        False,
    ]
    assert not parsed("--redirects", "0").redirects


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 3), ("", 0), ("0,2", 2), ("1,-1,2", 1), ("0,0", 1), ("7", 0), ("GPU-1a", 1)]
)
def test_gpus_are_counted_without_torch(tmp_path: Path, visible: str | None, count: int) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus(visible, tmp_path) == count


def test_the_fork_server_is_on_where_all_workers_may_be_started_again() -> None:
    assert parsed().job.fork_server == "auto"
    assert parsed("--max-restarts", "1").job.fork_server == "on"
    assert parsed("--max-restarts", "1", "--fork-server", "off").job.fork_server == "off"
