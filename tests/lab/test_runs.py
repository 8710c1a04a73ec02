import dataclasses
import json
import re
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from lab.processes import at_once, forked, killed_at_the_first_rename
from posterity_lab import methods, record, runs
from posterity_lab.config import Config

EPOCHS = 6
LEARNERS = ("bgd", "ivon", "vogn", "bbb")


@pytest.fixture(autouse=True)
def one_thread():
    # The same number of threads as the process that is killed, because sums depend on it.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(**keys: object) -> Config:
    return Config(
        **{"net": "mlp-16", "data": "digits", "epochs": EPOCHS, "batch_size": 64, "eval_samples": 3} | keys
    )


def lines(folder: Path) -> list[dict]:
    """The metrics, without what a clock decides."""
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in record.items() if key != "seconds"} for record in records]


def checkpoint(folder: Path) -> dict:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def posterior(folder: Path) -> dict[str, torch.Tensor]:
    file = folder / "posterior.safetensors"
    return load_file(file) if file.exists() else {}


def tensors(value: object, path: str = "") -> dict[str, object]:
    if isinstance(value, dict):
        return {k: v for key, part in value.items() for k, v in tensors(part, f"{path}/{key}").items()}
    return {path: value}


def assert_same(one: Path, two: Path) -> None:
    assert lines(one) == lines(two)
    first, second = tensors(checkpoint(one)), tensors(checkpoint(two))
    assert first.keys() == second.keys()
    assert any(isinstance(value, torch.Tensor) for value in first.values())
    for key, value in first.items():
        same = torch.equal(value, second[key]) if isinstance(value, torch.Tensor) else value == second[key]
        assert same, key
    assert posterior(one).keys() == posterior(two).keys()
    assert all(torch.equal(value, posterior(two)[key]) for key, value in posterior(one).items())


def test_nll_of_a_confidently_wrong_net_does_not_saturate():
    model, none = torch.nn.Linear(1, 2, bias=False), SimpleNamespace(posterior=lambda: None)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[200.0], [0.0]]))
    held_out = runs.Split(torch.ones(2, 1), torch.tensor([0, 1]))
    assert runs._scores(model, none, held_out, tiny())["nll"] == 100.0  # e^-200 is no number of float32


def test_an_epochs_loss_is_the_mean_over_its_examples():
    training = runs.data.load("digits").train.subset(range(150))  # in batches of 64, 64 and 22
    method = SimpleNamespace(step=lambda x, y: x.mean())
    shown = []
    loss = runs._epoch(method, training, tiny(), 0, lambda **fields: shown.append(fields["loss"]))
    assert loss == pytest.approx(float(training.x.mean()), rel=1e-5)
    assert shown[-1] == f"{loss:.4f}"


def test_every_process_has_its_part_of_a_batch(monkeypatch):
    training = runs.data.load("digits").train.subset(range(150))  # in batches of 64, 64 and 22
    seen = []
    for rank in range(3):
        monkeypatch.setattr(runs, "World", lambda mesh, rank=rank: SimpleNamespace(size=3, rank=rank))
        parts: list[torch.Tensor] = []
        method = SimpleNamespace(step=lambda x, y, parts=parts: parts.append(x) or torch.zeros(()))
        runs._epoch(method, training, tiny(), 0, lambda **_: None)
        seen.append(parts)
    whole = [x for x, _ in runs.data.batches(training, 64, seed=0, epoch=0)]
    assert [[len(x) for x in parts] for parts in seen] == [[22, 22, 8], [21, 21, 7], [21, 21, 7]]
    for x, *parts in zip(whole, *seen, strict=True):
        assert torch.equal(torch.cat(parts), x)


