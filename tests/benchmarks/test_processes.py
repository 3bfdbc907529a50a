"""The benchmark of several processes: that it measures what it says."""

import pytest

from benchmarks import processes


@pytest.mark.long
def test_every_kind_of_photo_is_measured_with_each_number_of_processes(folder_of, monkeypatch):
    monkeypatch.setattr(processes, "PHOTOS", 2)
    rows = processes.measure(folder_of("vit"), "cpu", 0.2, counts=(1, 2), turns=1)
    assert [(row["photos"], row["processes"]) for row in rows] == [
        ("new", 1), ("new", 2), ("cached", 1), ("cached", 2)
    ]  # fmt: skip
    assert [row["over_one"] for row in rows if row["processes"] == 1] == [1.0, 1.0]
    assert all(row["rate"] > 0 and row["cpu_ms"] > 0 for row in rows)
    assert processes.table_of(rows).count("\n") == 5
