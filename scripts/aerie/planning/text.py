"""A plan (aerie.planning.plan) for people: a table of the stages, and a few lines."""

from typing import Any

from rich.console import Console
from rich.table import Table


def show(result: dict[str, Any]) -> None:
    # A pipe has no width; a table cut at 80 columns is of no use there.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=150)
    counts, held = result["counts"], result["kept"]
    console.print(
        f"[bold]{result['run']}[/]: {counts['records']:,} records, {counts['samples']:,} samples, "
        f"{counts['tokens']:,} tokens, {counts['shards']:,} shards ({counts['basis']})"
    )
    console.print(
        f"in the store already: {held['answers']:,} answers, {held['shards']:,} shards with "
        f"{held['tokens']:,} tokens"
    )
    table = Table(box=None, pad_edge=False)
    for title, justify in (
        ("stage", "left"),
        ("there", "right"),
        ("to run", "right"),
        ("to do", "right"),
        ("time", "right"),
        ("GPU-hours", "right"),
        ("why", "left"),
        ("rate", "left"),
    ):
        table.add_column(title, justify=justify)
    for s in result["stages"]:
        runs = s["jobs"] > 0
        # What is counted in operations says nothing to a reader.
        shown = f"{s['units']:,.0f} {s['unit']}" if s["unit"] and "10⁹" not in s["unit"] else ""
        table.add_row(
            s["stage"],
            str(s["present"]),
            str(s["jobs"]) if runs else "–",
            shown if runs else "",
            duration(s["seconds"]) if runs else "",
            f"{s['gpu_hours']:.1f}" if runs and s["gpu_hours"] else "",
            ", ".join(s["reasons"]),
            s["rate"] if runs and s["seconds"] else "",
        )
    console.print(table)
    hardware = result["hardware"]
    console.print(
        f"in all {duration(result['seconds'])}, {result['gpu_hours']:.1f} GPU-hours; where no rate "
        f"was measured: {hardware['name']} of config/hardware.yaml ({hardware['note']}). Drafters "
        "and measurements that are found in the store take seconds."
    )
    if "one_pass" in result:
        spared = result["one_pass"]
        console.print(
            f"generation.capture saves the states of {spared['tokens']:,} tokens while they are "
            f"generated, which spares about {duration(spared['seconds'])} of extraction."
        )
    if "bytes" in result:
        b = result["bytes"]
        omitted = ""
        if b["states_omitted"]:
            omitted = f" (last_state: supervised leaves out {size(b['states_omitted'])} of the raw)"
        console.print(
            f"\nhidden states {size(b['states_raw'])} raw, {size(b['states_stored'])} stored"
            f"{omitted}, {size(b['states_new'])} of it new; staging {size(b['staging'])} "
            f"(free {size(b['staging_free'])}); drafters {size(b['drafters'])}, checkpoints "
            f"{size(b['checkpoints'])}; needed {size(b['needed'])}, free {size(b['free'])}"
        )
        v = result["verifier"]
        m = v["memory"]
        console.print(
            f"verifier {v['parameters'] / 1e6:,.0f} M parameters; memory of a device: weights "
            f"{size(m['weights'])}, a step {size(m['activations'])}, cache {size(m['cache_one'])} "
            f"a sequence, {size(m['cache_all'])} for all; lm_head {size(v['lm_head'])} "
            f"({v['vocabulary']:,} tokens)"
        )
        for name, d in result["drafters"].items():
            console.print(
                f"drafter {name}: head {size(d['head'])} ({d['vocabulary']:,} tokens), "
                f"{d['trained_parameters'] / 1e6:,.1f} M trained, model {size(d['model'])}; "
                f"training peaks at {size(d['memory']['peak'])}, logits "
                f"{size(d['memory']['logits'])} of it"
            )
        if hardware["gpus"]:
            console.print("Memory and times on GPUs are estimates, not measured.")
    for warning in result["warnings"]:
        console.print(f"[bold red]warning:[/] {warning}")


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def size(number: float) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20)):
        if number >= factor:
            return f"{number / factor:.1f} {unit}"
    return f"{number / 1024:.0f} KiB"
