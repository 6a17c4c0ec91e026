"""Prompts in, completions out, with the sampler's own log-probabilities."""

from valence.rollouts.hf import HFGenerator
from valence.rollouts.protocol import Generator, Sampling

__all__ = ["Generator", "HFGenerator", "Sampling"]
