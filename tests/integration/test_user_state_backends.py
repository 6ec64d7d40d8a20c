"""What users hang on parameters and optimizers, on the backends that other packages bring."""

import pytest
import tp_shard
from tp_testing import UserStateConformance

from tests.installed import backend_class

TEST = "test_it_is_carried_or_refused"
OWN_COUNT = f"{TEST}[a count of the step's own]"
KEPT = [f"{TEST}[{what} kept by forward]" for what in ("a tensor", "a list", "a dict", "a generator")]
KEPT.append(f"{TEST}[a list kept by forward and an average]")


@pytest.mark.slow
class TestTuple(UserStateConformance):
    backend = backend_class("tuple")
    devices = ("cpu", "cpu")
    limits = {OWN_COUNT: "each device runs the step on its part, and so counts; a warning names it"}


@pytest.mark.nightly
class TestTupleWithCopies(TestTuple):
    """Each device has parameters of its own, as on several accelerators."""

    options = {"force_copies": True}


@pytest.mark.slow
class TestGather(UserStateConformance):
    backend = backend_class("dp-gather")
    devices = ("cpu", "cpu")


@pytest.mark.slow
class TestPipeline(UserStateConformance):
    backend = backend_class("pipeline")
    processes = 2
    limits = {
        OWN_COUNT: "the step is called for each part of the batch, and so counts; a warning names it",
        f"{TEST}[accumulated gradient hooks before]": "a hook is called for each part of the batch",
        f"{TEST}[nonlinear gradient hooks before]": "a hook sees the gradient of each part of the batch",
        f"{TEST}[a second model after the first]": (
            "each batch draws a seed from the program's generator; a warning says so"
        ),
        **dict.fromkeys(KEPT, "forward runs for each part of the batch"),
    }


def split():
    """Return the kit's model with two layers split over the ranks."""
    if not tp_shard.distributed.is_initialized():
        tp_shard.distributed.init_process_group(-1)
    model = UserStateConformance.make_model()
    to_parallel = tp_shard.nn.ParallelLinear.convert_parallel_linear
    model[0], model[2] = to_parallel(model[0], 1), to_parallel(model[2], 0)
    return model


@pytest.mark.slow
class TestShard(UserStateConformance):
    backend = backend_class("shard")
    processes = 2
    limits = dict.fromkeys(
        [
            f"{TEST}[gradient hooks before]",
            f"{TEST}[gradient hooks in on_setup]",
            f"{TEST}[gradient hooks and a count in a group]",
            f"{TEST}[gradient hooks and two optimizers]",
            f"{TEST}[gradient hooks and clipping]",
            f"{TEST}[gradient hooks, resumed]",
        ],
        "the parameter of a split layer is this rank's shard, and so is the gradient that a hook sees",
    )

    @staticmethod
    def make_model():
        return split()
