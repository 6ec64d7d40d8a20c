"""Runners that a module starts when it is imported are refused; workers import what they need alone."""

import os
import sys
import textwrap

import pytest
import tp_runner
from tp_core.errors import ConfigError

CALLS = {
    "map": "list(tp_runner.map(work, range(4), n_workers=2, **options))",
    "runner": "Runs(2, **options)(range(4))",
    "executor": "[f.result() for f in [tp_runner.Executor(2, **options).submit(work, 1)]]",
    "pipeline": "list(tp_runner.Pipeline(n_workers=2, **options).map(work).stream(range(4)))",
    "joblib": """
tp_runner.register_joblib()
import joblib
with joblib.parallel_config("tp", n_jobs=2, **options):
    joblib.Parallel()(joblib.delayed(work)(i) for i in range(4))
""",
    "items": "list(tp_runner.map(len, [Item()] * 4, n_workers=2, **options))",
    "preload": "list(tp_runner.map(abs, range(4), n_workers=2, preload=['starts_runners'], **options))",
}
MODULE = """
import os
import tp_runner

with open("imports", "a") as file:
    file.write(f"{os.getpid()}\\n")

options = %r

def work(x):
    return x

class Item(list):
    pass

class Runs(tp_runner.OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, data):
        return data

%s
"""


def script_of(kind, method):
    module = MODULE % ({"start_method": method}, CALLS[kind])
    program = """
        import sys
        open("starts_runners.py", "w").write(MODULE)
        sys.path.insert(0, "")
        try:
            import starts_runners
        except BaseException as error:
            print(type(error).__name__, "put it under if __name__ == '__main__'" in str(error))
        else:
            print("no error")
        """
    return textwrap.dedent(program).replace("MODULE", repr(module))


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("map", "forkserver"),
        *(
            pytest.param(kind, method, marks=pytest.mark.slow)
            for kind in CALLS
            for method in ("forkserver", "spawn")
            if (kind, method) not in {("map", "forkserver"), ("preload", "spawn")}
        ),
    ],
)
def test_a_module_that_starts_runners_when_it_is_imported_is_refused(
    kind, method, run_script, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    name, has_remedy = run_script(script_of(kind, method)).split()
    n_imports = len((tmp_path / "imports").read_text().split())
    if kind == "preload":  # whose workers do not need the module
        assert n_imports == 2
    else:
        assert has_remedy == "True", name
        assert n_imports <= 3  # the program, and its two workers


def test_a_forked_copy_starts_runners_when_it_imports(tmp_path, monkeypatch):
    (tmp_path / "starts_one.py").write_text(
        "import tp_runner\nR = list(tp_runner.map(abs, [-1], n_workers=1, start_method='fork'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    def work(_):
        import starts_one

        return starts_one.R

    assert list(tp_runner.map(work, [0], n_workers=1, start_method="fork")) == [[1]]
    sys.modules.pop("starts_one", None)


def test_the_number_of_nested_workers_has_a_bound(monkeypatch):
    def width(_):
        return os.environ["TP_RUNNER_WIDTH"]

    assert list(tp_runner.map(width, [0], n_workers=2, start_method="fork")) == ["2"]
    monkeypatch.setenv("TP_RUNNER_DEPTH", "2")  # as in a worker of a worker
    monkeypatch.setenv("TP_RUNNER_WIDTH", "200")
    assert list(tp_runner.map(width, [0], n_workers=1, start_method="fork")) == ["200"]
    with pytest.raises(ConfigError, match=r"200 workers would start 2000 workers each, 400000 in all"):
        list(tp_runner.map(width, [0], n_workers=2000, start_method="fork"))


def test_a_worker_imports_nothing_that_its_parent_alone_needs():
    def imported(names):
        return [name for name in names if name in sys.modules]

    names = ["concurrent.futures", "tp_runner.errors", "tp_runner._workers._fleet", "tp_runner._scheduling"]
    assert list(tp_runner.map(imported, [names], n_workers=1, start_method="spawn")) == [[]]
