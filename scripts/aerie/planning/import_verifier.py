"""The stage `import_verifier`: find the checkpoint, compare it with the run, fingerprint it."""

from pathlib import Path

from aerie.common.errors import InputError
from aerie.config import Config
from aerie.planning.preflight.verifier import check_verifier
from aerie.verifier.checkpoint import locate_verifier
from aerie.verifier.compatibility import check_config
from aerie.verifier.fingerprint import describe_verifier


def import_verifier(config: Config, store: Path, output: Path) -> None:
    """Write the fingerprint of the configured verifier to `output`.

    `store`: where a converted checkpoint is kept. Prints warnings; raises `InputError` when the
    verifier cannot be found or the configuration does not fit it.
    """
    source = config.verifier.source
    folder = locate_verifier(source, store)
    fingerprint = describe_verifier(folder, source, config.verifier.trust_remote_code)
    check_config(config, fingerprint.sizes)
    # `make check` could not see these before the verifier was on this machine.
    findings = [f for f in check_verifier(config, store) if f.severity != "ok"]
    for found in findings:
        print(f"{found.severity}: {found.check}: {found.found} {found.meaning} {found.advice}")
    errors = [f"{f.check}: {f.found}; {f.advice}" for f in findings if f.severity == "error"]
    if errors:
        raise InputError("the verifier cannot be used:\n  " + "\n  ".join(errors))
    fingerprint.write(output)
