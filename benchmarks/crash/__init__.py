"""Training processes that are killed at any moment: does the run end as if nothing had been?"""
