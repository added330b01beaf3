"""From vLLM's outputs to rollouts, with everything checked that could make a response not the policy's own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rollplex.data.records import FinishReason, Request, Rollout
from rollplex.engines.sampling import not_finite
from rollplex.engines.text import Detokenizer


class ResponseReader:
    """Reads finished responses, and those still in vLLM's output processor."""

    def __init__(self, output_processor: Any, detokenizer: Detokenizer) -> None:
        self._states: dict[str, Any] = output_processor.request_states
        self._detokenizer = detokenizer

    def finished(self, request: Request, out: Any, version: int) -> Rollout:
        """What vLLM ended; `version` is that of the weights published last."""
        row = request.prompt.sample.id
        if out.prompt_token_ids != request.prompt.input_ids.tolist():
            raise RuntimeError(f"row {row!r}: vLLM ran another prompt than the trainer's")
        (completion,) = out.outputs
        reason: FinishReason = completion.finish_reason
        if reason not in ("stop", "length"):
            raise RuntimeError(f"row {row!r}: vLLM ended a response with {reason!r}")
        ids = list(completion.token_ids)
        _check_version(row, {span.version for span in completion.weight_versions or ()}, version)
        if reason == "length" and request.params.stop and self._detokenizer.completes(ids, request.params.stop):
            reason = "stop"
        return self._rollout(request, ids, _logps(completion.logprobs, ids), reason, version)

    def unfinished(self, request: Request, internal_id: str, version: int, reason: FinishReason) -> Rollout:
        """A response as far as it is, which ends for `reason`."""
        state = self._states[internal_id]
        ids = list(state.detokenizer.output_token_ids)
        if ids:
            _check_version(request.prompt.sample.id, {v for v, _ in state.weight_version_starts}, version)
        return self._rollout(request, ids, _logps(state.logprobs_processor.logprobs, ids), reason, version)

    def completes(self, internal_id: str, stops: Sequence[str]) -> bool:
        """Does the newest token of an unfinished response complete one of `stops`?"""
        ids = self._states[internal_id].detokenizer.output_token_ids
        return bool(ids) and self._detokenizer.completes(ids, stops)

    def _rollout(
        self, request: Request, ids: list[int], logps: list[float], reason: FinishReason, version: int
    ) -> Rollout:
        logps_R = torch.tensor(logps, dtype=torch.float32)
        if not torch.isfinite(logps_R).all():
            raise not_finite(request, int(torch.nonzero(~torch.isfinite(logps_R))[0]), version)
        ended_by_id = reason == "stop" and ids[-1] in request.params.stop_token_ids
        return Rollout(
            group=request.group,
            index=request.index,
            token_ids=torch.tensor(ids, dtype=torch.int64),
            logps=logps_R,
            text=self._detokenizer.decode(ids[:-1] if ended_by_id else ids),
            finish_reason=reason,
            weights_version=version,
        )


def _logps(flat: Any, ids: list[int]) -> list[float]:
    if flat.token_ids != ids:
        raise RuntimeError("vLLM's log-probabilities are not those of the sampled tokens alone")
    return list(flat.logprobs)


def _check_version(row: str, versions: set[str], published: int) -> None:
    if versions != {str(published)}:
        raise RuntimeError(
            f"row {row!r}: vLLM sampled with weights version {sorted(versions)}, the trainer published {published}"
        )
