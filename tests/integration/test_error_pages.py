"""Every public error says where the documents explain it, and is explained there."""

import copy
import pickle
import re
import traceback
from importlib import import_module
from importlib.resources import files

import pytest
from tp_core.errors import StateError, TpError

from tests.run_tp import run

PAGE = files("tp_core.cli").joinpath("errors.md").read_text()
MODULES = [import_module(f"{package}.errors") for package in ("tp_core", "tp_runner", "tp_shard")]
ERRORS = [getattr(module, name) for module in MODULES for name in module.__all__]


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_an_error_is_explained_where_its_note_says(error):
    raised = error("this went wrong")
    anchor = error.anchor().removeprefix("errors#")
    assert raised.__notes__ == [f"More: tp explain {anchor}"]
    assert str(raised) == "this went wrong"
    section = re.search(rf"^\({anchor}\)=\n##+ {error.__name__}\n(.*?)(?=^##|^\(|\Z)", PAGE, re.M | re.S)
    assert section is not None, "docs/errors.md does not have it"
    assert len(section[1].split()) > 15


def test_a_traceback_ends_with_the_place_once_wherever_the_error_has_been():
    for error in (
        StateError("torn"),
        copy.copy(StateError("torn")),
        pickle.loads(pickle.dumps(StateError("torn"))),
    ):
        last = traceback.format_exception(error)[-2:]
        assert last == ["tp_core.errors.StateError: torn\n", "More: tp explain state-error\n"]


def test_an_error_of_a_plugin_is_explained_by_the_one_above_it():
    class TornError(StateError):
        pass

    assert TornError.anchor() == "errors#state-error"
    assert TpError.anchor() == "errors#tp-error"


@pytest.mark.parametrize(("word", "meant"), [("nonsense", ""), ("step", "; did you mean 'step-error'?")])
def test_a_word_that_is_no_error_is_answered_with_those_that_are(word, meant, capsys):
    assert run(["explain", word]) == 2
    said = capsys.readouterr().err
    assert (
        f"no error of tp is called {word!r}{meant}; those that have a section: config-error, device" in said
    )
