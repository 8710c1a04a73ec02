"""What records say of themselves, and that nobody has edited them since."""

import copy
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch

from posterity_lab import bench, record
from posterity_lab.record import Provenance, digest, fits, look, looks, sealed
from posterity_lab.reproduce import driver, records
from posterity_lab.reproduce.study import Outcome, Study, Unit

ROOT = bench.FOLDER.parent
COMMITTED = sorted(
    path
    for folder in (ROOT / "results", ROOT / "benchmarks" / "results")
    for path in folder.rglob("*.json")
    if path.name != "config.json" and "cache" not in path.parts
)
# Of runs from before records had digests of what lies beside them: SHA-256, the first half.
WITHOUT_DIGEST = {
    "mnist-5-epochs/bbb/config.json": "92bd4c571066578fa24e2700d11b7cba",
    "mnist-5-epochs/bbb/metrics.jsonl": "94d3422d034f8721ab44e383b86d23e0",
    "mnist-5-epochs/bgd/config.json": "7ec4ddab0c4582c937e2a726aa5ded69",
    "mnist-5-epochs/bgd/metrics.jsonl": "a75286e8ef16e75beb53baa6d7927d71",
    "mnist-5-epochs/ivon/config.json": "193586146a96e944267a42cef2b44e5a",
    "mnist-5-epochs/ivon/metrics.jsonl": "0c69ecc7abaf2641f61ab5cfb345d65d",
    "mnist-5-epochs/vogn/config.json": "88a3535a59df78a0f2b58d99cde2b34b",
    "mnist-5-epochs/vogn/metrics.jsonl": "4fb20be95fad671c73869c008ba4503d",
}
needs_checkout = pytest.mark.skipif(not COMMITTED, reason="needs a checkout")


@needs_checkout
def test_no_committed_record_was_edited() -> None:
    assert len(COMMITTED) > 250
    edited = [str(path) for path in COMMITTED if not fits(json.loads(path.read_text()))]
    assert not edited


@needs_checkout
def test_no_file_beside_an_old_record_was_edited() -> None:
    folder = ROOT / "results"
    beside = {*folder.rglob("config.json"), *folder.rglob("metrics.jsonl")}
    found = {
        path.relative_to(folder).as_posix(): sha256(path.read_bytes()).hexdigest()[:32] for path in beside
    }
    assert found == WITHOUT_DIGEST


@needs_checkout
def test_committed_records_have_a_source_digest_or_are_marked_sealed_afterwards() -> None:
    for path in COMMITTED:
        content = json.loads(path.read_text())
        place = content if path.name == "environment.json" else content.get("environment", {})
        if content.get("sealed") == "afterwards":
            assert "source" not in place
        else:
            assert len(place["source"]) == 64
            assert place["started"] <= place["ended"]


@needs_checkout
def test_committed_counts_of_looks_have_every_reported_run() -> None:
    for path in sorted((ROOT / "results").rglob("*.json")):
        found = json.loads(path.read_text())
        if "study" in found and found["trial"] is None and found["study"] not in ("bgd-theory", "vogn-toy"):
            row = f"{found['study']}/{found['setting']} {found['method']}"
            count = looks(ROOT / "results", row, found["seed"])
            own = found.get("looks") or {"configs": 1, "evaluations": 1}
            assert all(count[key] >= own[key] for key in own), path


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every number, text or truth value in a record, with what holds it."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in pairs:
        if isinstance(each, dict | list):
            yield from places(each)
        else:
            yield value, key


def test_every_change_to_a_record_is_noticed() -> None:
    content = {"metrics": {"errors": [0.0169, 0.017]}, "n": 10_000, "diverged": None, "resumed": False}
    whole = sealed({**content, "environment": {"commit": "abc", "gpu": "H200"}})
    assert fits(json.loads(json.dumps(whole)))
    for number in range(len(list(places(whole)))):
        edited = copy.deepcopy(whole)
        holder, key = list(places(edited))[number]
        holder[key] = "another"
        assert not fits(edited)
    assert not fits({**whole, "n": 10_000.0})
    assert not fits({**whole, "more": None})
    assert not fits({key: value for key, value in whole.items() if key != "digest"})


def test_a_tensor_counts_with_every_bit() -> None:
    one = {"state": {0: {"std": torch.randn(3, 2).bfloat16()}}, "epoch": 1}
    other = copy.deepcopy(one)
    assert digest(one) == digest(other)
    other["state"][0]["std"].view(torch.int16)[1, 1] ^= 1
    assert digest(one) != digest(other)


def test_values_that_differ_in_anything_have_digests_of_their_own() -> None:
    values = [
        *(0, 0.0, False, None, "", "0", b"", [], {}, [0], [[0]], [[], 0], {"a": 0}, {"a": 1}, {"b": 0}),
        *({"a": 0, "b": 1}, {"a": 1, "b": 0}, {"a": {"b": 0}}, ["a", 0], "a0"),
        *(torch.zeros(2), torch.zeros(2, 1), torch.zeros(1, 2), torch.ones(2), torch.zeros(3)),
        *(torch.zeros(2, dtype=torch.int32), torch.zeros(1, dtype=torch.float64), torch.tensor([-0.0, 0.0])),
    ]
    assert len({digest(value) for value in values}) == len(values)


