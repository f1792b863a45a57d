"""The picture of ``evenstep bench``: one bar a row, as SVG without any library."""

from __future__ import annotations

from html import escape

from evenstep.bench.results import Report

_COLOURS = {"plain": "#8a8f98", "data_parallel": "#b08968", "ddp": "#4c78a8", "evenstep": "#2a9d5c"}
_LEFT, _BAR, _STEP, _TOP, _RIGHT = 260, 22, 40, 64, 540


def chart(report: Report) -> str:
    """Return an SVG picture: for each row the median, and a whisker from its slowest to its fastest round.

    A dotted line stands at the bound of arithmetic where it fits into the picture.
    """
    against = "x DDP" if report.baseline.row.kind == "ddp" else "x plain"
    busy = " THE MACHINE WAS BUSY." if report.is_busy else ""
    rounds = f"{report.rounds} x {report.steps} steps"
    about = f"{report.device}; {rounds}; bar: median, whisker: slowest to fastest.{busy}"
    longest = max(max(result.images_per_s) for result in report.rows)
    scale = _RIGHT / longest
    height = _TOP + _STEP * len(report.rows) + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="960" height="{height}" '
        f'viewBox="0 0 960 {height}" font-family="sans-serif" font-size="14">',
        f'<rect width="960" height="{height}" fill="white"/>',
        _text(16, 26, f"{report.model} on {report.data}, batch size {report.batch_size}: images/s"),
        _text(16, 46, about),
    ]
    for number, result in enumerate(report.rows):
        y, row = _TOP + _STEP * number, result.row
        middle = y + _BAR / 2
        low, high = (_LEFT + scale * value for value in (min(result.images_per_s), max(result.images_per_s)))
        parts += [
            _text(16, y + 16, f"{row.label}, {row.processes} x {row.threads}"),
            f'<rect x="{_LEFT}" y="{y}" width="{scale * result.median:.1f}" height="{_BAR}" '
            f'fill="{_COLOURS[row.kind]}"/>',
            f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="black"/>',
            _text(
                _LEFT + _RIGHT + 12, y + 16, f"{result.median:.0f}  ({report.ratio(result):.2f} {against})"
            ),
        ]
        bound = report.bound(result)
        if bound is not None and bound <= longest:
            x = _LEFT + scale * bound
            parts.append(f'<path d="M{x:.1f} {y - 6}V{y + _BAR + 6}" stroke="black" stroke-dasharray="2 2"/>')
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x}" y="{y}">{escape(text)}</text>'
