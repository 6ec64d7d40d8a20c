"""The command tp, its plugins' commands, and tp doctor."""

import itertools
import json
import os
import subprocess
import sys
from importlib.metadata import version

import pytest
from tp_core.discovery import PluginRegistry
from tp_core.plugins import registry
from tp_testing import fake_distribution

from tests.run_tp import doctor, run, seen

COMMANDS = """
    import typer
    from tp_core.errors import TpError
    from tp_core.plugins import Command, hookimpl

    def load_hello():
        app = typer.Typer()
        @app.command()
        def hello(name: str):
            if name == "nobody":
                raise type("Short", (TpError, EOFError), {})("nobody is there")
            print(f"hello {name}")
        return app

    def load_bad():
        raise ImportError("no such library")

    def load_ending():
        raise SystemExit(3)

    def load_clicked():
        import click
        @click.command()
        @click.option("--times", type=int, default=1)
        @click.pass_context
        def clicked(ctx, times):
            click.echo(f"clicked {times}")
            ctx.exit(times)
        return clicked

    @hookimpl
    def tp_commands():
        return [Command("hello", "Say hello.", load_hello), Command("bad", "Fail.", load_bad),
                Command("clicked", "Of click.", load_clicked),
                Command("ending", "End.", load_ending), Command("nothing", "None.", lambda: None),
                Command("doctor", "Hide the doctor.", load_hello)]
"""


@pytest.fixture(autouse=True)
def looked_before():
    """The registry of the process has looked before a made-up distribution is there, and keeps none."""
    registry.plugins()


def tp(*arguments, **kwargs):
    return subprocess.run(
        [sys.executable, "-m", "tp_core", *arguments],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        **kwargs,
    )


@pytest.fixture
def with_commands(tmp_path):
    points, modules = {"hello": "hello_plugin"}, {"hello_plugin": COMMANDS}
    with seen(fake_distribution(tmp_path, "tp-hello", entry_points=points, modules=modules)):
        yield


def test_a_plugins_command_runs_and_loads_no_other_one(with_commands, capsys):
    assert run(["hello", "world"]) == 0
    captured = capsys.readouterr()
    assert "hello world" in captured.out
    assert "the command 'doctor' of plugin hello (tp-hello 1.0) is left out" in captured.err
    assert "bad" not in captured.err
    assert run(["hello", "nobody"]) == 1
    assert capsys.readouterr().err.endswith("\ntp hello: nobody is there\n")  # not click's for an EOFError


@pytest.mark.parametrize("arguments", [["--help"], ["bad"]])
def test_a_broken_command_is_left_out_with_its_cause(with_commands, capsys, arguments):
    run(arguments)
    assert "command 'bad' of tp-hello 1.0 is broken: ImportError: no such library" in capsys.readouterr().err


def test_a_command_that_loads_nothing_is_told_what_it_should(with_commands, capsys):
    run(["nothing"])
    said = "command 'nothing' of tp-hello 1.0 is broken: ContractError: its load() must return a typer.Typer"
    assert f"{said}, got NoneType" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--times", "3"], 3, "clicked 3"),
        (["--help"], 0, "--times INTEGER"),
        (["--times", "x"], 2, "Error: Invalid value for '--times'"),
        (["--tims"], 2, "No such option"),
    ],
)
def test_a_command_of_click_runs_and_ends_as_one_of_typer(with_commands, capsys, arguments, status, said):
    assert run(["clicked", *arguments]) == status
    captured = capsys.readouterr()
    assert said in captured.out + captured.err


def test_help_lists_the_commands_with_their_lines(with_commands, capsys):
    assert run(["--help"]) == 0
    out = capsys.readouterr().out
    assert "Say hello." in out
    assert "doctor" in out


def test_a_command_that_ends_the_process_while_it_loads_is_left_out_too(with_commands, capsys):
    assert run(["--help"]) == 0
    captured = capsys.readouterr()
    assert "Say hello." in captured.out
    assert "command 'ending' of tp-hello 1.0 is broken: SystemExit: 3" in captured.err


def test_a_misspelled_command_gets_a_suggestion(capsys):
    assert run(["lunch"]) == 2
    assert "did you mean 'launch'?" in capsys.readouterr().err


