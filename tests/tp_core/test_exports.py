"""The public surface of tp_core: what is exported, and that importing it is cheap."""

import subprocess
import sys

import pytest
import tp_core
import tp_core.errors
import tp_core.plugins
import tp_core.testing

PUBLIC = """
    KNOWN_BACKENDS SHARDED_ATTRIBUTE Backend Candidate CollateAdapter Container DeviceLoad
    DeviceSpec Engine Job LaunchEnvironment LossReduction ModelTraits NoOptions Parts PerType Pool
    Precision PreparedLoader ProcessGroupSession ReduceOp Selection Session Share StepOutput
    TensorInfo TensorSlice Verdict as_device available_devices containers count_samples device_loads
    device_of_rank errors is_sharded lazy_exports least_busy plugins read_tensors recursive_pin
    recursive_to rendezvous_store resolve_devices seeded select split_evenly tensor_infos
    tree_leaves tree_map write_tensors
"""


def test_the_public_names_of_tp_core_are_these():
    assert tp_core.__all__ == sorted(PUBLIC.split(), key=lambda n: (not n.isupper(), n))


@pytest.mark.parametrize("module", [tp_core, tp_core.errors, tp_core.plugins, tp_core.testing])
def test_what_is_exported_exists_and_is_sorted_constants_first(module):
    assert module.__all__ == sorted(
        module.__all__, key=lambda n: (not n.replace("_", "").isupper(), n[0].islower(), n)
    )
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_error_is_a_tp_error_and_a_builtin_that_users_catch():
    for name in tp_core.errors.__all__:
        error = getattr(tp_core.errors, name)
        assert issubclass(error, tp_core.errors.TpError)
        assert name in tp_core.errors.__doc__
        if error is not tp_core.errors.TpError:
            assert len(error.__mro__) > 4 or issubclass(error, Exception)


@pytest.mark.parametrize("package", ["tp_core", "tp_trainer"])
def test_importing_leaves_the_heavy_libraries_alone(package):
    code = (
        "import sys, torch; before = set(sys.modules); import "
        f"{package}; print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=50
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert not loaded & {"rich", "typer", "click", "psutil", "numpy", "pytest", "cloudpickle"}
    assert "torch._dynamo" not in done.stdout.split()
