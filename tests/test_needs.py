"""Options that do something only beside another one: refused where they were meant, left out where not."""

import json
import re
from pathlib import Path

import pytest

from evenstep import cli, needs, options
from evenstep.config import TrainConfig
from evenstep.data import sources
from evenstep.errors import ConfigError
from evenstep.flat import field_groups, to_flat, write_toml
from evenstep.recipes import RECIPES
from evenstep.verify import command

# What is given, which option does nothing, and beside what.
REFUSED = [
    ("--flip random", "--flip random", "without --augment"),
    ("--no-augment --crop-padding 4", "--crop-padding 4", "without --augment"),
    ("--crop-border reflect", "--crop-border reflect", "without --augment"),
    (
        "--augment --crop-padding 0 --crop-border reflect",
        "--crop-border reflect",
        "with --crop-padding 0",
    ),
    ("--data digits --data-dir x", "--data-dir x", "with --data digits"),
    ("--data a:b --data-dir x", "--data-dir x", "with --data a:b"),
    ("--workers 2", "--workers 2", "with --data auto, the default"),
    ("--batchnorm global", "--batchnorm global", "with --model net, the default"),
    ("--lr-rest 1", "--lr-rest 1.0", "with --optimizer sgd, the default"),
    ("--optimizer adam --momentum 0.9", "--momentum 0.9", "with --optimizer adam"),
    ("--optimizer adamw --nesterov", "--nesterov", "with --optimizer adamw"),
    ("--optimizer muon --no-nesterov", "--no-nesterov", "with --optimizer muon"),
    ("--nesterov --momentum 0", "--nesterov", "with --momentum 0.0"),
    ("--lr-schedule cosine --lr-decay 0.3", "--lr-decay 0.3", "with --lr-schedule cosine"),
    ("--recipe mission --lr-decay-epochs 2", "--lr-decay-epochs 2", "constant (recipe mission)"),
    ("--lr-schedule onecycle --warmup-epochs 1", "--warmup-epochs 1.0", "with --lr-schedule onecycle"),
    ("--loss a:b --label-smoothing 0.1", "--label-smoothing 0.1", "with --loss a:b"),
    ("--device cpu --gpus 0", "--gpus 0", "with --device cpu"),
    ("--rdzv-endpoint a:1", "--rdzv-endpoint a:1", "with --nnodes 1, the default"),
    ("--rdzv-id a", "--rdzv-id a", "without --rdzv-endpoint"),
    ("--hang-after 0 --on-hang abort", "--on-hang abort", "with --hang-after 0.0"),
]
UNDER_A_LAUNCHER = [
    ("--nproc 3", "--nproc 3"),
    ("--nnodes 2", "--nnodes 2"),
    ("--nnodes 2 --rdzv-endpoint a:1", "--nnodes 2"),
    ("--nnodes 1 --rdzv-endpoint a:1", "--rdzv-endpoint a:1"),
    ("--nnodes 1 --rdzv-endpoint a:1 --rdzv-id x", "--rdzv-endpoint a:1"),
    ("--max-restarts 0", "--max-restarts 0"),
    ("--nproc-min 1", "--nproc-min 1"),
    ("--stop-grace-s 9", "--stop-grace-s 9.0"),
]


@pytest.fixture(autouse=True)
def _in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


def torchrun(monkeypatch):
    values = {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "a"}
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize(("argv", "option", "beside"), REFUSED)
def test_an_option_that_does_nothing_is_refused(argv, option, beside):
    with pytest.raises(ConfigError) as error:
        options.parse(argv.split())
    assert str(error.value).startswith(f"{option} does nothing ")
    assert f" {beside}: " in str(error.value)
    assert str(error.value).endswith(f", or leave out {option.split()[0]}.")


@pytest.mark.parametrize(("argv", "option"), UNDER_A_LAUNCHER)
def test_what_the_launcher_has_decided_is_refused(argv, option, monkeypatch):
    torchrun(monkeypatch)
    with pytest.raises(ConfigError, match=f"^{re.escape(option)} does nothing under torchrun: it "):
        options.parse(argv.split())


def test_every_row_of_the_table_is_tested(monkeypatch):
    rows = [needs.Need(**{**vars(need), "options": (key,)}) for need in needs.NEEDS for key in need.options]
    assert {need.on for need in rows} | {need.options[0] for need in rows} <= {*field_groups(), "launcher"}
    calls = []
    monkeypatch.setattr(options, "without_effect", lambda *a, **k: (calls.append((a, k)), ({}, ()))[1])
    for argv, *_ in REFUSED:
        options.parse(argv.split())
    torchrun(monkeypatch)
    for argv, _ in UNDER_A_LAUNCHER:
        options.parse(argv.split())

    def is_refused(row):
        for args, more in calls:
            try:
                needs.without_effect(*args, **more, needs=(row,))
            except ConfigError:
                return True
        return False

    assert [row for row in rows if not is_refused(row)] == []


