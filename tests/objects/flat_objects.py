"""flat://: an object store for tests, over a local folder, with fsspec. PYTHONPATH=tests/objects makes it known.

As such stores are: no rename, no folders of their own, an object is written in one go when its upload is closed. And
worse than they are: whoever looks meanwhile sees the first half of it.
"""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

from fsspec.spec import AbstractFileSystem


class FlatObjects(AbstractFileSystem):
    """flat:///folder/key is the file /folder/key."""

    protocol = "flat"
    cachable = False

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        path = self._strip_protocol(path)
        if os.path.isfile(path):
            entries = [self.info(path)]
        else:
            entries = [self.info(f"{path}/{name}") for name in sorted(os.listdir(path))]
        return entries if detail else [each["name"] for each in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        kind = "directory" if os.path.isdir(path) else "file"
        return {"name": path, "size": os.stat(path).st_size if kind == "file" else 0, "type": kind}

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        return open(path, "rb") if mode == "rb" else _Upload(Path(path))

    def rm_file(self, path: str) -> None:
        if os.path.isdir(path):
            return  # there are no folders, and so none to remove
        os.unlink(path)
        with contextlib.suppress(OSError):  # other objects begin with this prefix
            os.rmdir(os.path.dirname(path))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("objects cannot be renamed")

    rename = move = mv_file = cp_file = mv


class _Upload(io.BytesIO):
    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self._is_wanted = True

    def discard(self) -> None:
        self._is_wanted = False

    def close(self) -> None:
        if self._is_wanted and not self.closed:
            data = self.getvalue()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("wb", buffering=0) as file:
                file.write(data[: len(data) // 2])
                file.write(data[len(data) // 2 :])
        super().close()
