"""The error for a conversation that must not be used."""


class Unverified(Exception):
    """A conversation whose tokens or loss mask cannot be verified.

    `reason` is a short text under which such conversations are counted (docs/loss_masks.md).
    """

    def __init__(self, reason: str):
        super().__init__(reason)
        self.reason = reason
