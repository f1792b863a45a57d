"""TensorFlow is kept to its share of a GPU: tested with a stand-in, since the hook must not import it."""

import importlib.machinery
import importlib.util
import sys
import textwrap

import pytest

from evenstep import guests

MIB = 2**20
FAKE = """
    import types

    class Options(types.SimpleNamespace):
        pass

    def ConfigProto(fraction=0.0, virtual=()):
        experimental = types.SimpleNamespace(virtual_devices=list(virtual))
        options = types.SimpleNamespace(
            per_process_gpu_memory_fraction=fraction, allow_growth=False, experimental=experimental
        )
        return types.SimpleNamespace(gpu_options=options)

    class Session:
        def __init__(self, target="", graph=None, config=None):
            self.config = config

    class InteractiveSession:
        def __init__(self, target="", graph=None, config=None):
            self.config = config
"""
SECOND = """
    limits, grown = {}, []

    def LogicalDeviceConfiguration(memory_limit):
        return memory_limit

    def set_memory_growth(device, enable):
        assert device not in limits
        grown.append(device)

    config = types.SimpleNamespace(
        list_physical_devices=lambda kind: ["gpu 0", "gpu 1", "gpu 2"],
        LogicalDeviceConfiguration=LogicalDeviceConfiguration,
        set_logical_device_configuration=limits.__setitem__,
        get_logical_device_configuration=limits.get,
        experimental=types.SimpleNamespace(set_memory_growth=set_memory_growth),
    )
    v1 = types.SimpleNamespace(
        ConfigProto=ConfigProto, Session=Session, InteractiveSession=InteractiveSession
    )
    compat = types.SimpleNamespace(v1=v1)
    del ConfigProto, Session, InteractiveSession
"""


@pytest.fixture
def tensorflow(tmp_path, monkeypatch):
    """Write a stand-in for TensorFlow 1 or 2 that ``import tensorflow`` finds."""
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        package = tmp_path / "tensorflow"
        package.mkdir()
        (package / "__init__.py").write_text(text)

    yield write
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorflow"]:
        del sys.modules[name]


def two():
    return textwrap.dedent(FAKE) + textwrap.dedent(SECOND)


def test_tensorflow_2_gets_a_limit_on_each_gpu(tensorflow):
    tensorflow(two())
    hooks = len(sys.meta_path)
    guests.limit_tensorflow(0.25, lambda: [1000 * MIB, 400 * MIB])
    tf = importlib.import_module("tensorflow")
    assert tf.limits == {"gpu 0": [250], "gpu 1": [100]}
    assert len(sys.meta_path) == hooks, "the hook has done its work and is gone"
    assert tf.__spec__.loader is tf.__loader__
    assert isinstance(tf.__loader__, importlib.machinery.SourceFileLoader)


def test_the_usual_call_for_growth_still_works(tensorflow):
    tensorflow(two())
    guests.limit_tensorflow(0.5, lambda: [MIB, MIB])
    tf = importlib.import_module("tensorflow")
    for device in ("gpu 0", "gpu 2"):
        tf.config.experimental.set_memory_growth(device, True)
    assert tf.grown == ["gpu 2"], "TensorFlow refuses it where there is a limit"


def test_nothing_is_imported_by_the_hook(tensorflow):
    tensorflow(two())
    guests.limit_tensorflow(0.5, lambda: pytest.fail("nobody imported TensorFlow"))
    assert "tensorflow" not in sys.modules
    importlib.import_module("textwrap")


def test_a_tensorflow_that_is_there_already_is_limited_at_once(tensorflow):
    tensorflow(two())
    tf = importlib.import_module("tensorflow")
    guests.limit_tensorflow(0.5, lambda: [100 * MIB] * 3)
    assert tf.limits == {"gpu 0": [50], "gpu 1": [50], "gpu 2": [50]}


@pytest.mark.parametrize("kind", ["Session", "InteractiveSession"])
def test_sessions_of_the_old_api_are_limited(tensorflow, kind):
    tensorflow(two())
    guests.limit_tensorflow(0.5, lambda: [])
    tf = importlib.import_module("tensorflow")
    v1 = tf.compat.v1
    shares = [
        getattr(v1, kind)(config=v1.ConfigProto(asked)).config.gpu_options for asked in (0.0, 0.25, 0.9)
    ]
    assert [options.per_process_gpu_memory_fraction for options in shares] == [0.5, 0.25, 0.5]
    assert all(options.allow_growth for options in shares)
    assert getattr(v1, kind)().config is None, "TensorFlow 2 takes the config of the devices then"
    both = getattr(v1, kind)("", None, v1.ConfigProto(virtual=["4 GiB"])).config.gpu_options
    assert both.per_process_gpu_memory_fraction == 0.0, "TensorFlow refuses both at once"


def test_tensorflow_1_is_limited_without_a_config_too(tensorflow):
    tensorflow(textwrap.dedent(FAKE))
    guests.limit_tensorflow(0.4, lambda: [])
    tf = importlib.import_module("tensorflow")
    assert tf.Session().config.gpu_options.per_process_gpu_memory_fraction == 0.4


def test_an_import_does_not_fail_because_of_the_hook(tensorflow):
    from loguru import logger

    said = []
    number = logger.add(lambda line: said.append(str(line)), level="WARNING", format="{message}")
    tensorflow(two())

    def totals():
        raise RuntimeError("no GPU answers")

    guests.limit_tensorflow(0.4, totals)
    importlib.import_module("tensorflow")
    logger.remove(number)
    assert len(said) == 1
    assert "could not be kept to --gpu-memory-fraction 0.4: RuntimeError: no GPU answers" in said[0]


def test_a_missing_tensorflow_stays_missing(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    if importlib.util.find_spec("tensorflow") is not None:
        pytest.skip("TensorFlow is installed")
    guests.limit_tensorflow(0.4, list)
    with pytest.raises(ModuleNotFoundError, match="No module named 'tensorflow'"):
        importlib.import_module("tensorflow")
