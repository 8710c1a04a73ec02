"""The list of mutations fits the source, and the command tells what is noticed from what is not."""

import re
from pathlib import Path

import pytest

from mutation import run
from mutation.sites import SITES, Site


@pytest.mark.parametrize("site", SITES, ids=lambda site: site.name)
def test_a_mutations_text_is_in_the_source_once(site: Site) -> None:
    assert run.stale(site) is None
    assert site.right != site.wrong
    assert site.tests


def test_names_of_mutations_are_unique() -> None:
    assert len({site.name for site in SITES}) == len(SITES)


def test_stale_sites_are_named() -> None:
    good = SITES[0]
    for change, reason in (
        ({"file": "posterity/nowhere.py"}, "there is no src/posterity/nowhere.py"),
        ({"right": "no such text"}, "0 times, not once"),
        ({"right": "import"}, " times, not once"),
        ({"tests": ("test_nowhere.py",)}, "there is no tests/test_nowhere.py"),
        (
            {"tests": ("test_objective.py::test_nothing",)},
            "there is no tests/test_objective.py::test_nothing",
        ),
    ):
        assert reason in str(run.stale(good._replace(**change)))


def test_the_command_tells_killed_from_survived(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, text in {
        "src/one.py": "def one():\n    return 1  # not 2\n",
        "tests/test_one.py": "from one import one\n\n\ndef test_one():\n    assert one() == 1\n",
        "tests/test_two.py": "def test_two():\n    assert False\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(run, "ROOT", tmp_path)
    sites = [
        Site("killed", "one.py", "return 1", "return 2", ("test_one.py",)),
        Site("survived", "one.py", "# not 2", "# not 3", ("test_one.py",)),
        Site("broken", "one.py", "def one():", "def one()", ("test_one.py",)),
        Site("stale", "one.py", "no such text", "", ("test_one.py",)),
    ]
    monkeypatch.setattr(run, "SITES", sites)
    assert run.main(["--only", "killed"]) == 0
    assert "test_one.py::test_one\n1 sites: 1 killed, 0 survived" in capsys.readouterr().out
    assert run.main(["--jobs", "2"]) == 1
    printed = capsys.readouterr().out
    assert all(re.search(rf"^{site.name} .*{site.name}; ", printed, re.MULTILINE) for site in sites)
    # A test that fails anyway has noticed nothing.
    monkeypatch.setattr(run, "SITES", [sites[0]._replace(tests=("test_two.py",))])
    assert run.main([]) == 1
    assert "killed means nothing" in capsys.readouterr().out
    assert (tmp_path / "src/one.py").read_text() == "def one():\n    return 1  # not 2\n"
