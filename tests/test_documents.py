"""README and docs: short, without dead links, and their Python runs."""

import ast
import inspect
import math
import re
import tomllib
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import posterity
from posterity.optim.presets import TABLE
from posterity_lab import bench

ROOT = bench.FOLDER.parent
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs a checkout")


def test_readme_has_at_most_120_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def anchors(page: Path) -> set[str]:
    """The fragments that GitHub gives a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_relative_links_point_to_files_and_headings(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or (fragment and fragment not in anchors(target)):
            dead.append(link)
    assert not dead


def blocks(page: Path) -> list[str]:
    """A page's Python, in order; of a diff, what it leads to."""
    found = re.findall(r"^```(python|diff)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [
        re.sub(r"^[+ ]", "", re.sub(r"^-.*\n", "", code, flags=re.MULTILINE), flags=re.MULTILINE)
        if kind == "diff"
        else code
        for kind, code in found
    ]


def names() -> dict[str, Any]:
    """What the pages take for given."""
    torch.manual_seed(0)
    x, y = torch.randn(16, 4), torch.randint(0, 3, (16,))
    data = TensorDataset(x, y)
    factors = (torch.eye(3), torch.eye(5))
    return {
        "F": F,
        "posterity": posterity,
        "torch": torch,
        "model": nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)),
        "net": nn.Linear(4, 3),
        "data": data,
        "loader": DataLoader(data, batch_size=8),
        "x": x,
        "y": y,
        "goal": torch.randn(16, 3),
        "x_new": x,
        "y_new": y,
        "weight": torch.zeros(3, 4),
        "bias": torch.zeros(3),
        "chol_u": factors[0],
        "chol_v": factors[1],
        "s": factors[0],
        "a": factors[1],
        "num_data": 16,
        "temperature": 1.0,
    }


def of_curvature() -> dict[str, Any]:
    model = nn.Sequential(OrderedDict(fc=nn.Linear(4, 8), act=nn.ReLU(), out=nn.Linear(8, 3)))
    stacks = {
        name: p.detach().expand(2, *p.shape).clone().requires_grad_() for name, p in model.named_parameters()
    }
    samples = [{name: p[k].detach().requires_grad_() for name, p in stacks.items()} for k in range(2)]
    return {"model": model, "stacks": stacks, "samples": samples, "K": 2, "loss_fn": F.cross_entropy}


def learn(model: nn.Module, opt: posterity.BGD, batches: DataLoader[Any]) -> None:
    for x, y in batches:
        opt.step(partial(lambda x, y: F.cross_entropy(model(x), y), x, y))


def of_diagnostics() -> dict[str, Any]:
    model = names()["model"]
    return {"model": model, "opt": posterity.BGD(model), "epochs": 1, "learn": learn}


def of_pruning() -> dict[str, Any]:
    pytest.importorskip("onnxscript")
    model = names()["model"]
    same = {"net": model, "sgd_net": model, "sgd_error": 0.5, "posterior": posterity.BGD(model).posterior()}
    return same | {
        "x_test": torch.randn(16, 4),
        "y_test": torch.randint(0, 3, (16,)),
        "predict": posterity.predict,
    }


