"""Refusals of farandole.spark.run() that need no Spark, and rows of Parquet files."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

import farandole.spark
from farandole.errors import ConfigError


def test_without_pyspark_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ConfigError, match=r"pip install 'farandole\[spark\]'"):
        farandole.spark.run(lambda: None)


def test_a_folder_without_files_is_no_data_set(tmp_path: Path) -> None:
    (tmp_path / "_SUCCESS").touch()
    with pytest.raises(ConfigError, match="no Parquet files"):
        farandole.spark.ParquetRows(str(tmp_path))
    with pytest.raises(ConfigError, match="no Parquet files"):
        farandole.spark.ParquetRows(str(tmp_path / "missing"))


def test_the_rows_of_several_files_and_row_groups_are_one_data_set(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    for number, size in enumerate((5, 0, 7)):
        table = pyarrow.table({"id": [10 * number + i for i in range(size)], "text": ["x"] * size})
        parquet.write_table(table, tmp_path / f"part-{number}.parquet", row_group_size=2)
    (tmp_path / "_SUCCESS").touch()
    rows = farandole.spark.ParquetRows(str(tmp_path), columns=["id"], groups_kept=1)
    expected = [*range(5), *range(20, 27)]
    assert len(rows) == 12
    assert [rows[i] for i in reversed(range(12))] == [{"id": each} for each in reversed(expected)]
    assert pickle.loads(pickle.dumps(rows))[11] == {"id": 26}
    with pytest.raises(IndexError, match="row 12 of 12"):
        rows[12]
    assert len(farandole.spark.ParquetRows(str(tmp_path / "part-0.parquet"))) == 5
