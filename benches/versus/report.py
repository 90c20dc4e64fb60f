"""Rounds as a table and as a picture.

Takes rounds (load, proxy, round, figures), gives text and SVG. Medians of rounds; a ratio is the median of the ratios
within rounds, so that what changes from one minute to the next cancels out. Never rounds what it computes with."""

import html
from statistics import median

# Load, its title, its figures: key, heading, digits; the first is compared. `more` says that more is better.
LOADS = [
    ("small", "small JSON, 64 connections", [("cpu_us", "µs/request", 2), ("core_us", "core µs", 2), ("rate", "requests/s", 0), ("busy", "core %", 0)], False),
    ("stream", "100-event SSE, 256 streams, an event each 10 ms",
     [("cpu_us", "µs/event", 2), ("core_us", "core µs", 2), ("rate", "events/s", 0), ("busy", "core %", 0)], False),
    ("bursts", "100-event SSE, 256 streams, those of a worker at once",
     [("cpu_us", "µs/event", 2), ("core_us", "core µs", 2), ("rate", "events/s", 0), ("busy", "core %", 0)], False),
    ("long", "128 KiB prompts, 32 connections",
     [("cpu_us", "µs/request", 1), ("core_us", "core µs", 1), ("rate", "requests/s", 0), ("busy", "core %", 0)], False),
    ("answer", "1 MiB answers, 16 connections",
     [("gib_s", "GiB/CPU s", 2), ("cpu_us", "µs/request", 0), ("busy", "core %", 0)], True),
    ("latency", "latency added at half load, small JSON",
     [("p50", "p50 µs", 1), ("p99", "p99 µs", 1), ("p999", "p99.9 µs", 0), ("rate", "requests/s", 0)], False),
    ("idle", "memory of an idle connection", [("kib", "KiB", 2), ("connections", "connections", 0)], False),
    ("streams", "slow streams, an event each 2 s",
     [("kib", "KiB", 2), ("cpu_us", "µs/event", 2), ("connections", "streams", 0)], False),
    ("pairs", "small JSON to prefill/decode pairs, 64 connections",
     [("cpu_us", "µs/request", 2), ("core_us", "core µs", 2), ("rate", "requests/s", 0), ("busy", "core %", 0)], False),
]
# What else than the first figure of a load gets a panel.
PANELS = {("latency", "p99"), ("latency", "p999"), ("streams", "cpu_us")}
COLOURS = {"corelane": "#1b7f5c", "floor": "#444a52", "haproxy": "#4c6ea8", "haproxy-headers": "#86a3d1", "nginx": "#8a8f98", "smg": "#c2703d", "sglang-router": "#b0528c",
           "vllm-router": "#a39134", "direct": "#c8ccd2"}


def values(rounds, load, proxy, key):
    """A figure by round; without a proxy, of all of them by place in the list."""
    return {r["round"] if proxy else i: r["figures"][key] for i, r in enumerate(rounds)
            if r["load"] == load and proxy in (r["proxy"], None) and key in r["figures"]}


def proxies(rounds, load):
    """Who was measured under a load, in the order in which they came first."""
    return list(dict.fromkeys(r["proxy"] for r in sorted(rounds, key=lambda r: r["round"]) if r["load"] == load))


def ratio(rounds, load, key, proxy, to):
    """Median of the ratios within rounds; None where there is nothing to compare."""
    ours, theirs = values(rounds, load, proxy, key), values(rounds, load, to, key)
    common = [ours[r] / theirs[r] for r in ours if theirs.get(r, 0) > 0]
    return median(common) if common and proxy != "direct" else None


