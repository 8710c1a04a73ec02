"""Running a stream: what is learned, tested, told and refused, and that a cut run ends like a whole one."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from posterity import BGD, metrics
from posterity.predict import Mode
from posterity_lab import nets
from posterity_lab.baselines import adam, ewc, l2, sgd, si, vcl
from posterity_lab.continual import AsksForBoundaries, Scores, by_rule, run
from posterity_lab.data import Split, load
from posterity_lab.methods import Method
from posterity_lab.streams import (
    Stream,
    joint,
    many_heads,
    normalised,
    one_head,
    own_head,
    parts,
    permuted,
    present,
    split,
    stream,
)

DOCS = Path(__file__).parents[2] / "docs" / "continual.md"

LEARNERS: dict[str, Callable[[nn.Module], Method]] = {
    "bgd": lambda net: by_rule(net, BGD(net, std_init=0.05, mc_samples=2, seed=0)),
    "sgd": lambda net: sgd(net, lr=0.05, momentum=0.9),
    "adam": lambda net: adam(net, lr=0.01),
    "l2": lambda net: l2(net, lr=0.01, strength=0.01),
    "ewc": lambda net: ewc(net, lr=0.01, strength=1.0, examples=20),
    "si": lambda net: si(net, lr=0.01, strength=1.0),
    "vcl": lambda net: vcl(net, num_data=30, lr=0.01),
}


def blobs(count: int, shift: float, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(count) % 3
    centres = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    return Split(centres[y] + shift + torch.randn(count, 2, generator=generator), y)


def shifted(**how: float) -> Stream:
    pairs = [(blobs(30, shift, 1), blobs(12, shift, 2)) for shift in (0.0, 1.0, 2.0)]
    return stream(pairs, **{"epochs": 2, "batch_size": 8, "seed": 0, **how})  # type: ignore[arg-type]


def small(classes: int = 3) -> nn.Module:
    return nets.initialise(nets.mlp(2, [5], classes), seed=3)


quiet = partial(run, samples=3, progress=False)


class Killed(Exception):
    pass


def killed(method: Method, after: int) -> Method:
    """The method, which dies when it has taken some steps."""
    step, taken = method.step, []

    def counted(x: Tensor, y: Tensor) -> Tensor:
        if len(taken) == after:
            raise Killed
        taken.append(1)
        return step(x, y)

    method.step = counted  # type: ignore[method-assign]
    return method


def same(one: Scores, two: Scores) -> bool:
    return all(
        torch.equal(getattr(one, key), getattr(two, key)) for key in ("accuracy", "nll", "ece", "untrained")
    )


@pytest.mark.parametrize(("name", "overlap"), [*((name, 0.0) for name in LEARNERS), ("bgd", 0.25)])
def test_a_cut_run_ends_like_a_whole_one(name: str, overlap: float, tmp_path: Path) -> None:
    shown = shifted(overlap=overlap)
    assert (len(shown), shown.ends) == (24, [8, 16, 24])
    whole_net, cut_net = small(), small()
    whole = quiet(LEARNERS[name](whole_net), shown)
    for after in (11, 10):  # killed within the second task, then again in what was left
        with pytest.raises(Killed):
            quiet(killed(LEARNERS[name](small()), after), shown, folder=tmp_path, every=5, resume=True)
    assert torch.load(tmp_path / "checkpoint.pt", weights_only=True)["batch"] == 20
    resumed = quiet(LEARNERS[name](cut_net), shown, folder=tmp_path, resume=True)
    assert same(whole, resumed)
    for one, two in zip(whole_net.parameters(), cut_net.parameters(), strict=True):
        assert torch.equal(one, two)


def test_finished_run_is_loaded_not_retrained(tmp_path: Path) -> None:
    first = quiet(LEARNERS["sgd"](small()), shifted(), folder=tmp_path)
    again = quiet(killed(LEARNERS["sgd"](small()), after=0), shifted(), folder=tmp_path, resume=True)
    assert same(first, again)


def test_every_row_is_what_the_net_can_do_at_that_time() -> None:
    net, by_hand = small(), small()
    scores = quiet(sgd(net, lr=0.05), shifted())
    assert scores.accuracy.shape == scores.nll.shape == scores.ece.shape == (3, 3)
    shown, method = shifted(), sgd(by_hand, lr=0.05)

    def probs(test: Split) -> Tensor:
        return by_hand(test.x).softmax(-1).detach()

    assert scores.untrained.tolist() == [metrics.accuracy(probs(test), test.y) for test in shown.tests]
    for number, (x, y) in enumerate(shown, start=1):
        method.step(x, y)
        if number in shown.ends:
            row = shown.ends.index(number)
            for column, test in enumerate(shown.tests):
                for key in ("accuracy", "nll", "ece"):
                    expected = getattr(metrics, key)(probs(test), test.y)
                    assert getattr(scores, key)[row, column].item() == pytest.approx(expected, abs=1e-6)


class Told(Method):
    """Learns nothing and writes down what it is told."""

    def __init__(self, net: nn.Module) -> None:
        self.model, self.optimizer = net, torch.optim.SGD(net.parameters(), lr=0.0)
        self.events: list[object] = []

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.events.append("step")
        return torch.zeros(())

    def posterior(self) -> None:
        return None


class Asking(Told):
    def boundary(self, data: Split) -> None:
        self.events.append(data)


def test_only_who_asks_is_told_of_boundaries() -> None:
    tasks = permuted(load("digits"), tasks=3, seed=0)
    shown = stream(tasks, epochs=1, batch_size=1000, seed=0)
    asking, plain = Asking(nets.mlp(64, [], 10)), Told(nets.mlp(64, [], 10))
    quiet(asking, shown)
    quiet(plain, shown)
    assert plain.events == ["step"] * 6
    assert [event if event == "step" else "over" for event in asking.events] == [
        "step",
        "step",
        "over",
    ] * 2 + [
        "step",
        "step",
    ]
    taught = [event for event in asking.events if isinstance(event, Split)]
    for data, task in zip(taught, tasks.items, strict=False):
        assert torch.equal(data.x, task.seen(task.train).x)
    assert not torch.equal(taught[0].x, taught[1].x)


def test_which_methods_ask() -> None:
    asking = {name for name, make in LEARNERS.items() if isinstance(make(small()), AsksForBoundaries)}
    assert {"l2", "ewc", "si", "vcl"} <= asking
    assert "bgd" not in asking


class Fixed(nn.Module):
    """Logits that prefer class 3, then 1, whatever the input."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor([0.0, 1.0, 0.0, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.logits.expand(len(x), -1)


