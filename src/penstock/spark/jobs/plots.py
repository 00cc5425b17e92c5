"""The plots of ``profile``: one PNG for each question that somebody has about a topic.

Drawn with matplotlib's Agg, which needs no screen, and without pyplot, which would keep figures alive in a process
that is not ours. A plot without anything to show is not drawn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from penstock.spark.jobs.forecast import DAY_MS
from penstock.spark.jobs.profile_counts import BUCKETS_PER_DOUBLING, bucket_bytes_max
from penstock.spark.jobs.profile_tables import TopicProfile

WIDTH_IN = 10.0
DPI = 120
BLUE, ORANGE, GREY, RED = "#3b6ea5", "#d98032", "#8a8a8a", "#b23a3a"
KEY_CHARACTERS_MAX = 28
TOPIC_CHARACTERS_MAX = 50
# What the two lines of the title take of a figure's height.
TITLE_IN = 0.68
# Fewer bars than that are not drawn any thicker.
BARS_MIN = 4
# Bars beyond that are too thin to be told apart: the largest are shown.
BARS_MAX = 40
GROUPS_MAX = 12
BYTE_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")
COUNT_UNITS = ("", "k", "M", "G", "T")


def draw(profile: TopicProfile, directory: Path) -> Iterator[Path]:
    """Write the plots of a topic; the path of each."""
    directory.mkdir(parents=True, exist_ok=True)
    drawings = {
        "partitions": _partitions,
        "timeline": _timeline,
        "sizes": _sizes,
        "hot_keys": _hot_keys,
        "lag": _lag,
        "forecast": _forecast,
    }
    for name, drawing in drawings.items():
        figure = drawing(profile)
        path = directory / f"{name}.png"
        if figure is None:
            path.unlink(missing_ok=True)  # of an earlier run, when there was something to show
            continue
        FigureCanvasAgg(figure).print_png(path)  # type: ignore[no-untyped-call]
        yield path


def _partitions(profile: TopicProfile) -> Figure | None:
    if profile.records == 0:
        return None
    shown = sorted(profile.partitions, key=lambda each: -each.counts.record_bytes)[:BARS_MAX]
    shown.sort(key=lambda each: each.partition)
    names = [str(each.partition) for each in shown]
    figure = _figure(5.2)
    left, right = figure.subplots(1, 2)
    _bars(left, names, [each.counts.records for each in shown], "records", COUNT_UNITS)
    _bars(right, names, [each.counts.record_bytes for each in shown], "bytes of keys and values", BYTE_UNITS)
    most = (
        f" (the {BARS_MAX} largest of {len(profile.partitions)})"
        if len(shown) < len(profile.partitions)
        else ""
    )
    _title(
        figure,
        profile,
        f"partitions{most}",
        f"{_count(profile.records)} records, {_bytes(profile.record_bytes)}; "
        f"the largest partition has {profile.skew or 0:.2f} times the average",
    )
    return figure


def _bars(axes: Axes, names: Sequence[str], amounts: Sequence[int], label: str, units: Sequence[str]) -> None:
    axes.bar(names, amounts, color=BLUE, width=0.7)
    mean = sum(amounts) / len(amounts)
    axes.axhline(mean, color=ORANGE, linewidth=1.5, linestyle="--", label=f"average {_scaled(mean, units)}")
    axes.set_xlabel("partition")
    axes.set_ylabel(label)
    axes.set_xlim(*_bar_limits(len(names)))
    if len(names) > 20:
        axes.tick_params(axis="x", rotation=90, labelsize=7)
    axes.set_ylim(0, max(*amounts, mean) * 1.18)  # room for the legend
    _amounts(axes.yaxis, units)
    axes.legend(loc="upper right", frameon=False)
    _plain(axes)


def _timeline(profile: TopicProfile) -> Figure | None:
    clock = profile.clock
    totals: dict[int, tuple[int, int]] = {}
    for each in profile.partitions:
        for start, (records, amount) in each.counts.timeline.items():
            before = totals.get(start, (0, 0))
            totals[start] = (before[0] + records, before[1] + amount)
    if not totals:
        return None
    starts = np.arange(min(totals), max(totals) + clock.bucket_ms, clock.bucket_ms)
    seconds = clock.bucket_ms / 1000
    edges = np.append(starts, starts[-1] + clock.bucket_ms) / DAY_MS  # matplotlib counts days since 1970
    figure = _figure(5.8)
    upper, lower = figure.subplots(2, 1, sharex=True)
    for axes, at, label, units, color in (
        (upper, 0, "records/s", COUNT_UNITS, BLUE),
        (lower, 1, "bytes/s", BYTE_UNITS, ORANGE),
    ):
        rates = [totals.get(int(start), (0, 0))[at] / seconds for start in starts]
        axes.stairs(rates, edges, fill=True, color=color, alpha=0.85)
        axes.set_ylabel(label)
        axes.set_ylim(0, max(rates) * 1.08)
        _amounts(axes.yaxis, units)
        _plain(axes)
    locator = AutoDateLocator(minticks=4, maxticks=9, tz=UTC)  # type: ignore[no-untyped-call]
    lower.xaxis.set_major_locator(locator)
    lower.xaxis.set_major_formatter(ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    lower.set_xlabel("timestamp of the records (UTC)")
    oldest, newest = _time(min(totals)), _time(max(totals) + clock.bucket_ms)
    _title(
        figure,
        profile,
        "what came when",
        f"{_minute(oldest)} to {_minute(newest)}, averages over {_duration(clock.bucket_ms)}",
    )
    return figure


def _sizes(profile: TopicProfile) -> Figure | None:
    counts = sum((each.counts.sizes for each in profile.partitions), np.zeros(1, np.int64))
    used = np.flatnonzero(counts)
    if len(used) == 0:
        return None
    # A bucket more at each side, so that one size alone is a bar and not the whole width.
    first, last = max(0, int(used[0]) - 2), min(len(counts) - 1, int(used[-1]) + 2)
    buckets = np.arange(first, last + 1)
    figure = _figure(4.8)
    axes = figure.subplots()
    axes.bar(buckets - 0.5, counts[first : last + 1], width=0.9, color=BLUE)
    powers = np.arange(
        first - first % BUCKETS_PER_DOUBLING, last + BUCKETS_PER_DOUBLING, BUCKETS_PER_DOUBLING
    )
    step = max(1, len(powers) // 10)
    axes.set_xticks(
        powers[::step], [_power_of_two(bucket_bytes_max(int(each)) + 1) for each in powers[::step]]
    )
    axes.set_xlim(first - 1.5, last + 0.5)
    axes.set_xlabel("bytes of key and value of a record (logarithmic)")
    axes.set_ylabel("records")
    _amounts(axes.yaxis, COUNT_UNITS)
    _plain(axes)
    total = np.cumsum(counts)
    named = {
        "half": bucket_bytes_max(int(np.searchsorted(total, 0.5 * total[-1]))),
        "99 %": bucket_bytes_max(int(np.searchsorted(total, 0.99 * total[-1]))),
    }
    largest = max(each.counts.record_bytes_max or 0 for each in profile.partitions)
    _title(
        figure,
        profile,
        "sizes of records",
        f"average {_bytes(profile.record_bytes / profile.records)}; "
        + "; ".join(f"{name} up to {_bytes(min(size, largest))}" for name, size in named.items())
        + f"; the largest {_bytes(largest)}",
    )
    return figure


def _hot_keys(profile: TopicProfile) -> Figure | None:
    keys = profile.hot_keys()
    if not keys:
        return None
    figure = _figure(1.6 + 0.28 * max(BARS_MIN, len(keys)))
    axes = figure.subplots()
    places = np.arange(len(keys))[::-1]
    axes.barh(places, [100 * each.share for each in keys], color=BLUE, height=0.7)
    axes.set_ylim(*_bar_limits(len(keys)))
    axes.set_yticks(places, [_key_text(each.key) for each in keys], fontfamily="monospace", parse_math=False)
    for place, each in zip(places, keys):
        axes.annotate(
            f"{_count(each.count)}  (partition {each.partition})",
            (100 * each.share, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=GREY,
        )
    axes.set_xlim(0, 100 * keys[0].share * 1.3)
    axes.set_xlabel("share of the topic's records (%)")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share:g}" if share <= 100 else ""))
    _plain(axes, "x")
    off = max(each.count_max - each.count for each in keys)
    exactness = "exact counts" if off == 0 else f"each count may be up to {_count(off)} too small"
    if profile.is_reckoned:
        exactness = "about; reckoned from a sample"
    _title(figure, profile, "most frequent keys", exactness)
    return figure


def _lag(profile: TopicProfile) -> Figure | None:
    groups: dict[str, list[int]] = {}
    for each in profile.groups:
        groups.setdefault(each.group, []).append(each.lag)
    if not groups:
        return None
    shown = sorted(groups.items(), key=lambda each: (-sum(each[1]), each[0]))[:GROUPS_MAX]
    figure = _figure(1.8 + 0.36 * max(BARS_MIN, len(shown)))
    axes = figure.subplots()
    places = np.arange(len(shown))[::-1]
    totals = [sum(lags) for _, lags in shown]
    worst = [max(lags) for _, lags in shown]
    axes.barh(places, totals, color=BLUE, height=0.6, label="all partitions")
    axes.set_ylim(*_bar_limits(len(shown)))
    axes.barh(places, worst, color=ORANGE, height=0.25, label="the partition furthest behind")
    axes.set_yticks(places, [_shortened(name, KEY_CHARACTERS_MAX) for name, _ in shown], parse_math=False)
    for place, total in zip(places, totals):
        axes.annotate(
            _count(total),
            (total, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=GREY,
        )
    axes.set_xlim(0, max(1, *totals) * 1.15)
    axes.set_xlabel("offsets not yet committed")
    _amounts(axes.xaxis, COUNT_UNITS)
    # On the line of the subtitle, which is short here.
    beside = (1, 1 - 0.36 / figure.get_figheight())
    figure.legend(loc="upper right", bbox_to_anchor=beside, frameon=False, ncols=2, borderpad=0)
    _plain(axes, "x")
    most = f" (the {GROUPS_MAX} largest of {len(groups)})" if len(shown) < len(groups) else ""
    _title(figure, profile, f"lag of groups{most}", f"as of {_minute(_time(profile.now_ms))}")
    return figure


def _forecast(profile: TopicProfile) -> Figure | None:
    amounts = profile.disk_bytes_by_day
    if not profile.records:
        return None
    figure = _figure(4.8)
    axes = figure.subplots()
    days = np.arange(len(amounts))
    axes.fill_between(days, amounts, color=BLUE, alpha=0.25)
    axes.plot(days, amounts, color=BLUE, linewidth=2)
    axes.set_xlim(0, days[-1])
    axes.set_ylim(0, max(amounts) * 1.2 or 1)
    axes.set_xlabel("days from now")
    axes.set_ylabel(f"on all disks ({profile.replicas} {'copy' if profile.replicas == 1 else 'copies'})")
    _amounts(axes.yaxis, BYTE_UNITS)
    _plain(axes)
    first = profile.deletes_from
    if first is not None and first.deletes_from_ms is not None:
        ahead = (first.deletes_from_ms - profile.now_ms) / DAY_MS
        if 0 < ahead <= days[-1]:
            axes.axvline(ahead, color=RED, linestyle="--", linewidth=1.2)
            near_end = ahead > days[-1] * 0.75
            axes.annotate(
                "deletion begins",
                (ahead, axes.get_ylim()[1]),
                xytext=(-6 if near_end else 6, -14),
                textcoords="offset points",
                ha="right" if near_end else "left",
                color=RED,
                fontsize=9,
            )
    window = max(each.forecast.window_ms for each in profile.partitions)
    growth = profile.growth_bytes_per_day * profile.replicas
    _title(
        figure,
        profile,
        f"disk in the next {len(amounts) - 1} days",
        f"growing by {_bytes(growth)} a day (measured over {_duration(window)}); {_retention_text(profile)}",
    )
    return figure


def _retention_text(profile: TopicProfile) -> str:
    first, limits = profile.deletes_from, []
    if profile.retention.retention_ms is not None:
        limits.append(f"kept for {_duration(profile.retention.retention_ms)}")
    if profile.retention.retention_bytes is not None:
        limits.append(f"up to {_bytes(profile.retention.retention_bytes)} a partition")
    if not limits:
        return "kept for ever"
    text = ", ".join(limits)
    if first is None or first.deletes_from_ms is None:
        return text
    if first.deletes_from_ms <= profile.now_ms:
        return f"{text}; being deleted now"
    return f"{text}; deletion begins {_minute(_time(first.deletes_from_ms))}"


# The look that all share


def _figure(height_in: float) -> Figure:
    return Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")


def _title(figure: Figure, profile: TopicProfile, question: str, answer: str) -> None:
    """Two lines above everything. A topic's name may have 249 characters."""
    height = figure.get_figheight()
    engine = figure.get_layout_engine()
    assert isinstance(engine, ConstrainedLayoutEngine)
    engine.set(rect=(0, 0, 1, 1 - TITLE_IN / height))
    name = _shortened(profile.topic, TOPIC_CHARACTERS_MAX)
    figure.text(0.01, 1 - 0.22 / height, f"{name}: {question}", fontsize=13, fontweight="bold", va="center")
    if profile.is_reckoned:
        figure.text(0.99, 1 - 0.22 / height, "from a sample", fontsize=9, color=RED, va="center", ha="right")
    figure.text(0.01, 1 - 0.48 / height, answer, fontsize=9, color=GREY, va="center")


