import logging

import pytest
from loguru import logger

from evenstep import log
from evenstep.testing import run_ranks


@pytest.fixture
def handlers():
    """The number of loguru's handlers; must be as before at the end."""
    count = len(logger._core.handlers)
    yield lambda: len(logger._core.handlers)
    assert len(logger._core.handlers) == count


def test_writes_whole_lines_in_utf8(tmp_path, handlers):
    with log.setup(tmp_path, 3):
        logger.info("Größe {}", 1)
        logger.debug("below the level")
    lines = log.path_of(tmp_path, 3).read_bytes().decode("utf8").splitlines()
    assert len(lines) == 1
    assert lines[0].endswith("| Größe 1")
    assert "| INFO     | rank 3 | test_log:" in lines[0]


def test_appends_after_a_restart(tmp_path, handlers):
    for text in ("one", "two"):
        with log.setup(tmp_path, 0, level="DEBUG"):
            logger.debug(text)
    assert [line[-3:] for line in log.path_of(tmp_path, 0).read_text().splitlines()] == ["one", "two"]


def test_warnings_go_to_stderr_with_the_rank(tmp_path, handlers, capsys):
    with log.setup(None, 1):
        logger.info("not shown")
        logger.warning("low on disk")
        logger.bind(file_only=True).error("in the report anyway")
    shown = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[rank 1]")]
    assert shown == ["[rank 1] WARNING: low on disk"]


def test_console_can_be_off(handlers):
    before = handlers()
    with log.setup(None, 1, console=False):
        assert handlers() == before


@pytest.mark.parametrize("diagnose", [False, True])
def test_values_are_in_tracebacks_only_if_asked_for(diagnose, tmp_path, handlers):
    password = "hunter2"
    with log.setup(tmp_path, 0, diagnose=diagnose, console=False):
        try:
            int(password)
        except ValueError:
            logger.bind(file_only=True).exception("failed")
    text = log.path_of(tmp_path, 0).read_text()
    assert "Traceback" in text
    assert ("└ 'hunter2'" in text) == diagnose


def test_rotates_by_size(tmp_path, handlers):
    with log.setup(tmp_path, 0, rotation="200 B", console=False):
        for i in range(6):
            logger.info("line {} {}", i, "x" * 40)
    assert len(list((tmp_path / "logs").glob("rank0*.log"))) > 1


def test_handlers_go_away_on_errors_and_if_the_user_removed_them(tmp_path):
    count = len(logger._core.handlers)
    with pytest.raises(KeyError), log.setup(tmp_path, 0):
        raise KeyError
    assert len(logger._core.handlers) == count
    with log.setup(tmp_path, 0, console=False):
        logger.remove(max(logger._core.handlers))
    assert len(logger._core.handlers) == count


def test_each_rank_has_its_file_and_the_console_stays_quiet(tmp_path):
    def main(world):
        from loguru import logger

        logger.info("hello from {}", world.rank)

    run_ranks(main, 2, run_dir=str(tmp_path))
    for rank in (0, 1):
        text = log.path_of(tmp_path, rank).read_text()
        assert f"hello from {rank}" in text
        assert f"rank {rank} of 2 runs, pid " in text
        assert f"hello from {1 - rank}" not in text
    assert (tmp_path / "logs" / "launcher.log").exists()


def test_the_launchers_log_takes_what_torchs_agent_says(tmp_path, capsys):
    agent = logging.getLogger("torch.distributed.elastic.agent.test")
    before = logging.getLogger("torch.distributed.elastic").propagate
    with log.launcher(tmp_path) as own:
        agent.warning("closing a process")
        own.error("the report")
    assert logging.getLogger("torch.distributed.elastic").propagate == before
    lines = (tmp_path / "logs" / "launcher.log").read_text().splitlines()
    assert [line.rpartition(" | ")[2] for line in lines] == ["closing a process", "the report"]
    assert capsys.readouterr().err == ""


def test_the_launchers_log_without_a_run_directory_keeps_stderr_clean(capsys):
    with log.launcher(None) as own:
        own.error("nobody reads this")
    assert capsys.readouterr().err == ""


def test_a_moment_goes_to_the_log_of_the_launcher_or_of_the_worker(tmp_path):
    with log.setup(tmp_path, 0, level="DEBUG", console=False):
        log.moment("in a worker")
        with log.launcher(tmp_path) as launching:
            launching.setLevel(logging.DEBUG)
            log.moment("in the launcher", launching=True)
            launching.setLevel(logging.NOTSET)
    worker = (tmp_path / "logs" / "rank0.log").read_text()
    launcher = (tmp_path / "logs" / "launcher.log").read_text()
    assert "moment: in a worker (" in worker
    assert "ms of CPU time" in worker
    assert "in the launcher" not in worker
    assert launcher.rstrip().endswith("| evenstep.launcher | moment: in the launcher")
