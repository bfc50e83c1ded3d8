"""What a device can do to us."""

from __future__ import annotations

from trainer.errors import TrainerError


class DeviceError(TrainerError):
    """The device cannot be opened or used, or computes nonsense; the message names it and why.

    A worker that it ends in the middle of a run is restarted, and determines again which
    backend works (F-DP-004).
    """

    exit_code = 7


class OutOfMemoryError(DeviceError):
    """The device has no room for a buffer; it works on with those that it has."""


class LostError(DeviceError):
    """The driver gave the device up, as after a hang; it cannot be used again.

    wgpu-native tells of it between submissions, and we raise this. When it notices within a
    submission or a wait it aborts the process instead, which a supervisor starts again.
    """
