"""The errors of a device."""

from __future__ import annotations

from trainer.system.errors import TrainerError


class DeviceError(TrainerError):
    """The device cannot be opened or used, or computes nonsense; the message names it and why.

    A worker that it ends during a run is restarted, and determines again which backend works
    (F-DP-004).
    """

    exit_code = 7


class NoGpuError(DeviceError):
    """This machine has no Vulkan device that is a GPU."""


class OutOfMemoryError(DeviceError):
    """The device has no memory for a buffer; existing ones stay usable."""


class LostError(DeviceError):
    """The driver lost the device, as after a hang; it cannot be used again.

    wgpu-native reports it between submissions, which raises this. Within a submission or a wait it
    aborts the process instead, and a supervisor restarts it.
    """
