"""What an error says of where its item is, also that of a file's last item, whose state is in the next file."""

import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

import streamline as sl

READ = {
    "files": ("file 0.x", "file 1.x"),
    "tar": ("file 0.x, byte 512, sample 1", "file 0.x, byte 1024, sample 2"),
    "npy": ("file 0.x, row 1", "file 0.x, row 2"),
    "parquet": ("file 0.x, group 0, row 1", "file 0.x, group 0, row 2"),
}


def write(kind: str, path: Path) -> None:
    if kind == "tar":
        with tarfile.open(path, "w") as archive:
            for name in ("a.txt", "b.txt"):
                archive.addfile(tarfile.TarInfo(name), io.BytesIO())
    elif kind == "npy":
        with path.open("wb") as file:
            np.save(file, np.arange(2))
    else:
        parquet.write_table(pa.table({"x": [0, 1]}), path)


@pytest.mark.parametrize(("kind", "nth"), [(kind, nth) for kind in READ for nth in (0, 1)])
@pytest.mark.parametrize("files", [2, 3])
def test_an_error_names_the_file_of_its_item(
    kind: str, nth: int, files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(files):
        write(kind, tmp_path / f"{number}.x")
    seen = iter(range(9))

    def fails(item: Any) -> Any:
        return 1 // (next(seen) != nth) and item

    with pytest.raises(ZeroDivisionError) as caught:
        list(getattr(sl, f"read_{kind}")("*.x").map(fails))
    assert f", at {READ[kind][nth]}: " in caught.value.__notes__[-1]
