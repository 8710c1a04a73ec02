"""The tables and figures of papers that can be reproduced, with the papers' numbers."""

from __future__ import annotations

from posterity_lab.hints import hint
from posterity_lab.reproduce import incremental, sparse, sparse_groups, sparse_vgg
from posterity_lab.reproduce.bandit import BANDIT
from posterity_lab.reproduce.blundell import BLUNDELL, TO_PRUNE
from posterity_lab.reproduce.calibration import ABLATED, CALIBRATION
from posterity_lab.reproduce.curve import CURVE
from posterity_lab.reproduce.doubt import DOUBT
from posterity_lab.reproduce.images import CIFAR10, MNIST
from posterity_lab.reproduce.proofs import THEORY
from posterity_lab.reproduce.study import Cell, Experiment, Study
from posterity_lab.reproduce.tasks import PERMUTED, SEQUENCE, SMALL_PERMUTED
from posterity_lab.reproduce.toy import TOY

_TABLE1 = {
    "bgd": {"400": "1.74", "800": "1.67", "1200": "1.78"},
    "bbb": {"400": "1.82", "800": "1.99", "1200": "2.04"},
    "sgd": {"400": "1.83", "800": "1.84", "1200": "1.88"},
}
_BLUNDELL = {
    "bbb-mixture": {"400": "1.36", "800": "1.34", "1200": "1.32"},
    "bbb": {"400": "1.82", "800": "1.99", "1200": "2.04"},
    "sgd": {"400": "1.83", "800": "1.84", "1200": "1.88"},
    "sgd-dropout": {"400": "1.51", "800": "1.33", "1200": "1.36"},
}
_BLUNDELL_PRUNED = "1.24 / 1.24 / 1.24 / 1.29 / 1.39"
# Train and validation accuracy in per cent, NLL, ECE, AUROC, seconds per epoch.
_VOGN_TABLE = {
    ("lenet5", "adam"): "71.98 / 67.67 / 0.937 / 0.021 / 0.794 / 6.96",
    ("lenet5", "bbb"): "66.84 / 64.61 / 1.018 / 0.045 / 0.784 / 11.43",
    ("lenet5", "mc-dropout"): "68.41 / 67.65 / 0.99 / 0.087 / 0.797 / 6.95",
    ("lenet5", "vogn"): "70.79 / 67.32 / 0.938 / 0.046 / 0.8 / 18.33",
    ("alexnet unaugmented", "adam"): "100.0 / 67.94 / 2.83 / 0.262 / 0.793 / 3.12",
    ("alexnet unaugmented", "mc-dropout"): "97.56 / 72.20 / 1.077 / 0.140 / 0.818 / 3.25",
    ("alexnet unaugmented", "vogn"): "79.07 / 69.03 / 0.93 / 0.024 / 0.796 / 9.98",
    ("alexnet", "adam"): "97.92 / 73.59 / 1.480 / 0.262 / 0.793 / 3.08",
    ("alexnet", "mc-dropout"): "80.65 / 77.04 / 0.667 / 0.114 / 0.828 / 3.20",
    ("alexnet", "vogn"): "81.15 / 75.48 / 0.703 / 0.016 / 0.832 / 10.02",
    ("resnet18", "adam"): "97.74 / 86.00 / 0.55 / 0.082 / 0.877 / 11.97",
    ("resnet18", "mc-dropout"): "88.23 / 82.85 / 0.51 / 0.166 / 0.768 / 12.51",
    ("resnet18", "vogn"): "91.62 / 84.27 / 0.477 / 0.040 / 0.876 / 53.14",
}

_SPARSE = {
    (f"{net}{chosen}", "sparse-vd"): numbers
    for net, numbers in (("300-100", "1.92 % / 68×"), ("lenet5", "0.75 % / 280×"))
    for chosen in ("", f" {sparse.CHOSEN}")
}

