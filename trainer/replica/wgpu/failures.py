"""What a device can do to us."""

from __future__ import annotations


class DeviceError(Exception):
    """The device cannot be opened or used, or computes nonsense; the message names it and why."""


class OutOfMemoryError(DeviceError):
    """The device has no room for a buffer; it works on with those that it has."""


class LostError(DeviceError):
    """The driver gave the device up, as after a hang; it cannot be used again.

    wgpu-native tells of it between submissions, and we raise this. When it notices within a
    submission or a wait it aborts the process instead, which a supervisor starts again.
    """
