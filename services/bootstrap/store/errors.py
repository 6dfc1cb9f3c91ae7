"""What can go wrong with a model's file."""

from services.common.errors import BlinkError


class ModelStoreError(BlinkError):
    """A model can't be found, fetched, checked or stored."""


class ChecksumError(ModelStoreError):
    """A file's SHA-256 is not the pinned one."""
