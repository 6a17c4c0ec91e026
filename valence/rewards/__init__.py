"""Rewards score completions: functions, rules, reward models and servers, or a sum of them."""

from valence.rewards.build import reward_of
from valence.rewards.run import Stopped, close, score_all

__all__ = ["Stopped", "close", "reward_of", "score_all"]
