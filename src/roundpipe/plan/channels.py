"""The ways between host and devices: when a transfer begins and ends."""

from __future__ import annotations

from roundpipe.plan.costs import Machine


class Channel:
    """One direction of the ways to the devices.

    Transfers of a device, and of all devices that share a link, go in the order of dispatch. A
    transfer takes as long as the slower of its device's rate and the link's; the link is free for
    the next one as soon as it could have carried it at its own rate.
    """

    def __init__(self, machine: Machine, rates: list[float | None]) -> None:
        self.rates = rates
        self.is_timed = any(rate is not None for rate in rates)
        self.free = [0.0] * len(rates)
        self._links = [device.link for device in machine.devices]
        self._link_rates = machine.links
        self.link_free = dict.fromkeys(machine.links, 0.0)

    def send(self, device: int, size: float, ready: float) -> tuple[float, float]:
        """Begin and end of a transfer that may begin at ``ready``."""
        rate = self.rates[device]
        assert rate is not None
        begin = max(ready, self.free[device])
        end = begin + size / rate
        link = self._links[device]
        if link is not None:
            begin = max(begin, self.link_free[link])
            self.link_free[link] = begin + size / self._link_rates[link]
            end = max(begin + size / rate, self.link_free[link])
        self.free[device] = end
        return begin, end
