"""From the records of single runs to medians, spread, ratios and the page of results. No measuring here."""

import statistics

from peers import BASELINE, TUNED, TUNED_BF16

MEASURES = {
    # key: (title, digits, whether more is better)
    "steady_images_per_s": ("training, images/s", 0, True),
    "eval_images_per_s": ("evaluation, images/s", 0, True),
    "launch_to_first_step_s": ("launch to first step, s", 2, False),
    "last_step_to_exit_s": ("last step to exit, s", 2, False),
    "whole_s": ("whole process, s", 1, False),
    "peak_pss_mb": ("peak memory (PSS), MB", 0, False),
}


def summarise(records):
    """Return for each peer and measure: median, least, greatest, n, and the ratio to the baseline's median.

    Times come from the rounds from 1 on, memory from wherever it was measured.
    """
    rows = {}
    for name in dict.fromkeys(record["peer"] for record in records):
        own = [record for record in records if record["peer"] == name]
        good = [record for record in own if "error" not in record]
        row = {"errors": [record["error"] for record in own if "error" in record]}
        for key in MEASURES:
            values = [
                record[key]
                for record in good
                if record.get(key) is not None and (record["round"] > 0 or key == "peak_pss_mb")
            ]
            row[key] = spread(values)
        counts = sorted({record["test_samples"] for record in good})
        row["test_samples"] = counts
        row["processes_left"] = max((record["processes_left"] for record in good), default=0)
        rows[name] = row
    for row in rows.values():
        for key in MEASURES:
            base = rows.get(BASELINE, {}).get(key)
            if row[key] is not None and base is not None:
                row[key]["ratio"] = row[key]["median"] / base["median"]
    return rows


def spread(values):
    """Return median, min, max and n of some numbers; None for none."""
    if not values:
        return None
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def is_peer(name):
    """Whether a row is somebody else's way to do it: not evenstep, and not tuned by hand."""
    return not name.startswith(("evenstep", "tuned"))


def best(rows, key):
    """Return (name, median) of the best peer in a measure, or None if none was measured."""
    more = MEASURES[key][2]
    found = [(row[key]["median"], name) for name, row in rows.items() if is_peer(name) and row[key]]
    if not found:
        return None
    median, name = max(found) if more else min(found)
    return name, median


# What evenstep has to reach: (row, measure, against, factor); "peer" is the best peer in that measure.
_TARGETS = (
    ("evenstep", "steady_images_per_s", TUNED, 1.05),
    ("evenstep", "steady_images_per_s", "peer", 1.25),
    ("evenstep", "steady_images_per_s", "evenstep_fast", 0.97),
    ("evenstep_bf16", "steady_images_per_s", TUNED_BF16, 1.05),
    ("evenstep_bf16", "steady_images_per_s", BASELINE, 2.3),
    ("evenstep", "eval_images_per_s", "peer", 2.0),
    ("evenstep", "launch_to_first_step_s", "peer", 0.7),
    ("evenstep", "last_step_to_exit_s", "peer", 0.2),
    ("evenstep", "whole_s", "peer", 0.8),
    ("evenstep_bf16", "whole_s", "peer", 0.5),
    ("evenstep", "peak_pss_mb", "peer", 1.0),
    ("evenstep_loop", "steady_images_per_s", "peer", 1.05),
    ("evenstep_loop_bf16", "steady_images_per_s", "peer", 1.8),
    ("evenstep_loop_dataset", "steady_images_per_s", "peer", 1.0),
    ("evenstep_loop_dataset", "eval_images_per_s", "peer", 1.0),
)

_LAUNCH_OF_FOUR = 0.45
_AUGMENTED = 1.5


def targets(rows, nproc=2, *, augment=False):
    """Return what the targets of evenstep came to; those whose rows were not run are left out.

    With four processes and more, the start has to be quicker still beside those of others; and with
    augmentation, which others do image by image, training has to be.
    """
    found = []
    for name, key, against, wanted in _TARGETS:
        own = rows.get(name, {}).get(key)
        if against == "peer":
            other = best(rows, key)
        else:
            row = rows.get(against, {}).get(key)
            other = row and (against, row["median"])
        if own is None or other is None:
            continue
        if key == "launch_to_first_step_s" and nproc >= 4:
            wanted = _LAUNCH_OF_FOUR
        if augment and (name, key, against) == ("evenstep", "steady_images_per_s", "peer"):
            wanted = _AUGMENTED
        ratio = own["median"] / other[1]
        met = ratio >= wanted if MEASURES[key][2] else ratio <= wanted
        found.append(
            {"row": name, "measure": key, "against": other[0], "wanted": wanted, "ratio": ratio, "met": met}
        )
    return found


def cell(value, digits):
    """Return one cell of the table: the median, its ratio to the baseline, and the range."""
    if value is None:
        return "-"
    text = f"{value['median']:,.{digits}f}"
    if "ratio" in value:
        text += f" · {value['ratio']:.2f}"
    if value["n"] > 1:
        text += f" ({value['min']:,.{digits}f} to {value['max']:,.{digits}f})"
    return text


def table(rows, eval_images):
    """Return the table of all peers as Markdown lines."""
    titles = [title for title, _, _ in MEASURES.values()]
    lines = [
        "| | " + " | ".join(titles) + f" | counts {eval_images:,} test images as | processes left |",
        "|---" * (len(titles) + 3) + "|",
    ]
    for name, row in rows.items():
        cells = [cell(row[key], digits) for key, (_, digits, _) in MEASURES.items()]
        counts = " or ".join(f"{count:,}" for count in row["test_samples"]) or "-"
        lines.append(f"| {name} | {' | '.join(cells)} | {counts} | {row['processes_left']} |")
    return lines


def page(report):
    """Return the page of results as Markdown."""
    settings, machine = report["settings"], report["machine"]
    length = f"{settings['steps']} steps" if settings["steps"] else f"{settings['epochs']} epochs"
    lines = [
        f"# Peers, {report['date']}",
        "",
        f"{length}, {settings['nproc']} processes of 1 thread, {settings['eval']:,} test images"
        f"{', augmented' if settings['augment'] else ''}; medians of n = {settings['rounds']} interleaved "
        f"rounds, the ratio to {BASELINE} after the dot, the range in brackets.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, load before "
        f"{machine['load_before'][0]}; took {report['took_s']:,.0f} s; "
        f"arguments `{' '.join(report['argv'])}`.",
        "",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version),
        "",
        *table(report["summary"], settings["eval"]),
    ]
    if report["targets"]:
        lines += ["", "| what | against | wanted | reached | met |", "|---|---|---|---|---|"]
        for t in report["targets"]:
            sign = "≥" if MEASURES[t["measure"]][2] else "≤"
            what = f"{t['row']}: {MEASURES[t['measure']][0].rpartition(',')[0]}"
            met = "yes" if t["met"] else "no"
            lines.append(f"| {what} | {t['against']} | {sign} {t['wanted']:g} | {t['ratio']:.2f} | {met} |")
    errors = [(name, error) for name, row in report["summary"].items() for error in row["errors"]]
    if errors:
        lines += ["", "Runs that failed:", "", *(f"- {name}: {error}" for name, error in errors)]
    return "\n".join(lines) + "\n"


def progress_line(record):
    """Return one line for a run that has just ended."""
    start = f"round {record['round']}  {record['peer']:<22}"
    if "error" in record:
        return f"{start}FAILED: {record['error'][:300]}"
    parts = [f"{record['whole_s']:.1f} s"]
    if record["steady_images_per_s"] is not None:
        parts.append(f"{record['steady_images_per_s']:,.0f} images/s")
    return start + "  ".join(parts)
