"""report.rankN.json."""

import json
import os

import pytest

from megatron_memo.errors import ConfigError
from megatron_memo.report.writer import make_directory, report_path, write_report


def test_a_report_is_written_whole_under_its_ranks_name(tmp_path):
    make_directory(str(tmp_path / "a" / "b"))
    path = write_report(str(tmp_path / "a" / "b"), 3, {"steps": [1, 2]})
    assert path == report_path(str(tmp_path / "a" / "b"), 3) and path.name == "report.rank3.json"
    assert json.loads(path.read_text()) == {"steps": [1, 2]}
    assert os.listdir(path.parent) == [path.name]


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path):
    path = write_report(str(tmp_path), 0, {"good": 1})
    with pytest.raises(TypeError):
        write_report(str(tmp_path), 0, {"bad": object()})
    assert json.loads(path.read_text()) == {"good": 1}


def test_a_directory_that_cannot_be_made_is_known_before_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--memo-report .*file.*cannot be made"):
        make_directory(str(tmp_path / "file" / "below"))
