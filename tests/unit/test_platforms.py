"""Farandole says at its import that it runs on Linux only; `import torch` works everywhere."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch  # noqa: F401 - before autoload.py, which it loads itself

import farandole
from farandole.integrations.torchrun.process_group import autoload


@pytest.mark.parametrize(("platform", "words"), [("darwin", "macOS"), ("win32", "WSL 2"), ("freebsd14", "freebsd14")])
def test_the_import_says_what_to_do_on_another_system(platform: str, words: str) -> None:
    code = f"import sys; sys.platform = {platform!r}; import farandole"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    (*_, last) = done.stderr.strip().splitlines()
    assert last.startswith("ImportError: Farandole runs on Linux only, and this is ")
    assert words in last


def test_the_import_by_torch_says_nothing() -> None:
    code = """
import sys, types, importlib.machinery
sys.platform = "darwin"
torch = types.ModuleType("torch")
torch.__spec__ = importlib.machinery.ModuleSpec("torch", None)
torch.__spec__._initializing = True
sys.modules["torch"] = torch
import farandole
torch.__spec__._initializing = False
del sys.modules["farandole"]  # as autoload.load() does
import farandole
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "line 11" in done.stderr
    assert "ImportError: Farandole runs on Linux only" in done.stderr


def test_torch_finds_nothing_to_load_on_another_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "farandole", farandole)  # put back at the end
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(autoload, "make_backend_known", lambda: pytest.fail("on another system"))
    autoload.load()
    assert "farandole" not in sys.modules


def test_linux_is_supported() -> None:
    farandole._require_linux("linux")
