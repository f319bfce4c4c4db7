"""examples/reformer.py: its quick runs give what they say."""

import importlib.util
import json
import pathlib

import numpy as np
import pytest

PATH = pathlib.Path(__file__).parents[1] / "examples" / "reformer.py"
spec = importlib.util.spec_from_file_location("reformer_example", PATH)
reformer = importlib.util.module_from_spec(spec)
spec.loader.exec_module(reformer)


def test_rounds_follow_the_law(capsys):
    table = reformer.rounds_law(True)
    for row in table["rows"]:
        # 2 draws of 128 queries: a standard error of at most sqrt(1/4/256), the law's own through 8 rounds included
        assert np.max(np.abs(np.subtract(row["measured"], row["law"]))) < 5 * 0.04
    assert "77.44" in capsys.readouterr().out


def test_depth_costs_the_ordinary_stack_only(capsys):
    table = reformer.by_depth(True)
    assert table["reversible"][-1] <= 1.1 * table["reversible"][0]
    assert 7 < table["ordinary"][-1] / table["ordinary"][0] < 9
    assert table["buckets"][-1] == 8 * table["buckets"][0]
    # 16 layers of 1e-13 each (tests/support.py), which later layers pass on with slopes of order 1
    assert max(table["error"]["float64"]) < 1e-11 < max(table["error"]["float32"]) < 1e-3


def test_data_and_picture(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    data, picture = tmp_path / "hash.json", tmp_path / "hash.png"
    monkeypatch.setattr("sys.argv", ["reformer.py", "hash", "--quick", "--data", str(data), "--picture", str(picture)])
    reformer.main()
    rows = json.loads(data.read_text())["rows"]
    assert all(np.all(np.diff(row["recall"]) >= 0) for row in rows)
    assert picture.read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr("sys.argv", ["reformer.py", "rounds", "--picture", str(picture)])
    with pytest.raises(SystemExit):
        reformer.main()
