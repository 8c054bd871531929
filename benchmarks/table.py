"""Result files of the benchmarks as Markdown tables.

    python benchmarks/table.py results/*.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Dict, Iterable, List, Sequence


def markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join(lines)


def number(value: Any, digits: int = 2) -> str:
    """Empty where there is no figure."""
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else ""


def yes(value: bool) -> str:
    return "yes" if value else "no"


def layer_stack_table(results: List[Dict[str, Any]]) -> str:
    """A row a mode. Ratios are to the first mode of the same file: figures of different files are of different machines or calls."""
    header = (
        "tokens, layers", "mode", "s/step", "spread %", "ratio", "MFU %", "% of ceiling",
        "GiB live", "GiB reserved", "GiB host", "GiB host/layer", "new segments", "stall ms",
    )
    rows = []
    for result in results:
        shape = result["shape"]
        reference = next(iter(result["modes"].values()), {}).get("median_s")
        for name, entry in result["modes"].items():
            work = f"{shape['tokens']:,}, {shape['layers']}"
            if "error" in entry:
                rows.append((work, name, entry["error"].splitlines()[0][:80]) + ("",) * (len(header) - 3))
                continue
            seconds = entry.get("median_s")
            rows.append((
                work, name, number(seconds, 4), number(entry.get("spread_percent")), number(reference / seconds, 3) if reference and seconds else "",
                number(entry.get("mfu_percent")), number(entry.get("ceiling_percent"), 1), number(entry.get("live_peak_gib")),
                number(entry.get("reserved_peak_gib")), number(entry.get("host_peak_gib")), number(entry.get("host_gib_per_layer")),
                ", ".join(str(n) for n in entry.get("new_segments", [])), number(entry.get("stall_ms"), 1),
            ))
    notes = [f"{results[0]['rank']}. Live: peak above weights, main gradients and the harness's tensors; reserved: all of the allocator's."]
    for result in results:
        if "ceiling" in result:
            c, shape = result["ceiling"], result["shape"]
            share = f" = {100 * c['tflops'] / result['peak_tflops']:.2f} % MFU" if result.get("peak_tflops") else ""
            notes.append(
                f"Ceiling of {shape['tokens']:,} tokens ({c['attention']}): attention {c['attention_forward_tflops']:.0f} forward / "
                f"{c['attention_backward_tflops']:.0f} backward, linears {c['linears_tflops']:.0f} TFLOP/s: {c['layer_s']:.4f} s a layer{share}."
            )
    return "\n".join([markdown(header, rows), ""] + [f"* {note}" for note in notes])


def first_step_table(results: List[Dict[str, Any]]) -> str:
    """A row a case: the parameter where memo's error is largest against stock's. Controls must be outside the bound."""
    header = ("weight gradients", "case", "stock's error", "memo's error", "ratio", "of", "within bound", "right")
    rows = []
    for result in results:
        for case in result["cases"]:
            rows.append((
                case["gradients"], case["case"], f"{case['stock_error']:.2e}", f"{case['memo_error']:.2e}", number(case["ratio"], 3),
                case["parameter"], yes(case["ok"]), yes(case["ok"] != case["control"]),
            ))
    return markdown(header, rows)


def waits_table(results: List[Dict[str, Any]]) -> str:
    """A row a left-out wait, and one for the intact executor under the same delays. Mutants must differ from stock, the intact one must not."""
    header = ("left out", "steps", "largest difference to stock", "seen", "right")
    rows = [
        (case["order"], case["scenario"], case.get("error", f"{case['difference']:.2e}")[:80], yes(case["seen"]),
         yes(case["seen"] == case["mutant"] and "error" not in case))
        for result in results
        for case in result["waits"]
    ]
    return markdown(header, rows)


def ranks_table(results: List[Dict[str, Any]]) -> str:
    """A row a parallel layout and case; differences are of the parameter that differs most, on any rank."""
    header = ("ranks", "stock against itself", "case", "memo against stock", "of", "host MiB")
    rows = []
    for result in results:
        for case in result["cases"]:
            rows.append((
                f"TP{result['tp']}", f"{result['noise']:.1e}", case["case"], f"{case['difference']:.1e}", case["parameter"],
                number(case.get("host_mib"), 1),
            ))
    return markdown(header, rows)


def ceiling_table(results: List[Dict[str, Any]]) -> str:
    header = ("tokens", "attention", "forward TFLOP/s", "backward TFLOP/s", "linears TFLOP/s", "s a layer")
    rows = [
        (f"{r['tokens']:,}", r["attention"], number(r["attention_forward_tflops"], 0), number(r["attention_backward_tflops"], 0),
         number(r["linears_tflops"], 0), number(r["layer_s"], 4))
        for r in results
    ]
    return markdown(header, rows)


TABLES = {
    "layer_stack": layer_stack_table,
    "first_step": first_step_table,
    "waits": waits_table,
    "ranks_on_one_gpu": ranks_table,
    "ceiling": ceiling_table,
}


def tables(paths: Sequence[str]) -> str:
    """All tables of the files, benchmark by benchmark. Raises ValueError for a file of no benchmark here."""
    found: Dict[str, List[Dict[str, Any]]] = {}
    for path in paths:
        result = json.loads(Path(path).read_text())
        benchmark = result.get("benchmark") if isinstance(result, dict) else None
        if benchmark not in TABLES:
            raise ValueError(f"{path}: expected a result of {', '.join(TABLES)}, found {benchmark}")
        found.setdefault(result["benchmark"], []).append(result)
    parts = []
    for benchmark, results in found.items():
        versions = results[0]["versions"]
        parts.append(f"### {benchmark}\n\n{TABLES[benchmark](results)}")
        parts.append(", ".join(f"{name} {version}" for name, version in versions.items() if version))
    return "\n\n".join(parts)


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    print(tables(sys.argv[1:]))
