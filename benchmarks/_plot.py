"""The plots of the experiments. This module only draws; it does not measure."""

import matplotlib as mpl
from matplotlib.figure import Figure

__all__ = ["plot_bars", "plot_rates"]

COLOURS = {"SSIJ": "#0b5fa5", "MeshJoin": "#d1731f", "index nested loops": "#7a7a7a", "DuckDB": "#3d8f4f"}
mpl.rcParams.update({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False})


def plot_rates(path, cells, title):
    """Draw rate over skew, a panel for each memory, a line for each operator."""
    percents = sorted({cell["percent"] for cell in cells})
    figure = Figure(figsize=(3.2 * len(percents), 3.6), layout="constrained")
    axes = figure.subplots(1, len(percents), sharey=True, squeeze=False)[0]
    for axis, percent in zip(axes, percents, strict=True):
        some = sorted((cell for cell in cells if cell["percent"] == percent), key=lambda cell: cell["skew"])
        for name in some[0]["rates"]:
            rates = [cell["rates"][name] for cell in some]
            axis.plot([cell["skew"] for cell in some], rates, marker="o", label=name, color=COLOURS.get(name))
        axis.set(title=f"memory {percent:g} % of the table", xlabel="Zipf skew", yscale="log")
        axis.grid(visible=True, axis="y", alpha=0.3)
    axes[0].set_ylabel("tuples per second")
    axes[-1].legend(frameon=False)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")


def plot_bars(path, groups, unit, title):
    """Draw a panel for each group of contestants: `groups` maps a title to a dict of name to value."""
    figure = Figure(figsize=(2.6 * len(groups), 3.4), layout="constrained")
    axes = figure.subplots(1, len(groups), squeeze=False)[0]
    for axis, (name, values) in zip(axes, groups.items(), strict=True):
        axis.bar(list(values), list(values.values()), color=[COLOURS.get(key, "#5b7fa6") for key in values])
        axis.set_title(name)
        axis.tick_params(axis="x", rotation=30)
    axes[0].set_ylabel(unit)
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    print(f"wrote {path}")
