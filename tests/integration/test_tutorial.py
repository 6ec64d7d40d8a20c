"""The tutorial's pages show the programs of its steps, and what they print when its notebooks run."""

import re

import pytest

from tests.tutorial import PAGES, PROGRAMS, agree, notebook, record, with_diff


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_the_diff_and_the_notebook_of_its_step(page):
    assert page.read_text() == with_diff(page), "python -m tests.tutorial --write"
    assert (PROGRAMS / f"{page.stem}.ipynb").read_text() == notebook(page), "python -m tests.tutorial --write"


@pytest.mark.takes(150)
@pytest.mark.nightly
def test_the_notebooks_run_and_print_what_the_pages_show(tmp_path):
    printed = {}
    for page in PAGES:
        shown = re.findall(r"^```console\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
        found = printed[page.stem] = record(page, tmp_path)
        missing = [agree(one, other) for one, other in zip(shown, found, strict=True)]
        assert not any(missing), f"{page.name} shows {missing}; it printed {found}"

    def losses(page):
        return [
            float(loss) for text in printed[page] for loss in re.findall(r"loss ([\d.]+), accuracy", text)
        ]

    # Whatever a step ran on, whole or split, at once or in two goes: the same number, for as many epochs.
    for same in (losses("two-ranks") + losses("split-model"), losses("interruption")):
        assert len(same) >= 3
        assert max(same) - min(same) <= 1e-4


def test_a_line_that_is_not_printed_and_a_loss_that_differs_are_found():
    shown = "$ python step.py\nloss 0.50, accuracy 0.900\n...\ntook 3 s"
    assert agree(shown, "took 4 s\nloss 0.51, accuracy 0.901\n") == []
    assert agree(shown, "took 4 s\nloss 0.71, accuracy 0.901\n") == ["loss 0.50, accuracy 0.900"]
    assert agree(shown, "loss 0.50, accuracy 0.900\n") == ["took 3 s"]
