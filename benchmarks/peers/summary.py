"""From the records of single runs to medians, spread, ratios and the page of results. No measuring here."""

import statistics

from peers import BASELINE, PEERS, TUNED, TUNED_BF16, TUNED_POOL_FIRST

MEASURES = {
    # key: (title, digits, whether more is better)
    "steady_images_per_s": ("training, images/s", 0, True),
    "eval_images_per_s": ("evaluation, images/s", 0, True),
    "launch_to_first_step_s": ("launch to first step, s", 2, False),
    "last_step_to_exit_s": ("last step to exit, s", 2, False),
    "last_step_to_all_gone_s": ("last step until all processes are gone, s", 2, False),
    "whole_s": ("whole process, s", 1, False),
    "peak_pss_mb": ("peak memory (PSS; one run), MB", 0, False),
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


def measured_peers(rows, key):
    """Return the peers that have a value in a measure."""
    return [name for name, row in rows.items() if is_peer(name) and row[key]]


def best(rows, key):
    """Return (name, median) of the best peer in a measure, or None if none was measured."""
    more = MEASURES[key][2]
    found = [(rows[name][key]["median"], name) for name in measured_peers(rows, key)]
    if not found:
        return None
    median, name = max(found) if more else min(found)
    return name, median


_POOL_FIRST = (
    "the command's `net` pools before it applies ReLU, the network of the peers after it: the same values, "
    "to the bit, and a quarter of them go through ReLU"
)
_SAME_ORDER = "both networks pool first"
_SAME_NET = "both have the network of the peers"

# What evenstep has to reach: (row, measure, against, factor, what to know); "peer" is the best peer in that
# measure. All but one were set for 2 processes, and are left out for other numbers.
_TARGETS = (
    ("evenstep", "steady_images_per_s", TUNED, 1.05, _POOL_FIRST),
    ("evenstep", "steady_images_per_s", TUNED_POOL_FIRST, 1.05, _SAME_ORDER),
    ("evenstep_loop", "steady_images_per_s", TUNED, 1.05, _SAME_NET),
    ("evenstep", "steady_images_per_s", "peer", 1.25, _POOL_FIRST),
    ("evenstep_loop", "steady_images_per_s", "peer", 1.05, _SAME_NET),
    ("evenstep", "steady_images_per_s", "evenstep_fast", 0.97, ""),
    ("evenstep_bf16", "steady_images_per_s", TUNED_BF16, 1.05, _POOL_FIRST),
    ("evenstep_bf16", "steady_images_per_s", BASELINE, 2.3, _POOL_FIRST),
    ("evenstep", "eval_images_per_s", "peer", 2.0, _POOL_FIRST),
    ("evenstep", "launch_to_first_step_s", "peer", 0.7, ""),
    ("evenstep", "last_step_to_all_gone_s", "peer", 0.2, ""),
    ("evenstep", "whole_s", "peer", 0.8, ""),
    ("evenstep_bf16", "whole_s", "peer", 0.5, ""),
    ("evenstep", "peak_pss_mb", "peer", 1.0, ""),
    ("evenstep_loop_bf16", "steady_images_per_s", "peer", 1.8, _SAME_NET),
    ("evenstep_loop_dataset", "steady_images_per_s", "peer", 1.0, _SAME_NET),
    ("evenstep_loop_dataset", "eval_images_per_s", "peer", 1.0, _SAME_NET),
)
_ON_ANY_NUMBER = {("evenstep", "steady_images_per_s", "evenstep_fast")}
_LAUNCH = ("evenstep", "launch_to_first_step_s", "peer")
_LAUNCH_OF_FOUR = 0.45
_AUGMENTED = {("evenstep", "steady_images_per_s", "peer"): 1.5}


def wanted_for(name, key, against, wanted, *, nproc, augment):
    """Return what a target asks for with so many processes, None where it was not set for them.

    With four processes and more, the start has to be quicker still beside those of others; and with
    augmentation, which others do image by image, training has to be.
    """
    target = (name, key, against)
    if target == _LAUNCH and nproc >= 4:
        return _LAUNCH_OF_FOUR
    if nproc != 2 and target not in _ON_ANY_NUMBER:
        return None
    return _AUGMENTED.get(target, wanted) if augment else wanted


def targets(rows, nproc=2, *, augment=False):
    """Return what the targets of evenstep came to; ratio and met are None where a row was not measured."""
    found = []
    for name, key, against, factor, note in _TARGETS:
        wanted = wanted_for(name, key, against, factor, nproc=nproc, augment=augment)
        if wanted is None:
            continue
        own = rows.get(name, {}).get(key)
        if against == "peer":
            other = best(rows, key)
        else:
            row = rows.get(against, {}).get(key)
            other = row and (against, row["median"])
        target = {"row": name, "measure": key, "wanted": wanted, "note": note, "ratio": None, "met": None}
        target["against"] = other[0] if other else "best peer" if against == "peer" else against
        target["chosen_from"] = measured_peers(rows, key) if against == "peer" else None
        if own is not None and other is not None:
            ratio = own["median"] / other[1]
            met = ratio >= wanted if MEASURES[key][2] else ratio <= wanted
            target |= {"ratio": ratio, "met": met}
        found.append(target)
    return found


def targets_table(found):
    """Return the table of the targets as Markdown lines, and from which peers the best one was chosen."""
    notes = list(dict.fromkeys(t["note"] for t in found if t["note"]))
    lines = ["| what | against | wanted | reached | met |", "|---" * 5 + "|"]
    for t in found:
        sign = "≥" if MEASURES[t["measure"]][2] else "≤"
        what = f"{t['row']}: {MEASURES[t['measure']][0].rpartition(',')[0]}"
        what += f" ({notes.index(t['note']) + 1})" if t["note"] else ""
        against = t["against"] + (" (best peer)" if t["chosen_from"] else "")
        reached = "not measured" if t["ratio"] is None else f"{t['ratio']:.2f}"
        met = "-" if t["met"] is None else "yes" if t["met"] else "no"
        lines.append(f"| {what} | {against} | {sign} {t['wanted']:g} | {reached} | {met} |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))] if notes else []
    chosen = {}
    for t in found:
        if t["chosen_from"] is not None:
            title = MEASURES[t["measure"]][0].rpartition(",")[0]
            chosen.setdefault(tuple(t["chosen_from"]), {})[title] = None
    everybody = [name for name in PEERS if is_peer(name)]
    for names, measures in chosen.items():
        missing = [name for name in everybody if name not in names]
        text = f"Best peer in {', '.join(measures)}: chosen from {', '.join(names) or 'none'}"
        lines += ["", f"{text}; not measured: {', '.join(missing)}." if missing else f"{text}: all peers."]
    return lines


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
        f"rounds, the ratio to {BASELINE} after the dot, the range in brackets. Memory is one run.",
        "",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']} GB, load before "
        f"{machine['load_before'][0]}; took {report['took_s']:,.0f} s; "
        f"arguments `{' '.join(report['argv'])}`.",
        "",
        ", ".join(f"{name} {version}" for name, version in report["versions"].items() if version),
        "",
        *_dirty(report["versions"]),
        *table(report["summary"], settings["eval"]),
    ]
    if report["targets"]:
        lines += ["", *targets_table(report["targets"])]
    errors = [(name, error) for name, row in report["summary"].items() for error in row["errors"]]
    if errors:
        lines += ["", "Runs that failed:", "", *(f"- {name}: {error}" for name, error in errors)]
    return "\n".join(lines) + "\n"


def _dirty(versions):
    """Return what to say where the measured code is in no commit."""
    if not (versions.get("evenstep commit") or "").endswith("-dirty"):
        return []
    return ["**The files of evenstep had changes that are in no commit.**", ""]


def progress_line(record):
    """Return one line for a run that has just ended."""
    start = f"round {record['round']}  {record['peer']:<22}"
    if "error" in record:
        return f"{start}FAILED: {record['error'][:300]}"
    parts = [f"{record['whole_s']:.1f} s"]
    if record["steady_images_per_s"] is not None:
        parts.append(f"{record['steady_images_per_s']:,.0f} images/s")
    return start + "  ".join(parts)
