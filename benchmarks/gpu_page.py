"""The results of `gpu.py` as a page in Markdown: the table of speeds first, then what
works, and with what all of it ran.
"""

from typing import Any

VERSIONS = {"torch": ("2.11", "2.12", "2.13"), "python": ("3.11", "3.12", "3.13")}
PLAIN = (
    "plain, eager",
    "plain, blocks compiled",
    "plain, blocks compiled, CUDA graph",
    "plain, eager, CUDA graph",
)
Rows = dict[str, dict[str, Any]]


def verdict(row: dict[str, Any]) -> str:
    """One line about a row."""
    if "not_run" in row:
        return f"not run: {row['not_run']}"
    found = "passed" if row.get("passed") else "failed"
    if "tokens_per_second" in row:
        found = f"{row['tokens_per_second']:,.0f} tokens/s" + (
            "" if row["passed"] else ", loss is no number"
        )
    if "tests" in row:
        found += f": {', '.join(f'{num} {kind}' for kind, num in row['tests'].items() if num)}"
    return f"{found}, {row['error']}" if "error" in row else found


def page(results: dict[str, Any]) -> str:
    """All that was found; figures in their tables, each with the number of the run that
    it is of.
    """
    runs, parts = results["runs"], results["parts"]
    last = runs[-1]
    lines = [f"# fzero on {'; '.join(last['cards']) or 'a processor'}", ""]
    if results["tiny"]:
        lines += [
            "`--tiny`: small models on the processor. The speeds show that each row runs, and "
            "nothing else.",
            "",
        ]
    lines += speed_table(parts.get("speed", {}), tiny=results["tiny"])
    lines += idle_lines(parts.get("speed", {}))
    lines += host_table(parts.get("host-state", {}))
    for name in ("laws", "tests"):
        lines += row_lines(name, parts.get(name, {}))
    others = {
        key: x
        for key in ("speed", "host-state")
        for x in [_without_figures(parts.get(key, {}))]
        if x
    }
    for name, rows in others.items():
        lines += row_lines(f"{name}: without figures", rows)
    return "\n".join([*lines, *run_lines(runs)]) + "\n"


def run_lines(runs: list[dict[str, Any]]) -> list[str]:
    """With what everything ran. Runs on one machine differ in their command alone."""
    lines = ["", "## Runs", ""]
    for index, run in enumerate(runs):
        versions = ", ".join(f"{key} {value}" for key, value in run["versions"].items())
        where = "; ".join(run["cards"]) or "no card"
        power = f", power limit, clock and driver {run['power']}" if run["power"] else ""
        system = ", ".join(f"{key} {value}" for key, value in run["system"].items())
        lines += [
            f"{index + 1}. `{run['command']}`, {run['date']}, commit {run['commit']}, "
            f"{run['result']}: {where}{power}; "
        ]
        lines[-1] += f"{system}; {versions}."
    versions = runs[-1]["versions"]
    others = [
        f"{key} {x}"
        for key, of in VERSIONS.items()
        for x in of
        if not versions[key].startswith(f"{x}.")
    ]
    return [*lines, "", f"Not run: the other versions that fzero supports ({', '.join(others)})."]


