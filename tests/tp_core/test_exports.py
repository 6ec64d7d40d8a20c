"""The public surface of tp_core: what is exported."""

import gc
import importlib
import sys
from importlib.metadata import version
from importlib.util import find_spec

import pytest
import tp_core
import tp_core.errors
from tp_core.plugins import lazy_exports

from tests.surface.names import PACKAGES, public_modules


def test_what_is_exported_exists_and_is_sorted_constants_first():
    for module in public_modules("tp_core"):
        key = lambda n: (not n.replace("_", "").isupper(), n[0].islower(), n)  # noqa: E731 - short
        assert module.__all__ == sorted(module.__all__, key=key), module
        assert [name for name in module.__all__ if not hasattr(module, name)] == [], module


def test_every_error_is_a_tp_error_and_a_builtin_that_users_catch():
    for name in tp_core.errors.__all__:
        error = getattr(tp_core.errors, name)
        assert issubclass(error, tp_core.errors.TpError)
        assert name in tp_core.errors.__doc__
        if error is not tp_core.errors.TpError:
            builtin = [base for base in error.__mro__ if base.__module__ == "builtins"]
            assert set(builtin) > {Exception, BaseException, object}, "and none that users would catch"


@pytest.mark.parametrize("package", PACKAGES)
def test_the_errors_of_a_package_are_called_so_and_are_in_a_module_of_errors(package):
    module = pytest.importorskip(package)
    modules = [tp_core.errors, getattr(module, "errors", tp_core.errors)]
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, type) and issubclass(found, Exception):
            assert name.endswith("Error")
            assert found in [getattr(errors, name, None) for errors in modules]


def test_a_package_says_its_version():
    installed = {package: importlib.import_module(package) for package in PACKAGES if find_spec(package)}
    assert {package: module.__version__ for package, module in installed.items()} == {
        package: version(package.replace("_", "-")) for package in installed
    }


def test_a_table_is_what_a_package_exports(tmp_path, monkeypatch):
    package = tmp_path / "lazy_package"
    package.mkdir()
    (package / "__init__.py").write_text(
        "from tp_core.plugins import lazy_exports\n"
        "__getattr__, __dir__, __all__ = lazy_exports(__name__, {\n"
        "    'lazy_package': ['compat'],\n"
        "    'lazy_package._names': ['B_C', 'Late', '_hidden', 'map'],\n"
        "    'lazy_package.compat': ['old'],\n"
        "}, answers='lazy_package._peers')\n"
    )
    (package / "_peers.py").write_text("NAMES = {'Theirs': 'ours()'}\n")
    (package / "_names.py").write_text("B_C, Late, _hidden, map = 1, 2, 3, 4\n")
    (package / "compat.py").write_text("old = 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("lazy_package")
    assert module.__all__ == ["B_C", "Late", "compat"]
    assert not vars(module).keys() & {"Late", "_names", "compat"}
    assert [module.B_C, module.Late, module._hidden, module.map, module.old] == [1, 2, 3, 4, 5]
    assert {"B_C", "Late", "_hidden", "compat", "map", "old"} <= set(dir(module))
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        module.other  # noqa: B018 - it raises
    with pytest.raises(AttributeError, match=r"no attribute 'Theirs'; write ours\(\)"):
        module.Theirs  # noqa: B018 - it raises
    assert not hasattr(module, "Theirs")
    for name, answer in {
        "Theirs": r"cannot import name 'Theirs' from 'lazy_package'; write ours\(\)",
        "old_": "cannot import name 'old_' from 'lazy_package'; look in lazy_package.compat",
        "Lat": "did you mean 'Late'",
    }.items():
        with pytest.raises(ImportError, match=answer):
            exec(f"from lazy_package import {name}")
    for name in [name for name in sys.modules if name.startswith("lazy_package")]:
        del sys.modules[name]


@pytest.mark.parametrize("works", [True, False])
def test_the_garbage_collector_rests_while_a_name_is_imported_and_is_then_as_before(
    tmp_path, monkeypatch, works
):
    monkeypatch.syspath_prepend(tmp_path)
    get, _, _ = lazy_exports("tp_core", {"resting": ["_works"], "missing_module": ["lost"]})
    (tmp_path / "resting.py").write_text("import gc\n_works = gc.isenabled()\n")
    try:
        if not works:
            gc.disable()
        assert get("_works") is False
        assert gc.isenabled() is works
        with pytest.raises(ModuleNotFoundError):
            get("lost")
        assert gc.isenabled() is works
    finally:
        gc.enable()
        del sys.modules["resting"], tp_core._works
