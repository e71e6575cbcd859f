"""The program of the fork server, a separate script under the options of the workers' Python: it imports the modules
that every worker imports, and then forks a worker whenever its agent requests one. Started by fork_server.py.

Its arguments: the number of the descriptor on which it listens, the nice value of its imports, its agent's process id,
and the target: a script, or "-m" and a module, with arguments.

The agent sends one end of a new connection for each worker. The worker sends its process id there and receives its
environment and the writing ends of its output. It is forked twice, so that the agent, and not the server, is its
parent: if the server is killed, no worker and no exit code is lost.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import importlib.machinery
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import threading
import types
from collections.abc import Mapping, Sequence

# torch's optimizers import the last one, which takes longer than all the others (torch 2.13,
# torch/optim/optimizer.py, _use_grad_for_differentiable).
PRELOADED = (
    "torch",
    "farandole",
    "farandole.elastic",
    "farandole.integrations.ddp.module",
    "farandole.integrations.horovod.commit_loop",
    "farandole.integrations.horovod.named.named_extender",
    "farandole.integrations.horovod.named_path",
    "farandole.integrations.torchrun.process_group.registration",
    "torch._dynamo",
)
AUTOLOAD = "farandole.integrations.torchrun.process_group.autoload"
SIZE = struct.Struct("!I")

_LOOKS = 50  # a millisecond apart
_ADOPTED_S = 2.0  # the agent is the parent of an orphan at once; this bounds the wait in case of an error
_was_interrupted = False


def main() -> None:
    """Serve until the agent is gone. Returns only in a worker that has come to its end."""
    descriptor, nice, agent, *target = sys.argv[1:]
    channel = socket.socket(fileno=int(descriptor))
    atexit.register(_end_as_interrupted)  # first of all, so that it is the last one to run
    _stand_in_place_of(target)
    problem = _import_all(int(nice), channel)
    channel.send((problem or "ready").encode("utf-8", "backslashreplace")[:1000])
    if problem:
        os._exit(1)
    gc.collect()
    gc.freeze()  # or the first collection in a worker would copy all these pages
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # buffered output would be printed by every worker
    while True:
        message, descriptors, _, _ = socket.recv_fds(channel, 1, 1)
        if not message:
            os._exit(0)
        if _is_worker(descriptors[0], int(agent)):
            channel.close()
            sys.exit(_work(socket.socket(fileno=descriptors[0]), target))


def _stand_in_place_of(target: Sequence[str]) -> None:
    """Set sys.argv and sys.path as in the workers: modules beside the script are found, ours are not."""
    is_module = target[0] == "-m"
    ours = sys.orig_argv.index(__file__) if __file__ in sys.orig_argv else 1  # before it: options of the interpreter
    sys.orig_argv = [sys.orig_argv[0], *sys.orig_argv[1:ours], *target]
    sys.argv = ["-m", *target[2:]] if is_module else list(target)
    if not getattr(sys.flags, "safe_path", False):  # since Python 3.11
        sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.realpath(target[0]))


def _import_all(nice: int, channel: socket.socket) -> str:
    """Import in a thread, since a thread's nice value ends with it. Return "", or the reason why no worker can be
    forked here."""
    problems: list[str] = []
    thread = threading.Thread(target=_import_in_thread, args=(nice, problems), daemon=True)
    thread.start()
    poll = select.poll()  # poll takes any descriptor, unlike select(): this one has the number that it had in the agent
    poll.register(channel, select.POLLIN)
    while thread.is_alive():
        if poll.poll(50):  # a server that is not ready gets no requests: the agent is gone
            os._exit(0)
    thread.join()
    if problems:
        return problems[0]
    # Libraries such as OpenBLAS end their threads before a fork (man 3 pthread_atfork), and start them again when they
    # need them.
    if not (pid := os.fork()):
        os._exit(0)
    os.waitpid(pid, 0)
    for _ in range(_LOOKS):  # a thread that was joined is listed until the kernel has freed it
        threads = len(os.listdir("/proc/self/task"))
        if threads == 1:
            return ""
        poll.poll(1)
    return f"it has {threads} threads after importing {', '.join(PRELOADED)}, but must have one to fork"


def _import_in_thread(nice: int, problems: list[str]) -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), nice)
    try:
        for name in PRELOADED:
            module = importlib.import_module(name)
            if name.startswith("farandole"):
                for each in getattr(module, "__all__", ()):
                    with contextlib.suppress(ImportError):
                        getattr(module, each)
    except BaseException as error:  # noqa: BLE001 - told to the agent, which starts workers in the plain way
        problems.append(f"{type(error).__name__}: {error}")


def _is_worker(connection: int, agent: int) -> bool:
    """Fork: True in the worker, False in the server."""
    if between := os.fork():
        os.close(connection)
        os.waitpid(between, 0)
        return False
    if os.fork():
        os._exit(0)
    os.setsid()
    for _ in range(int(_ADOPTED_S / 0.001)):
        if os.getppid() == agent:
            return True
        select.select([], [], [], 0.001)
    os._exit(1)


def _work(agent: socket.socket, target: Sequence[str]) -> int:
    """Be a worker and return the exit code. Raises SystemExit as the script does."""
    try:
        agent.sendall(SIZE.pack(os.getpid()))
        variables = _receive_place(agent)
    except OSError:
        os._exit(1)
    agent.close()
    _begin_anew(variables)
    return _run(target)


def _receive_place(agent: socket.socket) -> dict[str, str]:
    """Install standard output and error from the agent, and return the environment."""
    head, descriptors, _, _ = socket.recv_fds(agent, SIZE.size, 2)
    if len(head) < SIZE.size or len(descriptors) < 2:
        os._exit(1)
    for own, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, own)
        os.close(descriptor)
    (size,) = SIZE.unpack(head)
    data = bytearray()
    while len(data) < size:
        more = agent.recv(size - len(data))
        if not more:
            os._exit(1)  # the agent has abandoned this worker
        data += more
    variables: dict[str, str] = json.loads(data)
    return variables


def _begin_anew(variables: Mapping[str, str]) -> None:
    """Replace the server's state that must be this process's own."""
    from farandole.base.env import replace_environment

    replace_environment(variables)
    if sys.modules["torch"]._is_device_backend_autoload_enabled():
        importlib.import_module(AUTOLOAD).load()  # again: at `import torch` this process was no worker
    # Python's own random number generator is reseeded at a fork.
    sys.modules["torch"].default_generator.seed()
    if (numpy_random := sys.modules.get("numpy.random")) is not None:
        numpy_random.seed()
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)


def _run(target: Sequence[str]) -> int:
    """Run the target as `__main__`, and report a failure as Python does."""
    main, error = _new_main(), None
    try:
        if target[0] == "-m":
            import runpy

            runpy._run_module_as_main(target[1])  # type: ignore[attr-defined] # what `python -m` calls itself
        else:
            _run_script(main, target[0])
    except SystemExit:
        raise
    except BaseException as caught:  # noqa: BLE001 - the place where it would end the interpreter
        error = caught
    if error is None:
        return 0
    _show(error)  # no exception is being handled any more here, which hooks can see
    return 1


def _new_main() -> types.ModuleType:
    """Return a `__main__` in which no code has run yet."""
    fresh = types.ModuleType("__main__")
    fresh.__dict__.update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = fresh
    return fresh


def _run_script(main: types.ModuleType, script: str) -> None:
    path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    main.__dict__.update(__file__=path, __cached__=None, __loader__=loader)
    try:
        with io.open_code(path) as file:
            source = file.read()
    except OSError as error:
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None
    exec(compile(source, path, "exec", dont_inherit=True), main.__dict__)


def _show(error: BaseException) -> None:
    """Show an exception as the interpreter does."""
    global _was_interrupted
    _forget_own_frames(error)
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    _was_interrupted = isinstance(error, KeyboardInterrupt)
    failure = None
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except BaseException as caught:  # noqa: BLE001 - a hook of the script's own
        failure = caught
    if failure is not None:
        _forget_own_frames(failure)
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(failure), failure, failure.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _forget_own_frames(error: BaseException) -> None:
    while (trace := error.__traceback__) is not None and trace.tb_frame.f_code.co_filename == __file__:
        error.__traceback__ = trace.tb_next


def _end_as_interrupted() -> None:
    """End by SIGINT, as a Python that ends with KeyboardInterrupt does, for the process that waits for it."""
    if _was_interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)


if __name__ == "__main__":
    main()
