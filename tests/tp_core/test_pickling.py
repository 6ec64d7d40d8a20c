"""What other processes cannot import goes to them by value, and still says where it was written."""

import pickle
import sys

import torch
from tp_core.ranks import dumps_by_value, pickled_by_value


def test_code_keeps_the_name_of_its_file():
    names = {"__name__": "__main__"}
    exec(compile("def outer():\n    return lambda: 1 / 0\n", "a script.py", "exec"), names)
    sent = pickle.loads(dumps_by_value(names["outer"], protocol=5))
    assert {sent.__code__.co_filename, sent().__code__.co_filename} == {"a script.py"}


class Stepping(torch.optim.SGD):
    """Has a step of its own, around which torch puts what calls hooks."""

    @torch.no_grad()
    def step(self, closure=None):
        return super().step(closure)


def test_a_wrapper_of_a_library_has_the_globals_of_the_library_in_the_other_process():
    Stepping([torch.nn.Parameter(torch.zeros(1))])
    own = Stepping.step  # loading replaces it: here the class is there already
    assert own.hooked  # it is wrapped, and torch wraps it once
    with pickled_by_value([sys.modules[__name__]]):
        sent = pickle.loads(dumps_by_value(own, protocol=5))
    assert sent is not own
    assert (sent.hooked, sent.__module__, sent.__qualname__) == (True, __name__, "Stepping.step")
    # In its globals torch finds the hooks of all optimizers.
    assert sent.__globals__ is own.__globals__ is vars(sys.modules["torch.optim.optimizer"])
    assert sent.__wrapped__.__wrapped__.__code__ == own.__wrapped__.__wrapped__.__code__
