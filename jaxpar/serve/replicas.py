"""Independent replicas: the same plan several times, each on devices of its own.

A program per replica, rather than one program over all with an outer axis. In one program replicas
would step together: whoever is idle computes padding, a prefill holds up the others' decode, and
when one device is gone all are. Of one program the audit could prove independence too (and
`independence.crossings` does, of whatever is spread over `data`); of one per replica it proves
more: that no program so much as runs on another replica's devices. It costs one compilation each.

A request goes to the replica with the fewest tokens left to compute (router.py), and stays there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jaxpar.errors import IndependenceError, LostError, PlanError, require_whole
from jaxpar.model.config import ModelConfig
from jaxpar.model.transformer import Params
from jaxpar.serve import scheduler as scheduling
from jaxpar.serve.independence import Independence, prove
from jaxpar.serve.plan import KINDS, ServePlan
from jaxpar.serve.router import Router, Routing
from jaxpar.serve.scheduler import Admission
from jaxpar.serve.workers import Batching, Fleet, make_workers


class Replicas(Fleet):
    """`num_replicas` copies of `config`, each under `plan`, as workers "replica 0", ...

    params: whole float32 ones, as `ServeStep.place` takes them. devices: consecutive ones for each
    replica; None for those that JAX finds. admission: what a full cache does, batching: when
    requests may join a step; both can be changed with `start`.
    Raises PlanError for what the model, the mesh or the machine does not allow.
    """

    def __init__(
        self,
        config: ModelConfig,
        plan: ServePlan,
        params: Params,
        *,
        num_replicas: int,
        devices: Sequence[Any] | None = None,
        admission: Admission = "preempt",
        routing: Routing = "load",
        batching: Batching = "continuous",
    ) -> None:
        require_whole(PlanError, "num_replicas", num_replicas)
        self.routing: Routing = routing
        named = [(f"replica {i}", plan, KINDS) for i in range(num_replicas)]
        super().__init__(config, make_workers(config, params, named, devices))
        self.start(admission=admission, batching=batching)

    def start(self, **options: Any) -> None:
        super().start(**options)
        self.router = Router(self.routing)

    def _send(self, sequence: scheduling.Sequence, *, first: bool) -> None:
        loads = {worker.name: worker.load for worker in self.living}
        if not loads:
            raise LostError(f"all {len(self.workers)} replicas are lost.")
        name = self.router.choose(loads)
        next(worker for worker in self.living if worker.name == name).take(sequence, first=first)

    def independence(self) -> Independence:
        """What the audit of all replicas' compiled programs says of communication between them."""
        programs = [program for worker in self.workers for program in worker.compiled()]
        return prove(programs, [worker.devices for worker in self.workers])

    def require_independence(self) -> Independence:
        """The same; raises IndependenceError where anything joins two replicas."""
        found = self.independence()
        if not found.holds:
            told = "; ".join(map(str, found.crossings))
            raise IndependenceError(f"Replicas communicate. {told}.")
        return found
