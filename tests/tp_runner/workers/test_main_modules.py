"""Classes and functions of a session without a file travel to workers of every start method."""

import subprocess
import sys
import textwrap

import pytest

METHODS = ["fork", "spawn", "forkserver"]

FIRST = """
import tp_runner

FACTOR = 10

def scaled(x):
    return x * FACTOR

class Item:
    def __init__(self, value):
        self.value = value

class Scaler(tp_runner.OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return Item(scaled(item.value))

def all_of(method):
    with Scaler(2, start_method=method) as runner:
        results = list(runner.stream(map(Item, range(3))))
    assert all(type(result) is Item for result in results)
    return [result.value for result in results]

"""
SECOND = """
FACTOR = 100  # a cell is run again with another value

def scaled(x):
    return x * FACTOR + 1

"""


def run(arguments, code):
    done = subprocess.run(
        [sys.executable, *arguments], input=code, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


@pytest.mark.parametrize("method", METHODS)
def test_classes_typed_at_the_prompt(method):
    typed = FIRST.replace("\n\n    ", "\n    ")
    code = f"{typed}print(all_of({method!r}))\n{SECOND}print(all_of({method!r}))\n"
    code += f"list(tp_runner.map(lambda x: scaled(x), [5], devices=1, start_method={method!r}))\n"
    done = run(["-i", "-q"], code)
    assert done.stdout.splitlines() == ["[0, 10, 20]", "[1, 101, 201]", "[501]"], done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("method", METHODS)
def test_classes_of_a_notebook(method):
    # As its kernel does: a main module without a file, and one compiled cell after the other.
    kernel = f"""
        import sys, types

        main = types.ModuleType("__main__")
        sys.modules["__main__"] = main
        cells = {[FIRST, f"print(all_of({method!r}))", SECOND, f"print(all_of({method!r}))"]!r}
        for n, cell in enumerate(cells):
            exec(compile(cell, f"/tmp/ipykernel/{{n}}.py", "exec"), main.__dict__)
        """
    done = run(["-c", textwrap.dedent(kernel)], "")
    assert done.stdout.splitlines() == ["[0, 10, 20]", "[1, 101, 201]"]
    assert not done.stderr


def test_what_makes_batches_of_a_program_travels(run_script):
    out = run_script(
        """
        import threading
        import tp_runner

        def total(items):
            return {"total": [sum(items)] * len(items)}

        def same(batch):
            return batch

        if __name__ == "__main__":
            options = {"n_workers": 1, "batch": 2}
            print([row["total"] for row in tp_runner.map(same, range(4), collate=total, **options)])
            print(list(tp_runner.map(same, range(4), collate=lambda items: items[::-1], **options)))
            lock = threading.Lock()
            try:
                list(tp_runner.map(same, [1], collate=lambda items: lock, **options))
            except tp_runner.NotPicklableError as error:
                print(error)
        """
    ).splitlines()
    assert out[:2] == ["[1, 1, 5, 5]", "[1, 0, 3, 2]"]
    assert "collate of type function cannot be pickled" in out[2]
    assert "it must travel to the workers" in out[2]