@pytest.mark.parametrize("recipe", ["", *RECIPES])
def test_defaults_and_recipes_do_what_they_say(recipe):
    assert options.parse(["--recipe", recipe] if recipe else []).notes == ()


@pytest.mark.parametrize(
    "argv",
    [
        "--flip none --crop-padding 0 --crop-border zeros",
        "--no-nesterov --optimizer adam --workers 0 --batchnorm lane --on-hang wait --hang-after 0",
        "--nesterov --optimizer muon",
        "--lr-schedule onecycle --warmup-epochs 0 --loss a:b --label-smoothing 0",
        "--data a:b --workers 2",
        "--data digits --cache-dir x",
        "--data-dir x --cache-dir y",
        "--smoke-test --data-dir x",
        "--nnodes 1 --rdzv-endpoint a:1 --rdzv-id x",
        "--gpus 0",
    ],
)
def test_what_asks_for_nothing_or_may_do_something_is_taken(argv):
    assert not [note for note in options.parse(argv.split()).notes if "nothing" in note]


def test_the_number_of_processes_that_the_launcher_has_started_may_be_said(monkeypatch):
    torchrun(monkeypatch)
    assert options.parse(["--nproc", "2", "--nnodes", "1"]).config.process.nproc == 2


@pytest.mark.parametrize(
    ("argv", "left_out", "note"),
    [
        (
            "--recipe fast --no-augment",
            {"crop_padding": 4, "crop_border": "zeros", "flip": "random", "image_sizes": ...},
            "left out crop_padding 2, crop_border reflect, flip alternate of the recipe fast, for they do "
            "nothing without --augment",
        ),
        (
            "--recipe fast --optimizer adam",
            {"lr_rest": None, "momentum": 0.9, "lr": 0.17},
            "left out lr_rest 53.0, momentum 0.6 of the recipe fast, for they do nothing with "
            "--optimizer adam",
        ),
        (
            "--recipe fast --loss a:b",
            {"label_smoothing": 0.0},
            "left out label_smoothing 0.2 of the recipe fast, for it does nothing with --loss a:b",
        ),
        (
            "--config run.toml --lr-schedule cosine",
            {"lr_decay": 0.3, "flip": "alternate"},
            "left out lr_decay 0.5 of the file run.toml, for it does nothing with --lr-schedule cosine",
        ),
    ],
)
def test_what_loses_its_meaning_through_a_flag_is_left_out(argv, left_out, note):
    Path("run.toml").write_text('lr_decay = 0.5\naugment = true\nflip = "alternate"\n')
    asked = options.parse(argv.split())
    values = to_flat(asked.config)
    for key, value in left_out.items():
        if value is ...:
            assert values[key] == RECIPES["fast"][key]
        else:
            assert values[key] == value
    assert asked.notes == (note,)
    gone = {key for key in RECIPES["fast"] if f" {key} " in note}
    assert {asked.sources[key] for key in gone} <= {"default"}


@pytest.mark.parametrize("recipe", ["", 'recipe = "mission"\n'])
def test_a_file_and_a_recipe_count_as_given(recipe):
    Path("run.toml").write_text(recipe + 'flip = "alternate"\n')
    message = "flip alternate (file run.toml) does nothing without --augment: "
    with pytest.raises(ConfigError, match=re.escape(message)):
        options.parse(["--config", "run.toml"])
    assert options.parse(["--config", "run.toml", "--augment"]).config.data.flip == "alternate"
    Path("run.toml").write_text('optimizer = "adam"\n')
    with pytest.raises(
        ConfigError, match=re.escape("does nothing with --optimizer adam (file run.toml): it")
    ):
        options.parse(["--config", "run.toml", "--momentum", "0.5"])


def test_a_recipe_that_contradicts_itself_is_refused(monkeypatch):
    monkeypatch.setitem(RECIPES, "odd", {"flip": "alternate"})
    with pytest.raises(ConfigError, match=re.escape("flip alternate (recipe odd) does nothing without")):
        options.parse(["--recipe", "odd"])


@pytest.mark.parametrize("argv", ["", "--recipe fast", "--recipe fast --no-augment", "--recipe mission"])
def test_a_runs_own_config_begins_another_run_and_is_resumed(argv, monkeypatch):
    first = options.parse(argv.split()).config
    Path("run").mkdir()
    Path("run/config.toml").write_text(write_toml(first))
    asked = options.parse(["--config", "run/config.toml"])
    assert (asked.config, asked.notes) == (first, ())
    monkeypatch.setattr(options, "checkpoints", lambda run_dir: [run_dir])
    asked = options.parse(["--resume", "--run-dir", "run"])
    assert asked.notes == ()
    assert asked.config.data == first.data
    assert asked.config.optim == first.optim