def study(**metrics: float) -> Study:
    return Study("mnist", lambda quick: [], lambda unit, *rest: Outcome(metrics, 7))


def run(folder: Path, seed: int = 0, trial: dict[str, float] | None = None, **config: Any) -> dict[str, Any]:
    told = driver._Told(driver.Console(quiet=True))
    unit = Unit("mnist", "400", "sgd", seed, config, "by hand", trial)
    return driver._run(study(accuracy=0.5), unit, folder, "cpu", told, jobs=3)


def test_a_run_writes_its_whole_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/usr/bin/posterity", "reproduce", "x", "--jobs", "3"])
    found = run(tmp_path, seed=4, lr=0.1)
    assert records.read(tmp_path / "mnist" / "400-sgd-seed4.json") == found
    place = found["environment"]
    assert place["command"] == ["posterity", "reproduce", "x", "--jobs", "3"]
    assert (place["jobs"], place["seeds"], place["threads"]) == (3, [4], torch.get_num_threads())
    assert place["started"] <= place["ended"]
    assert place["source"] == record.source.digest()
    assert "commit" not in place
    assert found["looks"] == {"configs": 1, "evaluations": 1}


def test_reruns_and_other_configs_are_counted_as_looks(tmp_path: Path) -> None:
    asked = [(0, 0.1), (1, 0.1), (0, 0.1), (1, 0.2), (0, 0.1)]
    seen = [run(tmp_path, seed, lr=lr)["looks"] for seed, lr in asked]
    assert [(each["configs"], each["evaluations"]) for each in seen] == [
        (1, 1),
        (1, 1),
        (1, 2),
        (2, 2),
        (2, 3),
    ]
    assert run(tmp_path, trial={"lr": 0.3}, lr=0.3)["looks"] is None
    assert looks(tmp_path, "mnist/400 sgd", 0) == {"configs": 2, "evaluations": 3}
    with (tmp_path / record.LOOKS).open("a") as file:
        file.write('{"row": ')
    with pytest.raises(ValueError, match=r"looks\.jsonl is damaged: restore it from the last commit"):
        run(tmp_path, lr=0.1)


def test_a_look_is_counted_before_it_can_be_lost(tmp_path: Path) -> None:
    def killed(*work: Any) -> Outcome:
        raise KeyboardInterrupt

    unit = Unit("mnist", "400", "sgd", 0, {}, "")
    told = driver._Told(driver.Console(quiet=True))
    with pytest.raises(KeyboardInterrupt):
        driver._run(Study("mnist", lambda quick: [], killed), unit, tmp_path, "cpu", told, jobs=1)
    assert looks(tmp_path, "mnist/400 sgd", 0)["evaluations"] == 1


def test_a_unit_that_another_process_runs_is_refused(tmp_path: Path) -> None:
    unit = Unit("mnist", "400", "sgd", 0, {"lr": 0.1}, "")
    with (
        driver.locked(unit.cache(tmp_path)),
        pytest.raises(ValueError, match=f"is in use by process {os.getpid()}"),
    ):
        run(tmp_path, lr=0.1)
    assert not (tmp_path / "mnist").exists()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the one for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path / f"posterity-{os.getuid()}"


def test_unshared_machine_is_recorded_and_marks_are_removed(machine: Path) -> None:
    machine.mkdir()
    ended = subprocess.Popen(["true"])
    ended.wait()
    (machine / f"cpu.{ended.pid}.dead").touch()
    made = Provenance("cpu")
    assert made.content()["shared"] is False
    assert len(list(machine.iterdir())) == 1
    del made
    assert not list(machine.iterdir())


def test_runs_at_the_same_time_both_say_so(machine: Path) -> None:
    made, elsewhere = Provenance("cpu"), Provenance("cuda")
    assert made.content()["shared"] is False
    code = "from posterity_lab.record import Provenance; print(Provenance('cpu').content()['shared'])"
    # By a shell, because the parent of a run does not count as another run.
    line = f'{sys.executable} -c "{code}"; true'
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n"
    assert made.content()["shared"] is True
    assert elsewhere.content()["shared"] is False


def test_benchmarks_write_sealed_records_and_refuse_edited_ones(tmp_path: Path) -> None:
    options = bench.parser("").parse_args(["--out", str(tmp_path / "record.json")])
    kept = bench.Record("some", options, "ms", "ours")
    kept.add("a net", "fp32", {"ours": {"value": 1.0}}, looks=kept.look("a net", 0, {}))
    kept.close(table="")
    content = json.loads((tmp_path / "record.json").read_text())
    assert fits(content)
    assert content["environment"]["source"]
    assert content["rows"][0]["looks"] == {"configs": 1, "evaluations": 1}
    content["rows"][0]["columns"]["ours"]["value"] = 0.5
    (tmp_path / "record.json").write_text(json.dumps(content))
    with pytest.raises(ValueError, match="was changed and does not fit its digest: choose another file"):
        bench.Record("some", options, "ms", "ours").resume()


def test_looks_are_counted_by_row() -> None:
    with tempfile.TemporaryDirectory() as folder:
        look(Path(folder), "one", 0, {"lr": 1})
        assert look(Path(folder), "two", 0, {"lr": 2}) == {"configs": 1, "evaluations": 1}
