"""Preemption notices, with servers that play the clouds' metadata services."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.base.config import Preemption, parse_preemption
from farandole.base.events.host_events import PreemptionAnnounced, PreemptionUnwatched, PreemptionWatched
from farandole.errors import ConfigError
from farandole.job.agent.preemption import Metadata, MetadataUnavailable, Notice, cloud_of_machine, watch_for_notices
from tests.support.metadata_services import MetadataService, aws, azure, azure_event, gcp
from tests.support.waiting import DEADLINE_S, EventLog, run


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The service is asked more often than a cloud would like."""
    for name in ("_AwsPage", "_GcpValue", "_AzureEvents"):
        monkeypatch.setattr(f"farandole.job.agent.preemption.{name}.every_s", 0.02)


async def first_notice(cloud: str, service: MetadataService, change: Callable[[], None], log: EventLog) -> Notice:
    """The first notice after `change`, which is called once the service was asked."""
    found: asyncio.Future[Notice] = asyncio.get_running_loop().create_future()

    def on_notice(notice: Notice) -> None:
        if not found.done():
            found.set_result(notice)

    setting = Preemption(cloud, service.url)
    task = asyncio.create_task(watch_for_notices(setting, on_notice, log, after_failure_s=(0.02, 0.05)))
    try:
        while len(service.requests) < 3:
            await asyncio.sleep(0.01)
        assert not found.done()
        change()
        return await asyncio.wait_for(found, DEADLINE_S)
    finally:
        task.cancel()
        await asyncio.wait([task])


TERMINATES = {"action": "terminate", "time": "2017-09-18T08:22:00Z"}


@pytest.mark.parametrize("action", ["terminate", "stop", "hibernate"])
def test_an_interruption_of_a_spot_instance_is_a_notice_to_leave(action: str) -> None:
    log = EventLog()
    with aws() as service:
        change = {"action": action, "time": "2017-09-18T08:22:00Z"}
        notice = run(first_notice("aws", service, lambda: service.set(action=change), log))
    assert notice == Notice(f"AWS: the spot instance will {action} at 2017-09-18T08:22:00Z", left_s=0.0)
    assert [event.must_leave for event in log.of(PreemptionAnnounced)] == [True]
    assert [event.cloud for event in log.of(PreemptionWatched)] == ["aws"]


def test_a_recommendation_to_rebalance_is_reported_and_changes_nothing() -> None:
    log = EventLog()
    with aws() as service:
        change = {"noticeTime": "2020-10-27T08:22:00Z"}
        notice = run(first_notice("aws", service, lambda: service.set(rebalance=change), log))
    assert not notice.must_leave
    assert "2020-10-27T08:22:00Z; training goes on here" in log.of(PreemptionAnnounced)[0].line()


def test_a_token_that_is_over_is_renewed() -> None:
    with aws() as service:
        notice = run(first_notice("aws", service, lambda: service.set(token="other", action=TERMINATES), EventLog()))
        assert notice.must_leave
        assert sum("api/token" in request for request in service.requests) >= 2


def test_a_preemption_by_google_arrives_at_the_waiting_request() -> None:
    log = EventLog()
    with gcp() as service:
        notice = run(first_notice("gcp", service, lambda: service.set(preempted="TRUE"), log))
        assert any("wait_for_change=true" in request for request in service.requests)
    assert (notice.must_leave, notice.left_s) == (True, 30.0)
    assert notice.time_to_leave_s == 25.0


@pytest.mark.parametrize(("value", "must_leave"), [("MIGRATE", False), ("TERMINATE", True)])
def test_maintenance_by_google_means_leaving_only_where_the_machine_is_stopped(value: str, must_leave: bool) -> None:
    with gcp() as service:
        change = f"{value}_ON_HOST_MAINTENANCE"
        notice = run(first_notice("gcp", service, lambda: service.set(maintenance=change), EventLog()))
    assert notice.must_leave == must_leave


@pytest.mark.parametrize("kind", ["Preempt", "Terminate", "Reboot", "Redeploy", "Freeze"])
def test_an_event_of_azure_for_this_machine_is_a_notice(kind: str) -> None:
    with azure() as service:
        others = [azure_event("Preempt", "vm_1"), azure_event("Preempt", "vm_0", "Completed")]
        service.set(events=others)  # of other machines, and of the past
        change = [*others, azure_event(kind)]
        notice = run(first_notice("azure", service, lambda: service.set(events=change), EventLog()))
    assert notice.must_leave == (kind != "Freeze")
    assert notice.left_s == (None if kind == "Freeze" else 0.0)


