import json
import os

import pytest

from evenstep.files import json_text, write_whole


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch, on_disk):
    path = tmp_path / "values.txt"
    write_whole(path, "old", on_disk=on_disk)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync" if on_disk else "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new", on_disk=on_disk)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["values.txt"]


def test_what_is_to_be_on_the_disk_is_flushed_before_it_takes_the_name(tmp_path, monkeypatch):
    path, seen = tmp_path / "values.txt", []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(path.exists()))
    write_whole(path, "new", on_disk=True)
    assert seen == [False, True]  # the file, then the directory with its name
    write_whole(path, "newer")
    assert len(seen) == 2
    assert path.read_text() == "newer"


def test_json_has_no_numbers_that_it_does_not_know():
    values = {"a": float("nan"), "b": [1.5, float("-inf")], "c": {"d": (float("inf"), 1, "NaN", None, True)}}
    text = json_text(values)
    assert json.loads(text) == {"a": None, "b": [1.5, None], "c": {"d": [None, 1, "NaN", None, True]}}
    assert "NaN" not in text.replace('"NaN"', "")
    assert json_text({"a": 1}, indent=1) == '{\n "a": 1\n}'
