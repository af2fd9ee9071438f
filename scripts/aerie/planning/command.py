"""`make plan`: a plan from the configuration files to the terminal."""

import json
from pathlib import Path

from aerie.common.paths import CONFIG
from aerie.config import load_config, read_config
from aerie.planning.dry_run import dry_run
from aerie.planning.hardware import choose_hardware
from aerie.planning.plan import make_plan
from aerie.planning.show import show

RESULTS = Path("results")


def plan_run(config_files: list[Path], machine: str | None, as_json: bool) -> None:
    """Print the plan of the run that these files laid over the default configuration describe.

    `machine`: a name in config/hardware.yaml. Raises `InputError` for an invalid configuration.
    """
    config = load_config(read_config(config_files))
    hardware = choose_hardware(CONFIG / "hardware.yaml", machine, config)
    plan = make_plan(config, RESULTS / config.run, dry_run(config_files), hardware)
    if as_json:
        print(json.dumps(plan.as_json(), indent=1))
    else:
        show(plan)
