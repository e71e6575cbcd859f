"""Our options are ours, checked before anything starts; the user's words are the user's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from farandole import __version__
from farandole.base.config import JobConfig, Preemption
from farandole.base.env import CheckpointEnv
from farandole.job.engines.host_list import HostSlots, PodSelection, SshSettings
from farandole.job.launch.arguments import parse_run, split_command
from farandole.job.launch.cli import main

WORDS = st.lists(st.one_of(st.sampled_from(["-np", "--min-np", "--", "--help", "-v", "3", "-"]), st.text(max_size=8)))
OPTIONS = st.lists(
    st.sampled_from([["-np", "3"], ["--min-np=2"], ["-q"], ["--grace", "-1"], ["-prefix-timestamp"], ["-n2"]])
)


@given(OPTIONS, st.booleans(), WORDS)
def test_from_the_first_word_on_everything_is_the_users(
    options: list[list[str]], separated: bool, words: list[str]
) -> None:
    ours = [word for option in options for word in option]
    between, command = (["--"], words) if separated else ([], ["sh", *words])
    assert split_command([*ours, *between, *command], {"-np": 1, "--grace": 1}) == (ours, command)


@given(WORDS)
def test_flags_of_the_users_script_are_never_touched(words: list[str]) -> None:
    options = parse_run(["-np", "3", "sh", *words])
    assert options.command == ("sh", *words)
    assert options.config == JobConfig(num_proc=3)


def test_every_option_arrives() -> None:
    text = (
        "--num-proc 4 --min-num-proc 2 --max-num-proc 8 --restarts 5 --elastic-timeout 10 --start-timeout 20 "
        "--spares 2 --fork-server on --max-restarts 3 --progress never "
        "--detection-budget 0.5 --grace 0 --host ::1 --port 4711 --output-filename out -prefix-timestamp --verbose sh"
    )
    options = parse_run(text.split())
    assert options.config == JobConfig(4, 2, 8, 5, 10.0, 20.0, 0.5, 0.0, spares=2, max_restarts=3)
    assert (options.hosts, options.environment) == (None, {"FARANDOLE_SHARDS": "8"})
    assert [note.split(":")[0] for note in options.notes] == ["--fork-server on has no effect"]
    assert (options.host, options.port, options.command) == ("::1", 4711, ("sh",))
    assert (options.output_directory, options.prefix_timestamp) == (Path("out"), True)
    assert (options.loudness, options.fork_server, options.progress) == ("VERBOSE", "on", "never")


def test_a_job_of_pods_fills_their_slots_and_has_none_of_its_own(tmp_path: Path) -> None:
    token = ("--token-file", str(tmp_path / "token"))
    options = parse_run(["-np", "4", "--kubernetes", "app=train", *token, "--kubernetes-namespace", "lab", "sh"])
    assert options.pods == PodSelection("app=train", "lab")
    assert options.hosts == ()
    assert (options.config.fills_slots, options.config.max_np) == (True, 4)
    options = parse_run(["-np", "4", "--max-np", "8", "--kubernetes", "app=train", *token, "--local-slots", "1", "sh"])
    assert options.hosts == (HostSlots("localhost", 1),)
    assert options.config.max_np == 8


@pytest.mark.parametrize(
    ("flags", "grows"),
    [
        (("--local-slots", "0", "--max-np", "8"), True),
        (("--local-slots", "2", "--max-np", "8"), True),
        (("--local-slots", "0"), False),
        (("--local-slots", "0", "--max-np", "4"), False),
        (("--max-np", "8"), False),  # this machine offers all of them
    ],
)
def test_a_job_uses_the_slots_that_join_where_it_may_have_more_workers_than_at_the_start(
    tmp_path: Path, flags: tuple[str, ...], grows: bool
) -> None:
    options = parse_run(["-np", "4", "--token-file", str(tmp_path / "token"), *flags, "sh"])
    assert options.config.fills_slots is grows


def test_preemption_is_watched_only_on_request() -> None:
    assert parse_run(["-np", "2", "sh"]).preemption == Preemption("none")
    assert parse_run(["-np", "2", "--preemption", "auto", "sh"]).preemption == Preemption("auto")


@pytest.mark.parametrize("flag", ["-np", "-n", "--num-proc"])
def test_the_defaults_are_those_of_the_job(flag: str) -> None:
    options = parse_run([flag, "2", "sh"])
    assert options.config == JobConfig(num_proc=2)
    assert (options.host, options.port, options.output_directory) == ("", 0, None)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("sh", "-np"),
        ("-np 0 sh", "-np must be at least 1, got 0"),
        ("-np -1 sh", "-np must be at least 1, got -1"),
        ("-np 3 --min-np 3 --max-np 2 sh", "--min-np 3 is above --max-np 2"),
        ("-np three sh", "three"),
        ("-np 2 --spares -1 sh", "--spares must not be negative, got -1"),
        ("-np 2 --spares one sh", "--spares"),
        ("-np 2 --grace nan sh", "--grace"),
        ("-np 2 --min 1 sh", "--min"),
        ("-np 2", "the command is missing"),
        ("-np 2 --", "the command is missing"),
        ("-np", "-np"),
        ("-np 2 --host 0.0.0.0 sh", "0.0.0.0"),
        ("-np 2 --host example.org sh", "example.org"),
        ("-np 2 --port 65536 sh", "65536"),
        ("-np 2 -q --verbose sh", "--verbose"),
        ("-np 2 no-such-command", "no-such-command"),
        ("-H localhost:2 sh", "-np 2"),
        ("-np 3 -H localhost:2 sh", "-np 3 is above the 2 slots of localhost:2"),
        ("-np 2 -H localhost:two sh", "two"),
        ("-np 2 -H localhost:2 --host-discovery-script ./hosts.sh sh", "--host-discovery-script"),
        ("-np 2 --hostfile no-such-file sh", "no-such-file"),
        ("-np 2 --slots-per-host 0 sh", "--slots-per-host must be at least 1, got 0"),
        ("-np 2 --on-failure rank sh", "rank"),
        ("-np 2 --blacklist-cooldown-range 60 sh", "--blacklist-cooldown-range"),
        ("-np 2 --blacklist-cooldown-range 60 20 sh", "60"),
        ("-np 2 --cycle-time-ms -1 sh", "--cycle-time-ms must be >= 0, got -1"),
        ("-np 2 --autotune-gaussian-process-noise 1.5 sh", "must be between 0 and 1, got 1.5"),
        ("-np 2 --log-level LOUD sh", "LOUD"),
        ("-np 2 --stall-check --no-stall-check sh", "--no-stall-check"),
        ("-np 2 --config-file no-such-file sh", "no-such-file"),
        ("-np 2 --kubernetes app=train sh", "--kubernetes needs --token-file FILE"),
        ("-np 2 --kubernetes-namespace lab sh", "--kubernetes-namespace needs --kubernetes LABELS"),
        ("-np 2 --state s -H localhost:2 sh", "--state cannot be combined with --hosts: the agents that this command"),
        ("-np 2 --state s --host-discovery-script ./h sh", "--state cannot be combined with --host-discovery-script"),
        ("-np 2 --state s --patience 0 sh", "--patience must be a number of seconds > 0, got 0"),
        ("-np 2 --patience 60 sh", "--patience needs --state DIR"),
        ("-np 2 --state etcd://localhost/a sh", "--state etcd://... needs --token-file FILE: the job's token is not"),
        ("-np 2 --state etcd://localhost/a -H localhost:2 sh", "--state cannot be combined with --hosts"),
        ("-np 2 --preemption ibm sh", "--preemption must be one of auto, aws, gcp, azure, none, got 'ibm'"),
    ],
)
def test_what_cannot_work_is_said_in_one_line_with_a_hint(
    arguments: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(["run", *arguments.split()])
    assert end.value.code == 2
    said, hint = capsys.readouterr().err.splitlines()
    assert said.startswith("farandole run: ")
    assert reason in said
    assert "farandole run --help" in hint


@pytest.mark.parametrize("flag", ["-v", "--version"])
def test_the_version_is_told(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([flag])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"farandole {__version__}\n"


def test_an_unknown_command_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["walk"])
    assert end.value.code == 2
    assert "'walk'" in capsys.readouterr().err


def test_checkpoints_are_asked_for_with_a_folder(tmp_path: Path) -> None:
    options = parse_run(["-np", "1", "--checkpoint", str(tmp_path), "--checkpoint-every", "500steps", "sh"])
    assert options.checkpoint == CheckpointEnv(str(tmp_path), "500steps", 2)
    assert parse_run(["-np", "1", "sh"]).checkpoint is None


@pytest.mark.parametrize("flags", [["--checkpoint-every", "often"], ["--checkpoint-keep", "0"]])
def test_checkpoints_that_cannot_be_meant_are_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_run(["-np", "1", "--checkpoint", str(tmp_path), *flags, "sh"])
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "flags"),
    [
        (["--checkpoint-every", "5m"], "--checkpoint-every has"),
        (["--checkpoint-every", "5m", "--checkpoint-keep", "3"], "--checkpoint-every and --checkpoint-keep have"),
        (["--slots-per-host", "3"], "--slots-per-host 3 has"),
    ],
)
def test_what_has_no_effect_without_another_option_is_said(words: list[str], flags: str) -> None:
    (note,) = parse_run(["-np", "2", *words, "sh"]).notes
    assert note.startswith(f"{flags} no effect: ")


def test_what_has_an_effect_is_not_said_to_have_none(tmp_path: Path) -> None:
    words = ["--checkpoint", str(tmp_path), "--checkpoint-every", "5m", "-H", "localhost", "--slots-per-host", "3"]
    assert parse_run(["-np", "2", *words, "sh"]).notes == ()


@pytest.mark.parametrize("shutdown", ["10", "9"])
def test_a_stalled_operation_is_not_given_up_before_anybody_is_warned(
    shutdown: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--stall-check-warning-time-seconds", "10", "--stall-check-shutdown-time-seconds", shutdown]
    with pytest.raises(SystemExit):
        parse_run(["-np", "2", *words, "sh"])
    assert "--stall-check-shutdown-time-seconds must be more than the 10 s of" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "meant"),
    [
        (["run", "-np", "2", "--chekpoint=x", "sh"], "--checkpoint"),
        (["rnu", "-np", "2", "sh"], "run"),
        (["statsu"], "status"),
        (["run", "-np", "2", "--transport", "smh", "sh"], "shm"),
    ],
)
def test_a_slip_of_the_fingers_is_answered_by_what_was_meant(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert f"did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [(["stop"], "a job ends with its launcher"), (["run", "--nproc-per-node=2", "sh"], "write -np N for all workers")],
)
def test_names_of_other_programs_are_answered_by_ours(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(words)
    assert said in capsys.readouterr().err


def test_the_way_to_other_hosts() -> None:
    words = (
        "-np 2 -H a:1,b:1 -p 2222 -i key --remote-python /py --remote-folder /data --network-interfaces eth0,eth1 sh"
    )
    options = parse_run([*words.split(), "sh"])
    assert options.ssh == SshSettings(2222, "key", "/py")
    assert (options.remote_folder, options.interfaces) == ("/data", ("eth0", "eth1"))


def test_a_port_of_ssh_that_is_none_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(["-np", "2", "-H", "a:1,b:1", "-p", "0", "sh"])
    assert "--ssh-port must be between 1 and 65535, got 0" in capsys.readouterr().err


def test_a_strict_job_has_as_many_shards_as_workers_may_train(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    for text, shards in (("--strict", "3"), ("--strict --max-np 6", "6"), ("--shards 12", "12")):
        environment = parse_run([*f"-np 3 {text} sh".split()]).environment
        assert environment["FARANDOLE_STRICT"] == "True"
        assert environment["FARANDOLE_SHARDS"] == shards
        assert (environment["MKL_CBWR"], environment["OMP_NUM_THREADS"]) == ("AUTO,STRICT", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    environment = parse_run(["-np", "3", "--strict", "sh"]).environment
    assert not {"OMP_NUM_THREADS", "MKL_CBWR"} & set(environment)


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--shards 2", "--shards 2 is below the largest number of workers, 3.*--max-np 2"),
        ("--max-np 8 --shards 4", "below the largest number of workers, 8"),
        ("--strict --horovod", "--strict and --horovod contradict each other"),
        ("--shards 6 --transport nccl", "--shards 6 and --transport nccl contradict each other"),
    ],
)
def test_a_job_that_cannot_be_strict_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(["-np", "3", *words.split(), "sh"])
    assert re.search(error, capsys.readouterr().err)


def test_balance_is_in_the_environment_of_the_workers_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "FARANDOLE_BALANCE" not in parse_run(["-np", "3", "sh"]).environment
    assert parse_run(["-np", "3", "--balance", "auto", "sh"]).environment["FARANDOLE_BALANCE"] == "auto"
    monkeypatch.setenv("FARANDOLE_BALANCE", "auto")
    assert parse_run(["-np", "3", "sh"]).environment["FARANDOLE_BALANCE"] == "auto"
    assert parse_run(["-np", "3", "--balance", "off", "sh"]).environment["FARANDOLE_BALANCE"] == "off"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--balance fast", "invalid choice: 'fast' .*auto.*off"),
        ("--balance auto --horovod", "--balance auto and --horovod contradict each other"),
        ("--balance auto --in-place", "--balance auto and --in-place contradict each other"),
    ],
)
def test_a_job_that_cannot_balance_is_refused(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_run(["-np", "3", *words.split(), "sh"])
    assert re.search(error, capsys.readouterr().err)
