"""Real ranks that may fail: the notebook goes on, and says why."""

from servelab.ranks import trial


def answer():
    return 42


def fail():
    raise ValueError("no such thing")


def test_a_run_that_works(monkeypatch):
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    assert list(trial.on_real_ranks(2, answer, backend="gloo").values) == [42, 42]


def test_a_run_that_fails_is_reported(monkeypatch, capsys):
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    assert trial.on_real_ranks(2, fail, backend="gloo") is None
    assert "no such thing" in capsys.readouterr().out


def test_nothing_is_started_while_nbgrader_runs(monkeypatch, capsys):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    assert trial.on_real_ranks(2, fail) is None
    assert "not started" in capsys.readouterr().out
