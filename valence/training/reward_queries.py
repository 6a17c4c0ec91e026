"""Reward models whose texts are given whole, prompt, template and all, as a reward server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

from valence.data.encode import Encoder, Unusable
from valence.reward.calls import Backend
from valence.training.reward_models import ModelScores, reward_model
from valence.types import Demonstration, Encoded, Ids


@dataclass
class AsItIs:
    """Encodes a text as the tokens that it is, without any that a tokenizer or a template would add."""

    encoder: Encoder

    def encode(self, example: Demonstration) -> Encoded | Unusable:
        ids = cast(list[int], self.encoder.tokenizer(str(example.completion), add_special_tokens=False)["input_ids"])
        return self.encoder.encode(replace(example, prompt=Ids(tuple(ids[:1])), completion=Ids(tuple(ids[1:]))))


def query_model(target: str, settings: Mapping[str, Any], where: str) -> Backend:
    """A reward model that reads ``Completion.text`` as the whole of what it judges. Raises UserError as ``reward_model``."""
    model = cast(ModelScores, reward_model(target, settings, where))
    return replace(model, encoder=cast(Encoder, AsItIs(model.encoder)))