def test_tp_says_the_versions_of_its_packages(capsys):
    assert run(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == sorted(lines)
    assert f"tp-core {version('tp-core')}" in lines


def test_looking_after_jobs_does_not_wait_for_torch(tmp_path):
    code = (
        "import sys; from tp_core.cli import main\nsys.argv = ['tp', 'jobs']\n"
        "try: main()\nexcept SystemExit as end: assert not end.code\nassert 'torch' not in sys.modules"
    )
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=800, env=environ)


@pytest.mark.parametrize(("typed", "completed"), [("tp doc", "doctor"), ("tp doctor --j", "--json")])
def test_shells_complete_commands_and_options(typed, completed, capsys, monkeypatch):
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(typed.count(" ")))
    monkeypatch.setenv("_TP_COMPLETE", "complete_bash")
    run([])
    assert capsys.readouterr().out.split() == [completed]


def test_an_unknown_command_ends_with_a_status(capsys):
    assert run(["no-such-command"]) == 2


def test_the_doctor_finds_nothing_broken_here(capsys):
    assert run(["doctor", "--ranks", "0"]) == 0
    out = capsys.readouterr().out
    assert "Nothing is broken." in out
    assert "cpu" in out


def test_the_doctor_speaks_json(capsys):
    assert run(["doctor", "--ranks", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["problems"] == []
    assert {"python", "torch", "tp-core"} <= set(report["versions"])
    assert report["environment"]["launcher"] == "plain"
    assert all({"device", "free_bytes", "total_bytes", "utilization"} <= set(d) for d in report["devices"])


def test_the_doctor_reports_a_broken_plugin_with_its_traceback(tmp_path, capsys):
    points, modules = {"bad": "bad_plugin"}, {"bad_plugin": "1 / 0"}
    made = fake_distribution(tmp_path, "tp-bad", version="0.3", entry_points=points, modules=modules)
    with seen(made):
        report = doctor()
        assert run(["doctor", "--ranks", "0"]) == 1
    (broken,) = report["broken"]
    assert (broken["name"], broken["distribution"], broken["version"]) == ("bad", "tp-bad", "0.3")
    assert "ZeroDivisionError" in broken["traceback"]
    (problem,) = report["problems"]
    assert problem.startswith("plugin bad of tp-bad: ZeroDivisionError: division by zero; ")
    assert problem.endswith("block it with TP_DISABLE_PLUGINS=bad")
    assert "ZeroDivisionError" in capsys.readouterr().out


TALKATIVE = """
    print("loaded")
    from tp_core.plugins import Backend, Session, Verdict
    from tp_core.plugins import hookimpl

    class Talkative(Backend):
        name = "talkative"
        def assess(self, job):
            print("asked")
            return Verdict.fits(1, "it talks")
        def open(self, job):
            return Session(job)

    @hookimpl
    def tp_backends():
        print("hooked")
        return [Talkative()]
"""


@pytest.fixture
def talkative(tmp_path):
    points, modules = {"talk": "talk_plugin"}, {"talk_plugin": TALKATIVE}
    return fake_distribution(tmp_path, "tp-talk", entry_points=points, modules=modules)


def test_what_a_plugin_prints_is_no_part_of_the_report(talkative, capsys):
    with seen(talkative):
        assert run(["doctor", "--ranks", "0", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["problems"] == []
    assert all(word in captured.err for word in ("loaded", "hooked", "asked"))


def test_what_a_plugin_prints_while_it_is_loaded_never_reaches_stdout(talkative, capsys):
    with talkative:
        PluginRegistry(environ={}).broken()
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "loaded" in captured.err


def test_the_doctor_shows_what_each_plugin_brings(with_commands, capsys):
    brings = {p["name"]: p["brings"] for p in doctor()["plugins"]}
    assert brings["hello"] == {"command": ["bad", "clicked", "ending", "hello", "nothing"]}
    assert brings["tp-runner"]["engine"] == ["inline", "process", "thread"]
    assert brings["tp-tuple"] == {"backend": ["tuple"], "collate adapter": ["tuple"]}
    run(["doctor", "--ranks", "0"])
    assert "collate adapter" in capsys.readouterr().out


def test_the_doctor_says_of_a_plugin_that_it_does_not_name_its_contract(with_commands):
    report = doctor()
    assert [n for n in report["notes"] if "plugin hello (tp-hello 1.0)" in n and "tp_contract = 1" in n]
    assert not [n for n in report["notes"] if "tp-trainer" in n]


def test_the_doctor_says_which_backend_takes_long_to_assess(talkative, monkeypatch):
    clock = itertools.count(step=0.75)
    monkeypatch.setattr("tp_core.plugins._select.perf_counter", lambda: float(next(clock)))
    monkeypatch.setattr("tp_core.plugins._select.SLOW_S", 0.5)
    with seen(talkative):
        notes = doctor()["notes"]
    assert [n for n in notes if "backend talkative of tp-talk 1.0: assess() took 0.8 s" in n]


RAISING = """
    from tp_core.plugins import Backend
    from tp_core.plugins import hookimpl

    class Raising(Backend):
        name = "raising"
        def assess(self, job):
            raise RuntimeError("cannot look")
        def open(self, job):
            pass

    @hookimpl
    def tp_backends():
        return [Raising()]
"""


def test_the_doctor_reports_a_backend_that_raises_while_it_looks(tmp_path):
    points, modules = {"raise": "raise_plugin"}, {"raise_plugin": RAISING}
    with seen(fake_distribution(tmp_path, "tp-raise", entry_points=points, modules=modules)):
        report = doctor()
    assert any("assess() raised RuntimeError: cannot look" in p for p in report["problems"])


def test_the_doctor_reports_a_half_set_environment(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    report = doctor()
    assert report["environment"] is None
    assert any("WORLD_SIZE" in p for p in report["problems"])


def bare(tmp_path, *words):
    """Run ``tp`` as where tp-core alone is installed."""
    (tmp_path / "typer.py").write_text("raise ModuleNotFoundError('no', name='typer')")
    paths = [str(tmp_path), *filter(None, sys.path)]
    return tp(*words, env={"PYTHONPATH": os.pathsep.join(paths), "PATH": ""})


@pytest.mark.slow
def test_without_its_libraries_tp_has_its_commands_versions_and_a_plain_doctor(tmp_path):
    done = bare(tmp_path, "--version")
    assert done.returncode == 0
    assert f"tp-core {version('tp-core')}" in done.stdout.splitlines()
    for words in ((), ("--help",)):
        done = bare(tmp_path, *words)
        assert done.returncode == 0, done.stderr
        assert "\n  doctor " in done.stdout
        assert "need: pip install 'tp-core[cli]'" in done.stdout
        assert f"tp-core {version('tp-core')}" in done.stdout
    done = bare(tmp_path, "doctor", "--ranks", "0")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("python 3.")
    assert "\ndevices: cpu" in done.stdout
    assert "pip install 'tp-core[cli]'" in done.stderr


def test_without_its_libraries_tp_says_what_to_install(tmp_path):
    done = bare(tmp_path, "explain", "ConfigError")  # each error's message ends with this command
    assert done.stdout.startswith("### ConfigError\n"), done.stderr
    done = bare(tmp_path, "doctor", "--json")  # the plain report is none
    assert (done.returncode, done.stdout) == (1, "")
    assert "tp: the command line needs typer" in done.stderr
    assert "pip install 'tp-core[cli]'" in done.stderr


def test_the_doctor_says_what_does_not_work_on_a_platform():
    from tp_core.cli._plain import platform_notes  # private: no other platform is at hand

    assert any("engine='thread'" in note for note in platform_notes("win32"))
    assert any("the accelerator trains in one process" in note for note in platform_notes("darwin"))
    assert platform_notes("linux") == []


def test_a_pipe_has_the_width_that_is_asked_for(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    assert run(["doctor", "--ranks", "0"]) == 0
    assert 50 < max(map(len, capsys.readouterr().out.splitlines())) <= 60


def test_tp_is_a_module_too():
    done = tp("--version")
    assert done.returncode == 0, done.stderr
    assert f"tp-core {version('tp-core')}" in done.stdout.splitlines()


@pytest.mark.parametrize(
    ("keywords", "points", "is_named"),
    [
        ("pytorch,tp-plugin", {}, True),
        ("tp-plugin pytorch", {}, True),
        ("tp-plugin", {"hello": "hello_plugin"}, False),
        ("tp-plugins", {}, False),
    ],
)
def test_doctor_names_a_plugin_whose_entry_point_was_forgotten(keywords, points, is_named, tmp_path):
    with fake_distribution(
        tmp_path, "acme", entry_points=points, modules={"hello_plugin": COMMANDS}
    ) as place:
        (metadata,) = place.glob("*.dist-info/METADATA")
        metadata.write_text(metadata.read_text() + f"Keywords: {keywords}\n")
        notes = doctor()["notes"]
    assert any("distribution acme has the keyword 'tp-plugin'" in note for note in notes) == is_named
