"""The folder of a job's checkpoints: which there are, how one is published, which are removed. Without torch.

DIR/step-000000000500-1f0c…/   one checkpoint, unique by step and nonce
    state.json  tensors.safetensors
    manifest.json              written last, by a rename: without it there is no checkpoint
DIR/job.lock, job.json         the job that uses the folder: see job_lock.py
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from dataclasses import dataclass
from pathlib import Path

from farandole.checkpoint import manifest as manifests
from farandole.checkpoint.manifest import FileSum, Manifest
from farandole.errors import ConfigError

MANIFEST = "manifest.json"
_NAME = re.compile(r"step-\d{12}-[0-9a-f]{16}")


@dataclass(frozen=True)
class Found:
    """A complete checkpoint."""

    path: Path
    manifest: Manifest


@dataclass(frozen=True)
class Damaged:
    """A folder with a manifest that cannot be gone on from, and why."""

    path: Path
    why: str


class CheckpointFolder:
    """Everything here may raise OSError. Folders that are no checkpoint of ours are never touched."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def complete(self) -> tuple[list[Found], list[Damaged]]:
        """The checkpoints, newest first, and those whose manifest or files are not as they were written (sizes
        only: checksums are compared when one is read)."""
        found, damaged = [], []
        for path in self._folders():
            try:
                found.append(read_manifest(path))
            except FileNotFoundError:
                continue  # not published, or just being removed
            except ConfigError as error:
                damaged.append(Damaged(path, str(error)))
        found.sort(key=lambda each: each.manifest.progress, reverse=True)
        return found, damaged

    def begin(self, step: int) -> Path:
        """A new folder for a checkpoint; not one until it is published."""
        path = self.path / f"step-{step:012d}-{secrets.token_hex(8)}"
        path.mkdir()
        return path

    def publish(self, path: Path, manifest: Manifest) -> None:
        """From now on, and not before, `path` is a checkpoint. Its files are on the disk already."""
        _sync_folder(path)
        unfinished = path / f"{MANIFEST}.new"
        with unfinished.open("xb") as file:
            file.write(manifests.encode(manifest))
            file.flush()
            os.fsync(file.fileno())
        unfinished.rename(path / MANIFEST)
        _sync_folder(path)
        _sync_folder(self.path)

    def retain(self, keep: int) -> None:
        """Remove all but the newest `keep` checkpoints, and what was begun before the oldest of them and never
        published. The one that a slow writer still writes is newer, or of no use any more."""
        found, _ = self.complete()
        for each in found[keep:]:
            discard(each.path)
        if kept := found[:keep]:
            oldest = min(each.path.name for each in kept)  # names sort as their steps do
            for path in self._folders():
                if path.name < oldest and not (path / MANIFEST).exists():
                    discard(path)

    def remove_unpublished(self) -> None:
        """What earlier jobs have begun. Only while no other job uses the folder."""
        for path in self._folders():
            if not (path / MANIFEST).exists():
                discard(path)

    def _folders(self) -> list[Path]:
        return [path for path in self.path.iterdir() if _NAME.fullmatch(path.name) and path.is_dir()]


def read_manifest(path: Path) -> Found:
    """Raises FileNotFoundError where there is none, ConfigError when files are not as it says."""
    manifest = manifests.decode((path / MANIFEST).read_bytes(), str(path / MANIFEST))
    for name, sum in manifest.files.items():
        size = _size(path / name)
        if size != sum.size_bytes:
            raise ConfigError(f"{path / name} has {size} bytes, and {sum.size_bytes} were written")
    return Found(path, manifest)


def write_file(path: Path, data: bytes) -> FileSum:
    """A new file, on the disk when this returns."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return FileSum.of(data)


def discard(path: Path) -> None:
    """Remove one checkpoint: its manifest first, so that a half-removed one is none. Nothing is raised: what is
    left is no checkpoint, and is removed another time."""
    with contextlib.suppress(OSError):
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
