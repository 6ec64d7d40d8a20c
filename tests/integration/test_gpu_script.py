"""The script for GPU machines runs all gpu tests there are, and loses nothing to one that fails."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "run.py"


def module_of(path):
    spec = importlib.util.spec_from_file_location(f"gpu_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def script():
    return module_of(SCRIPT)


@pytest.fixture(scope="module")
def llama():
    return module_of(SCRIPT.with_name("llama.py"))


def execute(command, **options):
    options = {"capture_output": True, "text": True, "timeout": 800, "cwd": ROOT, **options}
    return subprocess.run(list(map(str, command)), check=False, **options)


def run(*arguments):
    return execute([sys.executable, SCRIPT, *arguments])


def gpu_tests():
    """Return the names of the gpu tests that pytest collects."""
    collected = execute([sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "gpu"])
    found = {line for line in collected.stdout.splitlines() if "::" in line and not line.startswith(" ")}
    assert len(found) > 100
    return found


@pytest.mark.nightly
def test_it_lists_every_gpu_test_that_pytest_collects():
    listed = run("--list")
    assert listed.returncode == 0, listed.stderr
    assert {name for name in listed.stdout.splitlines() if not name.startswith("benchmark ")} == gpu_tests()


@pytest.mark.takes(40)
@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_every_gpu_test_is_skipped_with_its_reason(script, tmp_path):
    out = tmp_path / "folder" / "out.json"
    done = run("--json", out, "--only", "tests")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert found["machine"]["devices"] == []
    assert {entry["name"] for entry in found["tests"]} == gpu_tests()
    assert {entry["package"] for entry in found["tests"]} >= {
        f"tp_{name}" for name in ("core", "tuple", "dp_gather", "shard", "runner", "trainer")
    }
    options = {"folder": tmp_path, "environment": dict(os.environ), "limit_s": 800, "end": script.now() + 800}
    for entry in [*found["tests"], script.run_benchmark("step_time", **options)]:
        assert entry["outcome"] == "skipped", entry
        assert "CUDA device" in entry["reason"] or "accelerator" in entry["reason"], entry


@pytest.mark.takes(150)
@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_it_is_rehearsed_on_simulated_devices(tmp_path):
    out = tmp_path / "out.json"
    done = run("--device", "sim", "--json", out, "--budget-s", "150")
    found = json.loads(out.read_text())
    entries = [*found["tests"], *found["benchmarks"]]
    wrong = [entry for entry in entries if entry["outcome"] not in {"passed", "skipped", "not run"}]
    assert (done.returncode, wrong) == (0, []), done.stdout[-3000:] + done.stderr[-3000:]
    assert {entry["package"] for entry in entries if entry["outcome"] == "passed"} >= {
        "integration",
        "benchmarks",
    }


TESTS = """
    import os, signal, time, warnings
    import pytest

    pytestmark = pytest.mark.gpu

    def test_first():
        warnings.warn("mind the gap", UserWarning, stacklevel=1)

    def test_that_fails():
        assert 1 == 2

    def test_that_hangs():
        open("hanging", "w").close()
        while True:
            time.sleep(0.1)

    def test_that_dies():
        os.kill(os.getpid(), signal.SIGKILL)

    @pytest.mark.skip(reason="not today")
    def test_skipped():
        pass

    @pytest.mark.parametrize("word", ["a b", "['c']"])
    def test_last(word):
        pass
"""


@pytest.fixture
def tests_of(script, tmp_path):
    """Run the tests of some files as those of one package; return entries by name."""

    def run_them(*texts, deadline_s=800.0, limit_s=800.0):
        files = [tmp_path / f"test_{i}.py" for i in range(len(texts))]
        for path, text in zip(files, texts, strict=True):
            path.write_text(textwrap.dedent(text))
        entries = []
        script.run_tests(
            "package",
            files,
            ini=script.write_ini(tmp_path),
            environment=script.make_environment(tmp_path),
            deadline=script.now() + deadline_s,
            limit_s=limit_s,
            root=tmp_path,
            add=entries.extend,
        )
        assert len({e["name"] for e in entries}) == len(entries)
        return {e["name"].partition("::")[2] or e["name"]: e for e in entries}

    return run_them


@pytest.mark.slow
def test_tests_that_fail_hang_or_die_cost_no_other(tests_of):
    found = tests_of(TESTS, limit_s=10.0)
    assert {name: entry["outcome"] for name, entry in found.items()} == {
        "test_first": "passed",
        "test_that_fails": "failed",
        "test_that_hangs": "timeout",
        "test_that_dies": "crashed",
        "test_skipped": "skipped",
        "test_last[a b]": "passed",
        "test_last[['c']]": "passed",
    }
    assert "assert 1 == 2" in found["test_that_fails"]["reason"]
    assert "not today" in found["test_skipped"]["reason"]
    assert found["test_first"]["warnings"] == ["UserWarning: mind the gap"]


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_costs_no_other(tests_of):
    found = tests_of(
        "import nothing_of_that_name", TESTS.replace("while True", "while False").replace("kill", "str")
    )
    assert found["test_0.py"]["outcome"] == "not collected"
    assert "nothing_of_that_name" in found["test_0.py"]["reason"]
    assert found["test_last[a b]"]["outcome"] == "passed"


HIDING = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"hypothesis", "pytest_timeout", "xdist", "transformers"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
"""


