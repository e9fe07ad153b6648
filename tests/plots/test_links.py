"""The pictures of costs and of the fitted line show the numbers that they were given; their text twins say the same."""

from servelab.plots import links

SIZES = (64, 256)
SECONDS = {"ring": [2e-6, 3e-6], "tree": [1e-6, 4e-6]}


def test_a_line_for_each_algorithm_and_one_at_the_crossover():
    (axes,) = links.cost_curves(SECONDS, 128.0, SIZES).axes
    ring, tree, crossing = axes.lines
    assert list(ring.get_ydata()) == [2.0, 3.0] and list(tree.get_ydata()) == [1.0, 4.0]
    assert list(crossing.get_xdata()) == [128.0, 128.0]


def test_no_crossover_outside_the_sizes():
    (axes,) = links.cost_curves(SECONDS, 0.0, SIZES).axes
    assert len(axes.lines) == 2


def test_the_table_names_the_fastest():
    rows = links.cost_text(SECONDS, SIZES).splitlines()[2:]
    assert rows == ["| 64 | 2.0 | 1.0 | tree |", "| 256 | 3.0 | 4.0 | ring |"]


def test_points_are_measured_and_the_line_is_fitted():
    (axes,) = links.fit_picture(SIZES, [2e-6, 3e-6], 1e-6, 1e-8).axes
    line, points = axes.lines
    assert [round(line.get_ydata()[end], 6) for end in (0, -1)] == [1.64, 3.56]
    assert len(line.get_xdata()) > 100  # a curve, on logarithmic axes
    assert list(points.get_ydata()) == [2.0, 3.0]
    assert links.fit_text(SIZES, [2e-6, 3e-6], 1e-6, 1e-8).splitlines()[2] == "| 64 | 2.0 | 1.6 |"


def test_the_noted_times_belong_to_the_sizes_of_the_unit():
    assert len(links.RECORDED_SECONDS) == len(range(0, 21, 2))
