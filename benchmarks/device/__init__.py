"""What a training step takes on the device that is here, beside what the device can do."""
