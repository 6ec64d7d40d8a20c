"""An odd plugin: what its code does when it is loaded or asked is the test's."""

from textwrap import dedent

from tp_testing import fake_distribution

HEAD = """
    from tp_core.plugins import Backend, Command, Session, Verdict, hookimpl

    tp_contract = 1

    class Odd(Backend):
        name = "odd"
        def assess(self, job):
            {asked}
            return Verdict.fits(1, "it is odd")
        def open(self, job):
            return Session(job)

    @hookimpl
    def tp_backends():
        {hooked}
        return [Odd()]
"""


def source(*, loaded="", hooked="", asked=""):
    return dedent(HEAD).format(hooked=hooked or "pass", asked=asked or "pass") + "\n" + dedent(loaded) + "\n"


def odd(folder, text, *, point="odd_plugin", name="odd"):
    return fake_distribution(
        folder, "acme-odd", version="0.1", entry_points={name: point}, modules={"odd_plugin": text}
    )
