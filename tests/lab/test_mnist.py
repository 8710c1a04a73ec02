"""Each method on MNIST with its own defaults; minutes long, so only when POSTERITY_SLOW=1 asks for it."""

import os

import pytest

from posterity_lab import files, runs
from posterity_lab.config import Config


def wanted() -> bool:
    if os.environ.get("POSTERITY_SLOW") != "1" or not os.environ.get("POSTERITY_DATA"):
        return False
    return set(files.verify("mnist").values()) == {"ok"}


pytestmark = pytest.mark.skipif(not wanted(), reason="needs POSTERITY_SLOW=1 and MNIST in POSTERITY_DATA")


@pytest.mark.parametrize(
    ("method", "highest_error"), [("bgd", 0.028), ("ivon", 0.030), ("vogn", 0.030), ("bbb", 0.030)]
)
def test_five_epochs_reach_the_error_that_the_defaults_promise(tmp_path, method, highest_error):
    last = runs.train(Config(method=method, net="mlp-400-400", data="mnist", epochs=5), tmp_path / method)[-1]
    assert last["split"] == "test"
    assert 1 - last["accuracy"] <= highest_error
