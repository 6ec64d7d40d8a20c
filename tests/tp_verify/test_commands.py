"""``tp verify`` on a command line, and the fixture of pytest in a project of others."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tp_verify._preload import imports_of
from tp_verify._script_runs import ScriptRun, Trials, compare_runs

ROOT = Path(__file__).parents[2]

CASES = """
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def build():
    return nn.Linear(3, 1)


def step(model, batch):
    return model(batch).square().mean()


def unchanged(model):
    print("what libraries log")
    return model


def cases():
    given = {"build": build, "batches": [torch.ones(4, 3).cumsum(0)], "step": step}
    return [{**given, "parallel": DistributedDataParallel}, {**given, "parallel": unchanged}]


def half():
    return {"build": build, "step": step}


def typo():
    return {**cases()[0], "max_nrom": 1.0}


def nothing():
    pass


def parts(model):
    return model(torch.ones(1, 4))


def fails():
    return {**cases()[0], "parallel": parts}


def waits(model):
    while torch.distributed.is_initialized():
        pass


def hangs():
    return {**cases()[0], "parallel": waits, "vary": False}
"""


def tp_verify(folder, *arguments, environ=None):
    command = [sys.executable, "-m", "tp_core.cli", "verify", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environ, capture_output=True, text=True, timeout=800, check=False
    )


@pytest.mark.slow
def test_the_command_proves_and_names(tmp_path):
    (tmp_path / "mine.py").write_text(CASES)
    done = tp_verify(tmp_path, "mine.py:cases", "--json", "--html", "page.html")
    assert done.returncode == 1, done.stderr
    first, second = json.loads(done.stdout)["reports"]
    assert (first["ok"], second["ok"]) == (True, False)
    assert second["finding"]["what"] == "the gradient"
    assert done.stderr.count("what libraries log") == 2  # a rank each
    assert "parts from one device" in (tmp_path / "page.html").read_text()
    for name, said in (
        ("half", "verify(): missing a required argument: 'batches'; write verify(build, batches, parallel="),
        ("typo", "verify() has no argument 'max_nrom'; did you mean 'max_norm'?"),
        ("nothing", "has to return arguments of verify() as a dict, or a list of dicts; got None"),
    ):
        assert said in tp_verify(tmp_path, f"mine.py:{name}").stderr
    done = tp_verify(tmp_path, "mine.py:fails")
    (said,) = done.stderr.strip().splitlines()
    assert re.match(
        r"tp verify: rank [01] raised: RuntimeError: mat1 and mat2 .*mine\.py, in parts; --trace", said
    )
    done = tp_verify(tmp_path, "mine.py:cases", "--dtype", "int8")
    assert "--dtype is one of float64, float32, bfloat16, got 'int8'" in done.stderr
    (tmp_path / "script.py").write_text("raise SystemExit('it ran')")
    done = tp_verify(tmp_path, "script.py", "--dtype", "float32")
    assert "--dtype is for file.py:function; a script makes its model in a type of its own" in done.stderr


@pytest.mark.slow
def test_a_hang_is_said_in_one_line_and_the_stacks_follow_where_they_are_asked_for(tmp_path):
    (tmp_path / "mine.py").write_text(CASES)
    hangs = tmp_path, "mine.py:hangs", "--timeout-s", "10"
    (said,) = tp_verify(*hangs).stderr.strip().splitlines()
    assert re.match(
        r"tp verify: rank 0 had not ended at the deadline \(line \d+ of .*mine\.py, in waits; --trace", said
    )
    done = tp_verify(*hangs, "--traceback")
    said, *stacks = done.stderr.strip().splitlines()
    assert said == "tp verify: rank 0 had not ended at the deadline", done.stderr
    assert len([line for line in stacks if line.endswith(" in waits")]) == 2, done.stderr


TEST = """
from mine import build, step, unchanged
import torch
from torch.nn.parallel import DistributedDataParallel

BATCHES = [torch.ones(4, 3).cumsum(0)]


def test_proven(tp_verify):
    assert tp_verify(build, BATCHES, parallel=DistributedDataParallel, step=step)


def test_parts(tp_verify):
    tp_verify(build, BATCHES, parallel=unchanged, step=step)