# What a page takes for given besides, or in another form.
GIVEN: dict[str, Callable[[], dict[str, Any]]] = {
    "docs/curvature.md": of_curvature,
    "docs/diagnostics.md": of_diagnostics,
    "docs/dropout.md": lambda: {"x": torch.randn(16, 784), "y": torch.randint(0, 10, (16,))},
    "docs/methods/bgd.md": lambda: {"stream": names()["loader"]},
    "docs/methods/bong.md": lambda: {"stream": names()["loader"]},
    "docs/methods/kfac.md": lambda: {"model": of_curvature()["model"]},
    "docs/methods/vogn.md": lambda: {"tasks": [1, 2], "learn": lambda model, opt, task: None},
    "docs/pruning.md": of_pruning,
}
PAGES = [page for page in DOCUMENTS if blocks(page)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_python_in_the_documents_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    more = GIVEN.get(page.relative_to(ROOT).as_posix(), dict)
    given = names() | more()
    for block in blocks(page):
        exec(compile(block, page.name, "exec"), given)


def test_the_settings_page_shows_the_table() -> None:
    table = tomllib.loads((ROOT / "src/posterity/presets.toml").read_text())
    rules = {
        "BGD": "BGD",
        "BONG": "BONG",
        "IVON": "IVON",
        "VOGN": "VOGN, OGN",
        "NoisyKFAC": "Noisy K-FAC, K-FAC",
    }
    keys = [
        "std_scale",
        "lr",
        "max_step",
        "settle_after",
        "betas",
        "prior_precision",
        "temperature",
        "hess_init",
    ]
    derived = {("IVON", "hess_init")}

    def cell(rule: str, key: str) -> str:
        value = table[rule]["default"].get(key)
        if value is None:
            return "derived" if (rule, key) in derived else "–"
        return ", ".join(f"{each:g}" for each in (value if isinstance(value, list) else [value]))

    lines = [["", *rules.values()], ["---"] * (1 + len(rules))]
    for key in (*keys, "mc_samples", "factors_every", "second_every", "consolidate_after"):
        lines.append([f"`{key}`", *(cell(rule, key) for rule in rules)])
    lines.append(
        ["presets", *(", ".join(f"`{name}`" for name in table[rule] if name != "default") for rule in rules)]
    )
    expected = "\n".join("| " + " | ".join(line) + " |" for line in lines).replace("|  |", "| |")
    page = (ROOT / "docs/settings.md").read_text()
    shown = page.partition("<!-- from presets.toml -->\n")[2].partition("\n<!-- end -->")[0]
    assert shown == expected


NUMBER = r"\d[\d.]*(?:e-?\d+)?"
PAIR = rf"\({NUMBER}, {NUMBER}\)"


def as_python(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@pytest.mark.parametrize("rule", [rule for rule in TABLE if rule != "variational"])
def test_defaults_in_docstrings_are_those_of_the_table(rule: str) -> None:
    """An argument states its default behind a colon, ``std_scale: Std of a weight at the start: 0.3.``"""
    text = inspect.getdoc(getattr(posterity, rule)) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", arguments, re.MULTILINE)
    stated: list[tuple[str, str]] = []
    for name, entry in entries:
        line = " ".join(entry.split())
        stated += [(name, value) for value in re.findall(rf": ({PAIR}|{NUMBER})(?=[.,;: ]|$)", line)[:1]]
        stated += re.findall(rf"``(\w+)`` are ({PAIR})", line)
    settings = TABLE[rule]["default"]
    found = {name: ast.literal_eval(value.rstrip(".")) for name, value in stated if name in settings}
    assert found == {name: as_python(settings[name]) for name in found}
    common = {"std_scale", "lr", "max_step", "mc_samples"}
    assert found.keys() >= ({"factors_every", "betas"} if rule == "NoisyKFAC" else common)


@pytest.mark.parametrize(("page", "rule"), [("bgd", "BGD"), ("vogn", "VOGN"), ("kfac", "NoisyKFAC")])
def test_settings_of_a_methods_page_are_those_of_the_table(page: str, rule: str) -> None:
    """Columns are presets; a cell has one number for each name of its row, and may say more behind it."""
    section = (ROOT / f"docs/methods/{page}.md").read_text().partition("\n## Settings\n")[2].strip()
    lines = section.partition("\n\n")[0].splitlines()
    head, _, *rows = ([cell.strip() for cell in line.split("|")[1:-1]] for line in lines)
    presets = [re.search(r'default|(?<=preset=")\w+', cell) for cell in head]
    checked = set()
    for names, *cells in rows:
        for preset, cell in zip(presets[1:], cells, strict=True):
            keys = re.findall(r"`(\w+)`", names)
            values = re.match(rf"({PAIR}|{NUMBER}|none|derived)(?:, ({PAIR}|{NUMBER}|derived))?", cell)
            if preset is None or values is None:
                continue
            settings = {**TABLE[rule]["default"], **TABLE[rule][preset[0]]}
            for key, value in zip(keys, filter(None, values.groups()), strict=False):
                own = as_python(settings.get(key))
                stated = {"none": math.inf, "derived": None}.get(value)
                assert own == (stated if value in ("none", "derived") else ast.literal_eval(value)), (
                    key,
                    cell,
                )
                checked.add((preset[0], key))
    assert checked >= {(preset, key) for preset in TABLE[rule] for key in ("lr", "max_step")}
