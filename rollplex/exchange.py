"""Which engine generates what, when trainers and engines are not the same processes.

In a block of processes (rollplex.topology) there may be several trainers for one engine, or several engines for one
trainer. An engine of several processes is stepped by each of them, and all must submit the same requests in the same
order; a trainer of several processes must learn from the same responses on each.

| in a block | requests | responses |
|---|---|---|
| one trainer, one engine | its own, on every rank | on every rank, from its part of the engine |
| several trainers, one engine | gathered from the trainers, under numbers of their own | each keeps its own |
| one trainer, several engines | prefix passes are dealt out to the engines | exchanged in the rounds of `Lockstep` |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rollplex.data.records import Prompt, Request, Rollout, Sample
from rollplex.ranks import Ranks
from rollplex.topology import Topology


class Exchange:
    """Of one process. Every process of the block makes the same calls, on the Trainer's thread."""

    def __init__(self, topology: Topology, process: int, block: Ranks) -> None:
        self._block = block
        self.trainers, self.engines = topology.trainers, topology.engines
        self._trainer, self._engine = topology.trainer(process), topology.engine(process)
        self._speaks_for_trainer = topology.train_rank(process) == 0
        self._speaks_for_engine = topology.rollout_rank(process) == 0
        self._news: list[Rollout] = []

    @property
    def pools(self) -> bool:
        """Several trainers share an engine: submitting is a collective of them."""
        return self.trainers > 1

    @property
    def shares(self) -> bool:
        """Responses come from engines of other processes too."""
        return self.engines > 1

    def requests(self, own: Sequence[Request]) -> list[Request]:
        """What this process's engine is to generate. A collective where trainers share an engine."""
        if self.pools:
            return self._pooled(own)
        if not self.shares:
            return list(own)
        passes = list(dict.fromkeys(_pass_of(r) for r in own))
        mine = set(passes[self._engine :: self.engines])
        return [r for r in own if _pass_of(r) in mine]

    def _pooled(self, own: Sequence[Request]) -> list[Request]:
        sent = _renumbered(own, self._trainer, self.trainers)
        everywhere = self._block.gather(sent if self._speaks_for_trainer else [])
        found = [r for there in everywhere for r in there]
        return sorted(found, key=lambda r: r.key)

    def arrived(self, rollout: Rollout) -> list[Rollout]:
        """A response of this process's engine: those of it that the trainer may take at once."""
        if self.shares:
            if self._speaks_for_engine:
                self._news.append(rollout)
            return []
        group, trainer = divmod(rollout.group, self.trainers)
        return [replace(rollout, group=group)] if trainer == self._trainer else []

    def take_news(self) -> list[Rollout]:
        """Responses that the trainer's other processes do not know yet."""
        news, self._news = self._news, []
        return news

    def forget(self) -> None:
        """Of a rollout that was given up."""
        self._news.clear()


def _pass_of(request: Request) -> tuple[str, int]:
    """Prompts of one prefix pass stay together; an engine's K/V then round as they would in one engine."""
    return ("group", request.group) if request.prefix is None else ("pass", request.prefix.index)


def _renumbered(requests: Sequence[Request], trainer: int, trainers: int) -> list[Request]:
    """Under numbers that no other trainer uses, with what an engine needs of their prompts: no labels, no pictures for
    logs, no state of the trainer's. Requests of one group go on sharing one prompt."""
    prompts: dict[int, Prompt] = {}
    for r in requests:
        if id(r.prompt) not in prompts:
            prompts[id(r.prompt)] = replace(
                r.prompt, sample=Sample(r.prompt.sample.id), media=dict(r.prompt.media), images=()
            )
    return [replace(r, group=r.group * trainers + trainer, prompt=prompts[id(r.prompt)], prefix=None) for r in requests]
