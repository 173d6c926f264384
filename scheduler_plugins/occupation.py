"""For how long devices have been busy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler_plugins.inference import InferencePlugin
    from scheduler_plugins.load import DeviceLoad


def busy_seconds(plugin: InferencePlugin, now: float) -> dict[str, float]:
    """Seconds that each worker has run batches, of all deployments.

    That of passes that have ended, and of what runs now since it began.
    """
    dispatcher = plugin.dispatcher
    total = dict.fromkeys(plugin.registry.workers, 0.0)
    for counts in dispatcher.statistics.values():
        for address, done in counts.workers.items():
            total[address] = total.get(address, 0.0) + done.seconds
    devices: dict[str, DeviceLoad] = {}
    for line in dispatcher.lines.values():
        devices |= line.devices
    for address, device in devices.items():
        running = device.running
        if running is not None:
            since = max(running.sent_at + dispatcher.link.outbound, device.free_at)
            total[address] = total.get(address, 0.0) + max(now - since, 0.0)
    return total
