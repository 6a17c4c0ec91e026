"""Learning from the policy's own answers: rounds of sampling, judging, and steps on what was made
of the answers.
"""
