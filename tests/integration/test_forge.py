"""The files that a forge reads: workflows, forms, hooks, each calling commands that exist."""

import re
import subprocess
import tomllib

import pytest
import yaml

from tests.wheels import ROOT

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))
SCRIPT_KEYS = {"run", "name", "if", "env", "working-directory", "shell", "id"}
ACTION_KEYS = {"uses", "with", "name", "if", "env", "id"}
JOB_KEYS = {
    "name",
    "runs-on",
    "timeout-minutes",
    "steps",
    "strategy",
    "env",
    "if",
    "needs",
    "permissions",
    "environment",
}
CONTEXTS = {"github", "matrix", "env", "needs", "steps", "secrets", "runner", "inputs", "vars"}


def load(path):
    return yaml.safe_load(path.read_text())


def scripts():
    """Return what `hatch run` knows, scripts of other environments with theirs before them."""
    found = set()
    for name, settings in tomllib.loads((ROOT / "hatch.toml").read_text())["envs"].items():
        found |= {
            script if name == "default" else f"{name}:{script}" for script in settings.get("scripts", {})
        }
    return found


def test_an_environment_that_is_made_first_leaves_the_place_of_the_default_one():
    """Beside pyproject.toml, virtualenv makes `.venv` a file that names the first one (PEP 832)."""
    environments = tomllib.loads((ROOT / "hatch.toml").read_text())["envs"]
    paths = {settings["path"] for settings in environments.values() if "path" in settings}
    assert {path for path in paths if "/" not in path} == {".venv"}


def commands(path):
    return [step["run"] for job in load(path)["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_is_one_that_a_forge_takes(path):
    workflow = load(path)
    # YAML reads the key "on" as a truth.
    assert set(workflow) <= {"name", True, "permissions", "concurrency", "env", "jobs"}
    assert set(workflow[True]) <= {"push", "pull_request", "schedule", "workflow_dispatch"}
    assert workflow["permissions"] == {"contents": "read"}, "more is given to the jobs that need it"
    jobs = workflow["jobs"]
    for name, job in jobs.items():
        assert set(job) <= JOB_KEYS, name
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        needs = job.get("needs", [])
        assert {needs} if isinstance(needs, str) else set(needs) <= set(jobs)
        for step in job["steps"]:
            assert set(step) <= (ACTION_KEYS if "uses" in step else SCRIPT_KEYS), step
            # By its commit: whoever can move a tag could run anything here.
            assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", step.get("uses", f"a/b@{'0' * 40}")), step
        matrix = job.get("strategy", {}).get("matrix", {})
        given = {key for row in matrix.get("include", []) for key in row} | set(matrix) - {
            "include",
            "exclude",
        }
        used = set(re.findall(r"\$\{\{ *matrix\.(\w+)", str(job)))
        assert used <= given, f"{name} uses {used - given}, which its matrix lacks"
    for expression in re.findall(r"\$\{\{ *(.*?) *\}\}", path.read_text()):
        assert expression.split(".")[0] in CONTEXTS, expression


@pytest.mark.parametrize("path", [*WORKFLOWS, ROOT / ".pre-commit-config.yaml"], ids=lambda path: path.name)
def test_what_is_called_exists(path):
    called = (
        commands(path) if path in WORKFLOWS else [h["entry"] for r in load(path)["repos"] for h in r["hooks"]]
    )
    for command in called:
        for script in re.findall(r"hatch run (\S+)", command):
            assert script in scripts() | {"python", "ruff"}, command
        for file in re.findall(r"(?:^|python )((?:\.ci|tests|tools)/\S+)", command):
            assert (ROOT / file).is_file(), command
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr


def test_the_action_on_the_page_of_verify_is_one_that_a_forge_takes():
    (block,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs" / "verify.md").read_text(), re.DOTALL)
    (job,) = yaml.safe_load(block)["jobs"].values()
    assert set(job) <= JOB_KEYS
    assert all(set(step) <= (ACTION_KEYS if "uses" in step else SCRIPT_KEYS) for step in job["steps"])
    (called,) = [step["run"] for step in job["steps"] if "tp verify" in step.get("run", "")]
    known = (ROOT / "tests" / "surface" / "commands.txt").read_text().partition("\ntp verify:")[2]
    assert all(f" {option} " in known for option in re.findall(r"--[\w-]+", called)), called


def test_ci_runs_what_developers_run():
    called = " ".join(commands(ROOT / ".github/workflows/ci.yml")) + (ROOT / ".ci/run").read_text()
    for script in (
        "lint",
        "types",
        "imports",
        "test",
        "slow",
        "nightly",
        "bench:peers",
        "docs",
        "linkcheck",
        "bench",
        "dist:all",
    ):
        assert f"hatch run {script}" in called
    assert "tests/matrix.sh --wheels" in called


def test_what_builds_a_release_is_known_by_version_and_hash():
    called = commands(ROOT / ".github/workflows/release.yml")
    installed = [command for command in called if "pip install" in command]
    assert installed == ["python -m pip install --require-hashes -r tools/dist.txt"]
    entries = re.split(
        r"\n(?=\S)", (ROOT / "tools/dist.txt").read_text().partition("-c constraints.txt -\n")[2]
    )
    assert all(re.match(r"[\w.-]+==\S+ \\\n    --hash=sha256:[0-9a-f]{64}", entry) for entry in entries)
    for command in commands(ROOT / ".github/workflows/ci.yml"):
        assert re.search(r"pip install hatch(?!==)", command) is None, command


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.name)
def test_a_form_for_issues_is_one_that_a_forge_takes(path):
    form = load(path)
    if path.name == "config.yml":
        assert set(form) <= {"blank_issues_enabled", "contact_links"}
        return
    assert {"name", "description", "body"} <= set(form) <= {"name", "description", "body", "labels", "title"}
    for field in form["body"]:
        assert field["type"] in {"textarea", "input", "dropdown", "checkboxes", "markdown"}
        assert field["attributes"].get("label") or field["type"] == "markdown"


def test_the_citation_has_what_its_format_requires():
    citation = load(ROOT / "CITATION.cff")
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert all("name" in author or "family-names" in author for author in citation["authors"])


@pytest.mark.parametrize(
    "name", ["SECURITY.md", "CODE_OF_CONDUCT.md", "CONTRIBUTING.md", "LICENSE", "CHANGELOG.md"]
)
def test_the_files_that_a_forge_looks_for_are_there(name):
    assert (ROOT / name).read_text().strip()
