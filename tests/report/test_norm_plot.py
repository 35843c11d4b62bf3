"""The thresholds of the plot of norms are those of the step that was judged."""

from __future__ import annotations

from replay_lib.report.figures.norms import history_plot
from replay_lib.report.history import Point


def test_the_judged_step_counts_and_not_a_later_one() -> None:
    judged = Point(61, 1.0, median=0.25, detector=2.0, target=1.5)
    plot = history_plot([Point(44, 0.27, 0.28), judged, Point(85, 8.0, median=2.0)])
    assert "step 61 has the norm 1, 4 times the median before it" in plot.alt
    assert "median of the steps before 61" in str(plot.wide)
