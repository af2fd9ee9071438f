"""Errors by meaning, each with the exit status of a script that ends with it.

| class | meaning | status | tried again |
|---|---|---|---|
| `InputError` | something the user gave cannot be used | 1 | yes |
| `EngineError` | the verifier's engine, or a server, failed or timed out | 69 | yes |
| `UnusableStates` | hidden states that must not be stored or trained on | 77 | no |
| `PermanentError` | anything else that running again does not fix | 76 | no |

A message says what was found and where, what was expected, and what to do next.
"""

EXIT_INPUT = 1
EXIT_ENGINE = 69
EXIT_CRASH = 70
"""An exception that nobody expected."""
EXIT_STALLED = 75
"""The supervisor stopped a job that made no progress."""
EXIT_PERMANENT = 76
EXIT_UNUSABLE_STATES = 77

PERMANENT = (EXIT_PERMANENT, EXIT_UNUSABLE_STATES)
"""Exit statuses of jobs that are not tried again."""


class AerieError(Exception):
    """Ends a script with its message alone, without a traceback, and with `status`."""

    status = EXIT_INPUT


class InputError(AerieError):
    """Something the user gave cannot be used: a file, a key, an argument."""

    status = EXIT_INPUT


class EngineError(AerieError):
    """The engine or a server of the verifier failed; running again goes on from what was kept."""

    status = EXIT_ENGINE


class PermanentError(AerieError):
    """Running again does not fix this."""

    status = EXIT_PERMANENT


class UnusableStates(PermanentError):
    """Hidden states that must not be stored or trained on; the message says what is wrong."""

    status = EXIT_UNUSABLE_STATES
