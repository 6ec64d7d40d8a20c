"""The engine `ray` where there is no cluster: it is found, checks options, and loads nothing of Ray's."""

import subprocess
import sys

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_core.plugins import registry


def test_the_registry_finds_the_engine():
    (found,) = [found for found in registry.engines() if found.item.name == "ray"]
    assert found.distribution == "tp-ray"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"resources": {"num_cpus": -1}}, "resources must say how much .*got {'num_cpus': -1}"),
        ({"placement": "wide"}, "placement must be one of 'pack', 'spread', .*, got 'wide'"),
        ({"min_workers": 2}, "min_workers=2 is more than there are devices, 1"),
        ({"start_method": "fork"}, "engine 'ray' has no use for start_method='fork': Ray starts the workers"),
        ({"max_items_per_worker": 3}, "engine 'ray' has no use for .*: only processes are replaced"),
    ],
)
def test_options_are_checked_before_a_cluster_is_looked_for(options, message):
    with pytest.raises(ConfigError, match=message):
        tp_runner.map(abs, [1], n_workers=1, engine="ray", **options)


LOOK = """
import sys, tp_ray._plugin
tp_ray._plugin.tp_engines()
print(sorted({"ray", "torch"} & sys.modules.keys()))
"""


def test_to_find_the_engine_loads_neither_ray_nor_torch():
    command = [sys.executable, "-c", LOOK]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800)
    assert done.stdout == "[]\n"


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(type(registry), "engines", lambda _: [])
    with pytest.raises(ConfigError, match=r"engine 'ray' is in a .*; pip install 'tp-runner\[ray\]'"):
        tp_runner.map(abs, [1], n_workers=1, engine="ray")