def _bar_limits(count: int) -> tuple[float, float]:
    spare = max(0, BARS_MIN - count) / 2
    return -0.6 - spare, count - 0.4 + spare


def _plain(axes: Axes, grid: str = "y") -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, alpha=0.3)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def _amounts(axis: Any, units: Sequence[str]) -> None:
    axis.set_major_locator(MaxNLocator(6, integer=units is COUNT_UNITS))
    axis.set_major_formatter(FuncFormatter(lambda amount, _: _scaled(amount, units)))


def _scaled(amount: float, units: Sequence[str]) -> str:
    step = 0
    while step < len(units) - 1 and abs(amount) >= 999.5:
        amount /= 1000
        step += 1
    return f"{amount:.3g} {units[step]}".rstrip()


def _bytes(amount: float) -> str:
    return _scaled(amount, BYTE_UNITS)


def _power_of_two(size: int) -> str:
    return f"{size} B" if size < 1 << 10 else f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"


def _count(amount: float) -> str:
    return _scaled(amount, COUNT_UNITS)


def _duration(milliseconds: float) -> str:
    units = (("day", DAY_MS), ("hour", 3_600_000), ("minute", 60_000), ("second", 1000))
    unit, size = next((each for each in units if milliseconds >= each[1]), units[-1])
    amount = f"{milliseconds / size:.3g}"
    return f"{amount} {unit}" if amount == "1" else f"{amount} {unit}s"


def _time(milliseconds: int) -> datetime:
    return datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=milliseconds)


def _minute(time: datetime) -> str:
    return f"{time:%Y-%m-%d %H:%M} UTC"


def _key_text(key: bytes) -> str:
    text = key.decode(errors="backslashreplace")
    printable = "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)
    return _shortened(printable, KEY_CHARACTERS_MAX)


def _shortened(text: str, characters: int) -> str:
    return text if len(text) <= characters else f"{text[: characters - 1]}…"
