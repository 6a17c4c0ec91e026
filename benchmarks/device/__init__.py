"""The time of a training step on this device, compared with the device's limits."""
