import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from evenstep import evaluate
from evenstep.errors import ConfigError, DataError
from evenstep.testing import run_ranks
from evenstep.world import World


def mean_of_x(model, batch):
    x = batch[0]
    return {"x": x.squeeze(1), "mean": x.mean(), "weighted": ((x * x).sum(), x.sum())}


def measured(world, n):
    torch.manual_seed(5)
    x = torch.rand(n, 1)
    return evaluate(nn.Identity(), TensorDataset(x), mean_of_x, chunk_size=4), x


@pytest.mark.parametrize("n", [1, 3, 21, 40])
def test_every_sample_counts_once_on_any_number_of_processes(n):
    found = [value for world_size in (1, 2, 4) for value in run_ranks(measured, world_size, n)]
    means, x = found[0]
    assert all(value[0] == means for value in found)  # the same bits, also with fewer samples than ranks
    assert means["samples"] == n
    assert means["x"] == pytest.approx(x.double().mean().item(), rel=1e-12)
    assert means["mean"] == pytest.approx(x.mean().item(), rel=1e-6)  # means of uneven chunks, weighted
    assert means["weighted"] == pytest.approx(((x * x).sum() / x.sum()).item(), rel=1e-6)


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.tensor([float(i)]),) for i in range(10)])


def test_an_iterable_data_set():
    values = run_ranks(lambda world: evaluate(nn.Identity(), Stream(), mean_of_x, chunk_size=4), 2)
    assert values[0] == values[1]
    assert values[0]["samples"] == 10
    assert values[0]["x"] == 4.5


def test_the_model_is_evaluated_in_evaluation_mode_and_left_as_it_was():
    model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Dropout(0.5))
    model[1].eval()  # a frozen layer must stay frozen
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seen = []

    def metrics(model, batch):
        seen.append(model.training)
        return {"out": model(batch[0]).squeeze(1)}

    evaluate(model, TensorDataset(torch.rand(9, 1)), metrics, world=World())
    assert seen == [False]
    assert (model.training, model[1].training, model[2].training) == (True, False, True)
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_metric_of_the_wrong_shape_is_an_error():
    with pytest.raises(ConfigError, match=r"metric 'x' has shape \(9, 1\) for 9 samples.*shape \(9,\)"):
        evaluate(nn.Identity(), TensorDataset(torch.rand(9, 1)), lambda model, batch: {"x": batch[0]})


def test_an_empty_stream_is_an_error():
    class Nothing(IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(DataError, match="has no samples"):
        evaluate(nn.Identity(), Nothing(), mean_of_x)