"""


@pytest.mark.slow
def test_the_fixture_fails_a_test_with_the_report(tmp_path):
    (tmp_path / "mine.py").write_text(CASES)
    (tmp_path / "test_mine.py").write_text(TEST)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_mine.py"]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800, check=False
    )
    assert "1 failed, 1 passed" in done.stdout
    assert "unchanged on 2 ranks, float64: parts from one device" in done.stdout


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Dropout({rate}), nn.Linear(8, 1))
data = TensorDataset(torch.randn(24, 4), torch.randn(24, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
draws = {draws}


def step(model, batch):
    return nn.functional.mse_loss(model(batch[0]) + draws(), batch[1])


Trainer(seed=0, progress=False).fit(
    model, optimizer, DataLoader(data, batch_size=4, shuffle=True), step=step, epochs=3
)
"""


FUNCTIONS_DROP = """lambda: (
    nn.functional.dropout(torch.ones(4), 0.4).mean()
    + nn.functional.scaled_dot_product_attention(*torch.ones(3, 1, 2, 2), dropout_p=0.4).mean()
)"""


@pytest.mark.slow
@pytest.mark.takes(40)
def test_a_script_is_stopped_resumed_and_tried_on_each_backend(tmp_path):
    script = SCRIPT.format(rate=0.0, draws=FUNCTIONS_DROP).replace("batch_size=4", "batch_size=2")
    (tmp_path / "train.py").write_text(script)
    done = tp_verify(tmp_path, "train.py")
    assert done.returncode == 0, done.stdout + done.stderr
    # By default four steps beyond the first epoch, here of 12.
    assert "16 steps, of which a SIGTERM ended the run after 6" in done.stdout
    for backend in ("tuple", "dp-gather", "ddp", "fsdp", "shard"):
        assert f"backend {backend} on" in done.stdout
    assert "not covered: dropout and the statistics of batch norms" in done.stdout


VERIFIES = """
verified = Trainer().verify(steps=4)
if verified.text:  # there is none in the runs that this call starts
    print(bool(verified), verified.reports[0]["finding"]["what"])
    raise SystemExit
"""
OTHERS = "tp-tuple,tp-dp-gather,tp-shard,tp-context,tp-pipeline"


@pytest.mark.slow
@pytest.mark.takes(20)
def test_a_script_verifies_itself(tmp_path):
    script = SCRIPT.format(rate=0.0, draws="__import__('random').SystemRandom().random")
    (tmp_path / "train.py").write_text(script.replace("\nTrainer(", VERIFIES + "\nTrainer("))
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**os.environ, "TP_DISABLE_PLUGINS": OTHERS},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    # Draws of the system cannot be resumed.
    assert done.stdout == "False the weight\n", done.stderr


@pytest.mark.slow
def test_a_run_that_hangs_is_a_finding(tmp_path):
    (tmp_path / "train.py").write_text("import time\n\ntime.sleep(1000)\n")
    # Private: the command has one deadline for all its runs, also for those that have to train.
    hung = Trials(tmp_path / "train.py", [], tmp_path, steps=2, timeout_s=3.0).run("ddp", "ddp")
    report = compare_runs(ScriptRun([]), ScriptRun([]), hung, "ddp", 1, 2)
    assert not report.ok
    assert report.finding.said == "it had not ended after 3 s"


@pytest.mark.slow
@pytest.mark.takes(25)
def test_a_backend_that_fails_is_a_finding_and_one_that_refuses_is_not(tmp_path):
    fails = "lambda: 1 / 0 if __import__('os').environ.get('RANK') == '1' else 0.0"
    (tmp_path / "train.py").write_text(SCRIPT.format(rate=0.2, draws=fails))
    # 6 of 15 steps are an epoch: the resumed run has no metrics of the first one. The test above tries all.
    environ = {**os.environ, "TP_DISABLE_PLUGINS": "tp-dp-gather,tp-shard,tp-pipeline"}
    done = tp_verify(tmp_path, "train.py", "--steps", "15", "--json", environ=environ)
    assert done.returncode == 1, done.stderr
    reports = {report["name"]: report for report in json.loads(done.stdout)["reports"]}
    assert reports["stopped by SIGTERM and resumed"]["ok"], reports
    assert reports["backend tuple"]["ok"]
    for backend in ("ddp", "fsdp"):
        assert reports[f"backend {backend}"]["finding"]["said"] == "ZeroDivisionError: division by zero"
    refused = reports["backend context"]
    assert refused["ok"]
    (said,) = refused["not_covered"]
    assert "it refused: it is not clear what in the batch has the sequence" in said


