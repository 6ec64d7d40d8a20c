"""What the work raised is caught by its own type."""

import copy
import pickle
import threading

import pytest
import tp_runner
from tp_runner import WorkerError


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} {two}")
        self.two = two


class KeywordError(Exception):
    def __init__(self, *, code):
        super().__init__(code)
        self.code = code


class LockError(ValueError):
    def __init__(self):
        super().__init__("locked")
        self.lock = threading.Lock()


class NoRebuildError(LookupError):
    def __reduce__(self):
        return int, ("no number",)


def raise_it(make):
    raise make()


def raised(make, **options):
    with pytest.raises(WorkerError) as caught:
        list(tp_runner.map(raise_it, [make], n_workers=1, **(options or {"start_method": "fork"})))
    return caught.value


@pytest.mark.parametrize(
    "kind",
    [
        ValueError,
        KeyError,
        ZeroDivisionError,
        OSError,
        FileNotFoundError,
        MemoryError,
        ImportError,
        AttributeError,
        TypeError,
    ],
)
@pytest.mark.parametrize("options", [{"start_method": "fork"}, {"engine": "inline"}], ids=["fork", "inline"])
def test_an_error_is_of_the_type_of_what_was_raised(kind, options):
    error = raised(lambda: kind("oh"), **options)
    assert isinstance(error, kind)
    assert type(error).__name__ == "WorkerError"
    assert error.type_name == kind.__name__
    assert str(error).startswith("the work on item 0 (")
    assert type(error.__cause__) is kind


@pytest.mark.parametrize(
    "make",
    [lambda: TwoArgumentsError(1, 2), lambda: KeywordError(code=3), LockError, NoRebuildError],
    ids=["two arguments", "keyword", "lock", "no rebuild"],
)
def test_it_is_so_even_if_the_exception_cannot_travel(make):
    error = raised(make)
    kind = type(make())
    assert isinstance(error, kind)
    assert error.__cause__ is None
    assert error.type_name == f"{__name__}.{kind.__qualname__}"
    assert "in raise_it" in error.remote_traceback


def test_attributes_come_along():
    error = raised(lambda: FileNotFoundError(2, "nothing here", "some.file"))
    assert (error.errno, error.filename) == (2, "some.file")
    assert error.index == 0


def test_the_chain_below_comes_along():
    def make():
        try:
            try:
                {}["key"]
            except KeyError as error:
                raise OSError("middle") from error
        except OSError as error:
            top = ValueError("top")
            top.__cause__ = error
            return top

    error = raised(make)
    below = []
    cause = error.__cause__
    while cause is not None:
        below.append(type(cause))
        cause = cause.__cause__
    assert below == [ValueError, OSError, KeyError]
    assert "direct cause" in error.remote_traceback


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, StopIteration, GeneratorExit])
def test_what_means_the_end_of_something_else_is_an_error_alone(kind):
    with pytest.raises(WorkerError) as caught:
        list(tp_runner.map(raise_it, [kind], n_workers=1, engine="thread"))
    assert not isinstance(caught.value, kind)
    assert caught.value.type_name == kind.__name__


def test_groups_are_errors_alone():
    error = raised(lambda: ExceptionGroup("several", [ValueError(1)]))
    assert isinstance(error.__cause__, ExceptionGroup)


def test_such_an_error_travels_too():
    error = raised(lambda: ValueError("oh"))
    for again in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert isinstance(again, ValueError)
        assert isinstance(again, WorkerError)
        assert (str(again), again.index) == (str(error), 0)


def test_a_runner_inside_a_worker_hands_the_type_on():
    def inner(make):
        return list(tp_runner.map(raise_it, [make], n_workers=1, engine="inline"))

    with pytest.raises(KeyError) as caught:
        list(tp_runner.map(inner, [lambda: KeyError("deep")], n_workers=1, start_method="fork"))
    assert isinstance(caught.value, WorkerError)


def test_the_error_of_a_start_is_of_its_type_too():
    def init(device):
        raise FileNotFoundError("no model")

    with pytest.raises(FileNotFoundError, match="worker 0 did not start"):
        list(tp_runner.map(lambda s, x: x, [1], n_workers=1, init=init, start_method="fork"))


@pytest.mark.parametrize("options", [{"engine": "thread"}, {"start_method": "fork"}], ids=["thread", "fork"])
def test_an_error_about_a_group_is_a_group(options):
    def work(item):
        raise ExceptionGroup("two", [KeyError("k"), ValueError(item)])

    with pytest.raises(ExceptionGroup) as caught:
        list(tp_runner.map(work, ["v"], n_workers=1, **options))
    for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
        assert isinstance(error, WorkerError)
        assert error.index == 0
        assert [type(each) for each in error.exceptions] == [KeyError, ValueError]
        taken = []
        try:
            try:
                raise error
            except* KeyError as group:
                taken += group.exceptions
        except* ValueError as group:
            taken += group.exceptions
        assert [type(each) for each in taken] == [KeyError, ValueError]