def test_runs_killed_in_an_epoch_resume_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = forked()
    configs = {method: tiny(method=method) for method in LEARNERS}
    processes = {
        method: context.Process(target=runs.train, args=(config, tmp_path / method))
        for method, config in configs.items()
    }
    for process in processes.values():
        process.start()
    running = dict(processes)
    while running:  # all at once: one may be done before another has begun
        for method, process in list(running.items()):
            if not process.is_alive() or (tmp_path / method / "checkpoint.pt").exists():
                process.kill()
                del running[method]
        time.sleep(0.002)
    for method, process in processes.items():
        process.join()
        assert process.exitcode == -signal.SIGKILL
        assert 1 <= checkpoint(tmp_path / method)["epoch"] < EPOCHS
        runs.train(configs[method], tmp_path / method, resume=True)
        runs.train(configs[method], tmp_path / f"{method}-whole")
        assert [record["epoch"] for record in lines(tmp_path / method)] == list(range(1, EPOCHS + 1))
        assert_same(tmp_path / method, tmp_path / f"{method}-whole")


def test_run_killed_during_its_first_write_can_be_restarted(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = tiny(method="adam", epochs=1)
    process = forked().Process(target=killed_at_the_first_rename, args=(config, tmp_path / "run"))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    left = {path.name.split(".")[-1] for path in (tmp_path / "run").iterdir()}
    assert left == {"lock", "partial"}
    with pytest.raises(FileNotFoundError, match="there is no run in"):
        runs.train(config, tmp_path / "run", resume=True)
    runs.train(config, tmp_path / "run")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "environment.json", "metrics.jsonl", "checkpoint.pt", "looks.jsonl"}


