"""What judges completions: functions, rules, reward models and servers, alone or added up."""

from valence.rewards.build import reward_of
from valence.rewards.run import Stopped, close, score_all

__all__ = ["Stopped", "close", "reward_of", "score_all"]
