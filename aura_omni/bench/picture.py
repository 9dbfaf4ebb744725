"""A report of the bench as one picture: how long people wait, how much sound flows, what the stages did.

draw(json.loads(Path("turn.json").read_text()), Path("turn.png"))
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aura_omni.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Runs = Sequence[Mapping[str, Any]]

# What is shown of each, in the order of a turn: name in the report, label, colour (distinct also without colour vision).
TIMES = (
    ("first_text_s", "first text", "#0072B2"),
    ("first_audio_s", "first audio", "#E69F00"),
    ("gap_free_s", "could start without a gap", "#D55E00"),
    ("complete_s", "complete", "#666666"),
)
FLOWS = (("heard_s_per_s", "heard", "#0072B2"), ("audio_s_per_s", "spoken", "#E69F00"))
STAGES = (("asr", "#0072B2"), ("aura", "#009E73"), ("talker", "#E69F00"), ("code2wav", "#CC79A7"))


def draw(report: Mapping[str, Any], path: Path) -> None:
    """PNG, SVG or PDF, by the suffix. Raises ConfigError without matplotlib, or for a suffix that it does not know."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError(
            "a picture needs matplotlib; pip install 'aura-omni[bench]', or leave --picture out"
        ) from None
    runs: Runs = report["runs"]
    worked = any("stages" in run for run in runs)
    figure = Figure(figsize=(11, 8.5 if worked else 7.5), layout="constrained", dpi=120)
    figure.suptitle(_title(report), fontsize=9, family="monospace")
    grid = figure.add_gridspec(2, 3 if worked else 2, height_ratios=(3, 2))
    _times(figure.add_subplot(grid[0, :]), runs)
    panels = [figure.add_subplot(grid[1, column]) for column in range(grid.ncols)]
    _flows(panels[0], runs)
    if worked:
        _of_stages(
            panels[1], runs, "under_way", "share of the time with a step under way", lambda value: f"{value:.0%}"
        )
        _of_stages(panels[2], runs, "rows_a_step", "rows in a step", lambda value: f"{value:.3g}")
        panels[1].yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    else:
        _requests(panels[1], runs)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"--picture {path}: {error}") from None


def _title(report: Mapping[str, Any]) -> str:
    """The command whole, but one of more than four lines."""
    command = textwrap.wrap(str(report.get("command", "")), 140, break_on_hyphens=False, max_lines=4, placeholder=" …")
    return "\n".join([*command, f"{report.get('date', '')}, {report.get('client', '')}"])


def _times(axes: Axes, runs: Runs) -> None:
    """Each median with its number, and a line up to the 95th percentile."""
    shown = [entry for entry in TIMES if any(run.get(entry[0]) for run in runs)]
    for number, (name, label, colour) in enumerate(shown):
        places = [place for place, run in enumerate(runs) if run.get(name)]
        values = [runs[place][name] for place in places]
        at = [place + _beside(number, len(shown)) for place in places]
        medians = [value["median"] for value in values]
        above = [value["p95"] - value["median"] for value in values]
        bars = [[0.0] * len(above), above]
        axes.errorbar(at, medians, yerr=bars, fmt="o", color=colour, capsize=5, elinewidth=2, label=label)
        for x, value in zip(at, values, strict=True):
            axes.annotate(
                _seconds(value["median"]),
                (x, value["median"]),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=8,
                color=colour,
            )
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    digits = "25" if high > 10 * low else "23456789"  # that have a label; 1 always has
    axes.yaxis.set_major_formatter(lambda value, _: _seconds(value))
    axes.yaxis.set_minor_formatter(lambda value, _: _seconds(value) if f"{value:.0e}"[0] in digits else "")
    axes.tick_params(axis="y", which="both", labelsize=8)
    axes.set_ylabel("since the request was sent")
    axes.set_title("How long one waits: median, and up to the 95th percentile", fontsize=10)
    _loads(axes, runs, remarks=True)
    axes.grid(visible=True, axis="y", which="both", alpha=0.25)
    if shown:
        _legend_below(axes)


def _flows(axes: Axes, runs: Runs) -> None:
    shown = [entry for entry in FLOWS if any(run.get(entry[0]) for run in runs)]
    for number, (name, label, colour) in enumerate(shown):
        _bars(
            axes, [run.get(name, 0.0) for run in runs], number, len(shown), label, colour, lambda value: f"{value:.3g}"
        )
    axes.set_title("seconds of sound in a second", fontsize=10)
    _loads(axes, runs)
    if shown:
        _legend_below(axes)


def _requests(axes: Axes, runs: Runs) -> None:
    _bars(axes, [run["requests_per_s"] for run in runs], 0, 1, "", "#666666", lambda value: f"{value:.3g}")
    axes.set_title("answers in a second", fontsize=10)
    _loads(axes, runs)


def _of_stages(axes: Axes, runs: Runs, name: str, title: str, written: Callable[[float], str]) -> None:
    shown = [entry for entry in STAGES if any(entry[0] in run.get("stages", {}) for run in runs)]
    for number, (stage, colour) in enumerate(shown):
        values = [run.get("stages", {}).get(stage, {}).get(name, 0.0) for run in runs]
        _bars(axes, values, number, len(shown), stage, colour, written)
    axes.set_title(title, fontsize=10)
    _loads(axes, runs)
    _legend_below(axes)


def _bars(
    axes: Axes,
    values: Sequence[float],
    number: int,
    of: int,
    label: str,
    colour: str,
    written: Callable[[float], str],
) -> None:
    """One of `of` bars at each load."""
    at = [place + _beside(number, of) for place in range(len(values))]
    bars = axes.bar(at, values, width=0.8 / of, color=colour, label=label)
    axes.bar_label(
        bars,
        [written(value) if value else "" for value in values],
        fontsize=7 if of * len(values) <= 12 else 5.5,
        padding=1,
    )
    axes.margins(y=0.12)


def _legend_below(axes: Axes) -> None:
    """Inside it would lie on something: there is no telling where."""
    names = len(axes.get_legend_handles_labels()[1])
    axes.legend(
        fontsize=8,
        ncols=names,
        loc="upper center",
        bbox_to_anchor=(0.5, -0.1),
        frameon=False,
        columnspacing=1,
        handlelength=1.2,
    )


def _beside(number: int, of: int) -> float:
    """Where the number-th of `of` things at one load stands, from the load's middle."""
    return 0.8 * ((number + 0.5) / of - 0.5)


def _loads(axes: Axes, runs: Runs, *, remarks: bool = False) -> None:
    axes.set_xticks(
        range(len(runs)), [str(run["load"]) + (_remarks(run) if remarks else "") for run in runs], fontsize=8
    )
    axes.set_xlim(-0.5, len(runs) - 0.5)


def _remarks(run: Mapping[str, Any]) -> str:
    """What went wrong in a load."""
    found = [f"{run['errors']} of {run['requests']} failed"] if run["errors"] else []
    found += [f"{run['underruns']:.0%} had a gap"] if run.get("underruns") else []
    return "\n" + ", ".join(found)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"