@pytest.mark.slow
def test_pytest_is_all_that_the_tests_need(script, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(HIDING)
    record = tmp_path / "record"
    path = ROOT / "tests" / "tp_dp_gather" / "test_gpu.py"
    command = [sys.executable, SCRIPT.with_name("session.py"), record, script.write_ini(tmp_path), ROOT]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = execute([*command, "--collect-only", path], env=environment)
    (collected,) = [e for e in script.read_record(record) if e["event"] == "collected"]
    assert len(collected["ids"]) > 5, done.stdout


@pytest.mark.slow
def test_a_list_without_the_tests_is_an_error(script, tmp_path, monkeypatch, capfd):
    (tmp_path / "conftest.py").write_text("import nothing_of_that_name")
    (tmp_path / "test_a.py").write_text("def test_a(): pass")
    monkeypatch.setattr(script, "groups_of_tests", lambda folder: {"a": [tmp_path / "test_a.py"]})
    monkeypatch.setattr(script, "benchmark_limits", lambda environment: {})
    assert script._list(script.write_ini(tmp_path), dict(os.environ), script.now() + 800) == 1
    assert "nothing_of_that_name" in capfd.readouterr().err


@pytest.mark.slow
def test_when_time_is_up_what_was_not_run_is_said(tests_of, script, tmp_path, monkeypatch):
    # Time is up as soon as that test hangs, however long the others took.
    monkeypatch.setattr(script, "now", lambda: 1e3 * (tmp_path / "hanging").exists())
    found = tests_of(TESTS)
    for name in ("test_that_hangs", "test_that_dies"):
        assert (found[name]["outcome"], found[name]["reason"]) == ("not run", "out of time")


# The script with one file of tests. It ends at SIGTERM, also where what started these tests ignores that.
PROGRAM = """
import importlib.util, pathlib, signal, sys
signal.signal(signal.SIGTERM, signal.SIG_DFL)
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
_, path, test, out = sys.argv
spec = importlib.util.spec_from_file_location("script", path)
script = importlib.util.module_from_spec(spec)
spec.loader.exec_module(script)
script.groups_of_tests = lambda _: {"package": [pathlib.Path(test)]}
sys.exit(script.main(["--json", out, "--only", "tests"]))
"""

KILLED = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.gpu

def test_first():
    pass

def test_that_hangs():
    pathlib.Path(__file__).with_name("pid").write_text(str(os.getpid()))
    time.sleep(800)
"""


def wait_until(condition, deadline_s=120.0):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def is_alive(process_id):
    # One that has ended and that nobody has waited for yet is a zombie, "Z".
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_run_that_is_killed_leaves_what_it_knew_and_no_process(tmp_path, number):
    test, out, noted = tmp_path / "test_a.py", tmp_path / "out.json", tmp_path / "pid"
    test.write_text(KILLED)
    started = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, SCRIPT, test, out], stdout=subprocess.DEVNULL, cwd=ROOT
    )
    try:
        wait_until(lambda: noted.exists() and noted.read_text() and "test_first" in out.read_text())
        assert is_alive(noted.read_text())
        started.send_signal(number)
        wait_until(lambda: not is_alive(noted.read_text()))
    finally:
        started.kill()
        started.wait()
    (entry,) = json.loads(out.read_text())["tests"]
    assert (entry["name"].partition("::")[2], entry["outcome"]) == ("test_first", "passed")


@pytest.mark.slow
def test_the_tests_and_the_configuration_are_all_of_the_checkout_that_it_needs(tmp_path):
    shutil.copytree(ROOT / "tests", tmp_path / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    script, test = tmp_path / SCRIPT.relative_to(ROOT), tmp_path / "tests" / "tp_dp_gather" / "test_gpu.py"
    out = tmp_path / "out.json"
    done = execute([sys.executable, "-c", PROGRAM, script, test, out], cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {entry["package"] for entry in found["tests"]} == {"package"}
    assert found["machine"]["tp-dp-gather"]


@pytest.mark.slow
def test_packages_that_are_not_installed_are_found_with_their_plugins(script, tmp_path, monkeypatch):
    def missing(name):
        raise script.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(script.metadata, "version", missing)
    environment = script.make_environment(tmp_path)
    code = (
        "from importlib import metadata; from tp_core.plugins import registry; import tp_runner; "
        "print(metadata.distribution('tp-tuple').locate_file('')); "
        "print(*sorted(c.item.name for c in registry.backends()))"
    )
    done = execute([sys.executable, "-c", code], env=environment)
    assert done.returncode == 0, done.stderr
    where, backends = done.stdout.splitlines()
    assert Path(where).resolve() == tmp_path.resolve()
    assert {"tuple", "single", "dp-gather", "shard"} <= set(backends.split())


def test_the_file_is_whole_after_each_entry(script, tmp_path):
    report = script.Report(tmp_path / "deep" / "out.json")
    report.add("tests", [script._entry("a", "p", "passed")])
    report.add("benchmarks", [script._entry("b", "p", "crashed", reason="why")])
    found = json.loads((tmp_path / "deep" / "out.json").read_text())
    assert found["summary"] == {"tests": {"passed": 1}, "benchmarks": {"crashed": 1}}
    assert not report.is_good
    report = script.Report()
    report.add("benchmarks", [script._entry("a", "p", "not run", reason="out of time")])
    assert report.is_good


def test_a_benchmark_that_crashes_or_hangs_is_an_entry(script, tmp_path, monkeypatch):
    (tmp_path / "benchmarks.py").write_text(
        "import sys, time\nprint('so far')\nsys.exit(3) if 'a' in sys.argv else time.sleep(99)"
    )
    monkeypatch.setattr(script, "HERE", tmp_path)
    options = {"folder": tmp_path, "environment": dict(os.environ), "end": script.now() + 800}
    crashed = script.run_benchmark("a", **options, limit_s=800)
    assert (crashed["outcome"], crashed["reason"]) == ("crashed", "so far\n")
    assert script.run_benchmark("b", **options, limit_s=1)["outcome"] == "timeout"
    monkeypatch.setattr(script, "LEAST_S", 0.5)
    for name, left_s in (("b", 1.0), ("a", 0.1)):
        options["end"] = script.now() + left_s
        assert script.run_benchmark(name, **options, limit_s=800)["outcome"] == "not run"


# In one process, as most of the time of each would go into imports.
ALL = """
import runpy, sys
_, script, folder, *names = sys.argv
for name in names:
    sys.argv = [script, name, f"{folder}/{name}.json", "--device", "cpu"]
    sys.path.insert(0, folder)  # the script takes its own folder out
    runpy.run_path(script, run_name="__main__")
"""


@pytest.mark.slow
def test_the_benchmarks_run_in_small_on_the_cpu(script, tmp_path):
    names = script.benchmark_limits(dict(os.environ))
    assert len(names) >= 12
    command = [sys.executable, "-c", ALL, SCRIPT.with_name("benchmarks.py"), tmp_path, *names]
    # The default compiler would make C++ of the small model, for longer than all else takes.
    done = execute(command, env={**os.environ, "TORCHDYNAMO_DISABLE": "1"})
    assert done.returncode == 0, done.stderr
    for name in names:
        assert json.loads((tmp_path / f"{name}.json").read_text())["figures"], name


@pytest.mark.slow
def test_the_language_model_is_the_llama_of_transformers(llama):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = llama.TINY
    config = LlamaConfig(
        hidden_size=sizes.width,
        num_hidden_layers=sizes.depth,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.shared_heads,
        intermediate_size=sizes.inner,
        vocab_size=sizes.words,
        rms_norm_eps=torch.finfo(torch.float32).eps,
    )
    ours, theirs = llama.Llama(sizes), LlamaForCausalLM(config)
    with torch.no_grad():
        for mine, other in zip(ours.parameters(), in_our_order(theirs), strict=True):
            other.copy_(mine)
    words = torch.randint(sizes.words, (3, sizes.length + 1))
    inputs, targets = words[:, :-1], words[:, 1:]
    loss = ours(inputs, targets)
    logits = theirs(input_ids=inputs).logits
    torch.testing.assert_close(
        loss, torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    )


def in_our_order(model):
    """Yield the parameters of a Llama of transformers as ours has them."""
    yield model.model.embed_tokens.weight
    for layer in model.model.layers:
        attention, inner = layer.self_attn, layer.mlp
        yield from (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
        yield from (
            p.weight for p in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
        )
        yield from (inner.gate_proj.weight, inner.up_proj.weight, inner.down_proj.weight)
    yield from (model.model.norm.weight, model.lm_head.weight)


def test_the_operations_of_a_token_are_those_of_the_papers_formula(llama):
    sizes = llama.TINY
    of_a_block = 32 * (32 + 16 + 16 + 32 + 3 * 64) + 2 * 32
    weights = 2 * of_a_block + 32 + 32 * 50
    expected = 6 * weights + 12 * 2 * 32 * 16
    assert llama.operations_of_a_token(llama.Llama(sizes), sizes) == expected
    with torch.device("meta"):
        assert sum(p.numel() for p in llama.Llama(llama.Sizes()).parameters()) == 1_100_048_384


def test_the_part_of_a_cards_operations_is_known_for_known_cards(llama):
    assert llama.utilization(494.7e12, "NVIDIA H200") == 0.5
    assert llama.utilization(494.7e12, "CPU") is None
