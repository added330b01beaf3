"""What a user writes: a task gives samples, the chat messages for one, and the reward of a response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from rollplex.data.records import Rollout, Sample

if TYPE_CHECKING:
    from rollplex.rewards.base import Reward

Split = Literal["train", "validation", "test"]


class VLMTask:
    """Subclass this for a new task and name the class in the YAML (`data.init_args.task.class_path`).

    Only three methods matter: `samples`, `messages` and `reward`. Settings are the subclass's own keyword
    arguments.
    """

    rewards: Sequence[Reward] = ()
    """Rewards as objects (`rollplex.rewards`). If there are any, they score a response and `reward` is not called."""

    def samples(self, split: Split) -> Sequence[Sample]:
        """All rows of a split. Any object with `__len__` and `__getitem__` will do, so rows may be read lazily."""
        raise NotImplementedError(f"{type(self).__name__} must define samples(split)")

    def messages(self, sample: Sample) -> list[dict[str, Any]]:
        """The prompt as chat messages.

        Content is a string or a list of parts: {"type": "text", "text": str}, {"type": "image", "image": PIL image,
        path or bytes}, {"type": "video", "video": list of PIL frames, array (T, H, W, 3) uint8 or path, "fps": float}.
        """
        raise NotImplementedError(f"{type(self).__name__} must define messages(sample)")

    def reward(self, sample: Sample, response: Rollout) -> float | dict[str, float] | None:
        """Score one response (`response.text`, `response.token_ids`, `response.finish_reason`).

        A float, a dict of named floats (weighted by `reward_weights`), or None for "cannot be scored": the response
        is then left out of the group's statistics and of the loss, and counted. May be `async`: the responses of a
        group then wait together.
        """
        raise NotImplementedError(f"{type(self).__name__} must define reward(sample, response)")

    def correct(self, sample: Sample, response: Rollout) -> bool | None:
        """For validation's pass@k: is the response right? None when the task has no such notion.

        Not called where one of `rewards` judges (`Reward.judges`): a response is then right if that one gave 1.
        """
        return None