def test_second_process_in_a_folder_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    config = tiny(method="bgd", epochs=3)
    start = time.time() + 1.0
    processes = [forked().Process(target=at_once, args=(config, tmp_path / "run", start)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert sorted(process.exitcode for process in processes) == [0, 1]
    runs.train(config, tmp_path / "alone")
    assert_same(tmp_path / "run", tmp_path / "alone")
    assert not (tmp_path / "run" / "lock").exists()


def contents(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Every file with the time it was written."""
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


class Stop(Exception):
    pass


def interrupt(
    monkeypatch: pytest.MonkeyPatch, config: Config, folder: Path, epoch: int, resume: bool = False
) -> None:
    """Train, but stop where the checkpoint of an epoch would be written."""
    save = runs.save

    def stop(path: Path, value: dict) -> None:
        if value["epoch"] == epoch:
            raise Stop
        save(path, value)

    with monkeypatch.context() as patch, pytest.raises(Stop):
        patch.setattr(runs, "save", stop)
        runs.train(config, folder, resume)


@pytest.mark.parametrize("method", ["sgd", "adam"])
def test_methods_without_posterior_resume_too(tmp_path, monkeypatch, method):
    interrupt(monkeypatch, tiny(method=method), tmp_path / "cut", 3)
    runs.train(tiny(method=method), tmp_path / "cut", resume=True)
    runs.train(tiny(method=method), tmp_path / "whole")
    assert_same(tmp_path / "cut", tmp_path / "whole")
    assert not (tmp_path / "cut" / "posterior.safetensors").exists()


def test_a_run_from_a_gpu_resumes_on_a_cpu(tmp_path, monkeypatch):
    interrupt(monkeypatch, tiny(method="adam"), tmp_path / "cut", 3)
    saved = checkpoint(tmp_path / "cut")
    for group in saved["method"]["optimizer"]["param_groups"]:
        group["capturable"] = True  # as a step in a CUDA graph has it
    runs.save(tmp_path / "cut" / "checkpoint.pt", saved)
    runs.train(tiny(method="adam"), tmp_path / "cut", resume=True)
    runs.train(tiny(method="adam"), tmp_path / "whole")
    assert_same(tmp_path / "cut", tmp_path / "whole")


def test_metrics_after_the_checkpoint_are_truncated_on_resume(tmp_path, monkeypatch):
    config = tiny(method="adam")
    interrupt(monkeypatch, config, tmp_path / "run", 3)
    assert len(lines(tmp_path / "run")) == 3
    assert checkpoint(tmp_path / "run")["epoch"] == 2
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "st')
    history = runs.train(config, tmp_path / "run", resume=True)
    assert (
        [record["epoch"] for record in lines(tmp_path / "run")]
        == [1, 2, 3, 4, 5, 6]
        == [r["epoch"] for r in history]
    )


def test_a_run_killed_before_its_first_checkpoint_starts_again(tmp_path, monkeypatch):
    interrupt(monkeypatch, tiny(method="adam"), tmp_path / "run", 1)
    runs.train(tiny(method="adam"), tmp_path / "run", resume=True)
    assert len(lines(tmp_path / "run")) == EPOCHS


def test_resuming_a_finished_run_changes_nothing(tmp_path):
    config = tiny(method="bgd", epochs=1)
    runs.train(config, tmp_path / "run")
    before = contents(tmp_path / "run")
    history = runs.train(config, tmp_path / "run", resume=True)
    assert [record["epoch"] for record in history] == [1]
    assert contents(tmp_path / "run") == before
    assert set(posterior(tmp_path / "run")) == {
        f"{name}|{part}" for name in ("1.weight", "1.bias", "3.weight", "3.bias") for part in ("loc", "raw")
    }


def test_resume_writes_a_missing_posterior_without_data(tmp_path, monkeypatch):
    config = tiny(method="bgd", epochs=1)
    runs.train(config, tmp_path / "run")
    before = contents(tmp_path / "run")
    (tmp_path / "run" / "posterior.safetensors").unlink()
    monkeypatch.setattr(runs.data, "load", None)
    runs.train(config, tmp_path / "run", resume=True)
    assert {name: content for name, (content, _) in contents(tmp_path / "run").items()} == {
        name: content for name, (content, _) in before.items()
    }


def test_a_resumed_run_keeps_where_its_parts_were_made(tmp_path, monkeypatch):
    config = tiny(method="adam")
    interrupt(monkeypatch, config, tmp_path / "run", 2)
    runs.train(config, tmp_path / "run", resume=True)
    places = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert places["torch"] == torch.__version__
    assert len(places["earlier"]) == 1


def test_a_run_leaves_a_sealed_record_of_config_and_metrics(tmp_path):
    config = tiny(method="adam", epochs=2, seed=3)
    history = runs.train(config, tmp_path / "run")
    place = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert record.fits(place)
    assert place["metrics"] == record.digest(history)
    assert place["config"] == record.digest(json.loads((tmp_path / "run" / "config.json").read_text()))
    assert place["looks"] == {"configs": 1, "evaluations": 1}
    assert (place["seeds"], place["threads"], len(place["source"])) == ([3], 1, 64)
    runs.train(tiny(method="adam", epochs=1, validation=100), tmp_path / "held out")
    place = json.loads((tmp_path / "held out" / "environment.json").read_text())
    assert place["looks"] == {"configs": 0, "evaluations": 0}


@pytest.mark.parametrize("epochs_done", [1, 2])
def test_resume_refuses_metrics_that_were_edited(tmp_path, monkeypatch, epochs_done):
    config, folder = tiny(method="adam", epochs=2), tmp_path / "run"
    if epochs_done == 1:  # killed twice: the record of the second part has the digest of the first epoch
        config = tiny(method="adam")
        interrupt(monkeypatch, config, folder, 2)
        interrupt(monkeypatch, config, folder, 3, resume=True)
    else:
        runs.train(config, folder)
    path = folder / "metrics.jsonl"
    before = path.read_text()
    path.write_text(re.sub(r'"nll": [0-9.]+', '"nll": 0.1', before, count=1))
    with pytest.raises(
        ValueError, match=r"metrics.jsonl does not match its digest in environment.json: restore"
    ):
        runs.train(config, folder, resume=True)
    path.write_text(before)
    assert len(runs.train(config, folder, resume=True)) == config.epochs


@pytest.mark.parametrize("damage", ["cut short", "flipped", "of another run"])
def test_resume_writes_a_damaged_posterior_again(tmp_path, damage):
    config = tiny(method="bgd", epochs=1)
    runs.train(config, tmp_path / "run")
    path = tmp_path / "run" / "posterior.safetensors"
    whole = path.read_bytes()
    if damage == "cut short":
        path.write_bytes(whole[:-9])
    elif damage == "flipped":
        path.write_bytes(whole[:-2] + bytes([whole[-2] ^ 64]) + whole[-1:])
    else:
        runs.train(tiny(method="bgd", epochs=1, seed=1), tmp_path / "other")
        (tmp_path / "other" / "posterior.safetensors").replace(path)
    with pytest.warns(UserWarning, match=r"posterior.safetensors was damaged: it is written again from"):
        runs.train(config, tmp_path / "run", resume=True)
    assert path.read_bytes() == whole


@pytest.mark.parametrize(("method", "key"), [("bgd", "seed"), ("bgd", "lr"), ("adam", "lr")])
def test_a_checkpoint_with_another_setting_than_the_run_is_refused(tmp_path, monkeypatch, method, key):
    config = tiny(method=method, epochs=2)
    interrupt(monkeypatch, config, tmp_path / "run", 2)
    state = checkpoint(tmp_path / "run")
    state["method"]["optimizer"]["param_groups"][0][key] = 7
    runs.save(tmp_path / "run" / "checkpoint.pt", state)
    with pytest.raises(ValueError, match=f"checkpoint.pt has {key} = 7, and the run .*: train again"):
        runs.train(config, tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=f"checkpoint.pt has {key} = 7"):
        runs.load_run(tmp_path / "run")


def test_flipped_bits_in_a_checkpoint_are_noticed(tmp_path):
    runs.train(tiny(method="bgd", epochs=1), tmp_path)
    path = tmp_path / "checkpoint.pt"
    whole, unnoticed = path.read_bytes(), []
    state = runs.load_run(tmp_path).posterior
    for place in range(0, len(whole), len(whole) // 60):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 16]) + whole[place + 1 :])
        try:
            found = runs.load_run(tmp_path).posterior
        except ValueError:
            continue
        # Some bytes of the archive have no meaning: then nothing has changed.
        same = record.digest([found.mean(), found.std()]) == record.digest([state.mean(), state.std()])
        unnoticed += [] if same else [place]
    assert not unnoticed


def test_resuming_with_another_number_of_threads_warns(tmp_path, monkeypatch):
    config = tiny(method="adam", epochs=2)
    interrupt(monkeypatch, config, tmp_path / "run", 2)
    torch.set_num_threads(2)
    with pytest.warns(UserWarning, match="began with 1 threads and resumes with 2, .* OMP_NUM_THREADS=1"):
        runs.train(config, tmp_path / "run", resume=True)
    places = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert (places["threads"], places["earlier"][0]["threads"]) == (2, 1)


def test_a_folder_with_a_run_is_refused_without_resume(tmp_path):
    config = tiny(method="adam", epochs=1)
    runs.train(config, tmp_path / "run")
    with pytest.raises(ValueError, match="holds a run already: continue it with --resume"):
        runs.train(config, tmp_path / "run")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "checkpoint.pt").write_text("precious")
    with pytest.raises(ValueError, match="mine is not an empty folder: name a new one"):
        runs.train(config, tmp_path / "mine")
    assert (tmp_path / "mine" / "checkpoint.pt").read_text() == "precious"


def test_resuming_with_another_config_is_refused_by_the_key_that_differs(tmp_path):
    runs.train(tiny(method="adam", epochs=1), tmp_path / "run")
    with pytest.raises(ValueError, match="run has seed = 0, not 1: resume it with the same config"):
        runs.train(tiny(method="adam", epochs=1, seed=1), tmp_path / "run", resume=True)
    with pytest.raises(FileNotFoundError, match=r"there is no run in .*nowhere"):
        runs.train(tiny(), tmp_path / "nowhere", resume=True)


@pytest.mark.parametrize("method", ["bgd", "bbb", "adam"])
def test_non_finite_loss_keeps_the_last_good_checkpoint(tmp_path, monkeypatch, method):
    runs.train(tiny(method=method, epochs=1), tmp_path / "good")
    batches = runs.data.batches

    def poisoned(split, size, *, seed, epoch):
        for x, y in batches(split, size, seed=seed, epoch=epoch):
            yield (x * torch.nan if epoch == 1 else x), y

    monkeypatch.setattr(runs.data, "batches", poisoned)
    with pytest.raises(FloatingPointError, match=r"the loss is nan.*checkpoint.pt is that of epoch 1"):
        runs.train(tiny(method=method, epochs=3), tmp_path / "bad")
    assert checkpoint(tmp_path / "bad")["epoch"] == 1
    lower = "lr" if method == "adam" else "lr or std_init"
    with pytest.raises(ValueError, match=f"that diverged: train in another folder with a lower {lower}$"):
        runs.train(tiny(method=method, epochs=3), tmp_path / "bad")
    with pytest.raises(
        FloatingPointError, match=r"lower .*--resume would repeat this: train in another folder"
    ):
        runs.train(tiny(method=method, epochs=3), tmp_path / "bad", resume=True)
    good, bad = (tensors(checkpoint(tmp_path / name)["method"]["model"]) for name in ("good", "bad"))
    assert all(torch.equal(good[key], bad[key]) for key in good if isinstance(good[key], torch.Tensor))
    assert len(lines(tmp_path / "bad")) == 1


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"net": "lenet"}, "there is no net 'lenet', did you mean 'lenet5'?"),
        ({"data": "minst"}, "there is no data set 'minst', did you mean 'mnist'?"),
        ({"net": "lenet5"}, "LeNet-5 needs images of at least 12x12 pixels, not 8x8: use an mlp"),
        ({"device": "gpu"}, "device 'gpu' cannot be used on this machine: try cpu"),
        ({"validation": 1437}, "digits has 1437 training images: hold out fewer than 1437"),
    ],
)
def test_a_refused_run_leaves_no_folder(tmp_path, keys, message):
    with pytest.raises((ValueError, RuntimeError)) as error:
        runs.train(tiny(**keys), tmp_path / "run")
    assert str(error.value) == message
    assert not (tmp_path / "run").exists()


def test_validation_images_are_held_out_and_the_same_for_every_seed(tmp_path):
    dataset = runs.data.load("digits")
    training, held_out = runs._splits(dataset, 200)
    assert (len(training), len(held_out)) == (1237, 200)
    everything = torch.cat([training.x, held_out.x]).flatten(1).sum(1).sort().values
    assert torch.equal(everything, dataset.train.x.flatten(1).sum(1).sort().values)
    (record,) = runs.train(tiny(method="adam", epochs=1, validation=200), tmp_path / "run")
    assert record["split"] == "validation"
    assert record["step"] == -(-1237 // 64)


def test_test_only_data_set_is_refused():
    digits = runs.data.load("digits")
    with pytest.raises(ValueError, match="digits is for testing only: train on another data set"):
        runs._splits(dataclasses.replace(digits, train=digits.train.subset([])), 0)


@pytest.mark.parametrize("method", [*LEARNERS, "adam"])
def test_a_run_learns_and_reads_back_as_it_was(tmp_path, method):
    config = tiny(method=method, net="mlp-50", epochs=8)
    last = runs.train(config, tmp_path / "run")[-1]
    assert last["accuracy"] > 0.8
    run = runs.load_run(tmp_path / "run")
    assert run.config == config
    test = runs.data.load("digits").test
    probs = methods.predictions(run.model, run.posterior, test.x, config).probs
    assert float((probs.argmax(-1) == test.y).float().mean()) == pytest.approx(last["accuracy"])


@pytest.mark.parametrize("method", ["ivon", "vogn"])
def test_settings_reach_the_optimiser(method):
    given = {"lr": 0.02, "prior_precision": 3.0, "temperature": 0.7, "hess_init": 0.4}
    given |= {"damping": 0.05} if method == "vogn" else {}
    config = Config(method=method, samples=3, momentum=0.8, beta2=0.95, seed=4, **given)
    net = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 1), torch.nn.BatchNorm2d(2))
    optimizer = methods.build(config, net, num_data=60).optimizer
    group = optimizer.param_groups[0]
    assert {key: group[key] for key in given} == given
    assert (group["betas"], group["mc_samples"], group["seed"]) == ((0.8, 0.95), 3, 4)
    assert group["num_data"] == 60
    certain = [
        name for each in optimizer.param_groups if each["deterministic"] for name in each["param_names"]
    ]
    assert certain == (["1.weight", "1.bias"] if method == "vogn" else [])


def test_bgd_temperature_reaches_the_optimiser_and_changes_stds(tmp_path):
    for temperature in (1.0, 0.1):
        config = tiny(method="bgd", epochs=1, lr=temperature, temperature=temperature)
        runs.train(config, tmp_path / str(temperature))
    (group,) = checkpoint(tmp_path / "0.1")["method"]["optimizer"]["param_groups"]
    assert group["temperature"] == 0.1
    mild, sharp = (
        runs.load_run(tmp_path / name).posterior.std()["1.weight"].mean() for name in ("1.0", "0.1")
    )
    assert sharp < mild


def test_run_from_before_a_key_existed_uses_its_default(tmp_path):
    runs.train(tiny(method="bgd", epochs=1), tmp_path)
    made = json.loads((tmp_path / "config.json").read_text()) | {"temperature": None}
    (tmp_path / "config.json").write_text(json.dumps(made))
    runs.save(tmp_path / "checkpoint.pt", checkpoint(tmp_path) | {"config": made})
    assert runs.load_run(tmp_path).config.temperature == 1.0


def test_a_run_without_an_epoch_cannot_be_read(tmp_path, monkeypatch):
    interrupt(monkeypatch, tiny(method="adam"), tmp_path / "run", 1)
    with pytest.raises(FileNotFoundError, match="has no whole epoch yet: continue it with --resume"):
        runs.load_run(tmp_path / "run")


def test_a_run_cut_short_is_read_at_its_checkpoint(tmp_path, monkeypatch):
    interrupt(monkeypatch, tiny(method="bgd"), tmp_path / "cut", 3)
    runs.train(tiny(method="bgd", epochs=2), tmp_path / "short")
    cut, short = (runs.load_run(tmp_path / name).posterior for name in ("cut", "short"))
    assert torch.equal(cut.std()["1.weight"], short.std()["1.weight"])


def test_a_posterior_of_another_run_is_not_used(tmp_path):
    runs.train(tiny(method="bgd", epochs=1), tmp_path / "run")
    runs.train(tiny(method="bgd", epochs=1, seed=1), tmp_path / "other")
    own = runs.load_run(tmp_path / "run").posterior.std()["1.weight"]
    (tmp_path / "other" / "posterior.safetensors").replace(tmp_path / "run" / "posterior.safetensors")
    assert torch.equal(runs.load_run(tmp_path / "run").posterior.std()["1.weight"], own)


def damage(value: dict, *path: str) -> dict:
    """The checkpoint without one of its keys."""
    key, *rest = path
    return {k: damage(v, *rest) if rest and k == key else v for k, v in value.items() if rest or k != key}


@pytest.mark.parametrize(
    "make",
    [
        lambda folder: b"half a file",
        lambda folder: [1, 2],
        lambda folder: damage(checkpoint(folder), "epoch"),
        lambda folder: checkpoint(folder) | {"config": {"method": "none"}},
        lambda folder: checkpoint(folder) | {"config": 3},
        lambda folder: checkpoint(folder) | {"config": {"lr": {"a": {"b": 1}}}},
        lambda folder: checkpoint(folder) | {"epoch": "one"},
        lambda folder: checkpoint(folder) | {"num_data": "many"},
        lambda folder: checkpoint(folder) | {"shape": 3},
        lambda folder: damage(checkpoint(folder), "shape"),
        lambda folder: damage(checkpoint(folder), "method", "model"),
        lambda folder: damage(checkpoint(folder), "method", "optimizer", "param_groups"),
        lambda folder: damage(checkpoint(folder), "method", "model", "1.weight"),
        lambda folder: checkpoint(folder.parent / "sgd"),
    ],
)
def test_a_checkpoint_that_is_damaged_or_of_another_run_is_refused(tmp_path, monkeypatch, make):
    interrupt(monkeypatch, tiny(method="adam", epochs=2), tmp_path / "run", 2)
    interrupt(monkeypatch, tiny(method="sgd", epochs=2), tmp_path / "sgd", 2)
    foreign = make(tmp_path / "run")
    path = tmp_path / "run" / "checkpoint.pt"
    match foreign:
        case bytes():
            path.write_bytes(foreign)
        case dict():  # with the right digest: what is wrong is the content
            runs.save(path, foreign)
        case _:
            torch.save(foreign, path)
    before = contents(tmp_path / "run")
    message = r"checkpoint\.pt is of another run or damaged: train again in another folder$"
    with pytest.raises(ValueError, match=message):
        runs.load_run(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        runs.train(tiny(method="adam", epochs=2), tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


METRICS = json.dumps(
    {
        "epoch": 1,
        "step": 5,
        "train_loss": 0.5,
        "seconds": 1,
        "split": "test",
        "accuracy": 1,
        "nll": 1,
        "ece": 1,
    }
)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "config.json",
            "[1]",
            r"config\.json cannot be read \(it holds a list, not an object\): train again",
        ),
        (
            "config.json",
            "[" * 100_000,
            r"config\.json cannot be read \(it is nested too deeply\): train",
        ),
        ("config.json", '{"lr": {"a": 1}}', r"config\.json cannot be read \(lr must be .*\): train again"),
        ("config.json", "{", r"config\.json cannot be read \(.*\): train again in another folder$"),
        ("environment.json", "{", r"environment\.json is damaged: delete it, or train again"),
        ("environment.json", "[]", r"environment\.json is damaged: delete it, or train again"),
        ("environment.json", "{}", r"environment\.json is damaged: delete it, or train again"),
        ("metrics.jsonl", "", r"metrics\.jsonl has 0 of the 1 epochs .*: restore it, or train again"),
        ("metrics.jsonl", "garbage\n", r"metrics\.jsonl is damaged in line 1: restore it, or train again"),
        ("metrics.jsonl", "{}\n", r"metrics\.jsonl is damaged in line 1: restore it, or train again"),
        ("metrics.jsonl", METRICS.replace("0.5", "[]"), r"metrics\.jsonl is damaged in line 1: restore it"),
        (
            "metrics.jsonl",
            METRICS.replace("0.5", '"text"'),
            r"metrics\.jsonl is damaged in line 1: restore it",
        ),
        ("metrics.jsonl", "[" * 100_000, r"metrics\.jsonl is damaged in line 1: restore it, or train again"),
    ],
)
def test_a_damaged_file_is_named_with_its_remedy(tmp_path, monkeypatch, name, content, message):
    config = tiny(method="adam", epochs=2)
    interrupt(monkeypatch, config, tmp_path / "run", 2)
    (tmp_path / "run" / name).write_text(content)
    before = contents(tmp_path / "run")
    with pytest.raises(ValueError, match=message):
        runs.train(config, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before


def test_predictions_that_are_not_finite_are_a_divergence(tmp_path):
    # One step per epoch, so that no second loss tells before the metrics do.
    config = tiny(method="sgd", lr=1e30, batch_size=2000)
    with pytest.raises(FloatingPointError, match=r"^the predictions are not finite: lower lr \(no epoch"):
        runs.train(config, tmp_path / "run")
    assert not (tmp_path / "run" / "checkpoint.pt").exists()


@pytest.mark.parametrize("method", [*LEARNERS, "adam"])
def test_the_largest_seed_can_be_used(tmp_path, method):
    assert runs.train(tiny(method=method, epochs=1, seed=2**63 - 1), tmp_path / "run")


def test_a_run_without_its_checkpoint_is_left_as_it_is(tmp_path):
    runs.train(tiny(method="adam", epochs=2), tmp_path / "run")
    (tmp_path / "run" / "checkpoint.pt").unlink()
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(ValueError, match=r"has 2 epochs, but there is no checkpoint.pt to resume from"):
        runs.train(tiny(method="adam", epochs=2), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
