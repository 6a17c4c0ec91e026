"""Reward models for a reward server, which receives rendered texts of prompt and completion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from valence.data.encode import Encoder
from valence.data.encoded_set import Unusable
from valence.rewards.calls import CallBackend
from valence.training.reward_models import HERE, ModelScores, reward_model
from valence.types import Completion, Demonstration, Ids, TokenizedExample


def encode_query(encoder: Encoder, completion: Completion) -> TokenizedExample | Unusable:
    """Tokenize a query without the tokens that a tokenizer or a template would add."""
    ids = tuple(
        cast(list[int], encoder.tokenizer(completion.text, add_special_tokens=False)["input_ids"])
    )
    return encoder.encode(Demonstration(prompt=Ids(ids[:1]), completion=Ids(ids[1:]), origin=HERE))


def query_model(target: str, settings: Mapping[str, Any], where: str) -> CallBackend:
    """A reward model that reads ``Completion.text`` as the query. Raises UserError as
    ``reward_model`` does.
    """
    return replace(cast(ModelScores, reward_model(target, settings, where)), read=encode_query)
