"""The recipe for conda and the image name every package, with what each needs."""

import json
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECTS = {
    (found := tomllib.loads(path.read_text())["project"])["name"]: found
    for path in (ROOT / "packages").glob("*/pyproject.toml")
}
CONDA = {"ray": "ray-default", "torch": "pytorch"}


@pytest.mark.needs("yaml")
def test_the_recipe_has_each_package_with_its_requirements():
    import yaml

    recipe = yaml.safe_load((ROOT / "tools" / "conda" / "recipe.yaml").read_text())
    outputs = {output["package"]["name"]: output for output in recipe["outputs"]}
    assert outputs.keys() == PROJECTS.keys()
    for name, project in PROJECTS.items():
        run = {line.split()[0]: line.partition(" ")[2] for line in outputs[name]["requirements"]["run"]}
        assert run.pop("python") == project["requires-python"]
        for line in project["dependencies"]:
            needed, asked = re.match(r"([\w-]+)(?:\[[\w,]+\])?(.*)", line).groups()
            expected = "==${{ version }}" if needed.startswith("tp-") else asked
            assert run[CONDA.get(needed, needed)] == expected, (name, needed)
        assert outputs[name]["about"]["summary"] == project["description"]


def test_the_image_has_each_package_that_others_do_not_bring():
    text = (ROOT / "tools" / "docker" / "Dockerfile").read_text()
    for name in PROJECTS.keys() - {"tp-core"}:
        assert re.search(rf"\b{name}\b", text), name
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    build = container["build"]
    assert (ROOT / ".devcontainer" / build["dockerfile"]).resolve().is_file()
    assert f"AS {build['target']}" in text
