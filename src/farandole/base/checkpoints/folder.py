"""The folder of a job's checkpoints: listing, publication and removal, and its lock at the beginning of a job. Without
torch.

DIR/step-000000000500-1f0c…/   one checkpoint, unique by step and nonce
    state.json  tensors.safetensors
    manifest.json              put last, atomically: without it there is no checkpoint
DIR/job.lock, job.json         the job that uses the folder: see below
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from farandole.base.checkpoints import manifest as manifests
from farandole.base.checkpoints.manifest import FileSum, Manifest
from farandole.base.checkpoints.store import LocalStore, Store, open_store, write_all
from farandole.base.env import CheckpointEnv
from farandole.base.membership import Origin
from farandole.errors import ConfigError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{12}-[0-9a-f]{16}")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    store: Store
    name: str
    manifest: Manifest

    @property
    def place(self) -> str:
        """Place of the checkpoint, for people."""
        return f"{self.store.place}/{self.name}"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint with a manifest that a job cannot resume from, and the reason."""

    name: str
    why: str


class CheckpointFolder:
    """The checkpoints in a store. All methods may raise OSError. Folders that are no checkpoint of Farandole are never
    touched."""

    def __init__(self, store: Store | Path) -> None:
        self.store: Store = LocalStore(store) if isinstance(store, Path) else store

    def complete(self) -> tuple[list[Found], list[Damaged]]:
        """Return the checkpoints, newest first, and those whose manifest or files have changed since they were written
        (only sizes are checked: checksums are compared when a checkpoint is read)."""
        found, damaged = [], []
        for name in self._folders():
            try:
                found.append(self.read_manifest(name))
            except FileNotFoundError:
                continue  # not published, or just being removed
            except ConfigError as error:
                damaged.append(Damaged(name, str(error)))
        found.sort(key=lambda each: each.manifest.progress, reverse=True)
        return found, damaged

    def begin(self, step: int) -> str:
        """Return the name of a new checkpoint, which does not count until it is published."""
        name = f"step-{step:012d}-{secrets.token_hex(8)}"
        self.store.make_folder(name)
        return name

    def publish(self, name: str, manifest: Manifest) -> None:
        """Publish `name`, which is a checkpoint from now on. All its files exist already."""
        self.store.put(f"{name}/{MANIFEST}", manifests.encode(manifest), forced=True)

    def retain(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and unpublished ones begun before the oldest of them. A
        checkpoint that a slow writer still writes is newer, or no longer needed."""
        found, _ = self.complete()
        for each in found[keep:]:
            self.discard(each.name)
        if kept := found[:keep]:
            oldest = min(each.name for each in kept)  # names sort as their steps do
            for name in self._folders():
                if name < oldest and not self._is_published(name):
                    self.discard(name)

    def remove_unpublished(self) -> None:
        """Remove unpublished checkpoints of earlier jobs. Only while no other job uses the folder."""
        for name in self._folders():
            if not self._is_published(name):
                self.discard(name)

    def discard(self, name: str) -> None:
        """Remove a checkpoint: its manifest first, so that a partly removed one does not count. Raises nothing: the
        remaining files are not a checkpoint, and are removed another time."""
        with contextlib.suppress(OSError):
            self.store.remove(f"{name}/{MANIFEST}")
            self.store.remove_folder(name)

    def read_manifest(self, name: str) -> Found:
        """Return the checkpoint of a folder. Raises FileNotFoundError without a manifest, ConfigError when files differ
        from it."""
        here = f"{self.store.place}/{name}"
        manifest = manifests.decode(self.store.read(f"{name}/{MANIFEST}"), f"{here}/{MANIFEST}")
        for file, sum in manifest.files.items():
            size = self.store.size(f"{name}/{file}")
            if size != sum.size_bytes:
                raise ConfigError(f"{here}/{file} has {size} bytes, expected {sum.size_bytes}")
        return Found(self.store, name, manifest)

    def _folders(self) -> list[str]:
        return [name for name in self.store.folders() if _NAME.fullmatch(name)]

    def _is_published(self, name: str) -> bool:
        return self.store.size(f"{name}/{MANIFEST}") is not None


def write_file(store: Store, name: str, parts: Iterable[bytes | memoryview]) -> FileSum:
    """Write a new file. When this returns, it survives a power failure."""
    size_bytes = crc32 = 0
    with store.create(name) as file:
        for part in parts:
            size_bytes += len(part)
            crc32 = zlib.crc32(part, crc32)
            write_all(file, part)
    return FileSum(size_bytes, crc32)


# The beginning of a job -----------------------------------------------------------------------------------------------
#
# A job locks its place for checkpoints, reads it, and counts itself. The launcher does this for the jobs that it
# starts; without Farandole's launcher, rank 0 does.


@dataclass(frozen=True)
class LockedStore:
    """A place that this job has locked.

    origin    the beginning of its numbers
    settings  settings for its workers
    notes     notes for people
    lock      to be closed at the job's end
    """

    origin: Origin
    settings: CheckpointEnv
    notes: tuple[str, ...]
    lock: JobLock


def begin_job(settings: CheckpointEnv) -> LockedStore:
    """Lock a place and read it. Raises ConfigError when another job uses the place, when it cannot be reached or
    written to, and when it contains only damaged checkpoints."""
    taken = lock(open_store(settings.folder))
    try:
        return _begin_locked(settings, taken)
    except OSError as error:
        taken.close()
        raise ConfigError(f"--checkpoint {settings.folder}: {error}") from error
    except BaseException:
        taken.close()
        raise


def continue_job(settings: CheckpointEnv) -> JobLock:
    """Lock a place again for a job that goes on under another launcher, with the settings of LockedStore. Raises
    ConfigError as begin_job does."""
    return lock(open_store(settings.folder), settings.owner)


def _begin_locked(settings: CheckpointEnv, taken: JobLock) -> LockedStore:
    folder = CheckpointFolder(taken.store)
    folder.remove_unpublished()
    found, damaged = folder.complete()
    notes = [f"a damaged checkpoint was skipped: {each.why}" for each in damaged]
    if damaged and not found:
        raise ConfigError(
            f"--checkpoint {settings.folder}: no checkpoint in it can be read ({damaged[0].why}); to start from "
            f"the beginning, give an empty folder"
        )
    run_id, generation = taken.counted.run_id, taken.counted.generation
    if found:
        newest = found[0].manifest
        run_id, generation = max(run_id, newest.run_id), max(generation, newest.generation)
        notes.append(f"resuming from {found[0].place}: epoch {newest.epoch}, step {newest.step}")
    origin = Origin(run_id + 1, generation, has_checkpoint=bool(found))
    taken.count(origin.run_id, generation)
    settings = msgspec.structs.replace(
        settings, resume=found[0].name if found else "", run_id=origin.run_id, owner=taken.owner
    )
    return LockedStore(origin, settings, tuple(notes), taken)


# The lock of a place for checkpoints, which one job at a time uses, and the numbers of the jobs before ----------------

_JOB = "job.json"
_LOCK = "job.lock"


class Counted(msgspec.Struct, frozen=True):
    """The highest numbers that were ever used with this place, 0 for none, and their last owner."""

    run_id: int = 0
    generation: int = 0
    owner: str = ""


@dataclass
class JobLock:
    """The right to use a place, and the numbers that this job has used."""

    store: Store
    counted: Counted
    owner: str
    _handle: int | None

    def count(self, run_id: int, generation: int) -> None:
        """Record the numbers that are used from now on. The file is not flushed to disk, which would delay a regroup;
        after a power failure the manifests still have the numbers, up to the last checkpoint. Raises OSError."""
        now = Counted(max(run_id, self.counted.run_id), max(generation, self.counted.generation), self.owner)
        if now != self.counted and not has_lost_it(self.store, self.owner, self.counted.owner):
            self.store.put(_JOB, msgspec.json.encode(now), forced=False)
        self.counted = now

    def close(self) -> None:
        """Allow another job to use the folder."""
        if self._handle is not None:
            with contextlib.suppress(OSError):
                os.close(self._handle)
            self._handle = None


def lock(store: Store, owner: str = "") -> JobLock:
    """Create the place if necessary, and lock it, as `owner` or as a new one. Raises ConfigError, with advice, when
    another job has it and when it cannot be created or written to."""
    handle = None
    try:
        store.make()
        if isinstance(store, LocalStore):
            handle = _lock_file(store.path / _LOCK)
        taken = JobLock(store, _read(store), owner or secrets.token_hex(8), handle)
        taken.count(0, 0)  # checks now whether files can be written here
    except BaseException as error:
        if handle is not None:
            os.close(handle)
        if isinstance(error, OSError):
            raise _unusable(store, error) from error
        raise
    return taken


def has_lost_it(store: Store, owner: str, before: str = "") -> bool:
    """Return whether a later job has taken the place. `before`: the owner when this job came. Raises OSError."""
    return _read(store).owner not in ("", before, owner)


def _lock_file(path: Path) -> int:
    # Close-on-exec, or workers would inherit the lock and hold it after this process.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ConfigError(
            f"--checkpoint {path.parent}: another job is using this folder; wait until it has ended, or give another "
            f"folder"
        ) from None
    except OSError:
        os.close(handle)
        raise
    return handle


def _read(store: Store) -> Counted:
    try:
        return msgspec.json.decode(store.read(_JOB), type=Counted)
    except (FileNotFoundError, ValueError):  # the first job here, or a power failure
        return Counted()


def _unusable(store: Store, error: OSError) -> ConfigError:
    return ConfigError(
        f"--checkpoint {store.place}: no checkpoints can be written there ({error.strerror or error}); give a place "
        f"with free space that this user may write to"
    )