def test_tests_use_the_head_of_their_task_and_no_labels_trick() -> None:
    data = torch.zeros(4, 2), torch.tensor([0, 1, 1, 1])
    pairs = [(data, data), (data, data)]
    apart = quiet(Told(Fixed()), stream(many_heads(pairs), epochs=1, batch_size=4, seed=0))
    assert apart.accuracy.tolist() == [[0.75, 0.75]] * 2  # 1 before 0, and 3 before 2
    first = torch.tensor([0.0, 1.0]).log_softmax(0)
    assert apart.nll[0, 0].item() == pytest.approx(float(-(first[0] + 3 * first[1]) / 4))
    sure = Fixed()
    with torch.no_grad():
        sure.logits[0] = 200.0
    net = quiet(Told(sure), stream(many_heads(pairs), epochs=1, batch_size=4, seed=0))
    assert net.nll[0, 0].item() == pytest.approx(0.75 * 199.0)  # a probability of e^-199 is none in float32
    offset = [(data, data), ((data[0], data[1] + 2), (data[0], data[1] + 2))]
    together = quiet(Told(Fixed()), stream(one_head(offset), epochs=1, batch_size=4, seed=0))
    assert together.accuracy.tolist() == [[0.0, 0.75]] * 2  # 3 before all


def test_a_joint_stream_has_one_row() -> None:
    pairs = [(blobs(30, shift, 1), blobs(12, shift, 2)) for shift in (0.0, 1.0)]
    scores = quiet(LEARNERS["ewc"](small()), joint(pairs, epochs=2, batch_size=8, seed=0))
    assert scores.accuracy.shape == (1, 2)
    assert set(scores.summary()) == {"average_accuracy", "nll", "ece"}


def test_the_summary_of_a_sequence() -> None:
    rows = torch.tensor([[0.8, 0.2], [0.6, 0.9]], dtype=torch.float64)
    summary = Scores(rows, 2 * rows, rows / 2, torch.tensor([0.1, 0.1])).summary()
    wanted = {
        "average_accuracy": 0.75,
        "nll": 1.5,
        "ece": 0.375,
        "forgetting": 0.2,
        "backward_transfer": -0.2,
        "forward_transfer": 0.1,
    }
    assert summary == pytest.approx(wanted)


def test_too_few_outputs_are_refused_before_anything_is_learned() -> None:
    method = Told(small(classes=2))
    with pytest.raises(ValueError, match="the net has 2 outputs and the stream 3 classes"):
        quiet(method, shifted())
    data = torch.zeros(4, 2), torch.tensor([0, 1, 1, 1])
    apart = stream(many_heads([(data, data), (data, data)]), epochs=1, batch_size=4, seed=0)
    with pytest.raises(ValueError, match="the net has 5 outputs and the stream 4 classes"):
        quiet(Told(small(classes=5)), apart)
    assert method.events == []


def test_predictions_that_are_not_finite_are_refused() -> None:
    net = Fixed()
    net.logits.data.fill_(float("nan"))
    with pytest.raises(FloatingPointError, match="the predictions are not finite: lower lr"):
        quiet(Told(net), shifted())


