"""The two errors that the verifier's rooms share."""

__all__ = ["Unsupported", "UsageError"]


class UsageError(ValueError):
    """The request itself cannot be carried out: unknown preset, target that does not load ... (exit status 2)."""


class Unsupported(NotImplementedError):
    """The candidate cannot take this call; the probe is not run."""
