"""Figures in documents are those that were measured: each page is what its template and the JSON make."""

import json

import pytest

from tests.bench import _results, plots, render
from tests.bench._results import Results

DOCUMENTS = render.documents()


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(render.ROOT)))
def test_a_document_is_what_its_template_and_the_figures_make(path):
    assert path.read_text(encoding="utf-8") == DOCUMENTS[path], "run: hatch run figures"


@pytest.mark.parametrize("name", plots.PLOTS)
def test_a_plot_shows_the_figures_that_are_there(name):
    drawn = (_results.FOLDER / "plots" / f"{name}.svg").read_text(encoding="utf-8")
    assert plots.digest_of(name) in drawn, "run: hatch run figures"


@pytest.mark.slow
def test_plots_are_the_same_each_time(tmp_path):
    first, second = plots.draw(tmp_path / "first"), plots.draw(tmp_path / "second")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    assert [path.stem for path in first] == sorted(plots.PLOTS)


def test_every_file_of_figures_says_what_it_was_measured_on():
    files = sorted(_results.FOLDER.glob("*.json"))
    assert files
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert {"measured", "machine", "versions", "figures"} <= set(found), file
        assert {"python", "torch"} <= set(found["versions"]), file


def test_what_a_benchmark_notes_is_written_and_quoted(tmp_path, capsys):
    with Results("walk", tmp_path) as results:
        results.add("steps", 1234.5, "steps", note="at most 2000")
    assert "1,234.500 steps" in capsys.readouterr().out
    template = "{{walk | steps | ,.0f}} steps, {{walk | steps | 1e-3* .1f}} thousand"
    assert render.render(template, tmp_path) == "1,234 steps, 1.2 thousand"
    assert (
        render.render("{{walk | measured}}", tmp_path)
        == json.loads((tmp_path / "walk.json").read_text())["measured"]
    )


def test_a_benchmark_that_fails_leaves_the_figures_as_they_were(tmp_path):
    with pytest.raises(LookupError), Results("walk", tmp_path):
        raise LookupError
    assert list(tmp_path.iterdir()) == []


def test_a_part_of_a_benchmark_leaves_the_figures_of_the_rest(tmp_path):
    for steps, is_part in ((1, False), (2, True)):
        with Results("walk", tmp_path, is_part=is_part) as results:
            results.add(f"day {steps}", steps, "steps")
            results.add("steps", steps, "steps")
    assert json.loads((tmp_path / "walk.json").read_text())["figures"] == {"day 1": 1, "steps": 2, "day 2": 2}
    with Results("walk", tmp_path) as results:
        results.add("steps", 3, "steps")
    assert json.loads((tmp_path / "walk.json").read_text())["figures"] == {"steps": 3}


def test_a_section_of_a_document_is_replaced_and_a_missing_figure_named(tmp_path):
    with Results("walk", tmp_path) as results:
        results.add("steps", 7, "")
    (tmp_path / "README.md").write_text("# A\n\n## Figures\n\n6 steps\n\n## Rest\n")
    template = tmp_path / "a.md.in"
    template.write_text("<!-- README.md: ## Figures -->\n## Figures\n\n{{walk | steps | .0f}} steps\n\n")
    ((path, text),) = render.documents(tmp_path, tmp_path).items()
    assert path.name == "README.md"
    assert text == "# A\n\n## Figures\n\n7 steps\n\n## Rest\n"
    with pytest.raises(KeyError, match=r"walk\.json has no figure 'miles'"):
        render.render("{{walk | miles | .0f}}", tmp_path)
    template.write_text("no head")
    with pytest.raises(ValueError, match="has to begin with the name of its document"):
        render.documents(tmp_path, tmp_path)
