"""(DeviceSpec, FLOP, bytes) -> seconds of an operator on one device: the roofline, max(FLOP / rate, bytes / memory bandwidth)."""

from alpa_hpc.cluster.hardware import DeviceSpec


def compute_seconds(device: DeviceSpec, flop: float, num_bytes: float, itemsize: int) -> float:
    """Seconds of `flop` operations that move `num_bytes` through memory, on operands of `itemsize` bytes an element."""
    return max(flop / flop_rate(device, itemsize), num_bytes / device.memory_bandwidth)


def flop_rate(device: DeviceSpec, itemsize: int) -> float:
    """FLOP a second a device reaches: its peak for elements of `itemsize` bytes (16 bits or fewer, or more) times its efficiency."""
    peak = device.flops_16bit if itemsize <= 2 else device.flops_32bit
    return peak * device.efficiency
