"""A sharded checkpoint is data: nothing in it runs when it is loaded."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from farandole.errors import ConfigError
from farandole.integrations.sharding.safe_reading import SafePlanner, SafeReader, pack_values, unpack_values

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # DCP remarks that there is one process


class Runs:
    """Its unpickling creates the file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.file,)


class Reads:
    """Its unpickling reads an attribute of a type that metadata has."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, (Metadata, "__init__")


class OfTheUser:
    def __init__(self, number: int = 0) -> None:
        self.number = number


def fresh() -> dict[str, Any]:
    return {"weight": torch.zeros(2, 3), "half": torch.zeros(2, dtype=torch.bfloat16), "lr": 0.0, "values": b""}


def saved(folder: Path, **entries: Any) -> Path:
    state = {"weight": torch.full((2, 3), 7.0), "half": torch.ones(2, dtype=torch.bfloat16), "lr": 0.5, "values": b""}
    save({**state, **entries}, checkpoint_id=folder)
    return folder


def loaded(folder: Path) -> dict[str, Any]:
    state = fresh()
    try:
        load(state, storage_reader=SafeReader(folder), planner=SafePlanner())
    except CheckpointException as error:
        raise next(each for each, _ in error.failures.values()) from error
    return state


def test_tensors_and_values_come_back(tmp_path: Path) -> None:
    found = loaded(saved(tmp_path, values=pack_values({"epoch": 3, "name": "a", "table": {"b": [1, (2, None)]}})))
    assert found["weight"].eq(7).all()
    assert found["half"].eq(1).all()
    assert found["lr"] == 0.5
    assert unpack_values(found["values"]) == {"epoch": 3, "name": "a", "table": {"b": [1, (2, None)]}}


def test_code_in_the_metadata_is_not_run(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    (saved(tmp_path) / ".metadata").write_bytes(pickle.dumps(Runs(mark)))
    with pytest.raises(ConfigError, match=r"\.metadata cannot be read: it would call .*"):
        loaded(tmp_path)
    assert not mark.exists()


def test_of_types_in_the_metadata_only_members_of_an_enum_are_read(tmp_path: Path) -> None:
    (saved(tmp_path) / ".metadata").write_bytes(pickle.dumps(Reads()))
    with pytest.raises(ConfigError, match=r"\.metadata cannot be read: it would read __init__ of"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["lr", "values"])
def test_code_in_a_value_is_not_run(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "ran"
    saved(tmp_path, **{name: Runs(mark)})
    with pytest.raises(ConfigError, match=rf"the value {name} cannot be loaded .*add_safe_globals"):
        loaded(tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize("data", [b"", b"\x80\x04", b"garbage", pickle.dumps({"not": "metadata"})])
def test_metadata_that_is_none_is_an_error_that_names_the_file(tmp_path: Path, data: bytes) -> None:
    (saved(tmp_path) / ".metadata").write_bytes(data)
    with pytest.raises(ConfigError, match=r"\.metadata cannot be read"):
        loaded(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "/etc/passwd", "a/b", "..", ""])
def test_metadata_does_not_lead_out_of_the_folder(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path) / ".metadata"
    found: Metadata = pickle.loads(path.read_bytes())
    for stored in found.storage_data.values():
        stored.relative_path = name
    path.write_bytes(pickle.dumps(found))
    with pytest.raises(ConfigError, match="not in the folder"):
        loaded(tmp_path)


def test_an_object_of_the_user_is_refused_when_it_is_written_unless_he_has_declared_its_class() -> None:
    with pytest.raises(ConfigError, match=r"OfTheUser.*add_safe_globals"):
        pack_values({"mine": OfTheUser(3)})
    with torch.serialization.safe_globals([OfTheUser]):
        assert unpack_values(pack_values({"mine": OfTheUser(3)}))["mine"].number == 3


def test_plain_values_of_an_earlier_version_are_read_and_code_among_them_is_not_run(tmp_path: Path) -> None:
    values = {"epoch": 3, "seen": {1, 2}, "rate": 0.5}
    assert unpack_values(pickle.dumps(values)) == values
    with pytest.raises(ConfigError, match="earlier version"):
        unpack_values(pickle.dumps({"bad": Runs(tmp_path / "ran")}))
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ConfigError, match="not a dictionary"):
        unpack_values(pickle.dumps([1]))
