import pytest

from evenstep import errors


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.EvenstepError, 1),
        (errors.ConfigError, 2),
        (errors.MachineError, 3),
        (errors.DataError, 3),
        (errors.CheckpointError, 4),
        (errors.DivergedError, 5),
        (errors.StoppedError, 75),
    ],
)
def test_exit_codes_are_the_documented_ones(kind, code):
    assert issubclass(kind, errors.EvenstepError)
    assert kind("x").exit_code == code


def test_a_worker_error_carries_the_workers_code_and_rank():
    error = errors.WorkerError("rank 3 died", exit_code=137, rank=3)
    assert (error.exit_code, error.rank, str(error)) == (137, 3, "rank 3 died")
    assert (errors.WorkerError("x").exit_code, errors.WorkerError("x").rank) == (1, None)


def test_did_you_mean():
    assert errors.did_you_mean("batch_sise", ["batch_size", "epochs"]) == " Did you mean 'batch_size'?"
    assert errors.did_you_mean("zzz", ["batch_size", "epochs"]) == ""