def test_folders_of_other_runs_are_refused(tmp_path: Path) -> None:
    quiet(LEARNERS["sgd"](small()), shifted(), folder=tmp_path)
    with pytest.raises(ValueError, match="holds a run already: continue it with resume=True"):
        quiet(LEARNERS["sgd"](small()), shifted(), folder=tmp_path)
    again = partial(quiet, folder=tmp_path, resume=True)
    for method, shown in (
        (LEARNERS["adam"](small()), shifted()),
        (LEARNERS["bgd"](small()), shifted()),
        (LEARNERS["sgd"](small()), shifted(seed=1)),
        (LEARNERS["sgd"](small()), shifted(overlap=0.25)),
    ):
        with pytest.raises(ValueError, match="is of another method or stream"):
            again(method, shown)
    with pytest.raises(ValueError, match="is of another method or stream"):
        again(LEARNERS["sgd"](small()), shifted(), mode="mean")
    with pytest.raises(ValueError, match="of another run or damaged"):
        again(LEARNERS["sgd"](nets.mlp(2, [6], 3)), shifted())
    (tmp_path / "checkpoint.pt").write_bytes(b"half")
    with pytest.raises(ValueError, match="is of another run or damaged: train again in another folder"):
        again(LEARNERS["sgd"](small()), shifted())
    with pytest.raises(ValueError, match="nothing to resume from"):
        quiet(LEARNERS["sgd"](small()), shifted(), resume=True)
    with pytest.raises(ValueError, match="every must be at least 1"):
        quiet(LEARNERS["sgd"](small()), shifted(), every=0)


def test_progress_goes_to_the_error_stream(capsys: pytest.CaptureFixture[str]) -> None:
    run(LEARNERS["sgd"](small()), shifted())
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "task 3/3" in shown.err
    quiet(LEARNERS["sgd"](small()), shifted())
    assert capsys.readouterr().err == ""


def digits(make: Callable[[nn.Module], Method], tasks: int = 3) -> dict[str, float]:
    data = load("digits")
    ready = normalised(data, float(data.train.x.mean()), float(data.train.x.std()))
    shown = stream(permuted(ready, tasks=tasks, seed=0), epochs=5, batch_size=64, seed=0)
    return run(make(nets.initialise(nets.mlp(64, [60], 10), 0)), shown, progress=False).summary()


def test_penalties_forget_less_than_plain_training_on_digits() -> None:
    plain = digits(lambda net: adam(net, lr=3e-3))
    assert plain["forgetting"] > 0.15
    for make in (
        lambda net: l2(net, lr=3e-3, strength=0.03),
        lambda net: ewc(net, lr=3e-3, strength=10.0),
        lambda net: si(net, lr=3e-3, strength=10.0),
    ):
        kept = digits(make)
        assert kept["forgetting"] < plain["forgetting"] - 0.05
        assert kept["average_accuracy"] > plain["average_accuracy"] + 0.03


def test_heads_keep_split_digits_apart() -> None:
    tasks = split(load("digits"), tasks=5, scenario="task")
    shown = stream(tasks, epochs=2, batch_size=32, seed=0)
    net = nets.initialise(nets.mlp(64, [60], 10), 0)
    method = by_rule(net, BGD(net, std_init=0.1, mc_samples=3), partial(own_head, heads=tasks.heads))
    assert quiet(method, shown).summary()["average_accuracy"] > 0.9


def test_the_labels_trick_keeps_more_of_class_incremental_digits() -> None:
    tasks = split(load("digits"), tasks=5, scenario="class")
    shown = stream(tasks, epochs=3, batch_size=32, seed=0)
    accuracy = []
    for mask in (None, partial(present, classes=10)):
        net = nets.initialise(nets.mlp(64, [60], 10), 0)
        accuracy.append(quiet(sgd(net, lr=0.03, mask=mask), shown).summary()["average_accuracy"])
    assert accuracy[1] > accuracy[0] + 0.1


def test_parts_of_one_data_set_add_up() -> None:
    shown = stream(parts(load("digits"), tasks=3, seed=0), epochs=2, batch_size=32, seed=0)
    net = nets.initialise(nets.mlp(64, [60], 10), 0)
    scores = quiet(by_rule(net, BGD(net, std_init=0.1, mc_samples=3)), shown)
    assert (scores.accuracy == scores.accuracy[:, :1]).all()  # one test set for all
    assert scores.accuracy[-1, 0] > scores.accuracy[0, 0]


def test_the_stream_in_the_documents_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(code, str(DOCS), "exec"), names)
    assert "average_accuracy" in capsys.readouterr().out
    scores = names["scores"]
    assert isinstance(scores, Scores)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    plain = quiet(sgd(net, lr=0.1), stream(names["tasks"], epochs=3, batch_size=64, seed=0))  # type: ignore[arg-type]
    assert scores.summary()["average_accuracy"] > plain.summary()["average_accuracy"] + 0.03


def test_votes_do_not_change_losses_and_calibration() -> None:
    tasks = permuted(load("digits"), tasks=1, seed=0)
    found = []
    modes: tuple[Mode, ...] = ("vote", "average")
    for mode in modes:
        torch.manual_seed(0)
        net = nets.mlp(64, [8], 10)
        method = by_rule(net, BGD(net, std_init=0.1, lr=0.01, mc_samples=2))
        shown = stream(tasks, epochs=1, batch_size=500, seed=0)
        found.append(run(method, shown, mode=mode, samples=3, progress=False))
    voted, averaged = found
    assert torch.equal(voted.nll, averaged.nll)
    assert torch.equal(voted.ece, averaged.ece)
    assert not torch.equal(voted.accuracy, averaged.accuracy)
