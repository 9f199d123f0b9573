"""The catalogue of metrics can't lag behind the code."""

import re

import pytest

from engine.metrics import CATALOGUE, UnknownMetricError, checked


def test_known_metrics_pass_unchanged():
    values = {"train/loss": 0.5, "wait/learner_seconds": 2.0}
    assert checked(values) == values
    assert checked({}) == {}


def test_unknown_metrics_are_an_error_that_names_all_of_them():
    with pytest.raises(UnknownMetricError, match=r"train/tone, train/vibes"):
        checked({"train/vibes": 1.0, "train/loss": 0.5, "train/tone": 2.0})


@pytest.mark.parametrize("name", CATALOGUE)
def test_each_metric_says_what_it_is_and_in_which_unit(name):
    metric = CATALOGUE[name]
    assert metric.unit
    assert len(metric.meaning.split()) > 2
    assert re.fullmatch(r"[a-z]+/[a-z_0-9]+", name), "a group and a name, as trackers show them"
