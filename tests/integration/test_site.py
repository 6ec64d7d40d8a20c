"""The documentation site builds without a warning, and names all that is public."""

from importlib import import_module
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

DOCS = Path(__file__).parents[2] / "docs"
PACKAGES = sorted(path.name for path in DOCS.parent.glob("packages/*/src/*") if path.is_dir())


@pytest.mark.parametrize("package", PACKAGES)
def test_the_reference_of_a_package_has_its_public_names(site, package):
    page = (site / "api" / f"{package}.html").read_text()
    public = [name for name in import_module(package).__all__ if not name.isupper()]
    documented = [name for name in public if f'id="{package}.{name}"' in page]
    modules = {
        "callbacks",
        "compat",
        "distributed",
        "errors",
        "hosting",
        "loggers",
        "nn",
        "plans",
        "plugins",
        "tuning",
    }  # they have pages or sections of their own
    elsewhere = {"Callback", "RunView"} if package == "tp_trainer" else set()  # tp_core.plugins has them
    aliases = {"DeviceSpec", "LossReduction", "Precision", "ReduceOp", "StepOutput", "Step"}
    assert set(public) - set(documented) - modules - elsewhere - aliases == set()
