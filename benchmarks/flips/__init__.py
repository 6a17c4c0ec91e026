"""Wrong verdicts, planted: how many of them a run's page brings to light."""