def record(**changes):
    plain = {"step": 3, "backend": "single", "weights": {}, "buffers": {}, "states": {}, "metrics": {}}
    return {**plain, "rows": [[1.0, 2.0]] * 3, "norms": {}, "is_drawn": False, **changes}


def test_where_a_script_names_its_own_backend_nothing_is_claimed():
    # Private, as the two below: a script has to be wrong on one backend alone, at a known step.
    report = compare_runs(*[ScriptRun([record()])] * 2, ScriptRun([record(backend="tuple")]), "ddp", 2, 3)
    assert (report.ok, report.compared) == (True, {})
    assert report.not_covered == ["the script itself names a backend, 'tuple'"]


def test_the_first_step_with_another_weight_is_named():
    whole = record(weights={"a.weight": torch.ones(1)}, norms={n: {"a.weight": 1.0} for n in (1, 2, 3)})
    other = record(
        backend="ddp",
        weights={"a.weight": torch.full((1,), 1.2)},
        norms={1: {"a.weight": 1.0}, 2: {"a.weight": 1.1}, 3: {"a.weight": 1.2}},
    )
    first, last = ScriptRun([whole]), ScriptRun([other])
    finding = compare_runs(first, first, last, "ddp", 1, 3).finding
    assert str(finding) == "step 2: the weight of a.weight: rank 0: its norm is 1.1, and not 1"
    # Where a rounding of the first weights grows as far, this is one, too.
    report = compare_runs(first, last, last, "ddp", 1, 3)
    assert report.ok
    assert report.not_covered == ["less than 1 of a weight: one rounding at the start grows to 0.2"]


def test_ranks_that_share_samples_have_those_of_one_device():
    whole, first = [ScriptRun([record()])] * 2, record(backend="ddp", rows=[[2.0]] * 3)
    report = compare_runs(*whole, ScriptRun([first, record(backend="ddp", rows=[[1.0]] * 3)]), "ddp", 2, 3)
    assert (report.ok, report.compared["batches"]) == (True, 3)
    report = compare_runs(
        *whole, ScriptRun([first, record(backend="ddp", rows=[[1.0], [3.0], [1.0]])]), "ddp", 2, 3
    )
    assert (report.finding.what, report.finding.step) == ("the order of samples", 2)


def test_a_script_that_is_not_there_is_named(tmp_path):
    done = tp_verify(tmp_path, "nothing.py")
    assert "there is no script 'nothing.py'; a function is written file.py:function" in done.stderr
    done = tp_verify(tmp_path, "train.py", "--epochs", "2")
    assert "a script's own arguments follow --" in done.stderr


def test_imports_are_made_before_a_run_up_to_what_may_depend_on_the_script(tmp_path):
    script, begins = tmp_path / "train.py", '"""Train."""\nimport json, ast\nfrom os import path as p\n'
    (tmp_path / "beside.py").touch()
    for follows in ("import beside", "from . import other", "os.environ['A'] = '1'"):
        script.write_text(f"{begins}{follows}\nimport string\n")
        assert imports_of(script) == ["import json, ast", "from os import path as p"]
    script.write_text(f"{begins}def draw():\n    import string\n")
    assert imports_of(script) == ["import json, ast", "from os import path as p", "import string"]
    script.write_text("import json\nimport")
    assert imports_of(script) == []


@pytest.mark.nightly
@pytest.mark.takes(60)
@pytest.mark.needs("accelerate", "peft")
def test_adapters_are_kept_in_a_checkpoint_of_todays_accelerate():
    done = tp_verify(ROOT / "docs/examples/found", "adapters.py:cases")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "proven for a checkpoint that 2 ranks loaded" in done.stdout


REPORTED = {
    "torch-ddp-unfrozen-later": "programs/unfrozen_after_ddp.py:faulty",
    "torch-ddp-replaced-parameter": "programs/head_replaced_after_ddp.py:faulty",
    "torch-optimizer-before-fully-shard": "programs/optimizer_before_sharding.py:faulty",
    "torch-hook-of-each-use": "programs/hook_of_each_use.py:faulty",
    "accelerate-scheduler-per-rank": "pinned/scheduler_of_accelerate.py:cases",
}


@pytest.mark.nightly
@pytest.mark.takes(30)
@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("report", REPORTED)
def test_todays_versions_show_what_a_report_says(report):
    page = (ROOT / f"docs/found/{report}.md").read_text(encoding="utf-8")
    expected = page.rpartition("```text\n")[2].partition("\n```")[0]
    done = tp_verify(ROOT, f"tests/silentbench/{REPORTED[report]}")
    assert f"parts from one device\n  {expected}" in done.stdout, done.stdout + done.stderr


