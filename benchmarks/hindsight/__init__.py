"""What a model learns from messages of a simulated user, without a label."""
