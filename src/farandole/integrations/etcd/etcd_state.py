"""The state of a job in etcd (`farandole run --state etcd://HOST/PREFIX`); launch/job_state.py has it in a folder.

PREFIX/owner      who the launcher is; the key goes with the lease of that launcher
PREFIX/job        the job, what its token must be, and the number of its launcher
PREFIX/head       the number of the newest state, and of its parts
PREFIX/state/N/   the parts of the state with number N: a request of etcd has 1.5 MB at most

The journal's files are in the launcher's memory; the launcher writes a copy of each state to etcd. Each write is a
transaction that compares the owner: a launcher that has lost its lease cannot write once another one has taken over.
It also compares the head: a request that etcd carries out late, after it was repeated, changes nothing. The token
itself is not in etcd.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from farandole.base.config import JobConfig
from farandole.base.env import CheckpointEnv
from farandole.base.env.cluster_variables import take_etcd_variables
from farandole.base.machine import now_s
from farandole.base.wire.authentication import derive_key
from farandole.errors import ConfigError
from farandole.integrations.etcd.etcd_client import (
    EtcdAccess,
    EtcdClient,
    EtcdRefused,
    EtcdUnavailable,
    KeyValue,
    changed_in,
    created_in,
    delete,
    put,
)
from farandole.job.coordinator.journal import (
    FORMAT,
    SOFTWARE,
    Journal,
    JournalDamaged,
    JournalError,
    files_in_memory,
)
from farandole.job.launch.job_state import Owner, StateUnavailable, job_of_state

LEASE_S = 6
"""For so long nobody else takes over from a launcher that is silent."""

_RENEW_S = 1.0
_PART_BYTES = 1_000_000
_AGAIN_S = 0.2


class _Head(msgspec.Struct, frozen=True):
    number: int
    parts: int


@contextlib.contextmanager
def etcd_state(url: str, command: Sequence[str], config: JobConfig, token: bytes) -> Iterator[EtcdState]:
    """Have the job in etcd inside the block.

    Args:
        url: As in EtcdAccess.parse; the identity is in the environment.
        command, config: As in FolderState.
        token: Of the job.

    Raises:
        ConfigError: etcd cannot be used, or another launcher has the job, or it is damaged, or of another job or
            version.
    """
    state = EtcdState(EtcdAccess.parse(url, take_etcd_variables()), command, config, token)
    try:
        yield state
    finally:
        state.close()


class EtcdState:
    """A state in etcd, owned from the beginning until `close()`. Arguments and errors as in etcd_state."""

    def __init__(self, access: EtcdAccess, command: Sequence[str], config: JobConfig, token: bytes) -> None:
        self._access, self._prefix = access, access.prefix
        self.launcher, self.token = secrets.token_hex(8), token
        self._client, self._calling = EtcdClient(access), threading.Lock()  # the client's, which threads may share
        self._owner = Owner(self.launcher, os.uname().nodename, os.getpid())
        self._created = self._job_changed = self._head_changed = self._number = 0
        self._is_over, self._successor, self._lease = False, "", ""
        self._must_look, self._is_closed = threading.Event(), False
        self._changing = threading.Lock()  # held while the job's key changes, by which a successor is recognised
        self._renewing = threading.Thread(target=self._renew, name="etcd-lease", daemon=True)
        try:
            self._acquire()
            self._renewing.start()
            found = self._client.get(self._key("job"))
            self._job_changed = 0 if found is None else found.changed
            removal = f"remove the keys below {self._prefix}/ from etcd"
            data, proof = None if found is None else found.value, derive_key(token, b"state")
            self._job = job_of_state(data, command, config, proof, self._error, removal)
            self.job_id, self.number, self.lost = self._job.job_id, self._job.number, ""
            self._data = self._former_journal(removal)
        except (EtcdUnavailable, EtcdRefused) as error:
            self.close()
            raise self._not_usable(error) from None
        except BaseException:
            self.close()
            raise
        self.is_continued = self._data is not None or bool(self.lost)

    @property
    def checkpoint(self) -> CheckpointEnv | None:
        return self._job.checkpoint

    def begin(self, checkpoint: CheckpointEnv | None) -> None:
        """Take the job over, or begin it: from now on no former launcher can write. Raises ConfigError."""
        self.number = self._job.number + 1
        self.journal_files = files_in_memory()
        if self._data is not None:
            Journal(self.journal_files, self.job_id).write(self._data)
        self._job = msgspec.structs.replace(
            self._job, version=SOFTWARE, format=FORMAT, number=self.number, checkpoint=checkpoint
        )
        change = put(self._key("job"), msgspec.json.encode(self._job))
        with self._calling, self._changing:
            try:
                # That nobody has written since the journal was read is part of it: this process may have been stopped.
                self._job_changed = self._client.transact(self._is_current(), [change])
            except (EtcdUnavailable, EtcdRefused) as error:
                raise self._not_usable(error) from None
        if not self._job_changed:
            raise self._error("this launcher's lease in etcd has ended; start the command again")

    def write_copy(self, content: bytes) -> None:
        """Write a state: all of it or nothing. Raises StateUnavailable when it is to be repeated."""
        with self._calling:
            try:
                if not self._is_over:
                    self._write(content)
            except (EtcdUnavailable, EtcdRefused) as error:
                raise StateUnavailable(f"etcd: {error}") from None

    def successor(self) -> str:
        """Return who has taken the job over; empty: nobody has, as far as etcd has answered."""
        return self._successor

    def end(self, is_over: bool) -> None:
        """Forget the job, if it is over or has never begun. Idempotent."""
        if self._is_over or self._successor:
            return
        with contextlib.suppress(JournalError, OSError):
            files = getattr(self, "journal_files", None)
            if not self.lost:
                is_over |= files is None and self._data is None
                is_over |= files is not None and Journal(files, self.job_id).read() is None
        if is_over:
            changes = [delete(self._key(each)) for each in ("job", "head")]
            changes.append(delete(self._key("state/"), self._key("state0")))  # "0" comes after "/"
            with self._calling:
                self._is_over = True
                with contextlib.suppress(EtcdUnavailable, EtcdRefused):
                    self._client.transact([self._is_owned()], changes)

    def close(self) -> None:
        """Let another launcher have it. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        self._must_look.set()
        if self._renewing.is_alive():
            self._renewing.join()
        with self._calling:
            self._is_over = True
            if self._lease:
                with contextlib.suppress(EtcdUnavailable, EtcdRefused):
                    self._client.revoke(self._lease)
            self._client.close()
        for each in getattr(self, "journal_files", ()):
            os.close(each)

    # Its keys ---------------------------------------------------------------------------------------------

    def _write(self, content: bytes) -> None:
        self._number += 1  # parts of an attempt that is carried out late have names of their own
        parts = [content[at : at + _PART_BYTES] for at in range(0, len(content), _PART_BYTES)]
        puts = [put(f"{self._states(self._number)}{index}", part) for index, part in enumerate(parts)]
        last = [
            put(self._key("head"), msgspec.json.encode(_Head(self._number, len(parts)))),
            delete(self._key("state/"), self._states(self._number)),
        ]
        for each in puts[:-1]:
            self._change([each])
        self._head_changed = self._change([*puts[-1:], *last])

    def _change(self, operations: Sequence[dict[str, Any]]) -> int:
        if changed := self._client.transact(self._is_current(), operations):
            return changed
        head = self._client.get(self._key("head"))
        owner = self._client.get(self._key("owner"))
        if owner is None or owner.created != self._created:
            self._must_look.set()
            raise StateUnavailable("this launcher's lease in etcd has ended")
        self._head_changed = 0 if head is None else head.changed
        raise StateUnavailable("etcd has carried out a former attempt after all")

    def _former_journal(self, removal: str) -> bytes | None:
        """Return the newest state of the former launcher's coordinators; None: there is none, or it is lost."""
        found = self._client.get(self._key("head"))
        if found is None:
            return None
        self._head_changed = found.changed
        try:
            head = msgspec.json.decode(found.value, type=_Head)
        except msgspec.MsgspecError:
            self.lost = f"{self._key('head')} is damaged"
            return None
        self._number = head.number
        parts = [self._client.get(f"{self._states(head.number)}{index}") for index in range(head.parts)]
        if None in parts:
            self.lost = f"a part of {self._states(head.number)} is missing"
            return None
        files = files_in_memory(b"".join(each.value for each in parts if each is not None))
        try:
            return Journal(files, self.job_id).read()
        except JournalDamaged as error:
            self.lost = str(error)
            return None
        except JournalError as error:
            raise self._error(f"{error}; to begin the job anew, {removal}") from None
        finally:
            for each in files:
                os.close(each)

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"

    def _states(self, number: int) -> str:
        return self._key(f"state/{number:016d}/")

    def _is_owned(self) -> dict[str, Any]:
        return created_in(self._key("owner"), self._created)

    def _is_current(self) -> list[dict[str, Any]]:
        return [self._is_owned(), changed_in(self._key("head"), self._head_changed)]

    # The lease --------------------------------------------------------------------------------------------

    def _acquire(self) -> None:
        """Become the owner; a launcher that was killed has its lease for some seconds more."""
        until_s, wait = now_s() + LEASE_S + 2, threading.Event()
        while not self._take(self._client, []):
            if now_s() > until_s:
                found = self._client.get(self._key("owner"))
                who = "" if found is None else f" ({_decoded_owner(found)})"
                raise self._error(
                    f"another launcher{who} has it; end that job first (Ctrl-C, or kill its process), or give another "
                    "PREFIX"
                )
            wait.wait(_AGAIN_S)

    def _take(self, client: EtcdClient, conditions: Sequence[dict[str, Any]]) -> bool:
        """Try to become the owner, with a new lease. Return whether this launcher is."""
        key, lease = self._key("owner"), client.grant_lease(LEASE_S)
        value = msgspec.json.encode(self._owner)
        owning = put(key, value, lease)
        if created := client.transact([created_in(key, 0), *conditions], [owning]):
            self._lease, self._created = lease, created
            return True
        found = client.get(key)  # a former attempt may have been carried out though its answer was lost
        if found is None or found.value != value or not client.transact([created_in(key, found.created)], [owning]):
            client.revoke(lease)
            return False
        self._lease, self._created = lease, found.created
        return True

    def _renew(self) -> None:
        """Keep the lease, or take another one where nobody has taken the job over. In a thread of its own."""
        client = EtcdClient(self._access)
        while not self._is_closed and not self._successor:
            self._must_look.wait(_RENEW_S)
            self._must_look.clear()
            with contextlib.suppress(EtcdUnavailable, EtcdRefused):  # the next write says so
                if not self._is_closed and not (client.keep_alive(self._lease) and self._owns(client)):
                    with self._changing:
                        self._take_again(client)
        client.close()

    def _owns(self, client: EtcdClient) -> bool:
        found = client.get(self._key("owner"))
        return found is not None and found.created == self._created

    def _take_again(self, client: EtcdClient) -> None:
        if self._take(client, [changed_in(self._key("job"), self._job_changed)]):
            return
        found = client.get(self._key("owner"))
        job = client.get(self._key("job"))
        if found is not None:
            self._successor = _decoded_owner(found)
        elif (0 if job is None else job.changed) != self._job_changed:
            self._successor = "which has ended since"

    def _not_usable(self, error: Exception) -> ConfigError:
        return self._error(f"etcd cannot be used: {error}")

    def _error(self, text: str) -> ConfigError:
        endpoints = self._access.endpoints
        hosts = ",".join(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in endpoints)
        return ConfigError(f"--state etcd://{hosts}/{self._prefix}: {text}")


def _decoded_owner(found: KeyValue) -> str:
    try:
        return str(msgspec.json.decode(found.value, type=Owner))
    except msgspec.MsgspecError:
        return "of another version"