def test_a_flag_that_does_nothing_beside_a_file_of_all_options_is_refused():
    Path("all.toml").write_text(write_toml(options.parse([]).config))
    with pytest.raises(
        ConfigError, match=re.escape("--flip alternate does nothing without --augment (file all.toml): it")
    ):
        options.parse(["--config", "all.toml", "--flip", "alternate"])
    with pytest.raises(
        ConfigError, match=re.escape("--rdzv-endpoint a:1 does nothing with --nnodes 1 (file")
    ):
        options.parse(["--config", "all.toml", "--rdzv-endpoint", "a:1"])
    options.parse(["--config", "all.toml", "--rdzv-endpoint", "a:1", "--nnodes", "1"])
    text = Path("all.toml").read_text().replace('flip = "random"', 'flip = "alternate"')
    Path("all.toml").write_text(text)
    with pytest.raises(ConfigError, match=re.escape("flip alternate (file all.toml) does nothing")):
        options.parse(["--config", "all.toml"])


LINES = write_toml(TrainConfig()).splitlines()


@pytest.mark.parametrize("line", LINES)
def test_a_file_of_all_options_may_lack_any_of_them(line):
    Path("some.toml").write_text("\n".join(other for other in LINES if other != line))
    asked = options.parse(["--config", "some.toml"])
    assert (asked.config, asked.notes) == (TrainConfig(), ())


def test_a_file_may_say_defaults_that_do_nothing_and_is_still_stronger_than_a_recipe():
    Path("run.toml").write_text('nnodes = 1\nrdzv_endpoint = "a:1"\nlr_decay = 0.3\nlr_schedule = "cosine"\n')
    assert options.parse(["--config", "run.toml"]).config.process.rdzv_endpoint == "a:1"
    Path("run.toml").write_text("augment = false\n")
    asked = options.parse(["--recipe", "fast", "--config", "run.toml"])
    assert asked.config.data.flip == "random"
    assert asked.notes[0].endswith("nothing without --augment (file run.toml)")


def test_the_saved_config_of_data_chosen_by_itself_begins_another_run(monkeypatch):
    found = {"auto": "digits"}
    monkeypatch.setattr(sources, "prepare", lambda spec, **_: sources.Prepared(found.get(spec, spec), spec))
    config = cli.prepared(options.parse(["--data-dir", "x"]).config)
    Path("run.toml").write_text(write_toml(config))
    assert options.parse(["--config", "run.toml"]).config == config
    assert (config.data.data, config.data.data_dir) == ("digits", "data")
    found["auto"] = "cifar10"
    assert cli.prepared(options.parse(["--data-dir", "x"]).config).data.data_dir == "x"


@pytest.fixture
def old_run():
    """A run of a time when nobody looked."""
    checkpoint = Path("run/checkpoints/step-00000010")
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text(json.dumps({"step": 10}))
    Path("run/config.toml").write_text('flip = "alternate"\ndata = "digits"\ndata_dir = "x"\nlanes = 2\n')
    return checkpoint


def test_a_run_that_has_such_options_is_resumed_without_them(old_run):
    asked = options.parse(["--resume", "--run-dir", "run"])
    assert (asked.config.data.flip, asked.config.data.data_dir) == ("random", "data")
    assert asked.notes[0].endswith("of the run directory, for it does nothing without --augment")
    with pytest.raises(ConfigError, match=re.escape("--momentum 0.5 does nothing with --optimizer adam")):
        options.parse(["--resume", "--run-dir", "run", "--momentum", "0.5", "--optimizer", "adam"])
    with pytest.raises(ConfigError, match=re.escape("--workers 2 does nothing with --data digits (run dir")):
        options.parse(["--resume", "--run-dir", "run", "--workers", "2"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ("--workers 2", "--workers 2 does nothing with --data digits (run directory)"),
        ("--data-dir x", "--data-dir x does nothing with --data digits (run directory)"),
        ("--device cpu --gpus 0", "--gpus 0 does nothing with --device cpu"),
    ],
)
def test_evaluation_refuses_them_too(argv, message, old_run):
    options.eval_config(options.parse_eval(["--run-dir", "run"]))
    with pytest.raises(ConfigError, match=re.escape(message)):
        options.eval_config(options.parse_eval(["--run-dir", "run", *argv.split()]))


def test_the_command_ends_with_2(capsys):
    assert cli.main(["train", "--data", "digits", "--flip", "alternate"]) == 2
    assert "error: --flip alternate does nothing without --augment: " in capsys.readouterr().err
    assert not Path("runs").exists()


@pytest.mark.parametrize("flag", ["batch-size", "model", "tta", "lr", "data"])
def test_verify_refuses_what_a_loop_of_ones_own_does_not_look_at(flag):
    with pytest.raises(ConfigError, match=f"^--{flag} does nothing with --main: a loop of your own has"):
        command.parse(["--main", "a:b", f"--{flag}", "8"])


def test_verify_takes_what_starts_a_loop_of_ones_own():
    words = [
        "--main",
        "a:b",
        "--nproc",
        "1,2",
        "--seed",
        "3",
        "--device",
        "cpu",
        "--timeout-s",
        "9",
        "--quiet",
    ]
    assert command.parse(words)[1].run.seed == 3
