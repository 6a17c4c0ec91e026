"""Reward models whose texts are given whole, prompt, template and all, as a reward server has
them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, cast

from valence.data.encode import Encoder
from valence.data.encoded_set import Unusable
from valence.lifecycle.reward_models import HERE, ModelScores, reward_model
from valence.rewards.calls import CallBackend
from valence.types import Completion, Demonstration, Ids, TokenizedExample


def as_it_is(encoder: Encoder, completion: Completion) -> TokenizedExample | Unusable:
    """A text as the tokens that it is, without any that a tokenizer or a template would add."""
    ids = tuple(
        cast(list[int], encoder.tokenizer(completion.text, add_special_tokens=False)["input_ids"])
    )
    return encoder.encode(Demonstration(prompt=Ids(ids[:1]), completion=Ids(ids[1:]), origin=HERE))


def query_model(target: str, settings: Mapping[str, Any], where: str) -> CallBackend:
    """A reward model that reads ``Completion.text`` as the whole of what it judges.

    Raises UserError as ``reward_model``.
    """
    return replace(cast(ModelScores, reward_model(target, settings, where)), read=as_it_is)
