import math
import re
from typing import get_type_hints

import pytest

from evenstep.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    OutputConfig,
    ProcessConfig,
    TrainConfig,
    check_batch_size,
)
from evenstep.errors import ConfigError
from evenstep.flat import check_values, field_groups, from_flat, read_toml, to_flat, write_toml


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ProcessConfig(nproc=0), "nproc is 0; it must be above 0. Use --nproc"),
        (lambda: ProcessConfig(lanes=-1), "lanes is -1; it must be above 0. Use --lanes"),
        (lambda: ProcessConfig(gpu_memory_fraction=1.5), "at most 1, for example --gpu-memory-fraction 0.7"),
        (lambda: DataConfig(workers=-1), "workers is -1; it must be 0 or more, for example --workers 2"),
        (lambda: ModelConfig(model="nett"), "unknown model 'nett'. Did you mean 'net'?"),
        (lambda: OptimConfig(batch_size=0), "batch_size is 0; it must be above 0. Use --batch-size"),
        (lambda: OptimConfig(label_smoothing=1.0), "below 1, for example --label-smoothing 0.1"),
        (lambda: OptimConfig(ema_decay=1.0), "between 0 and 1, for example --ema-decay 0.999"),
        (
            lambda: ProcessConfig(hang_after=-1.0),
            "hang_after is -1.0; it must be at least 0 and below 31,536,000, ",
        ),
        (
            lambda: ProcessConfig(hang_after=-1.0),
            "for example --hang-after 60, or --hang-after 0 for no report.",
        ),
        (
            lambda: ProcessConfig(timeout_s=1e12),
            "timeout_s is 1000000000000.0; it must be at least 0 and below 31,",
        ),
        (lambda: ProcessConfig(stop_grace_s=1e12), "for example --stop-grace-s 30."),
        (
            lambda: OptimConfig(momentum=-1.0),
            "momentum is -1.0; it must be at least 0 and below 1, for example",
        ),
        (
            lambda: OptimConfig(momentum=1.0),
            "momentum is 1.0; it must be at least 0 and below 1, for example",
        ),
        (lambda: OptimConfig(weight_decay=-1.0), "weight_decay is -1.0; it must be at least 0, for example"),
        (
            lambda: OptimConfig(warmup_epochs=-3.0),
            "warmup_epochs is -3.0; it must be at least 0, for example",
        ),
        (lambda: OutputConfig(log_every=0), "log_every is 0; it must be above 0. Use --log-every"),
        (
            lambda: TrainConfig(process=ProcessConfig(nproc=4, lanes=2)),
            "nproc 4 is above lanes 2: each process needs a lane of its own. Use --nproc 2 or fewer",
        ),
        (
            lambda: TrainConfig(process=ProcessConfig(lanes=8), optim=OptimConfig(batch_size=4)),
            "batch_size 4 is smaller than lanes 8",
        ),
        (lambda: check_batch_size(1, 2), "Use --batch-size 2 or more, or --lanes 1 or fewer"),
    ],
)
def test_a_value_that_cannot_be_is_refused(make, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        make()


FLOATS = [
    key
    for key, group in field_groups().items()
    if "float" in str(get_type_hints(get_type_hints(TrainConfig)[group])[key])
]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("key", FLOATS)
def test_no_option_takes_what_is_no_finite_number(key, value):
    assert "lr" in FLOATS
    with pytest.raises(ConfigError, match=f"^{key} is {value}"):
        from_flat({key: value})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_sise": 3}, "run.toml: unknown key 'batch_sise'. Did you mean 'batch_size'?"),
        ({"batch_size": "3"}, "run.toml: batch_size is '3'; expected int."),
        ({"batch_size": True}, "batch_size is True; expected int."),
        ({"mode": "exat"}, "mode is 'exat'; expected exact or fast. Did you mean 'exact'?"),
        ({"nproc": "all"}, "nproc is 'all'; expected int or auto."),
    ],
)
def test_a_wrong_key_or_type_is_refused(values, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        from_flat(values, where="run.toml")


def test_whole_numbers_are_fine_where_floats_are_meant():
    checked = check_values({"lr": 1, "seed": 1}, "x")
    assert [type(value) for value in checked.values()] == [float, int]


def test_flat_and_back():
    config = from_flat({"batch_size": 64, "nproc": 2, "lr": 0.1, "resume": True})
    assert config.optim.batch_size == 64
    assert config.run.resume
    assert from_flat(to_flat(config)) == config
    assert list(to_flat(config)) == list(field_groups())


def test_names_are_unique_over_the_groups():
    fields = sum(len(vars(getattr(TrainConfig(), group))) for group in vars(TrainConfig()))
    assert len(field_groups()) == fields


def test_toml_and_back(tmp_path):
    config = from_flat({"data": 'a "quoted" path', "nproc": 2, "lr": 0.1, "ema_decay": None})
    path = tmp_path / "run.toml"
    path.write_text(write_toml(config))
    assert from_flat(read_toml(path)) == config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr = ", "is not valid TOML"),
        ("[optim]\nlr = 1", "[optim] is a table, but the keys of a run are flat. Remove the table's header"),
    ],
)
def test_a_broken_file_is_refused(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_toml(path)


def test_a_file_in_another_encoding_is_refused(tmp_path):
    path = tmp_path / "run.toml"
    path.write_bytes("# für\nlr = 1\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run.toml is not in UTF-8, .*at byte 3. Save it so"):
        read_toml(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the config file .*none\.toml: No such file"):
        read_toml(tmp_path / "none.toml")
