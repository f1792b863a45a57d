import sys

import pytest

from evenstep.errors import ConfigError
from evenstep.objects import import_object


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Make a module ``evenstep_user_code`` in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    path = tmp_path / "evenstep_user_code.py"
    path.write_text("def make():\n    return 7\nclass Nets:\n    small = 3\n")
    yield path
    sys.modules.pop("evenstep_user_code", None)


def test_an_object_of_a_module_in_the_current_directory(module):
    assert import_object("evenstep_user_code:make", what="model", flag="--model")() == 7
    assert import_object("evenstep_user_code:Nets.small", what="model", flag="--model") == 3
    assert import_object("math:pi", what="model", flag="--model") > 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            "evenstep_user_cod:make",
            r"no module 'evenstep_user_cod'.*Did you mean 'evenstep_user_code'\? Corr.*--model",
        ),
        ("evenstep_user_code:mak", r"has no 'mak'\. Did you mean 'make'\? Correct --model"),
        ("evenstep_user_code:Nets.smal", r"Nets has no 'smal'\. Did you mean 'small'\?"),
        ("evenstep_user_code.py:make", r"no module 'evenstep_user_code.py'"),
        (
            "dir/evenstep_user_code:make",
            r"model 'dir/.*' is not of the form module:attribute.*--model mymodule",
        ),
        ("evenstep_user_code:", r"not of the form module:attribute"),
        (":make", r"not of the form module:attribute"),
    ],
)
def test_messages(module, spec, message):
    with pytest.raises(ConfigError, match=message):
        import_object(spec, what="model", flag="--model")


def test_an_error_inside_the_module_is_passed_on(module):
    module.write_text("import evenstep_no_such_module\n")
    with pytest.raises(ModuleNotFoundError, match="evenstep_no_such_module"):
        import_object("evenstep_user_code:make", what="model", flag="--model")
