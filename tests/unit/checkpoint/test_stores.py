"""Places for checkpoints: a folder, a file:// address, and an object store without a rename."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import fsspec
import pytest

from farandole.base.checkpoints.folder import MANIFEST, CheckpointFolder, begin_job, write_file
from farandole.base.checkpoints.manifest import FORMAT, Manifest
from farandole.base.checkpoints.store import LocalStore, Store, normalized, open_store
from farandole.base.env import CheckpointEnv
from farandole.errors import ConfigError
from tests.objects.flat_objects import FlatObjects


@pytest.fixture(params=["{}/data", "file://{}/data", "flat://{}/data"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    fsspec.register_implementation("flat", FlatObjects, clobber=True)
    return str(request.param).format(tmp_path)


@pytest.fixture
def store(place: str) -> Store:
    store = open_store(place)
    store.make()
    return store


def publish(folder: CheckpointFolder, step: int) -> str:
    name = folder.begin(step)
    files = {"state.json": write_file(folder.store, f"{name}/state.json", [b"{}"])}
    folder.publish(name, Manifest(FORMAT, "step", 1, step, 0, step, step, 1, 1, 0.0, files))
    return name


def test_what_is_put_is_there_and_replaces_what_was(store: Store) -> None:
    assert store.size("job.json") is None
    with pytest.raises(FileNotFoundError):
        store.read("job.json")
    for data in (b"a long one", b"short"):
        store.put("job.json", data, forced=True)
        assert store.read("job.json") == data
        assert store.size("job.json") == len(data)
        with store.open("job.json") as file:
            assert file.read() == data
    store.remove("job.json")
    store.remove("job.json")
    assert store.size("job.json") is None


def test_an_upload_that_is_given_up_is_no_file_or_one_that_goes_with_its_folder(store: Store) -> None:
    store.make_folder("step-1")
    with contextlib.suppress(KeyError), store.create("step-1/tensors") as file:
        file.write(b"half")
        raise KeyError
    assert store.size("step-1/tensors") in (None, 4)
    store.remove_folder("step-1")
    assert store.folders() == []


def test_checkpoints_are_published_found_and_removed_alike_everywhere(store: Store) -> None:
    folder = CheckpointFolder(store)
    assert folder.complete() == ([], [])
    names = [publish(folder, step) for step in (10, 20, 30)]
    begun = folder.begin(40)
    write_file(store, f"{begun}/state.json", [b"{}"])
    assert [each.name for each in folder.complete()[0]] == names[::-1]
    folder.retain(2)
    folder.remove_unpublished()
    assert sorted(store.folders()) == names[1:]


def test_a_manifest_of_which_only_a_part_is_there_makes_no_checkpoint(store: Store) -> None:
    folder = CheckpointFolder(store)
    good, torn = publish(folder, 10), publish(folder, 20)
    whole = store.read(f"{torn}/{MANIFEST}").rstrip()
    for length in range(0, len(whole), 9):
        store.put(f"{torn}/{MANIFEST}", whole[:length], forced=False)
        found, damaged = folder.complete()
        assert ([each.name for each in found], [each.name for each in damaged]) == ([good], [torn])


def test_the_next_job_begins_where_the_last_one_was(place: str) -> None:
    begun = begin_job(CheckpointEnv(place))
    begun.lock.count(1, 4)
    name = publish(CheckpointFolder(begun.lock.store), 10)
    begun.lock.close()
    begun = begin_job(CheckpointEnv(place))
    assert (begun.origin.run_id, begun.origin.generation, begun.settings.resume) == (2, 4, name)
    begun.lock.close()


def test_errors_of_other_packages_come_as_those_of_a_disk(tmp_path: Path) -> None:
    class NoCredentials(Exception):
        pass

    class Refusing(FlatObjects):
        def refuse(self, *args: Any, **kwargs: Any) -> Any:
            raise NoCredentials("who are you?")

        ls = info = cat_file = pipe_file = rm_file = makedirs = _open = refuse

    fsspec.register_implementation("refusing", Refusing, clobber=True)
    store = open_store(f"refusing://{tmp_path}")
    for call in (store.make, store.folders, lambda: store.read("a"), lambda: store.put("a", b"", True)):
        with pytest.raises(OSError, match="NoCredentials: who are you"):
            call()
    with pytest.raises(OSError, match="NoCredentials"), store.create("a"):
        pass
    with pytest.raises(ConfigError, match=r"no checkpoints can be written there .NoCredentials: who are you"):
        begin_job(CheckpointEnv(f"refusing://{tmp_path}"))
    store.remove_folder("a")


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("memory://job", "in the memory of one process"),
        ("nosuch://job", r"cannot be reached from here \(Protocol not known: nosuch\); install"),
        ("file://job", "an absolute path is needed, as in file:///data/job"),
    ],
)
def test_a_place_that_cannot_be_reached_is_refused_with_what_to_do(place: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(place)


def test_an_address_whose_package_is_missing_is_refused_with_its_name() -> None:
    fsspec.register_implementation("missing", "no_such_package.FS", clobber=True, errtxt="Install nosuchfs")
    with pytest.raises(ConfigError, match=r"Install nosuchfs.*s3:// s3fs"):
        open_store("missing://bucket/job")


def test_places_mean_the_same_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalized("here") == str(tmp_path / "here")
    assert normalized("s3://bucket/job") == "s3://bucket/job"
    with pytest.raises(ConfigError, match="needs a folder, or an address"):
        normalized(" ")
    assert isinstance(open_store("file:///data"), LocalStore)


def test_write_all_goes_on_where_a_write_stopped() -> None:
    from farandole.base.checkpoints.store import write_all

    class Slow(io.BytesIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data[:3]))

    file = Slow()
    write_all(file, b"0123456789")
    assert file.getvalue() == b"0123456789"
