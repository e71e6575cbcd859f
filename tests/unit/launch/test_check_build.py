"""--check-build tells what is here: no more, no less."""

from __future__ import annotations

from pathlib import Path

import pytest

from farandole.job.launch.cli import main
from farandole.job.launch.machine_check import format_build

ALL = {"torch": "9.9", "cuda": True, "rocm": False, "gloo": True, "nccl": True, "mpi": False}


def test_what_is_there_has_a_cross() -> None:
    lines = [line.strip() for line in format_build(ALL, {"mpirun": "/usr/bin/mpirun", "srun": None}).splitlines()]
    assert "[X] PyTorch 9.9" in lines
    assert "[ ] TensorFlow" in lines
    assert "[X] Farandole's own shared memory, on one host (CPU, CUDA tensors)" in lines
    assert "[X] Farandole's own TCP ring (CPU, CUDA tensors)" in lines
    operations = lines.index("Available Tensor Operations:")
    assert lines[operations + 3 : operations + 8] == ["[X] NCCL", "[ ] DDL", "[ ] CCL", "[ ] MPI", "[ ] Gloo"]
    title = "Backends of the installed torch.distributed (NCCL is used for CUDA tensors):"
    backends = lines.index(title)
    assert lines[backends + 1 : backends + 4] == ["[X] Gloo", "[X] NCCL", "[ ] MPI"]
    assert lines[-2:] == ["[X] mpirun (/usr/bin/mpirun)", "[ ] srun"]


def test_a_torch_that_cannot_be_imported_has_none_and_says_why() -> None:
    text = format_build("ModuleNotFoundError: No module named 'torch'", {})
    assert "[ ] PyTorch: ModuleNotFoundError: No module named 'torch'" in text
    assert "[ ] Farandole's own TCP ring" in text


@pytest.mark.parametrize("flag", ["-cb", "--check-build"])
def test_it_needs_no_number_and_no_command(
    flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mpirun").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit) as end:
        main(["run", flag])
    assert end.value.code == 0
    said = capsys.readouterr().out
    assert "[X] PyTorch" in said
    assert f"[X] mpirun ({tmp_path / 'mpirun'})" in said
