"""Which backend is chosen, and what is said about the others."""

import itertools

import pytest
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.discovery import Contribution, check_backend_name, select
from tp_core.errors import ConfigError, PluginError, SelectionError
from tp_core.plugins import Backend, Job, NoOptions, Session, Verdict


def backend(name_, verdict):
    class Made(Backend):
        name = name_

        def assess(self, job):
            if isinstance(verdict, BaseException):
                raise verdict
            return verdict

        def open(self, job):
            return Session(job)

    return Contribution(Made(), name_, f"dist-{name_}", "1.0")


def job(**kwargs):
    return Job(devices=resolve_devices("cpu"), environment=LaunchEnvironment.read({}), **kwargs)


GOOD = backend("good", Verdict.fits(80, "it is good"))
FAIR = backend("fair", Verdict.fits(40, "it is fair"))
UNFIT = backend("unfit", Verdict.unfit("needs two", remedy="buy another"))
RAISES = backend("raises", ZeroDivisionError("oops"))
CONFUSED = backend("confused", "yes")


def test_the_best_score_wins_and_everybody_keeps_a_verdict():
    selection = select(job(), [UNFIT, FAIR, RAISES, GOOD], environ={})
    assert selection.chosen.name == "good"
    assert selection.asked_by == "auto"
    assert [c.name for c in selection.candidates] == ["good", "fair", "raises", "unfit"]
    assert "ZeroDivisionError: oops" in selection.candidates[2].verdict.reason


def test_ties_go_by_name_whatever_the_order_of_registration():
    a, b = backend("a", Verdict.fits(5, "x")), backend("b", Verdict.fits(5, "x"))
    assert select(job(), [b, a], environ={}).chosen.name == "a"
    assert select(job(), [a, b], environ={}).chosen.name == "a"


def test_an_argument_wins_over_the_variable_and_that_over_auto():
    both = [GOOD, FAIR]
    assert select(job(), both, environ={"TP_BACKEND": "fair"}).chosen.name == "fair"
    assert select(job(), both, name="auto", environ={"TP_BACKEND": "fair"}).chosen.name == "fair"
    assert select(job(), both, name="good", environ={"TP_BACKEND": "fair"}).chosen.name == "good"
    assert select(job(), both, environ={"TP_BACKEND": "auto"}).chosen.name == "good"


def test_the_table_tells_who_why_and_what_to_do():
    text = str(select(job(), [UNFIT, FAIR, GOOD], environ={}))
    assert text.splitlines()[0] == "backend 'good' (auto): it is good"
    assert "*  good" in text
    assert "dist-fair 1.0" in text
    assert "needs two; buy another" in text


def test_asking_for_an_unfit_one_gives_its_reason_and_remedy():
    with pytest.raises(SelectionError, match=r"'unfit' \(asked for\) does not fit: needs two; buy"):
        select(job(), [UNFIT, GOOD], name="unfit")


def test_asking_for_one_that_raised_gives_the_cause():
    with pytest.raises(PluginError, match=r"raises.*cannot be used") as caught:
        select(job(), [RAISES, GOOD], name="raises")
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_an_assess_that_returns_something_else_is_unfit_and_said_so():
    selection = select(job(), [CONFUSED, GOOD], environ={})
    assert "must return a Verdict, got str" in selection.candidates[-1].verdict.reason


def test_an_unknown_name_lists_what_is_installed_and_what_to_install():
    with pytest.raises(SelectionError, match="installed: 'fair', 'good'") as caught:
        select(job(), [GOOD, FAIR], name="tuple")
    assert "pip install tp-tuple" in str(caught.value)
    with pytest.raises(SelectionError, match=r"'shard' \(pip install tp-shard\)"):
        select(job(), [GOOD], name="no-such")


def test_no_fit_gives_everybodys_reason():
    with pytest.raises(SelectionError, match=r"(?s)no installed backend fits.*needs two"):
        select(job(), [UNFIT], environ={})


def test_no_backend_says_what_to_install():
    with pytest.raises(SelectionError, match="pip install tp-trainer"):
        select(job(), [], environ={})


def test_options_are_parsed_by_the_backend_that_they_are_for():
    with pytest.raises(ConfigError, match="'good' has no option 'speed'; it has: none"):
        GOOD.item.parse_options(job(options={"good": {"speed": 1}}))


def test_options_may_be_an_object_of_the_backends_own_type():
    given = NoOptions()
    assert GOOD.item.parse_options(job(options={"good": given})) is given
    with pytest.raises(ConfigError, match=r"'good' must be a NoOptions or a mapping of .*, got int: 3"):
        GOOD.item.parse_options(job(options={"good": 3}))


@pytest.mark.parametrize("score", [float("nan"), float("inf")])
def test_a_score_that_cannot_be_compared_is_refused(score):
    with pytest.raises(ConfigError, match="a score must be a finite number"):
        Verdict.fits(score, "x")


@pytest.mark.parametrize("make", [lambda: Verdict.fits(1, ""), lambda: Verdict.unfit("")])
def test_a_verdict_without_a_reason_is_refused(make):
    with pytest.raises(ConfigError, match="a verdict needs a reason"):
        make()


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("god", "did you mean 'good'[?]"),
        ("tupel", r"did you mean 'tuple' \(pip install tp-tuple\)[?]"),
        ("shard", "to get it: pip install tp-shard"),
    ],
)
def test_a_misspelled_name_is_noticed_without_a_job_and_gets_a_suggestion(wanted, message):
    for name, environ in ((wanted, {}), (None, {"TP_BACKEND": wanted})):
        with pytest.raises(SelectionError, match=message):
            check_backend_name(name, {"good", "fair"}, environ=environ)
    check_backend_name("good", {"good"}, environ={"TP_BACKEND": wanted})
    check_backend_name(None, {"good"}, environ={})


def test_the_table_says_who_took_long_to_answer(monkeypatch):
    clock = itertools.count(step=2.0)
    monkeypatch.setattr("tp_core.plugins._select.perf_counter", lambda: next(clock))
    assert "it is good (its assess() took 2.0 s)" in str(select(job(), [GOOD], environ={}))


def test_an_assess_that_ends_the_process_is_unfit_and_the_others_live_on():
    selection = select(job(), [backend("ends", SystemExit(3)), GOOD], environ={})
    assert selection.chosen.name == "good"
    assert "assess() raised SystemExit: 3" in selection.candidates[-1].verdict.reason
