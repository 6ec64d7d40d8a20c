"""A backend over torch's fully_shard, written as docs/plugins.md says, does what every backend must do."""

import importlib.util
import sys
from pathlib import Path

import pytest
from tp_testing import BackendConformance, TrainingConformance

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "fsdp2_backend.py"


def load():
    spec = importlib.util.spec_from_file_location("fsdp2_backend", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where a dataclass looks for the module that its methods are of
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]  # ranks could not import it: its classes go there by value
    return module


backend = load().FullyShardBackend


@pytest.mark.nightly
class TestFullyShard(BackendConformance):
    backend = backend
    processes = 2
    limits = {
        "test_parameters_of_several_types_have_the_gradients_of_one_device": (
            "torch gathers the parameters of a group as one tensor, so they have one type"
        ),
        "test_a_parameter_that_one_rank_alone_uses_has_the_gradient_of_the_mean": (
            "torch sends the gradients that a rank has as one tensor, whose length then differs between ranks"
        ),
    }


@pytest.mark.nightly
class TestTrainingOnFullyShard(TrainingConformance):
    backend = backend
    processes = 2
