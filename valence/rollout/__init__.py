"""Prompts in, completions out, with the sampler's own log-probabilities."""

from valence.rollout.hf import HFGenerator
from valence.rollout.protocol import Generator, Sampling

__all__ = ["Generator", "HFGenerator", "Sampling"]
