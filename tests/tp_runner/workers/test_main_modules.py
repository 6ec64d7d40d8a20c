"""Classes and functions of a session without a file travel to workers of every start method."""

import subprocess
import sys
import textwrap

import pytest

METHODS = ["fork", "spawn", "forkserver"]


def fast(method):
    """Return the methods to test with, all but one of them in the slow part."""
    return [method, *(pytest.param(other, marks=pytest.mark.slow) for other in METHODS if other != method)]


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


@pytest.mark.parametrize("method", fast("forkserver"))
@pytest.mark.slow
def test_classes_typed_at_the_prompt(method):
    typed = FIRST.replace("\n\n    ", "\n    ")
    code = f"{typed}print(all_of({method!r}))\n{SECOND}print(all_of({method!r}))\n"
    code += f"list(tp_runner.map(lambda x: scaled(x), [5], devices=1, start_method={method!r}))\n"
    done = run(["-i", "-q"], code)
    assert done.stdout.splitlines() == ["[0, 10, 20]", "[1, 101, 201]", "[501]"], done.stderr
    assert "Error" not in done.stderr


@pytest.mark.parametrize("method", fast("fork"))
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
            lock = (i for i in ())
            try:
                list(tp_runner.map(same, [1], collate=lambda items: lock, **options))
            except tp_runner.NotPicklableError as error:
                print(error)
        """
    ).splitlines()
    assert out[:2] == ["[1, 1, 5, 5]", "[1, 0, 3, 2]"]
    assert "collate of type function cannot be pickled" in out[2]
    assert "it must travel to the workers" in out[2]


KEPT = """
import enum, os, signal, sys
import tp_runner

def note():
    sys.__dict__.setdefault("told", []).append(1)

class Mark:
    def __reduce__(self):
        return note, ()

UNIT = "m"

class Item:
    mark, factor = Mark(), 1
    class Part:
        pass
    def __init__(self, value):
        self.value = value
    def text(self):
        return f"{self.value * self.factor}{UNIT}"

class Color(enum.Enum):
    RED = 1

class Result:
    def __init__(self, text, item):
        self.text, self.item = text, item

class Work(tp_runner.OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        match item:
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "told":
                return len(sys.__dict__.get("told", ()))
        return Result(item.text(), item) if hasattr(item, "text") else item

if __name__ == "__main__":
    runner = Work(1, start_method=sys.argv[1], max_restarts=9, on_error="return", queue_scale=1)
"""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_class_is_sent_once_and_again_when_it_has_changed(run_script, method):
    code = (
        KEPT
        + """
    def told():
        return next(runner.stream(["told"]))

    for _ in range(5):
        first = list(runner.stream(map(Item, range(4))))  # a chunk for each
    assert [r.text for r in first] == ["0m", "1m", "2m", "3m"]
    assert {type(r) for r in first} == {Result}
    assert {type(r.item) for r in first} == {Item}
    named = [(Item, Item.Part), Color.RED, [Color]]
    assert list(runner.stream(named)) == named
    assert type(next(runner.stream([Item.Part()]))) is Item.Part
    list(runner.stream([Item(2)]))  # copyreg notes something in a class, Part, when it is first pickled
    n_told = told()
    assert n_told <= 2
    for _ in range(5):
        list(runner.stream([Item(2)]))
    assert told() == n_told
    Item.factor = 10
    assert next(runner.stream([Item(2)])).text == "20m"
    UNIT = "km"
    assert next(runner.stream([Item(2)])).text == Item(2).text() == "20km"  # here it is untouched
    list(runner.stream(["die"]))
    assert next(runner.stream([Item(2)])).text == "20km"  # by another worker
    print("good")
"""
    )
    assert run_script(code, method) == "good\n"


def test_results_are_of_the_class_that_their_items_were_of(run_script):
    code = (
        KEPT
        + """
    Old, OldResult = Item, Result
    list(runner.stream([Item(1), Item(2)]))
    results = runner.stream(iter([Item(1), "told", Item(3)]))
    first = next(results)  # the others may be on their way

    class Item:
        def __init__(self, value):
            self.value = value
        def text(self):
            return "new"

    class Result:
        pass

    last = list(results)[-1]
    assert (type(first), type(last)) == (OldResult, OldResult)
    assert (type(first.item), type(last.item)) == (Old, Old)
    new, old = runner.stream([Item(1), Old(1)])
    assert (new.text, type(new.item)) == ("new", Item)
    assert (old.text, type(old.item)) == ("1m", Old)
    assert type(new) is type(old) is OldResult  # what the runner was made with
    print("good")
"""
    )
    assert run_script(code, "forkserver") == "good\n"


def test_a_class_that_cannot_be_made_in_a_worker_fails_its_items_each_time(run_script):
    out = run_script(
        """
        import os
        import tp_runner

        PARENT = os.getpid()

        def check(pid):
            if os.getpid() != pid:
                raise OSError("only at home")

        class Mark:
            def __reduce__(self):
                return check, (PARENT,)

        class Item:
            mark = Mark()

        if __name__ == "__main__":
            with tp_runner.OrderedRunner(1, on_error="return") as runner:
                for _ in range(2):
                    for error in runner.stream([Item(), Item()]):
                        print(type(error).__name__, "only at home" in str(error))
                print(list(runner.stream([1])))
        """
    )
    assert out == "NotPicklableError True\n" * 4 + "[1]\n"


def test_functions_of_the_program_are_called_with_what_they_refer_to_now(run_script):
    out = run_script(
        """
        import tp_runner

        FACTOR = 2

        def scaled(x):
            return x * FACTOR

        if __name__ == "__main__":
            with tp_runner.Executor(1) as executor:
                print([executor.submit(scaled, i).result() for i in range(3)])
                FACTOR = 3
                print([executor.submit(scaled, i).result() for i in range(3)])

                def scaled(x):
                    return -x

                print(executor.submit(scaled, 1).result())
        """
    )
    assert out.splitlines() == ["[0, 2, 4]", "[0, 3, 6]", "-1"]
