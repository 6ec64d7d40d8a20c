"""Notebooks that a real kernel runs."""

import pytest


def outputs_of(cells, folder):
    """Run cells one after the other, whatever they raise; return the outputs of each.

    Args:
        cells: The code of each, by what it is about.
        folder: Where the kernel runs, and where Jupyter keeps its own files meanwhile.
    """
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells.values()])
    with pytest.MonkeyPatch.context() as patch:
        for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
            patch.setenv(name, str(folder / name))
        nbclient.NotebookClient(
            notebook,
            timeout=800,
            startup_timeout=800,
            allow_errors=True,
            resources={"metadata": {"path": str(folder)}},
        ).execute()
    return dict(zip(cells, (cell["outputs"] for cell in notebook.cells), strict=True))
