"""The report: one HTML page that opens offline."""

import datetime
import json
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import markupsafe
from plotly.offline import get_plotlyjs

from aerie.common.files import write_bytes
from aerie.common.formatting import as_bytes, as_count, as_duration, as_figure, as_share
from aerie.common.paths import PROJECT
from aerie.config import Config
from aerie.report import data_charts, drafter_charts
from aerie.report.derived import counts_by_stage, describe_states, describe_training, machines
from aerie.report.remarks import LARGE_GAP, answer, explain_gap, likely_causes, losses, remarks
from aerie.report.run import REPORTED_SECTIONS, SPLITS, Run, read_run
from aerie.report.serving import serve_command, verifier_name

TEMPLATE = Path(__file__).with_name("report.html.j2")


def render_report(folder: Path, drafters: list[str], config: Config, output: Path) -> None:
    """Write the report of the run in `folder`, with the drafters in this order.

    Raises `InputError` for a file of the run that is absent or damaged.
    """
    page = render(read_run(folder, drafters, config), facts())
    # An id may contain half a surrogate pair, which UTF-8 cannot encode.
    write_bytes(output, page.encode("utf-8", "backslashreplace"))


def facts() -> dict[str, str]:
    """When the page was made, and with which version of the code if that is known."""
    found = {"Made": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")}
    command = ["git", "-C", str(PROJECT), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        found["Aerie"] = done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return found


def draw(run: Run) -> dict[str, Any]:
    """All figures of the report by name; a figure without data is left out."""
    figures = {
        "counts": data_charts.counts(run),
        "lengths": data_charts.lengths(run),
        "coverage": data_charts.coverage(run),
        "loss": drafter_charts.loss(run.drafters),
        "accuracy": drafter_charts.accuracy(run.drafters),
        "positions": drafter_charts.positions(run.drafters),
        "prompt_sets": drafter_charts.prompt_sets(run.drafters),
        "speed": drafter_charts.speed(run.drafters),
        "bytes": data_charts.stored_bytes(run),
        "origin": data_charts.origin(run),
        "durations": data_charts.durations(run),
    }
    return {name: figure for name, figure in figures.items() if figure is not None}


def render(run: Run, facts: dict[str, str]) -> str:
    """The page as HTML, with everything it needs. `facts`: name → text, about the page itself."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(
        count=as_count, share=as_share, figure=as_figure, bytes=as_bytes, duration=as_duration
    )
    figures = draw(run)
    return environment.from_string(TEMPLATE.read_text(encoding="utf-8")).render(
        run=run,
        verifier=run.verifier,
        verifier_name=verifier_name(run.verifier),
        splits=SPLITS,
        large_gap=LARGE_GAP,
        drafters=[
            {
                "drafter": d,
                "answer": answer(d),
                "expectation": d.expectation,
                "causes": likely_causes(run, d),
                "covered": run.covered(d),
                "training": describe_training(d),
                "serve": serve_command(run.verifier, d),
            }
            for d in run.drafters
        ],
        gap=explain_gap(run),
        stages=counts_by_stage(run),
        losses=losses(run),
        remarks=remarks(run),
        states=describe_states(run),
        machines=machines(run),
        facts=facts,
        config=json.dumps(
            run.config.model_dump(mode="json", include=set(REPORTED_SECTIONS)),
            indent=2,
            ensure_ascii=False,
        ),
        figures=set(figures),
        figures_json=markupsafe.Markup(_for_script(figures)),
        plotly=markupsafe.Markup(get_plotlyjs()),
    )


def _for_script(figures: dict[str, Any]) -> str:
    """Plotly figures by name as JSON that cannot end the script element it stands in."""
    parts = (f"{json.dumps(name)}: {figure.to_json()}" for name, figure in figures.items())
    text = "{" + ",\n".join(parts) + "}"
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
