"""The folder of a job's checkpoints: which there are, how one is published, which are removed. Without torch.

DIR/step-000000000500-1f0c…/   one checkpoint, unique by step and nonce
    state.json  tensors.safetensors
    manifest.json              put last, in one go: without it there is no checkpoint
DIR/job.lock, job.json         the job that uses the folder: see job_lock.py
"""

from __future__ import annotations

import contextlib
import re
import secrets
from dataclasses import dataclass
from pathlib import Path

from farandole.checkpoint import manifest as manifests
from farandole.checkpoint.local_store import LocalStore
from farandole.checkpoint.manifest import FileSum, Manifest
from farandole.checkpoint.store import Store, write_all
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
        """For people."""
        return f"{self.store.place}/{self.name}"


@dataclass(frozen=True)
class Damaged:
    """A checkpoint with a manifest that cannot be gone on from, and why."""

    name: str
    why: str


class CheckpointFolder:
    """Everything here may raise OSError. Folders that are no checkpoint of ours are never touched."""

    def __init__(self, store: Store | Path) -> None:
        self.store: Store = LocalStore(store) if isinstance(store, Path) else store

    def complete(self) -> tuple[list[Found], list[Damaged]]:
        """The checkpoints, newest first, and those whose manifest or files are not as they were written (sizes
        only: checksums are compared when one is read)."""
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
        """The name of a new checkpoint; not one until it is published."""
        name = f"step-{step:012d}-{secrets.token_hex(8)}"
        self.store.make_folder(name)
        return name

    def publish(self, name: str, manifest: Manifest) -> None:
        """From now on, and not before, `name` is a checkpoint. Its files are all there already."""
        self.store.put(f"{name}/{MANIFEST}", manifests.encode(manifest), forced=True)

    def retain(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what was begun before the oldest of them and never
        published. The one that a slow writer still writes is newer, or of no use any more."""
        found, _ = self.complete()
        for each in found[keep:]:
            self.discard(each.name)
        if kept := found[:keep]:
            oldest = min(each.name for each in kept)  # names sort as their steps do
            for name in self._folders():
                if name < oldest and not self._is_published(name):
                    self.discard(name)

    def remove_unpublished(self) -> None:
        """What earlier jobs have begun. Only while no other job uses the folder."""
        for name in self._folders():
            if not self._is_published(name):
                self.discard(name)

    def discard(self, name: str) -> None:
        """Remove one checkpoint: its manifest first, so that a half-removed one is none. Nothing is raised: what is
        left is no checkpoint, and is removed another time."""
        with contextlib.suppress(OSError):
            self.store.remove(f"{name}/{MANIFEST}")
            self.store.remove_folder(name)

    def read_manifest(self, name: str) -> Found:
        """Raises FileNotFoundError where there is none, ConfigError when files are not as it says."""
        here = f"{self.store.place}/{name}"
        manifest = manifests.decode(self.store.read(f"{name}/{MANIFEST}"), f"{here}/{MANIFEST}")
        for file, sum in manifest.files.items():
            size = self.store.size(f"{name}/{file}")
            if size != sum.size_bytes:
                raise ConfigError(f"{here}/{file} has {size} bytes, and {sum.size_bytes} were written")
        return Found(self.store, name, manifest)

    def _folders(self) -> list[str]:
        return [name for name in self.store.folders() if _NAME.fullmatch(name)]

    def _is_published(self, name: str) -> bool:
        return self.store.size(f"{name}/{MANIFEST}") is not None


def write_file(store: Store, name: str, data: bytes) -> FileSum:
    """A new file; there, also after a power failure, when this returns."""
    with store.create(name) as file:
        write_all(file, data)
    return FileSum.of(data)
