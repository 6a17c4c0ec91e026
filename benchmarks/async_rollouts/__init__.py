"""Online training with rounds that are sampled and scored in the background."""