@pytest.mark.parametrize("trouble", ["hang", "slow", "garbage", "endless", "404", "500", "403"])
@pytest.mark.parametrize("cloud", ["aws", "gcp", "azure"])
def test_a_service_in_trouble_is_reported_once_and_asked_until_it_answers(
    cloud: str, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_ANSWER_S", "_AZURE_FIRST_S"):
        monkeypatch.setattr(f"farandole.job.agent.preemption.{name}", 0.2)
    service, log = {"aws": aws, "gcp": gcp, "azure": azure}[cloud](), EventLog()
    service.trouble = trouble
    notice_of = {
        "aws": {"action": TERMINATES},
        "gcp": {"preempted": "TRUE"},
        "azure": {"events": [azure_event("Preempt")]},
    }

    async def scenario() -> None:
        loop_lateness_s = 0.0
        found = asyncio.Event()
        setting = Preemption(cloud, service.url)
        watch = watch_for_notices(setting, lambda _: found.set(), log, after_failure_s=(0.01, 0.02))
        task = asyncio.create_task(watch)
        while not log.of(PreemptionUnwatched):
            before_s = asyncio.get_running_loop().time()
            await asyncio.sleep(0.01)
            loop_lateness_s = max(loop_lateness_s, asyncio.get_running_loop().time() - before_s)
        assert loop_lateness_s < 2.0  # the event loop is never blocked
        service.trouble = ""
        service.set(**notice_of[cloud])
        await found.wait()
        task.cancel()
        await asyncio.wait([task])

    with service:
        run(scenario())
    [report] = log.of(PreemptionUnwatched)
    assert service.url in report.line() or "the answer is" in report.line()


@pytest.mark.parametrize("answer", ['"terminate"', "{", '{"action": "dance"}', "", "[1]"])
def test_an_answer_that_makes_no_sense_is_no_notice(answer: str) -> None:
    log = EventLog()
    with aws() as service:
        service.set(action=answer)
        run(first_notice("aws", service, lambda: service.set(action=TERMINATES), log))
    assert len(log.of(PreemptionAnnounced)) == 1


@pytest.mark.parametrize("events", [[5], [{"Resources": 5}], 5, None, [azure_event("Freeze", status="Completed")]])
def test_events_that_make_no_sense_are_no_notice(events: object) -> None:
    with azure() as service:
        service.set(events=events)
        change = [azure_event("Preempt")]
        assert run(first_notice("azure", service, lambda: service.set(events=change), EventLog())).must_leave


def test_nothing_listens_and_the_error_names_the_address() -> None:
    async def scenario() -> None:
        with pytest.raises(MetadataUnavailable, match=r"http://127\.0\.0\.1:9/x: .*refused|Connect call failed"):
            await Metadata("http://127.0.0.1:9").request("/x", {})

    run(scenario())


def test_without_the_option_nothing_is_asked() -> None:
    log = EventLog()

    async def scenario() -> None:
        with aws() as service:
            task = asyncio.create_task(watch_for_notices(Preemption("none", service.url), lambda _: None, log))
            await asyncio.sleep(0.1)
            task.cancel()
            await asyncio.wait([task])
            assert service.requests == []

    run(scenario())
    assert log.events == []


@pytest.mark.parametrize(
    ("files", "cloud"),
    [
        ({"sys_vendor": "Amazon EC2\n", "product_name": "m5.large"}, "aws"),
        ({"sys_vendor": "Google\n", "product_name": "Google Compute Engine\n"}, "gcp"),
        ({"sys_vendor": "Microsoft Corporation", "chassis_asset_tag": "7783-7084-3265-9085-8269-3286-77\n"}, "azure"),
        ({"sys_vendor": "Microsoft Corporation", "product_name": "Virtual Machine"}, "none"),
        ({}, "none"),
    ],
)
def test_the_firmware_tells_the_cloud(files: dict[str, str], cloud: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert cloud_of_machine(tmp_path) == cloud


@pytest.mark.parametrize(
    "text", ["auto", "none", "aws", "gcp", "azure", "aws=http://127.0.0.1:8080", "gcp=http://[::1]:80/x"]
)
def test_the_value_of_the_option_can_be_passed_on(text: str) -> None:
    assert str(parse_preemption(text)) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("amazon", "must be one of auto, aws, gcp, azure, none, got 'amazon'"),
        ("auto=http://x", "an address needs the cloud that answers there"),
        ("aws=https://x", "the address must look like http://HOST:PORT"),
        ("aws=http://x:70000", "the address must look like http://HOST:PORT"),
        ("aws=", "the address must look like http://HOST:PORT"),
    ],
)
def test_a_value_that_cannot_work_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        parse_preemption(text)
