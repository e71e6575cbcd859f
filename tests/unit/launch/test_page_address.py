"""Where the page of a job is served."""

from __future__ import annotations

import importlib.util
import socket

import pytest

from farandole.base.env import TorchrunSettings
from farandole.errors import ConfigError
from farandole.integrations.page.page_command import page_parser
from farandole.integrations.torchrun.torchrun_options import parse_torchrun
from farandole.job.launch import page_address
from farandole.job.launch.arguments import FARANDOLE_RUN, HOROVODRUN, parse_run
from farandole.job.launch.page_address import (
    PageAddress,
    PageOptions,
    is_loopback,
    listening,
    parse_page_address,
    url_of,
)

if importlib.util.find_spec("prometheus_client") is None:
    pytest.skip("it needs prometheus_client: pip install 'farandole[page]'", allow_module_level=True)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("", ("127.0.0.1", None)),
        (None, ("127.0.0.1", None)),
        ("127.0.0.1:9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[::1]:9000", ("::1", 9000)),
        ("::1", ("::1", None)),
        ("localhost:80", ("localhost", 80)),
        ("10.0.0.7", ("10.0.0.7", None)),
    ],
)
def test_addresses(text: str | None, address: tuple[str, int | None]) -> None:
    assert parse_page_address(text) == address


@pytest.mark.parametrize("text", ["a.example:80", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:-1", "1.2.3.4:x", "[::1"])
def test_other_addresses_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"must be HOST:PORT .* got"):
        parse_page_address(text)


def test_without_its_packages_the_user_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_address.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"aiohttp and prometheus_client: pip install 'farandole\[page\]'"):
        parse_page_address("")


def test_a_port_that_is_in_use_is_an_error_only_where_it_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1 port {port}: Address already in use; choose another"):
            listening(PageAddress("127.0.0.1", port))
        monkeypatch.setattr(page_address, "DEFAULT_PORT", port)
        with listening(PageAddress()) as sock:
            assert sock.getsockname()[1] > port
    with pytest.raises(ConfigError, match=r"cannot be served on 192\.0\.2\.1 port 80"):
        listening(PageAddress("192.0.2.1", 80))


def test_who_may_reach_it_and_how() -> None:
    with listening(PageAddress("127.0.0.1", 0)) as sock:
        assert is_loopback(sock)
        assert url_of(sock) == f"http://127.0.0.1:{sock.getsockname()[1]}/"
    with listening(PageAddress("0.0.0.0", 0)) as sock:
        assert not is_loopback(sock)
        assert url_of(sock) == f"http://{socket.gethostname()}:{sock.getsockname()[1]}/"


def test_the_command_begins_behind_the_option_also_without_an_address() -> None:
    options = parse_run(["-np", "1", "--page", "python", "-c", "0"], FARANDOLE_RUN)
    assert (options.page, options.command[0]) == (PageOptions(PageAddress()), "python")
    options = parse_run(["-np", "1", "--page=0.0.0.0:80", "python", "-c", "0"], HOROVODRUN)
    assert options.page == PageOptions(PageAddress("0.0.0.0", 80))
    script = parse_torchrun(["--page", __file__, "--page"], TorchrunSettings({})).job
    assert (script.page, script.command[-1]) == (PageOptions(PageAddress()), "--page")
    assert parse_run(["-np", "1", "python", "-c", "0"], FARANDOLE_RUN).page is None


def test_traces_are_exported_by_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_address, "check_traces", lambda url: None)
    for flags, page in (
        (["--traces"], PageOptions(PageAddress(), "")),
        (
            ["--traces=http://c:4318/v1/traces", "--page=:80"],
            PageOptions(PageAddress("127.0.0.1", 80), "http://c:4318/v1/traces"),
        ),
    ):
        assert parse_run([*flags, "-np", "1", "python", "-c", "0"], FARANDOLE_RUN).page == page
        assert parse_torchrun([*flags, __file__], TorchrunSettings({})).job.page == page


def test_help_shows_what_a_user_may_give() -> None:
    text = page_parser().format_help()
    assert "--print-token" in text
    assert "--from-launcher" not in text