def table(rounds, base):
    """All loads that have rounds."""
    to = list(dict.fromkeys(["haproxy", base]))
    lines = []
    for load, title, figures, more in LOADS:
        names = proxies(rounds, load)
        if not names:
            continue
        key, heading, digits = figures[0]
        lines.append(f"\n{load}: {title}; medians of {max(r['round'] for r in rounds if r['load'] == load) + 1} rounds, "
                     f"{'more' if more else 'less'} {heading} is better")
        heads = [heading, "least", "most", *(f"÷ {t}" for t in to), *(h for _, h, _ in figures[1:])]
        lines.append(f"  {'':15}" + "".join(f"{h:>12}" for h in heads))
        for name in names:
            v = values(rounds, load, name, key).values()
            cells = [f"{x:.{digits}f}" for x in (median(v), min(v), max(v))]
            ratios = (ratio(rounds, load, key, name, t) for t in to)
            cells += ["" if r is None else f"{r:.2f}" for r in ratios]
            # Rounds that were saved by an earlier version lack some.
            rest = ((values(rounds, load, name, k).values(), d) for k, _, d in figures[1:])
            cells += [f"{median(found):.{d}f}" if found else "" for found, d in rest]
            lines.append(f"  {name:15}" + "".join(f"{c:>12}" for c in cells))
        speeds = values(rounds, load, None, "probe_us").values()
        lines_ns = values(rounds, load, None, "line_ns").values()
        if lines_ns:
            lines.append(f"  a cache line took {median(lines_ns):.0f} ns to the load's core and back ({min(lines_ns):.0f} to {max(lines_ns):.0f})")
        if speeds and max(speeds) > 1.1 * min(speeds):
            lines.append(f"  the machine's own speed changed by {max(speeds) / min(speeds):.2f} meanwhile: trust only rounds beside each other")
    return "\n".join(lines)


def label(x, y, words, size=12, anchor="start", colour="#222", weight="normal"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}" font-weight="{weight}">'
            f"{html.escape(words)}</text>")


def panel(x, y, width, title, unit, rows, digits):
    """Bars of medians, with a line from the least to the most; rows are (name, values)."""
    left, right, bar = 108, 58, 16
    span = width - left - right
    top = max(max(max(v) for _, v in rows), 1e-9)
    at = lambda v: x + left + span * max(v, 0) / top
    parts = [label(x, y + 14, title, 13, weight="bold"), label(x, y + 30, unit, 11, colour="#666")]
    for i, (name, v) in enumerate(rows):
        line = y + 40 + i * (bar + 6)
        parts.append(label(x + left - 6, line + 12, name, anchor="end"))
        parts.append(f'<rect x="{x + left}" y="{line}" width="{at(median(v)) - x - left:.1f}" height="{bar}" rx="2" '
                     f'fill="{COLOURS.get(name, "#777")}"/>')
        parts.append(f'<path d="M{at(min(v)):.1f} {line + 8}H{at(max(v)):.1f}" stroke="#222" stroke-width="1"/>')
        parts.append(label(at(max(max(v), median(v))) + 5, line + 12, f"{median(v):.{digits}f}", 11))
    return "\n".join(parts), 40 + len(rows) * (bar + 6) + 18


def picture(rounds, about):
    """An SVG with a panel for each figure that is compared."""
    panels = []
    for load, title, figures, more in LOADS:
        for key, heading, digits in figures:
            if key != figures[0][0] and (load, key) not in PANELS:
                continue
            names = [n for n in proxies(rounds, load) if n != "direct"]
            rows = [(n, list(values(rounds, load, n, key).values())) for n in names]
            if rows := [(n, v) for n, v in rows if v]:
                panels.append((title, f"{heading}, {'more' if more else 'less'} is better", rows, digits))
    width, gap = 440, 24
    parts, heights = [], [60, 60]
    for i, (title, unit, rows, digits) in enumerate(panels):
        column = heights.index(min(heights))
        drawn, height = panel(gap + column * (width + gap), heights[column], width, title, unit, rows, digits)
        parts.append(drawn)
        heights[column] += height
    full = 2 * width + 3 * gap
    return "\n".join([
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{full}" height="{max(heights) + 8}" font-family="sans-serif">',
        '<rect width="100%" height="100%" fill="white"/>', label(gap, 26, "One core of each proxy, under the same load", 16, weight="bold"),
        label(gap, 44, about, 11, colour="#666"), *parts, "</svg>", ""])