def _table(names: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    head = [f"| | {' | '.join(names)} |", f"| --- |{' ---: |' * len(names)}"]
    return [*head, *(f"| {' | '.join(cells)} |" for cells in rows)]


def _without_figures(rows: Rows) -> Rows:
    return {
        name: row
        for name, row in rows.items()
        if "tokens_per_second" not in row and "idle" not in row
    }


def best_plain(rows: Rows) -> float | None:
    """Tokens per second of the fastest plain loop that was measured."""
    return max(
        (rows[x]["tokens_per_second"] for x in PLAIN if "tokens_per_second" in rows.get(x, {})),
        default=None,
    )


def speed_table(rows: Rows, *, tiny: bool) -> list[str]:
    """The contenders that were measured, and how fzero stands to the best plain loop."""
    speed = {name: row for name, row in rows.items() if "tokens_per_second" in row}
    if not speed:
        return []
    of, best = next(iter(speed.values())), best_plain(rows)
    planned = {
        row["plan"]: row["peak_mib"] for row in rows.get("planned peaks", {}).get("rows", ())
    }
    lines = [
        "## Speed",
        "",
        f"A GPT of {of['parameters'] / 1e6:,.1f} M parameters on one device, {of['tokens']:,} "
        f"tokens a step: bf16 with fp32 "
        "masters and AdamW, without checkpointing. A step is the median of three rounds. `MFU`: "
        "floating-point operations of the model (6 for each parameter and token, and causal "
        "attention), over 989 TFLOP/s. `peak`: the most memory of tensors; `planned`: by fzero, "
        "for its eager step.",
        "",
    ]
    cells = []
    for name, row in speed.items():
        peak, plan = (
            row.get("peak_mib"),
            planned.get(f"stage {name[13:14]}") if name.startswith("fzero, stage") else None,
        )
        cells.append(
            (
                name,
                f"{row['tokens_per_second']:,.0f}",
                f"{row['tokens_per_second'] / best:.2f}" if best else "–",
                f"{row['ms']:.1f}",
                f"{row['tflops']:.1f}",
                f"{row['mfu']:.1%}",
                "–" if peak is None else f"{peak:,.0f}",
                "–"
                if plan is None
                else f"{plan:,.0f}" + (f" ({plan / peak - 1:+.1%})" if peak else ""),
                f"{row['first_step_s']:.1f}",
                f"{row['loss']:.3f}",
                _run_of(row),
            )
        )
    names = (
        "tokens/s",
        "/ best plain",
        "step, ms",
        "TFLOP/s",
        "MFU",
        "peak, MiB",
        "planned, MiB",
        "first step, s",
        "last loss",
        "run",
    )
    lines += _table(names, cells)
    own = {
        name: row["tokens_per_second"] for name, row in speed.items() if name.startswith("fzero")
    }
    if own and best and not tiny:
        stages = [
            max((x for name, x in own.items() if f"stage {n}" in name), default=0) / best
            for n in range(4)
        ]
        said = ", ".join(f"stage {n} {ratio:.2f}" for n, ratio in enumerate(stages) if ratio)
        lines += [
            "",
            f"The fastest of fzero over the best plain loop: {said} (goal: at least 1.00 in each).",
        ]
    return [*lines, ""]


def idle_lines(rows: Rows) -> list[str]:
    """The times without work of the device."""
    found = {name: row for name, row in rows.items() if "idle" in row}
    if not found:
        return []
    lines = ["## Idle times of the device", ""]
    for name, row in found.items():
        lines.append(
            f"- **{name}** (run {_run_of(row)}): {row['idle']:.1%} of {row['ms']:.1f} ms, "
            f"{row['idle_ms']:.2f} ms a step (goal: at most 3 %), {row['kernels']:.0f} kernels and "
            f"copies; under torch.profiler, which slows the host. Longest:"
        )
        lines += [f"  - {gap['gap_ms']:.3f} ms before {gap['before']}" for gap in row["rows"]]
        lines += [
            f"  - work: {x['ms']:.2f} ms in {x['times']:.0f} of {x['kernel']}"
            for x in row.get("work", ())[:12]
        ]
    return [*lines, ""]


def host_table(rows: Rows) -> list[str]:
    """Models whose state is in host memory."""
    found = {name: row for name, row in rows.items() if "tokens_per_second" in row}
    if not found:
        return []
    of = next(iter(found.values()))
    cells = [
        (
            name,
            f"{row['parameters'] / 1e9:.2f}",
            f"{row['tokens_per_second']:,.0f}",
            f"{row['ms']:,.0f}",
            f"{row['tflops']:.1f}",
            f"{row['of_native']:.2f}" if "of_native" in row else "–",
            f"{row['peak_mib']:,.0f}" if "peak_mib" in row else "–",
            f"{row['host_mib']:,.0f}",
            f"{row['init_s']:.1f}",
            f"{row['first_step_s']:.1f}",
            _run_of(row),
        )
        for name, row in found.items()
    ]
    names = (
        "parameters, 10⁹",
        "tokens/s",
        "step, ms",
        "TFLOP/s",
        "of native",
        "peak, MiB",
        "host, MiB",
        "init, s",
        "first step, s",
        "run",
    )
    return [
        "## State in host memory",
        "",
        f"{of['tokens']:,} tokens an update, activation checkpointing in all rows, so that TFLOP/s "
        f"(without the second forward) "
        "compare. `of native`: TFLOP/s over those of the smallest model with its state on the "
        "device (goal: at least 0.60).",
        "",
        *_table(names, cells),
        "",
        *(
            f"- {name}, ms of the host: {row['ranges_ms']}"
            for name, row in found.items()
            if "ranges_ms" in row
        ),
        "",
    ]


def row_lines(title: str, rows: Rows) -> list[str]:
    """Rows in a list, with what they found."""
    if not rows:
        return []
    run = [row for row in rows.values() if "not_run" not in row]
    passed = sum(bool(row.get("passed")) and "error" not in row for row in run)
    lines = [f"## {title[:1].upper()}{title[1:]}", ""]
    lines += [f"{passed} passed, {len(run) - passed} failed, {len(rows) - len(run)} not run.", ""]
    for name, row in rows.items():
        checks = f"{len(row['laws'])} checks, " if "laws" in row else ""
        lines.append(
            f"- **{name}**: {verdict(row)} ({checks}{row['seconds']:.1f} s, run {_run_of(row)})"
        )
        simple = {
            key: x
            for key, x in row.items()
            if isinstance(x, int | float | str) and key not in ABOUT
        }
        lines += (
            [f"  - {', '.join(f'{key}: {_short(x)}' for key, x in simple.items())}"]
            if simple
            else []
        )
        failed = (x for x in row.get("laws", ()) if not x["passed"])
        lines += [
            f"  - failed: {x['name']}: {x['found']:.3g}, at most {x['most']:.3g}" for x in failed
        ]
        lines += [
            f"  - {', '.join(f'{key}: {_short(x)}' for key, x in one.items())}"
            for one in row.get("rows", ())
        ]
        if "tests" in row:
            lines += [f"  - {file}: {counts}" for file, counts in row["files"].items()]
            lines += [
                f"  - failed: {x['name']}: {x['said'].splitlines()[-1][:300]}"
                for x in row["failed"]
                if x["said"]
            ]
            lines += [f"  - {num} skipped: {why}" for why, num in row["skipped"].items()]
    return [*lines, ""]


ABOUT = {"passed", "seconds", "run", "begun", "ended", "error", "traceback", "not_run"}


def _run_of(row: dict[str, Any]) -> str:
    return str(row["run"] + 1)


def _short(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return (
        f"{value:,.4g}"
        if isinstance(value, float)
        else f"{value:,}"
        if isinstance(value, int)
        else str(value)
    )
