"""What other processes cannot import goes to them by value, and still says where it was written."""

import pickle

from tp_core.ranks import dumps_by_value


def test_code_keeps_the_name_of_its_file():
    names = {"__name__": "__main__"}
    exec(compile("def outer():\n    return lambda: 1 / 0\n", "a script.py", "exec"), names)
    sent = pickle.loads(dumps_by_value(names["outer"], protocol=5))
    assert {sent.__code__.co_filename, sent().__code__.co_filename} == {"a script.py"}
