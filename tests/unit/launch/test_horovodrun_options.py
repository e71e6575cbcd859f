"""horovodrun's options: all of them are taken, those with a meaning arrive, the others are spoken of once."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.base.config import JobConfig
from farandole.integrations.horovod import alias_path
from farandole.job.engines.host_list import HostScript, HostSlots
from farandole.job.launch.arguments import HOROVODRUN, parse_run

# Everything that `horovodrun --help` of Horovod 0.28 tells of, and some that it hides.
SWITCHES = """
--disable-cache --verbose --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --timeline-mark-cycles
--no-timeline-mark-cycles --no-stall-check --stall-check --mpi-threads-disable --no-mpi-threads-disable --tcp
--log-with-timestamp --log-without-timestamp -prefix-timestamp --prefix-output-with-timestamp --log-hide-timestamp
--no-log-hide-timestamp --gloo --mpi --jsrun
""".split()  # noqa: SIM905
WITH_VALUE = """
--start-timeout=30 --network-interfaces=eth0,eth1 --network-interface=lo --output-filename=out --ssh-port=22
--ssh-identity-file=key --fusion-threshold-mb=32 --cycle-time-ms=2.5 --cache-capacity=512
--autotune-log-file=log --autotune-warmup-samples=1 --autotune-steps-per-sample=5 --autotune-bayes-opt-max-samples=9
--autotune-gaussian-process-noise=0.2 --min-np=1 --min-num-proc=1 --max-np=3 --max-num-proc=3 --slots-per-host=2
--elastic-timeout=60 --reset-limit=10 --timeline-filename=t.json --stall-check-warning-time-seconds=10
--stall-check-shutdown-time-seconds=20 --mpi-args=a --binding-args=b --num-nccl-streams=2
--thread-affinity=1 --gloo-timeout-seconds=60 --log-level=INFO --hosts=localhost:2 --host-discovery-script=./hosts.sh
""".split()  # noqa: SIM905


@pytest.mark.parametrize("words", [[switch] for switch in SWITCHES] + [option.split("=") for option in WITH_VALUE])
@pytest.mark.parametrize("number", ["-np", "--num-proc"])
def test_every_option_of_horovodruns_is_taken(words: list[str], number: str) -> None:
    given = parse_run([number, "2", *words, "sh", "--flag"], HOROVODRUN)
    assert given.command == ("sh", "--flag")


def test_words_that_begin_with_dashes_are_given_with_an_equal_sign() -> None:
    assert parse_run(["-np", "2", "--mpi-args=--map-by ppr:6:node", "sh", "-c"]).command == ("sh", "-c")


@pytest.mark.parametrize(("short", "long"), [("-p", "--ssh-port"), ("-i", "--ssh-identity-file"), ("-H", "--hosts")])
def test_short_forms_are_taken(short: str, long: str) -> None:
    value = "localhost:2" if short == "-H" else "22"
    assert parse_run(["-np", "2", short, value, "sh"]) == parse_run(["-np", "2", long, value, "sh"])


def test_hosts_come_from_the_command_line_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("localhost slots=2\n127.0.0.1 slots=1\n")
    wanted = (HostSlots("localhost", 2), HostSlots("127.0.0.1", 1))
    for words in (["-H", "localhost:2,127.0.0.1:1"], ["-hostfile", str(tmp_path / "hosts")]):
        assert parse_run(["-np", "3", *words, "sh"]).hosts == wanted


def test_a_discovery_script_arrives_with_the_slots_of_hosts_it_gives_no_number_for() -> None:
    options = parse_run(["-np", "2", "--host-discovery-script", "./hosts.sh", "--slots-per-host", "4", "sh"])
    assert options.hosts == HostScript("./hosts.sh", 4)
    assert options.config == JobConfig(2, max_np=2, fills_slots=True)  # as many as -np, wherever there are slots


def test_elastic_policies_arrive() -> None:
    text = "-np 2 --reset-limit 10 --blacklist-cooldown-range 120 600 sh"
    assert parse_run(text.split()).config == JobConfig(
        2, on_failure="host", reset_limit=10, cooldown_range_s=(120.0, 600.0)
    )


def test_under_horovodrun_a_job_is_elastic_only_when_that_is_asked_for() -> None:
    assert parse_run(["-np", "2", "sh"], HOROVODRUN).config == JobConfig(2, 2, 2, restarts=0)
    for words, low, high in (
        ("--min-np 1", 1, None),
        ("--min-np 1 --max-np 4", 1, 4),
        ("--host-discovery-script x", 2, None),
    ):
        config = parse_run(f"-np 2 {words} sh".split(), HOROVODRUN).config
        assert config == JobConfig(2, low, high, fills_slots=True)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--spares 1", "--spares 1 needs a job that can continue when workers are lost"),
        ("--min-np 1 --spares 1", "--spares 1 needs --max-np"),
    ],
)
def test_under_horovodrun_spares_without_a_use_or_a_place_are_refused(
    words: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse_run(f"-np 2 {words} sh".split(), HOROVODRUN)
    assert reason in capsys.readouterr().err
    assert (
        parse_run(["-np", "2", "--min-np", "1", "--max-np", "2", "--spares", "1", "sh"], HOROVODRUN).config.spares == 1
    )


@pytest.mark.parametrize("most", ["1", "4"])
def test_under_horovodrun_max_np_alone_makes_no_job_elastic_and_that_is_said(most: str) -> None:
    options = parse_run(["-np", "2", "--max-np", most, "sh"], HOROVODRUN)
    assert options.config == JobConfig(2, 2, 2, restarts=0)
    assert [note.split(":")[0] for note in options.notes] == ["--max-np has no effect"]
    assert parse_run(["-np", "2", "--max-np", "4", "sh"]).notes == ()


def test_the_start_timeout_comes_from_the_flag_then_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_run(["-np", "2", "sh"]).config.start_timeout_s == JobConfig.start_timeout_s
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "45")
    assert parse_run(["-np", "2", "sh"]).config.start_timeout_s == 45
    assert parse_run(["-np", "2", "--start-timeout", "7", "sh"]).config.start_timeout_s == 7
    monkeypatch.setenv("HOROVOD_START_TIMEOUT", "soon")
    with pytest.raises(SystemExit):
        parse_run(["-np", "2", "sh"])


def test_under_horovodrun_what_is_said_counts() -> None:
    config = parse_run(["-np", "2", "--restarts", "1", "--on-failure", "host", "sh"], HOROVODRUN).config
    assert (config.restarts, config.on_failure) == (1, "host")


def test_settings_become_the_variables_that_horovod_makes_of_them() -> None:
    text = (
        "-np 2 --fusion-threshold-mb 10 --cycle-time-ms 20 --cache-capacity 512 --hierarchical-allreduce "
        "--no-hierarchical-allgather --autotune --autotune-log-file a.txt --timeline-filename t.json "
        "--timeline-mark-cycles --stall-check --stall-check-warning-time-seconds 10 "
        "--stall-check-shutdown-time-seconds 20 --log-level INFO --log-without-timestamp --tcp sh"
    )
    assert parse_run(text.split()).environment == {
        "HOROVOD_FUSION_THRESHOLD": str(10 * 1024 * 1024),
        "HOROVOD_CYCLE_TIME": "20.0",
        "HOROVOD_CACHE_CAPACITY": "512",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1",
        "HOROVOD_HIERARCHICAL_ALLGATHER": "0",
        "HOROVOD_AUTOTUNE": "1",
        "HOROVOD_AUTOTUNE_LOG": "a.txt",
        "HOROVOD_TIMELINE": "t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "0",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "10",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "20",
        "HOROVOD_LOG_LEVEL": "INFO",
        "HOROVOD_LOG_HIDE_TIME": "1",
        "NCCL_IB_DISABLE": "1",
    }


@pytest.mark.parametrize("words", ["--no-autotune --autotune-warmup-samples 3", "--autotune-log-file a.txt"])
def test_nothing_is_told_of_a_tuning_that_was_not_asked_for(words: str) -> None:
    assert parse_run(f"-np 2 {words} sh".split()).environment == {}


def test_marks_without_a_timeline_are_not_told_to_the_workers_but_spoken_of() -> None:
    options = parse_run(["-np", "2", "--timeline-mark-cycles", "sh"])
    assert options.environment == {}
    assert options.notes == ("--timeline-mark-cycles has no effect: there is no timeline without --timeline-filename",)


def test_what_has_no_effect_is_spoken_of_once_with_the_reason() -> None:
    text = "-np 2 --cycle-time-ms 1 -p 22 -i key --mpi --autotune --autotune-log-file a --fusion-threshold-mb 1 sh"
    assert parse_run(text.split()).notes == (
        "--mpi has no effect: Farandole does not use MPI",
        "--cycle-time-ms has no effect: operations start as soon as all ranks have submitted them",
        "--autotune, --autotune-log-file have no effect: only the size of buckets is tuned, in the first steps, "
        "with a loader of Farandole",
    )


@pytest.mark.parametrize("transport", ["auto", "tcp", "nccl"])
def test_the_reasons_about_nccl_and_gloo_hold_for_every_transport(transport: str) -> None:
    """None of them states that the transport is not used: a user may have chosen it."""
    text = f"-np 2 --transport {transport} --num-nccl-streams 2 --gloo-timeout-seconds 60 sh"
    assert parse_run(text.split()).notes == (
        "--num-nccl-streams has no effect: torch determines the streams on which NCCL runs",
        "--gloo-timeout-seconds has no effect: operations have no timeout; --detection-budget and --step-timeout limit "
        "how long a fault stays undetected",
    )


@pytest.mark.parametrize("words", ["--gloo", "--no-autotune", "--no-hierarchical-allreduce", "--log-without-timestamp"])
def test_nothing_is_said_of_what_is_so_anyway(words: str) -> None:
    assert parse_run(["-np", "2", words, "sh"]).notes == ()


def test_scripts_find_horovod_under_horovodrun_and_with_our_option(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/mine")
    wanted = {"PYTHONPATH": f"{alias_path()}:/mine"}
    assert parse_run(["-np", "2", "sh"], HOROVODRUN).environment == wanted
    assert parse_run(["-np", "2", "--horovod", "sh"]).environment == wanted
    assert parse_run(["-np", "2", "sh"]).environment == {}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where packages count as installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def _install(folder: Path, name: str, version: str) -> None:
    metadata = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_beside_an_installed_horovod_the_alias_is_refused(installed: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _install(installed, "horovod", "0.28.1")
    for words, program in ((["-np", "2", "sh"], HOROVODRUN), (["-np", "2", "--horovod", "sh"], None)):
        with pytest.raises(SystemExit):
            parse_run(words, program) if program else parse_run(words)
        assert "0.28.1" in capsys.readouterr().err
    assert parse_run(["-np", "2", "sh"]).environment == {}


def test_an_installed_alias_needs_no_help(installed: Path) -> None:
    _install(installed, "farandole-horovod", "1.0")
    assert parse_run(["-np", "2", "sh"], HOROVODRUN).environment == {}