_GROUPS = {
    **{(f"300-100{how}", "gnj"): "278-98-13 (recalled)" for how in ("", f" {sparse_groups.BOUNDED}")},
    **{(f"300-100{how}", "ghs"): "311-86-14 (recalled)" for how in ("", f" {sparse_groups.BOUNDED}")},
    ("300-100", "l0"): "266-88-33, 1.8 % (recalled)",
    (f"lenet5 {sparse_groups.BOUNDED}", "gnj"): "8-13-88-13, 108× / 361×, 1.0 %",
    (f"lenet5 {sparse_groups.BOUNDED}", "ghs"): "5-10-76-16, 156× / 419×, 1.0 %",
    ("lenet5", "l0"): "9-18-65-25, 1.0 % (recalled)",
}

_VGG = {
    ("k 0.25", "sparse-vd"): "about 13.5 % (dense 13.1), 5.5×",
    ("k 0.5", "sparse-vd"): "about 8.5 % (dense 8.2), 13.5×",
    ("k 1", "sparse-vd"): "about 7.3 % (dense 7.3), 48×",
    ("k 1.5", "sparse-vd"): "about 7.0 % (dense 7.0), 65×",
    ("k 1", "gnj"): "14× / 56×",
}


def _whole(cell: Cell) -> bool:
    """Whether a cell is of a net that is there for what it knows, not for what can be removed of it."""
    return not cell.setting.endswith("to prune")


def _whole_of_blundell(cell: Cell) -> bool:
    return not cell.setting.endswith(TO_PRUNE)


