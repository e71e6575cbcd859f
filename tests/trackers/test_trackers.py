"""The recipes of docs/logging.md, with a job whose rank 0 is killed three times, and leaves once. By the trackers' own
readers they have one run then, with the values of the undisturbed job."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tracked_jobs import Curves, check_curves, run_recipe, undisturbed

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    return undisturbed(tmp_path_factory.mktemp("undisturbed") / "alone")


def test_tensorboard_has_one_file_with_each_step_once(tmp_path: Path, expected: Curves) -> None:
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run_recipe("tensorboard", tmp_path)
    assert len(list((tmp_path / "runs").rglob("events.out.*"))) == 1
    board = event_accumulator.EventAccumulator(str(tmp_path / "runs" / "first"), size_guidance={"scalars": 0})
    board.Reload()
    found: Curves = {}
    for name in board.Tags()["scalars"]:
        points = board.Scalars(name)
        found[name] = {point.step: point.value for point in points}
        assert len(points) == len(found[name]), name
    check_curves(found, expected, relative=1e-6)  # 32 bits


def test_mlflow_has_one_run_with_each_step_once(
    tmp_path: Path, expected: Curves, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    store = f"file:{tmp_path / 'mlruns'}"
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    run_recipe("mlflow", tmp_path, MLFLOW_TRACKING_URI=store)
    client = mlflow.MlflowClient(store)
    runs = client.search_runs([each.experiment_id for each in client.search_experiments()])
    assert [run.info.status for run in runs] == ["FINISHED"]
    found: Curves = {}
    for name in runs[0].data.metrics:
        points = client.get_metric_history(runs[0].info.run_id, name)
        found[name] = {point.step: point.value for point in points}
        assert len(points) == len(found[name]), name
    check_curves(found, expected)


def test_weights_and_biases_has_one_offline_run_with_each_step_once(tmp_path: Path, expected: Curves) -> None:
    pytest.importorskip("wandb")
    run_recipe("wandb", tmp_path, WANDB_SILENT="true")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    check_curves(_offline_run(file), expected)


def _offline_run(file: Path) -> Curves:
    """Read the file of an offline run, whose records are messages that wandb defines."""
    from wandb.proto import wandb_internal_pb2

    curves: Curves = {}
    for data in _records_of_log(file.read_bytes()[_WANDB_HEADER_BYTES:]):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
            step = int(items.pop("_step"))
            for name, value in items.items():
                if not name.startswith("_"):
                    assert step not in curves.setdefault(name, {})
                    curves[name][step] = value
    return curves


_WANDB_HEADER_BYTES = 7
_BLOCK_BYTES, _CHUNK_HEADER_BYTES, _FULL, _LAST = 32768, 7, 1, 4


def _records_of_log(data: bytes) -> Iterator[bytes]:
    """Yield the records of a log in LevelDB's format (https://github.com/google/leveldb/blob/main/doc/log_format.md):
    blocks of chunks, each with a checksum, its length, and whether it is a whole record, or a part of one. The header
    of wandb is a part of the first block."""
    position, record = 0, b""
    while position < len(data):
        left = _BLOCK_BYTES - (position + _WANDB_HEADER_BYTES) % _BLOCK_BYTES
        if left < _CHUNK_HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += _CHUNK_HEADER_BYTES
        record += data[position : position + length]
        position += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""
