"""How the site is made: hatch run docs."""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import _reference

project = "tp"
release = metadata.version("tp-core")
author = "The tp authors"
copyright = "The tp authors, Apache-2.0"  # noqa: A001 - Sphinx's name for it

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
if os.environ.get("TP_DOCS_SOURCES") != "0":  # listings of sources take a quarter of the time
    extensions.append("sphinx.ext.viewcode")
exclude_patterns = ["_build", "_templates", "examples"]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
suppress_warnings = ["myst.header"]  # the packages' READMEs begin at their own level

html_theme = "furo"
html_title = f"tp {release}"
copybutton_prompt_text = "$ "
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
# `hatch run release --url` writes the address into the packages; without one, no page links to its source.
_urls = dict(line.split(", ") for line in metadata.metadata("tp-core").get_all("Project-URL", ()))
if "Homepage" in _urls:
    html_theme_options = {
        "source_repository": f"{_urls['Homepage']}/",
        "source_branch": "main",
        "source_directory": "docs/",
    }
# The publisher sets TP_DOCS_URL, below which each version has its site; without it, none is linked.
_address = os.environ.get("TP_DOCS_URL", "").rstrip("/")
if _address:
    _released = re.findall(
        r"^## \[?(\d[\w.]*)", (Path(__file__).parents[1] / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    html_context = {"versions": {"newest": f"{_address}/", **{v: f"{_address}/{v}/" for v in _released}}}
    templates_path = ["_templates"]
    html_sidebars = {
        "**": [
            "sidebar/brand.html",
            "versions.html",
            "sidebar/search.html",
            "sidebar/scroll-start.html",
            "sidebar/navigation.html",
            "sidebar/scroll-end.html",
        ]
    }
html_favicon = "_static/icon.svg"
pygments_dark_style = "github-dark"

# Links to elsewhere are looked at each night, by `hatch run linkcheck`: not every machine reaches them.
linkcheck_timeout = 30
linkcheck_retries = 2
linkcheck_anchors = False

autodoc_member_order = "groupwise"
autodoc_preserve_defaults = True  # a registry's repr, as a default, hid the types of a whole signature
maximum_signature_line_length = 88
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
napoleon_use_ivar = True
default_role = "code"

# Every name of ours in a signature or a text leads somewhere. Not so those of others, whose inventories only
# a machine with a network could fetch, and type variables, which have no place of their own.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(collections|concurrent|contextlib|logging|os|pathlib|torch|typing)\..*"),
    # The same, as modules write them that import them for type checkers alone.
    ("py:class", r"DeviceMesh|Figure|Optimizer|Path|ProcessGroup|Tensor|nn\.Module|(np|pd|random)\.[\w.]+"),
    ("py:class", r"object \| ~collections\.abc\..*"),  # a union is cut at its commas
    ("py:class", r"tp_[\w.]+\.(OptionsT|Output|State|Added|Function|R|T\d?)|P|T\d|_pickle\..*"),
]
nitpick_ignore = [
    # What arguments are whose values only other packages of ours make.
    ("py:class", "Console"),  # rich's
    ("py:class", "DTensor"),
    ("py:class", "MapStyle"),
    ("py:class", "RunnerPool"),
    ("py:class", "T"),
    ("py:class", "types.ModuleType"),
    ("py:class", "tp_core._trees.Container"),
    ("py:class", "tp_core._trees.PerType"),
    ("py:class", "tp_core.data._streams.Stream"),
    ("py:class", "tp_core.fully_sharded._units.Units"),
    ("py:class", "tp_data._order.Order"),
    ("py:class", "tp_runner._options.Batching"),
    ("py:class", "tp_runner._options.ItemOptions"),
    ("py:class", "tp_runner._scheduling._pool.RunnerPool"),
    ("py:class", "tp_runner._scheduling._source.MapStyle"),
    ("py:class", "tp_runner._stream.OpenRun"),
    ("py:class", "tp_runner._workers._item.WorkerIdentity"),
    ("py:class", "tp_shard._groups._group.Group"),
    ("py:class", "tp_shard._plans._summary.Summary"),
    ("py:class", "tp_shard._split.Split"),
    ("py:class", "tp_shard._verify._report.PlanReport"),
    ("py:class", "tp_shard.nn._sequence.SequenceState"),
    ("py:class", "tp_accelerate._loaders.AcceleratedLoader"),
    ("py:class", "tp_lightning._loggers.LoggerView"),
    ("py:class", "tp_lightning._optimizers.LearningRateSchedule"),
    ("py:class", "tp_trainer._layout_table.LayoutTable"),
    ("py:class", "tp_trainer._opening._boundaries.StepBoundaries"),
    ("py:class", "tuple[float"),  # an attribute's type in a docstring is cut at its comma
    ("py:class", "tp_testing._training_conformance.TrainingOutcome"),
    ("py:class", "tp_testing._user_state_conformance.UserStateOutcome"),
]


def setup(app):
    """Write the reference's pages before Sphinx looks for pages."""
    app.connect("config-inited", lambda app, _config: _reference.write(Path(app.srcdir)))
