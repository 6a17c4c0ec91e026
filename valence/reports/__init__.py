"""What people see of a run: logs, progress on the terminal, the run page and the model card."""