EXPERIMENTS = {
    experiment.name: experiment
    for experiment in (
        Experiment(
            "bgd-table1",
            "Table 1: classification error on MNIST",
            "BGD errs less than Bayes by Backprop with a Gaussian prior, and than SGD, at every width. The "
            "paper averages the accuracy of ten sampled networks; its numbers for BBB and SGD are "
            "Blundell's.",
            {(width, method): error for method, row in _TABLE1.items() for width, error in row.items()},
            MNIST,
            _whole,
        ),
        Experiment(
            "bgd-table2",
            "Table 2: weight pruning on MNIST",
            "With 95 % of 2.4 million weights removed by signal-to-noise ratio, without retraining, BGD's "
            "error grows by a factor of 1.05 and that of Bayes by Backprop (mixture prior) by 1.04; SGD's, "
            "pruned by magnitude, by 4.28.",
            {
                ("1200 to prune", "bgd"): "1.05",
                ("1200 to prune", "bbb-mixture"): "1.04",
                ("1200", "sgd"): "4.28",
            },
            MNIST,
            # The widest net of all, by every method.
            lambda cell: cell.setting.startswith(("1200", "24")),
        ),
        Experiment(
            "bgd-figure1",
            "Figure 1: permuted MNIST",
            "Over ten tasks BGD, never told of a switch, keeps far more than SGD does and somewhat less "
            "than SI, which is told. The paper has a plot without numbers, of 2x2000 units.",
            {},
            PERMUTED,
        ),
        Experiment(
            "bgd-figure2",
            "Figure 2: standard deviations after CIFAR-10",
            "Many stay close to where they began, 0.015; a small part is much lower or higher.",
            {},
            CIFAR10,
            lambda cell: cell.method == "bgd" and _whole(cell),
        ),
        Experiment(
            "bgd-figure3",
            "Figure 3: CIFAR-10 by VGG11",
            "By each of three ways of inference BGD is on a par with SGD or better, the committee's vote "
            "slightly ahead. The paper has a plot without numbers, of 400 epochs.",
            {},
            CIFAR10,
            _whole,
        ),
        Experiment(
            "bgd-table3",
            "Table 3: weight pruning on CIFAR-10",
            "With 90 % of 9.2 million weights removed, without retraining, BGD's error grows by a factor of "
            "1.04, SGD's by 7.7.",
            {("vgg11 to prune", "bgd"): "1.04", ("vgg11", "bgd"): "1.04", ("vgg11", "sgd"): "7.7"},
            CIFAR10,
        ),
        Experiment(
            "bgd-figure4",
            "Figure 4: CIFAR-10, then five parts of CIFAR-100",
            "In the authors' words BGD balances well between keeping reasonable accuracy on earlier tasks "
            "and reaching high accuracy on newer ones. The paper has a plot without numbers, of the accuracy "
            "on each task at the end.",
            {},
            SEQUENCE,
        ),
        Experiment(
            "bgd-theory",
            "Theorem 1 and Corollary 1",
            "Where the loss is strongly convex, E[g·eps] is positive for every weight and σ falls at every "
            "step; where it is strongly concave, σ grows. Both hold for exact expectations.",
            {},
            THEORY,
        ),
        Experiment(
            "vogn-table",
            "VOGN, table: CIFAR-10",
            "VOGN is about as accurate as Adam and better calibrated, with lower NLL and ECE, in 2.6 to 4.4 "
            "times Adam's time. For Adam on both AlexNets the paper prints the same ECE and AUROC. IVON, and "
            "K-FAC on CIFAR-10, are not in its table.",
            _VOGN_TABLE,
            CALIBRATION,
            lambda cell: not cell.setting.endswith(ABLATED),
        ),
        Experiment(
            "vogn-ablation",
            "VOGN, figure: momentum and BatchNorm",
            "On ResNet-18 momentum and BatchNorm each speed VOGN up. The paper has a plot without numbers.",
            {},
            CALIBRATION,
            lambda cell: cell.setting.endswith(ABLATED),
        ),
        Experiment(
            "vogn-permuted",
            "VOGN: permuted MNIST",
            "The last posterior as the next prior keeps about 94 % on ten tasks by nets of 2x100 units (read "
            "off a plot).",
            {("100", "vogn-told"): "about 94"},
            SMALL_PERMUTED,
        ),
        Experiment(
            "vogn-toy",
            "VOGN, figure: two classes in the plane",
            "VOGN's mean weights draw about the border that Adam's do; away from the data it is in doubt.",
            {},
            TOY,
        ),
        Experiment(
            "bbb-table1",
            "Bayes by Backprop, table 1: classification error on MNIST",
            "With a mixture for a prior, Bayes by Backprop errs about as little as SGD with dropout, and "
            "less than SGD; with a Gaussian prior it errs about as much as SGD.",
            {(width, method): error for method, row in _BLUNDELL.items() for width, error in row.items()},
            BLUNDELL,
            _whole_of_blundell,
        ),
        Experiment(
            "bbb-pruning",
            "Bayes by Backprop, table 2 and figures 2 and 3: pruning, and histograms of the weights",
            "With half, three quarters, 95 and 98 % of the weights removed by signal-to-noise ratio, the net "
            "of 2x1200 units with a mixture prior errs 1.24, 1.24, 1.29 and 1.39 %, and 1.24 % whole. Its "
            "weights spread wider than those of SGD with and without dropout.",
            {
                (setting, "bbb-mixture"): _BLUNDELL_PRUNED
                for setting in ("1200", *(f"1200 {name}" for name in TO_PRUNE))
            },
            BLUNDELL,
            lambda cell: cell.setting.startswith(("1200", "24")),
        ),
        Experiment(
            "incremental-mnist",
            "Bayesian incremental learning: MNIST in parts",
            "Fine-tuning performs poorly, and the fully factorised Gaussian suffices. The paper's plot is "
            "lost, with its numbers.",
            {},
            incremental.MNIST,
        ),
        Experiment(
            "incremental-cifar10",
            "Bayesian incremental learning: CIFAR-10 in parts",
            "As on MNIST; here the KL has to count for less to get good performance. The paper's plot is "
            "lost, with its numbers.",
            {},
            incremental.CIFAR10,
        ),
        Experiment(
            "incremental-pretrained",
            "Bayesian incremental learning: five classes of CIFAR-10 first, then the others in parts",
            "Pretraining helps Bayesian models and not fine-tuning, and with a Laplace approximation the "
            "prior's stds need no grid. The paper's plot is lost, with its numbers.",
            {},
            incremental.PRETRAINED,
        ),
        Experiment(
            "bbb-regression",
            "Bayes by Backprop, figure 5: a curve with noise",
            "Where there is no data, sampled networks go apart; a plain net is sure everywhere.",
            {},
            CURVE,
        ),
        Experiment(
            "bbb-bandit",
            "Bayes by Backprop, figure 6: mushrooms to eat or to pass",
            "Thompson sampling has less cumulative regret than agents that are greedy, always or but for 1 "
            "or 5 % of the time. The paper has a plot without numbers, of 50,000 mushrooms.",
            {},
            BANDIT,
        ),
        Experiment(
            "uncertainty-samples",
            "How many networks, and a digit that is turned",
            "Accuracy stops growing after few networks, and the log-likelihood goes on improving. Of a digit "
            "that is turned, a plain LeNet is sure of one class or another; sampled networks are in doubt.",
            {},
            DOUBT,
        ),
        Experiment(
            "sparse-lenet",
            "Sparse variational dropout: LeNets on MNIST",
            "A log-uniform prior leaves one weight in 68 of LeNet-300-100 at an error of 1.92 %, and one in "
            "280 of LeNet-5-Caffe at 0.75 %, with 98.9 – 97.2 – 62.0 % and 67 – 98 – 99.8 – 95 % removed by "
            "layer. Dense nets err 1.64 and 0.80 %. The other methods are not in that table.",
            _SPARSE,
            sparse.LENET,
        ),
        Experiment(
            "sparse-pictures",
            "Sparse variational dropout: weights as they are removed",
            "The lecture shows the kernels of LeNet-5's first convolution and a patch of its first matrix, "
            "from epoch 0 to 200 and a compression of 270.",
            {},
            sparse.LENET,
            lambda cell: cell.method == "sparse-vd" and not cell.setting.endswith(sparse.CHOSEN),
        ),
        Experiment(
            "sparse-random-labels",
            "Sparse variational dropout: random labels",
            "Where labels say nothing of the images, no weight is left and every accuracy is that of chance, "
            "while nets with binary dropout learn all labels by heart.",
            {
                (setting, method): numbers
                for setting in ("300-100", "vgg-like")
                for method, numbers in (
                    ("sparse-vd", "10 / 10, all removed"),
                    ("mc-dropout", "100 / 10"),
                )
            },
            sparse.LABELS,
        ),
        Experiment(
            "sparse-groups",
            "Bayesian compression: whole units of LeNets",
            "Of LeNet-5-Caffe, 20-50-800-500, a group normal-Jeffreys prior leaves 8-13-88-13, 108 times "
            "fewer weights and 361 times fewer bits; a group horseshoe 5-10-76-16, 156 and 419 times; both "
            "err 1.0 %.",
            _GROUPS,
            sparse_groups.GROUPS,
        ),
        Experiment(
            "sparse-vgg",
            "Sparse variational dropout: the VGG-like net on CIFAR-10",
            "At width 1 it leaves one weight in 48 and errs 7.3 %, as the dense net does (numbers are read "
            "off the paper's plot). GNJ leaves 14 times fewer weights and 56 times fewer bits. Rules are in "
            "neither paper.",
            _VGG,
            sparse_vgg.VGG,
        ),
    )
}


def experiment(name: str) -> Experiment:
    """The experiment of that name.

    Example:
        >>> experiment("bgd-tabel1")
        Traceback (most recent call last):
            ...
        ValueError: there is no experiment 'bgd-tabel1', did you mean 'bgd-table1'?
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"there is no experiment {name!r}{hint(name, EXPERIMENTS)}")
    return EXPERIMENTS[name]


def study(name: str) -> Study:
    """The study of that name.

    Example:
        >>> study("bgd-mnist").seeds
        (0, 1, 2)
    """
    return next(each.study for each in EXPERIMENTS.values() if each.study.name == name)
