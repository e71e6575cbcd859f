"""What workers print arrives with their rank in front, on the terminal and in files."""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from farandole.errors import ConfigError
from farandole.job.launch.output import OutputOptions, OutputSink

TRACEBACK = [b"Traceback (most recent call last):", b'  File "train.py", line 1', b"ValueError: no good"]


class Terminal(io.TextIOWrapper):
    def __init__(self, is_tty: bool = False) -> None:
        super().__init__(io.BytesIO())
        self._is_tty = is_tty

    def isatty(self) -> bool:
        return self._is_tty

    def text(self) -> str:
        data = self.buffer.getvalue()  # type: ignore[attr-defined]
        assert isinstance(data, bytes)
        return data.decode()


def shown(
    say: Callable[[OutputSink], None], options: OutputOptions | None = None, is_tty: bool = False
) -> tuple[str, str]:
    """What stdout and stderr have shown in the end."""
    stdout, stderr = Terminal(is_tty), Terminal(is_tty)

    async def main() -> None:
        sink = OutputSink(options or OutputOptions(), None, stdout, stderr)
        try:
            say(sink)
        finally:
            sink.close()

    asyncio.run(main())
    return stdout.text(), stderr.text()


def test_lines_carry_the_worker_until_it_has_a_rank() -> None:
    def say(sink: OutputSink) -> None:
        sink.line("w3", "stdout", b"importing")
        sink.placed("w3", 0)
        sink.line("w3", "stdout", b"training")
        sink.line("w3", "stderr", b"warning")
        sink.placed("w3", 1)
        sink.line("w3", "stdout", b"")

    assert shown(say) == ("[w3] importing\n[0] training\n[1] \n", "[0] warning\n")


def test_bytes_that_are_no_text_arrive_as_they_are() -> None:
    stdout = Terminal()

    async def main() -> None:
        sink = OutputSink(OutputOptions(), None, stdout, Terminal())
        sink.line("w0", "stdout", b"\xff\x00\xe2\x82")
        sink.close()

    asyncio.run(main())
    assert stdout.buffer.getvalue() == b"[w0] \xff\x00\xe2\x82\n"  # type: ignore[attr-defined]


def test_prefixes_are_coloured_on_a_terminal_only() -> None:
    def say(sink: OutputSink) -> None:
        sink.line("w0", "stdout", b"x")

    assert shown(say, is_tty=True)[0] == "\x1b[36m[w0]\x1b[0m x\n"


def test_lines_begin_with_the_time_when_asked_to() -> None:
    def say(sink: OutputSink) -> None:
        sink.line("w0", "stdout", b"x")

    said, _ = shown(say, OutputOptions(prefix_timestamp=True))
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \[w0\] x\n", said)


def test_a_traceback_of_all_workers_is_shown_once() -> None:
    def say(sink: OutputSink) -> None:
        for rank, worker in enumerate(("w0", "w1")):
            sink.placed(worker, rank)
            for line in TRACEBACK:
                sink.line(worker, "stderr", line)
        sink.closed("w0")
        sink.closed("w1")

    _, said = shown(say)
    assert said.splitlines()[3:] == ["[1] the same traceback as [0]: ValueError: no good"]
    assert said.count("ValueError") == 2


def test_what_is_held_back_is_shown_at_the_end() -> None:
    def say(sink: OutputSink) -> None:
        sink.line("w0", "stderr", TRACEBACK[0])

    assert shown(say)[1] == "[w0] Traceback (most recent call last):\n"


def test_what_is_held_back_is_shown_soon_when_nothing_follows() -> None:
    """The terminal says when it was written to: no sleep, one deadline."""

    async def main() -> None:
        loop, written = asyncio.get_running_loop(), asyncio.Event()

        class Watched(io.BytesIO):
            def write(self, data: object) -> int:
                loop.call_soon_threadsafe(written.set)
                return super().write(data)  # type: ignore[arg-type]

        stderr = io.TextIOWrapper(Watched())
        sink = OutputSink(OutputOptions(), None, Terminal(), stderr)
        for line in TRACEBACK:
            sink.line("w0", "stderr", line)
        await asyncio.wait_for(written.wait(), 5.0)
        sink.close()

    asyncio.run(main())


def test_files_by_rank_are_continued_by_a_replacement(tmp_path: Path) -> None:
    def say(sink: OutputSink) -> None:
        for worker, rank in (("w0", 0), ("w3", 0), ("w10", 10)):
            sink.line(worker, "stderr", b"early " + worker.encode())
            sink.placed(worker, rank)
            sink.line(worker, "stdout", b"hello from " + worker.encode())
            sink.closed(worker)

    directory = tmp_path / "new" / "logs"
    shown(say, OutputOptions(directory, rank_digits=2))
    files = {str(path.relative_to(directory)): path.read_text() for path in directory.glob("*/*")}
    assert files == {
        "rank.00/stdout": "hello from w0\nhello from w3\n",
        "rank.00/stderr": "early w0\nearly w3\n",
        "rank.10/stdout": "hello from w10\n",
        "rank.10/stderr": "early w10\n",
    }
    assert [path.name for path in sorted(directory.iterdir())] == ["rank.00", "rank.10"]


def test_each_rank_has_both_files(tmp_path: Path) -> None:
    shown(lambda sink: sink.placed("w0", 3), OutputOptions(tmp_path))
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.glob("*/*")} == {"rank.3/stdout", "rank.3/stderr"}


def test_files_of_a_worker_without_a_rank_are_its_own_or_in_the_end_of_the_rank_it_should_have_got(
    tmp_path: Path,
) -> None:
    def say(sink: OutputSink) -> None:
        sink.expected("w0", 1)
        sink.expected("w1", 0)
        for worker in ("w0", "w1", "w2"):
            sink.line(worker, "stdout", worker.encode())
            sink.line(worker, "stdout", b"." * 3_000_000)
        sink.placed("w1", 2)
        for worker in ("w0", "w1", "w2"):
            sink.closed(worker)

    shown(say, OutputOptions(tmp_path))
    files = {str(path.relative_to(tmp_path)): path.read_text().split() for path in tmp_path.glob("*/*")}
    dots = "." * 3_000_000
    written = {"rank.1/stdout": ["w0", dots], "rank.2/stdout": ["w1", dots], "w2/stdout": ["w2", dots]}
    assert files == {**written, "rank.1/stderr": [], "rank.2/stderr": []}


def test_files_that_cannot_be_written_are_an_error_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--output-filename"):
        OutputOptions(tmp_path / "file" / "logs")


def test_files_that_cannot_be_written_later_are_told_once_and_stop_nothing(tmp_path: Path) -> None:
    options = OutputOptions(tmp_path / "logs")
    (tmp_path / "logs" / "w0").touch()  # no folder can be made of it

    def say(sink: OutputSink) -> None:
        for number in range(3):
            sink.line("w0", "stdout", b"%d" % number)

    out, err = shown(say, options)
    assert out == "[w0] 0\n[w0] 1\n[w0] 2\n"
    assert err.count("[farandole] no more output is written") == 1
    assert "the job continues" in err


def test_a_terminal_that_is_gone_stops_nothing(tmp_path: Path) -> None:
    class ExitRecord(io.BytesIO):
        def write(self, data: object) -> int:
            raise BrokenPipeError

    async def main() -> None:
        sink = OutputSink(OutputOptions(tmp_path), None, io.TextIOWrapper(ExitRecord()), Terminal())
        for _ in range(3):
            sink.line("w0", "stdout", b"x")
        sink.close()

    asyncio.run(main())
    assert (tmp_path / "w0" / "stdout").read_text() == "x\nx\nx\n"
