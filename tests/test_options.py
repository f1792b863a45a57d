import datetime
import json
import os
import re

import pytest

from evenstep import options, rundir
from evenstep.errors import CheckpointError, ConfigError, MachineError
from evenstep.flat import field_groups, from_flat, to_flat
from evenstep.launcher import LaunchOptions

NOW = datetime.datetime(2024, 5, 6, 7, 8, 9)


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_JOB_ID", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.delenv(name, raising=False)


def make_run(run_dir, *, steps=(10,), config=None):
    for step in steps:
        checkpoint = run_dir / "checkpoints" / f"step-{step:08}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text(json.dumps({"step": step}))
    if config is not None:
        (run_dir / "config.toml").write_text(config)
    return run_dir


def torchrun(monkeypatch, *, rank=0, world_size=2, restart=0, **more):
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    for name, value in {**values, "TORCHELASTIC_RESTART_COUNT": restart, **more}.items():
        monkeypatch.setenv(name, str(value))


def test_flags_reach_the_config_and_are_named_as_the_source():
    asked = options.parse(["--batch-size", "64", "--nproc=2", "--resume", "--no-resume", "--lr_decay", "0.5"])
    values = to_flat(asked.config)
    assert (values["batch_size"], values["nproc"], values["resume"], values["lr_decay"]) == (
        64,
        2,
        False,
        0.5,
    )
    flags = {key for key, source in asked.sources.items() if source == "flag"}
    assert flags == {"batch_size", "nproc", "resume", "lr_decay"}
    assert set(asked.sources) == set(field_groups())


def test_without_flags_everything_is_the_default():
    asked = options.parse([])
    assert asked.config == from_flat({})
    assert set(asked.sources.values()) == {"default"}


def test_a_flag_goes_before_the_file_and_the_file_before_the_default(tmp_path):
    (tmp_path / "run.toml").write_text("batch_size = 256\nepochs = 3\nlr = 1\n")
    asked = options.parse(["--epochs", "4", "--config", "run.toml"])
    assert (asked.config.optim.batch_size, asked.config.optim.epochs, asked.config.optim.lr) == (256, 4, 1.0)
    assert asked.sources["batch_size"] == "file run.toml"
    assert asked.sources["epochs"] == "flag"
    assert asked.sources["seed"] == "default"


def test_a_flag_may_put_right_what_a_file_alone_has_wrong(tmp_path):
    (tmp_path / "run.toml").write_text("lanes = 256\n")
    asked = options.parse(["--config", "run.toml", "--batch-size", "512"])
    assert (asked.config.process.lanes, asked.config.optim.batch_size) == (256, 512)
    with pytest.raises(ConfigError, match="batch_size 128 is smaller than lanes 256"):
        options.parse(["--config", "run.toml"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-sise", "3"], "unknown flag --batch-sise. Did you mean '--batch-size'? A mistyped flag"),
        (["--batch_sise=3"], "unknown flag --batch_sise. Did you mean '--batch-size'?"),
        (["--batch"], "unknown flag --batch."),
        (["cifar10"], "evenstep train: 'cifar10' belongs to no flag."),
        (["--lr"], "--lr needs a value"),
        (["--run-dir", "--resume"], "--run-dir needs a value"),
        (["--quiet=yes"], "--quiet takes no value, and got 'yes'. Use --quiet or --no-quiet."),
        (["--batch-size", "0"], "batch_size is 0; it must be above 0."),
        (["--nproc", "4", "--lanes", "2"], "nproc 4 is above lanes 2"),
        (["--config", "none.toml"], "cannot read the config file none.toml"),
    ],
)
def test_a_wrong_command_line_is_a_config_error(argv, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        options.parse(argv)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("batch_sise = 3", "run.toml: unknown key 'batch_sise'. Did you mean 'batch_size'?"),
        ("lr = -1", "run.toml: lr is -1.0; it must be above 0."),
    ],
)
def test_a_wrong_file_is_named(tmp_path, text, message):
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)):
        options.parse(["--config", "run.toml"])


def test_a_wrong_choice_lists_the_choices(capsys):
    with pytest.raises(SystemExit) as stop:
        options.parse(["--mode", "exat"])
    assert stop.value.code == 2
    assert re.search(r"'exat'.*'exact'.*'fast'", capsys.readouterr().err.replace("\n", " "))


