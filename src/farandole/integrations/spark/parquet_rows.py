"""ParquetRows: a data set of the rows of Parquet files, as Spark writes a data frame."""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from farandole.errors import ConfigError

_HIDDEN = ("_", ".")  # beginnings of the names of files that have no rows, such as _SUCCESS


class ParquetRows:
    """A data set for any loader: `len(rows)`, and `rows[i]`, a dict with the values of one row. The order of the rows
    is that of the files' names. A loader of Farandole trains each row once per epoch.

    Rows are read by row groups, of which each process keeps the `groups_kept` that it has used last. Large row groups
    and a shuffled order read the same group often: write small ones (Spark: the option parquet.block.size).

    Args:
        path: A file, or the folder that `data_frame.write.parquet(path)` has written; also an address for fsspec, such
            as s3://bucket/rows. All workers must be able to read it.
        columns: The columns to read; None: all.
        groups_kept: The number of row groups that stay in memory.

    Raises:
        ConfigError: pyarrow is not installed, or there are no Parquet files at the path.

    Examples:
        ```python
        rows = fd.spark.ParquetRows(f"{folder}/rows.parquet", columns=["x", "y"])
        loader = fd.elastic.DataLoader(rows, global_batch_size=4)
        ```
    """

    def __init__(self, path: str, columns: Sequence[str] | None = None, groups_kept: int = 8) -> None:
        import fsspec  # type: ignore[import-untyped]

        self._path, self._columns = path, None if columns is None else list(columns)
        self._groups_kept = max(1, groups_kept)
        file_system, root = fsspec.core.url_to_fs(path)
        found = (
            [root] if file_system.isfile(root) else sorted(file_system.find(root)) if file_system.exists(root) else []
        )
        files = [each for each in found if not each.rpartition("/")[2].startswith(_HIDDEN)]
        if not files:
            raise ConfigError(f"there are no Parquet files at {path}; write them with data_frame.write.parquet(path)")
        self._file_system = file_system
        self._groups: list[tuple[str, int]] = []  # file and number in the file, of the groups with rows
        rows = []
        for file in files:
            metadata = self._open(file).metadata
            for number in range(metadata.num_row_groups):
                if count := metadata.row_group(number).num_rows:
                    self._groups.append((file, number))
                    rows.append(count)
        self._ends = list(accumulate(rows))
        self._kept: OrderedDict[int, Any] = OrderedDict()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)} rows")
        group = bisect_right(self._ends, index)
        table = self._read(group)
        row = index - (self._ends[group - 1] if group else 0)
        return {name: table.column(name)[row].as_py() for name in table.column_names}

    def __getstate__(self) -> dict[str, Any]:
        """Leave the rows that were read behind: a loader process reads its own."""
        return {**self.__dict__, "_kept": OrderedDict()}

    def _read(self, group: int) -> Any:
        if group not in self._kept:
            file, number = self._groups[group]
            self._kept[group] = self._open(file).read_row_group(number, columns=self._columns)
            if len(self._kept) > self._groups_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return self._kept[group]

    def _open(self, file: str) -> Any:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise ConfigError("pyarrow is not installed: pip install 'farandole[spark]'") from None
        return ParquetFile(self._file_system.open(file))
