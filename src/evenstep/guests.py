"""TensorFlow in the same process as torch, kept to its share of a GPU without being imported by us.

TensorFlow has no environment variable for a share of the memory, so a hook waits for the user's own import
of it and sets the limit before TensorFlow touches a GPU.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

from loguru import logger

_MIB = 2**20


def limit_tensorflow(fraction: float, totals: Callable[[], Sequence[int]]) -> None:
    """Keep TensorFlow, now or whenever it is imported, to a share of each GPU's memory.

    Covers TensorFlow 2 (a logical device with a limit on each GPU) and the sessions of TensorFlow 1's API
    (``compat.v1``, ``per_process_gpu_memory_fraction``). The user's own smaller limits stay.

    Args:
        fraction: the share, above 0 and at most 1.
        totals: returns the memory of each visible GPU in bytes, in CUDA's order; called at the import.
    """
    configure = functools.partial(_configure, fraction=fraction, totals=totals)
    if "tensorflow" in sys.modules:
        configure(sys.modules["tensorflow"])
    else:
        sys.meta_path.insert(0, _AfterImport("tensorflow", configure))


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with one module right after the module's code has run, then is gone."""

    def __init__(self, name: str, then: Callable[[types.ModuleType], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find the module as Python would without us, and wrap its loader."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._then)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, then: Callable[[types.ModuleType], None]) -> None:
        self._loader = loader
        self._then = then

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        module: types.ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._then(sys.modules.get(module.__name__, module))  # TensorFlow puts a wrapper in its own place


def _configure(tf: Any, *, fraction: float, totals: Callable[[], Sequence[int]]) -> None:
    """Set the limits in a TensorFlow that has just been imported; a warning if it does not let us."""
    try:
        has_devices = hasattr(getattr(tf, "config", None), "set_logical_device_configuration")
        if has_devices:  # TensorFlow 2
            _limit_devices(tf, fraction, totals())
        old_api: Any = getattr(getattr(tf, "compat", None), "v1", None)
        for api in (tf, old_api):
            for name in ("Session", "InteractiveSession"):
                session = getattr(api, name, None)
                if session is not None and "_evenstep_limit" not in vars(session):
                    _limit_sessions(session, None if has_devices else api.ConfigProto, fraction)
    except Exception as error:  # an import of the user's must not fail because of us
        logger.warning(
            "TensorFlow could not be kept to --gpu-memory-fraction {}: {}: {}. It grows as it needs; set "
            "its limit in your own code, before the first operation.",
            fraction,
            type(error).__name__,
            error,
        )


def _limit_devices(tf: Any, fraction: float, totals: Sequence[int]) -> None:
    for gpu, total in zip(tf.config.list_physical_devices("GPU"), totals, strict=False):
        limit = tf.config.LogicalDeviceConfiguration(memory_limit=int(total * fraction) // _MIB)
        tf.config.set_logical_device_configuration(gpu, [limit])
    grow = tf.config.experimental.set_memory_growth

    def set_memory_growth(device: Any, enable: bool) -> None:
        # TensorFlow refuses it on a device with a limit; TF_FORCE_GPU_ALLOW_GROWTH did it already.
        if tf.config.get_logical_device_configuration(device) is None:
            grow(device, enable)

    tf.config.experimental.set_memory_growth = set_memory_growth


def _limit_sessions(session: Any, make_config: Callable[[], Any] | None, fraction: float) -> None:
    """Give each session of TensorFlow 1's API the limit, unless its config has a smaller one.

    Args:
        session: its class.
        make_config: makes the config of a session that has none. None: such a session takes the config of
            the devices, as TensorFlow 2 does, and that has the limit.
        fraction: the limit.
    """
    init = session.__init__

    @functools.wraps(init)
    def limited(self: Any, target: str = "", graph: Any = None, config: Any = None) -> None:
        if config is None and make_config is not None:
            config = make_config()
        # TensorFlow takes a limit on the devices or on the session, not both.
        if config is not None and not config.gpu_options.experimental.virtual_devices:
            options = config.gpu_options
            asked = options.per_process_gpu_memory_fraction
            options.per_process_gpu_memory_fraction = min(asked, fraction) if asked > 0 else fraction
            options.allow_growth = True
        init(self, target, graph, config)

    session.__init__ = limited
    session._evenstep_limit = fraction