EXPERTS = [
    r"output of model\.layers\.0\.mlp\.experts$",
    r"output of model\.layers\.0\.mlp\.gate\.1",
    r"model\.layers\.\d\.mlp\.",  # what is in memory decides where
    r"gradient of model\.layers\.1\.mlp\.gate\.weight",
    r"output of model\.layers\.0\.mlp\.experts\.act_fn",
    "",
]
BEFORE = ["transformers==5.5.4", "huggingface-hub==1.5.0", "tokenizers==0.22.2"]
BEFORE += ["anyio", "h11", "httpcore", "httpx"]
ZERO = ["deepspeed==0.19.8", "einops", "hjson", "msgpack", "py-cpuinfo", "ninja"]
FABRIC, MEGATRON = ["lightning==2.6.6"], ["megatron-core==0.16.1"]
TITAN = ["torchtitan==0.3.0", "spmd-types", "tyro", "shtab", "typeguard"]


STACKS = [
    (BEFORE, "experts.py", EXPERTS),  # before its pull request 45473
    (["accelerate==1.14.0"], "adapters.py", [r"loaded weight of .*lora_A"]),  # before 4206
    (["accelerate==1.15.0"], "hybrid.py", ["", ""]),
    (FABRIC, "joint_setup.py", ["change of the weight", "", ""]),
    (MEGATRON, "megatron_layers.py", ["", "gradient of the input of up"]),
    (TITAN, "titan_llama.py", ["", ""]),
    (ZERO, "zero.py", ["", "", "", "change of the weight"]),
    (ZERO, "zero_experts.py", [""]),
    (ZERO, "zero_twice.py", ["", "", ""]),
    ([], "uneven_stages.py", ["the loss", ""]),
    ([], "trainer_tokens.py", ["", "the loss"]),
]


def installed_into(folder, packages):
    """Return an environment of processes that find these packages before those of this environment."""
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation"]
    if packages:
        subprocess.run([*install, "--target", str(folder), *packages], check=True, timeout=600)
    paths = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths}


@pytest.mark.nightly
@pytest.mark.takes(200)
@pytest.mark.needs("transformers", "accelerate", "peft")
@pytest.mark.parametrize(("packages", "file", "findings"), STACKS, ids=[file for _, file, _ in STACKS])
def test_what_the_page_says_of_other_stacks_is_so(packages, file, findings, tmp_path):
    program, environ = f"{ROOT}/docs/examples/found/{file}:cases", installed_into(tmp_path, packages)
    done = tp_verify(tmp_path, program, "--json", environ=environ)
    found = [report["finding"] or {} for report in json.loads(done.stdout)["reports"]]
    for finding, expected in zip(found, findings, strict=True):
        said = f"{finding.get('what', '')} of {finding.get('module', '')}.{finding.get('tensor', '')}".strip(
            ". "
        )
        assert re.search(expected, said) if expected else not finding, (said, done.stderr)


YOURS = ROOT / "docs/verify-yours.md"
OWN_BLOCKS = {"lightning": FABRIC, "deepspeed": ZERO, "megatron-core": MEGATRON}
OWN_BLOCK = re.compile(
    r"^```\{code-block\} python\n:name: (\S+)\n\n(.*?)^```\n\n```text\n(.*?)^```", re.MULTILINE | re.DOTALL
)


def test_each_library_of_the_page_has_its_block():
    assert [name for name, _, _ in OWN_BLOCK.findall(YOURS.read_text())] == [*OWN_BLOCKS]


@pytest.mark.nightly
@pytest.mark.takes(120)
@pytest.mark.parametrize("name", OWN_BLOCKS)
def test_a_block_with_another_library_prints_what_the_page_says(name, tmp_path):
    text = YOURS.read_text()
    shared = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)[1]
    own, says = {block: rest for block, *rest in OWN_BLOCK.findall(text)}[name]
    environ = installed_into(tmp_path / "installed", OWN_BLOCKS[name])
    (tmp_path / "yours.py").write_text(shared + own)
    command = [sys.executable, "-W", "ignore", "yours.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    found = [line for line in done.stdout.splitlines() if line.startswith(("None", "step "))]
    assert found == says.splitlines()