def test_help_lists_every_flag_in_its_group(capsys):
    with pytest.raises(SystemExit) as stop:
        options.parse(["--help", "--config", "none.toml"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    missing = [key for key in ["config", *field_groups()] if f"--{key.replace('_', '-')}" not in text]
    assert not missing
    assert "optim options" in text


def test_resume_takes_the_run_from_its_directory_and_the_moment_from_the_call(tmp_path):
    run = make_run(
        tmp_path / "r",
        config='lanes = 4\nthreads = 1\nepochs = 7\nlr = 0.2\ndata_dir = "d"\n'
        'nproc = 3\ndevice = "cuda"\nsteps = 5\nquiet = true\njson = true\nsmoke_test = true\n',
    )
    asked = options.parse(["--resume", "--run-dir", str(run), "--lr", "0.1"])
    values, sources = to_flat(asked.config), asked.sources
    assert (values["lanes"], values["threads"], values["epochs"], values["data_dir"]) == (4, 1, 7, "d")
    assert (values["nproc"], values["device"], values["steps"], values["lr"]) == ("auto", "auto", None, 0.1)
    assert [values[key] for key in ("quiet", "json", "smoke_test")] == [False] * 3
    assert (sources["lanes"], sources["lr"], sources["nproc"]) == ("run directory", "flag", "default")


def test_a_file_goes_before_the_run_directory(tmp_path):
    run = make_run(tmp_path / "r", config="epochs = 7\nlr = 0.2\n")
    (tmp_path / "run.toml").write_text("epochs = 9\nresume = true\n")
    asked = options.parse(["--config", "run.toml", "--run-dir", str(run)])
    assert (asked.config.optim.epochs, asked.config.optim.lr) == (9, 0.2)
    assert asked.sources["resume"] == "file run.toml"


def test_resume_alone_takes_the_newest_run_with_a_checkpoint(tmp_path):
    for number, name in enumerate(["a", "b"]):
        make_run(tmp_path / "runs" / name, config="epochs = 3\n")
        os.utime(tmp_path / f"runs/{name}/checkpoints/step-00000010/manifest.json", ns=(0, 10 - number))
    (tmp_path / "runs" / "c" / "checkpoints").mkdir(parents=True)
    asked = options.parse(["--resume"])
    assert asked.config.run.run_dir == "runs/a"
    assert asked.sources["run_dir"] == "newest run"
    assert asked.notes == ("resuming runs/a: the newest run in runs/ that has a checkpoint",)


def test_nothing_to_resume(tmp_path):
    with pytest.raises(CheckpointError, match=r"no run in runs/ .* has a checkpoint.*--run-dir DIR"):
        options.parse(["--resume"])
    with pytest.raises(CheckpointError, match=r"directory empty has no checkpoint to go on from.*--resume"):
        options.parse(["--resume", "--run-dir", "empty"])


def test_an_unfinished_checkpoint_does_not_count(tmp_path):
    run = make_run(tmp_path / "r", steps=(5, 100, 20))
    (run / "checkpoints" / "step-00000200").mkdir()
    (run / "checkpoints" / ".tmp-step-00000300").mkdir()
    assert [path.name for path in rundir.checkpoints(run)] == [f"step-{n:08}" for n in (5, 20, 100)]


def test_smoke_test_shortens_what_was_not_asked_for():
    asked = options.parse(["--smoke-test", "--epochs", "2"])
    values = to_flat(asked.config)
    assert (values["steps"], values["epochs"], values["log_every"], values["data"]) == (4, 2, 1, "digits")
    assert (asked.sources["steps"], asked.sources["epochs"]) == ("smoke test", "flag")
    assert asked.notes == ("smoke test: steps 4, log_every 1, data digits",)
    assert options.parse(["--smoke-test", "--data", "x.npz"]).config.data.data == "x.npz"


def test_the_default_run_directory_is_new_each_time(tmp_path):
    config = options.parse(["--model", "my.models:make_net"]).config
    names = [rundir.open_run_dir(config, now=NOW).run.run_dir for _ in range(3)]
    assert names == [f"runs/20240506-070809-make_net{end}" for end in ("", "-2", "-3")]
    assert all((tmp_path / name).is_dir() for name in names)


def test_a_run_is_not_overwritten_by_accident(tmp_path):
    run = make_run(tmp_path / "r", steps=(10, 1250))
    config = from_flat({"run_dir": str(run)})
    message = r"already has a checkpoint of step 1,250.*Add --resume.*or choose another --run-dir"
    with pytest.raises(ConfigError, match=message):
        rundir.open_run_dir(config)
    resumed = rundir.open_run_dir(from_flat({"resume": True}, config))
    assert resumed.run.resume


def test_a_run_directory_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot write the run directory file/run.*--run-dir DIR"):
        rundir.open_run_dir(from_flat({"run_dir": "file/run"}))
    (tmp_path / "runs").write_text("")
    with pytest.raises(MachineError, match=r"cannot write the run directory runs/.*--run-dir DIR"):
        rundir.open_run_dir(from_flat({}))


def test_a_worker_restarted_by_torchrun_goes_on(tmp_path, monkeypatch):
    run = make_run(tmp_path / "r")
    torchrun(monkeypatch, restart=1)
    assert rundir.open_run_dir(from_flat({"run_dir": str(run)})).run.resume


def test_ranks_of_a_slurm_job_share_a_run_directory(monkeypatch):
    torchrun(monkeypatch, rank=1, SLURM_JOB_ID="77")
    assert rundir.open_run_dir(from_flat({})).run.run_dir == "runs/slurm-77-net"


def test_ranks_without_a_common_name_need_a_run_directory(monkeypatch):
    torchrun(monkeypatch, rank=1)
    with pytest.raises(ConfigError, match=r"2 processes were started .* Give the same --run-dir DIR to all"):
        rundir.open_run_dir(from_flat({}))


def test_ranks_of_torchrun_take_rank_zeros_directory_and_keep_it_after_a_restart(monkeypatch):
    import torch.distributed as dist

    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": store.port}
    chosen = []
    for rank, restart, later in ((0, 0, 0), (1, 0, 1), (0, 1, 60), (1, 1, 61)):
        torchrun(monkeypatch, rank=rank, restart=restart, **agent)
        now = NOW + datetime.timedelta(seconds=later)
        chosen.append(rundir.open_run_dir(from_flat({}), now=now).run.run_dir)
    assert chosen == ["runs/20240506-070809-net"] * 4


@pytest.mark.parametrize("argv", [[], ["--run-dir", "a", "--checkpoint", "b"]])
def test_eval_needs_one_place(argv):
    with pytest.raises(ConfigError, match="needs one of --run-dir and --checkpoint"):
        options.parse_eval(argv)


def test_eval_takes_the_model_from_the_run_and_the_processes_from_the_call(tmp_path):
    run = make_run(
        tmp_path / "r", steps=(3, 12), config='model = "resnet9"\ndata = "digits"\nlanes = 2\nthreads = 1\n'
    )
    config, checkpoint = options.eval_config(options.parse_eval(["--run-dir", str(run), "--nproc", "4"]))
    values = to_flat(config)
    assert checkpoint == run / "checkpoints" / "step-00000012"
    assert (values["model"], values["data"], values["nproc"]) == ("resnet9", "digits", 4)
    assert (values["lanes"], values["threads"], values["run_dir"]) == (None, 1, None)

    asked = options.parse_eval(
        ["--checkpoint", str(checkpoint.with_name("step-00000003")), "--data", "x.npz"]
    )
    config, checkpoint = options.eval_config(asked)
    assert (config.data.data, config.model.model, checkpoint.name) == ("x.npz", "resnet9", "step-00000003")


def test_eval_without_a_checkpoint_or_a_config(tmp_path):
    with pytest.raises(
        CheckpointError, match=r"directory none has no checkpoint to evaluate.*--run-dir none"
    ):
        options.eval_config(options.parse_eval(["--run-dir", "none"]))
    with pytest.raises(CheckpointError, match=r"none is not a checkpoint: it has no manifest\.json"):
        options.eval_config(options.parse_eval(["--checkpoint", "none"]))
    run = make_run(tmp_path / "r")
    with pytest.raises(CheckpointError, match=r"config\.toml is missing.*evenstep\.evaluate"):
        options.eval_config(options.parse_eval(["--run-dir", str(run)]))


def test_launch_options_are_arguments_of_launch():
    config = from_flat({"nproc": 2, "lanes": 4, "seed": 7, "hang_after": 5.0})
    found = options.launch_options(config, leave_out=("nproc", "run_dir"))
    assert (found["lanes"], found["seed"], found["hang_after"]) == (4, 7, 5.0)
    whole = options.launch_options(config)
    assert whole.keys() - found.keys() == {"nproc", "run_dir"}
    assert LaunchOptions.of(whole).nproc == 2  # it refuses what launch does not know
