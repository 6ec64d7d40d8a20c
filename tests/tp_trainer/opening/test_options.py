"""Options of backends, as objects and by name."""

from dataclasses import dataclass

import pytest
from tp_core.discovery import PluginRegistry
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, NoOptions, Session, Verdict, hookimpl
from tp_trainer import DdpOptions, FsdpOptions, Trainer


@dataclass(frozen=True)
class OtherOptions:
    size: int = 1


class Other(Backend[OtherOptions]):
    name = "other"
    options_type = OtherOptions

    def assess(self, job):
        return Verdict.fits(60, "a test asked for it")

    def open(self, job):
        session = Session(job)
        session.options = self.parse_options(job)
        return session


class Plugin:
    tp_contract = 1

    @hookimpl
    def tp_backends(self):
        return [Other()]


@pytest.fixture
def plugins():
    registry = PluginRegistry()
    registry.register(Plugin(), name="other")
    return registry


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(OtherOptions(3), id="an object"),
        pytest.param([DdpOptions(static_graph=True), OtherOptions(3)], id="a list"),
        pytest.param((OtherOptions(3),), id="a tuple"),
        pytest.param({"other": {"size": 3}}, id="names"),
        pytest.param({"other": OtherOptions(3)}, id="an object by name"),
    ],
)
def test_the_chosen_backend_gets_its_options(plugins, options):
    with Trainer(devices="cpu", options=options, plugins=plugins) as trainer:
        assert trainer.session.options == OtherOptions(3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        pytest.param(3, "options must be objects of .*DdpOptions, .*OtherOptions, .* int: 3", id="a number"),
        pytest.param([{"size": 3}], "or a dict by backends' names, got dict", id="a dict in a list"),
        pytest.param(NoOptions(), "got NoOptions", id="those of a backend that has none"),
        pytest.param(OtherOptions, "got type", id="the class"),
        pytest.param(
            [OtherOptions(), OtherOptions(2)], "two of OtherOptions, both for backend", id="two of one"
        ),
    ],
)
def test_other_options_are_refused_at_once(plugins, options, words):
    with pytest.raises(ConfigError, match=words):
        Trainer(devices="cpu", options=options, plugins=plugins)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: DdpOptions(timeout_s=0),
            r"DdpOptions\(timeout_s=\.\.\.\) must be a finite number above 0, got 0",
        ),
        (lambda: DdpOptions(bucket_cap_mb="25"), "bucket_cap_mb.* got '25'"),
        (lambda: FsdpOptions(timeout_s=float("inf")), "got inf"),
        (lambda: FsdpOptions(replicas=0), "a whole number from 1, got 0"),
    ],
)
def test_a_time_or_a_size_that_is_not_above_0_is_refused_when_options_are_made(make, words):
    with pytest.raises(ConfigError, match=words):
        make()


def test_a_value_of_another_type_is_refused_before_a_backend_is_chosen():
    with pytest.raises(
        ConfigError, match=r"DdpOptions\(static_graph=\.\.\.\) must be True or False, got 'yes'"
    ):
        Trainer(devices="cpu", options=DdpOptions(static_graph="yes"), backend="single").session  # noqa: B018 - asking for it opens the backend


def test_an_object_under_another_backends_name_is_refused(plugins):
    with (
        Trainer(devices="cpu", options={"other": DdpOptions()}, plugins=plugins) as trainer,
        pytest.raises(ConfigError, match="the options of backend 'other' must be a OtherOptions"),
    ):
        trainer.session  # noqa: B018 - asking for it opens the backend
