"""Plans drawn at random over every way to spread 1 to 8 devices, each held to one device.

A drawn plan has two honest ends: it is refused by name before anything is traced, or it trains like
one device does and communicates what its closed form says. Everything else is a fault of jaxpar's,
and the exception or the numbers tell which.

Choices go through one function, `choose(options)`, simplest option first, so that a seeded
generator can make them, or a test tool that shrinks what it found.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import optax

from jaxpar.errors import JaxparError
from jaxpar.mesh import MeshSpec
from jaxpar.model.config import ModelConfig
from jaxpar.strategies.plan import Plan
from jaxpar.text import Corpus
from jaxpar.tour import References, TrainingRow, take_row
from jaxpar.train import TrainStep

Choose = Callable[[Sequence[Any]], Any]

AXES = ("pipe", "data", "fsdp", "expert", "context", "ulysses", "tensor")

NUM_STEPS = 2
"""Of training: the second one starts from parameters that the first one changed."""


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """What to train how. The plan is not built yet: building it is where it may be refused."""

    config: ModelConfig
    mesh: str
    fields: dict[str, Any]

    def __str__(self) -> str:
        told = ", ".join(f"{name}={value!r}" for name, value in self.fields.items())
        return f"{self.config.name} on {self.mesh}: {told}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a drawn plan ended; `why` is the refusal, the difference, or the exception."""

    kind: Literal["equal", "refused", "different", "crashed"]
    why: str = ""


# --- drawing ---------------------------------------------------------------------------------


@cache
def factorings(num_devices: int) -> tuple[dict[str, int], ...]:
    """All ways to spread this many devices over the axes, those with the fewest axes first."""

    def sizes(remaining: int, num_axes: int) -> Iterator[tuple[int, ...]]:
        if num_axes == 1:
            yield (remaining,)
            return
        for size in range(1, remaining + 1):
            if remaining % size == 0:
                for others in sizes(remaining // size, num_axes - 1):
                    yield size, *others

    found = [dict(zip(AXES, each, strict=True)) for each in sizes(num_devices, len(AXES))]
    return tuple(sorted(found, key=lambda axes: sum(size > 1 for size in axes.values())))


def draw_model(choose: Choose) -> ModelConfig:
    """A small transformer, with or without experts."""
    num_kv_heads, tied = choose((8, 2, 1, 4)), choose((False, True))
    num_layers, mlp = choose((2, 4, 3, 1)), choose(("swiglu", "gelu"))
    fields: dict[str, Any] = {}
    if choose((False, True)):
        fields = {
            "num_experts": choose((8, 4)),
            "num_experts_per_token": choose((2, 1)),
            "num_shared_experts": choose((0, 1)),
            "expert_hidden": 32,
            "router": choose(("softmax", "sigmoid")),
            "balance_weight": choose((0.0, 0.01)),
            "router_z_weight": choose((0.0, 0.001)),
            "bias_rate": choose((0.0, 0.001)),
            "num_dense_layers": choose((0, 0, min(1, num_layers - 1))),
        }
    if dropout := choose((0.0, 0.0, 0.0, 0.1)):
        fields["dropout"] = dropout
    about = [f"{num_layers} layers", f"{num_kv_heads} kv heads", mlp]
    about += ["tied"] if tied else []
    about += [f"{name}={value}" for name, value in fields.items() if value]
    return ModelConfig(
        name=" ".join(about), num_layers=num_layers, embed=32, num_heads=8,
        num_kv_heads=num_kv_heads, head_dim=4, mlp_hidden=32, vocab=256, max_seq_len=64, mlp=mlp,
        tied_embedding=tied, **fields,
    )  # fmt: skip


def draw(choose: Choose, config: ModelConfig) -> Drawn:
    """A float32 plan for `config` on some mesh of at most 8 devices.

    Fields are drawn where they have something to do, and now and then where they have not.
    """
    rarely = (False,) * 15 + (True,)
    every = factorings(choose((8, 8, 8, 8, 8, 4, 4, 2, 6, 6, 1, 3, 5, 7)))
    if not config.num_experts and not choose(rarely):
        every = tuple(axes for axes in every if axes["expert"] == 1)
    axes = choose(every)
    mesh = ",".join(f"{axis}={size}" for axis, size in axes.items() if size > 1) or "data=1"
    fields: dict[str, Any] = {"compute_dtype": "float32"}

    def maybe(is_at_home: bool, **options: Sequence[Any]) -> None:
        if is_at_home or choose(rarely):
            fields.update({name: choose(values) for name, values in options.items()})

    maybe(axes["tensor"] > 1, sequence=(False, True))
    if fields.get("sequence"):
        maybe(True, overlap=("none", "none", "unidirectional", "bidirectional"))
    maybe(axes["fsdp"] > 1, zero=(3, 2, 1))
    if fields.get("zero") == 3:
        maybe(True, reshard_after_forward=(True, False), prefetch=(False, False, True),
              num_layers_per_gather=(1, 1, 2))  # fmt: skip
    maybe(axes["context"] > 1, context=("ring", "allgather", "ulysses"),
          context_layout=("zigzag", "contiguous"))  # fmt: skip
    maybe(axes["pipe"] > 1, schedule=("1f1b", "gpipe", "interleaved", "zb-h1"),
          num_microbatches=(2, 4, 1, 8))  # fmt: skip
    maybe(fields.get("schedule") == "interleaved", num_virtual_stages=(2, 2, 1, 3))
    maybe(axes["pipe"] == 1, num_accumulation_steps=(1, 1, 2),
          overlap_gradients=(False, False, False, True))  # fmt: skip
    maybe(config.num_experts > 0, experts=("dropless", "capacity"))
    maybe(config.num_experts > 0 and axes["expert"] > 1, num_expert_chunks=(1, 1, 2))
    maybe(fields.get("experts") == "capacity", capacity_factor=(1.25, 0.75),
          drop_policy=("position", "weight"))  # fmt: skip
    maybe(True, remat=("none", "none", "selective", "dots", "full"),
          packed=(False, False, True), offload=(None,) * 7 + ("optimizer",))  # fmt: skip
    num_parts = math.prod(axes[axis] for axis in ("data", "fsdp", "expert"))
    num_parts *= fields.get("num_accumulation_steps", 1) * fields.get("num_microbatches", 1)
    num_pieces = 2 * axes["context"] * axes["ulysses"] * axes["tensor"]
    fields["batch_size"] = 16 if choose(rarely) else -(-16 // num_parts) * num_parts
    fields["seq_len"] = 16 if choose(rarely) else -(-16 // num_pieces) * num_pieces
    return Drawn(config=config, mesh=mesh, fields=fields)


def numbered(seed: int) -> Drawn:
    """The plan of this number, with a model of its own."""
    choose = random.Random(seed).choice
    return draw(choose, draw_model(choose))


# --- judging ---------------------------------------------------------------------------------


class Judge:
    """Trains drawn plans beside one device, whose runs it keeps: many plans share each."""

    def __init__(self) -> None:
        # What it adds to parameters is as exact as the gradients. Adam divides by their size, and
        # makes a step out of the rounding of those that are nearly 0.
        self._optimizer = optax.sgd(0.3, momentum=0.9)
        self._corpus = Corpus.standard_library()
        self._reference = References()

    def __call__(self, drawn: Drawn) -> Outcome:
        try:
            plan = Plan(mesh=MeshSpec.parse(drawn.mesh), **drawn.fields)
            step = TrainStep(config=drawn.config, plan=plan, optimizer=self._optimizer)
        except JaxparError as error:
            return Outcome(kind="refused", why=str(error))
        except Exception as error:
            return Outcome(kind="crashed", why=f"when it was made: {error!r}")
        # What raises from here on is a fault, whatever its class: it was to be refused above.
        try:
            batches = [
                self._corpus.batch(
                    i, batch_size=plan.batch_size, seq_len=plan.seq_len, packed=plan.packed
                )
                for i in range(NUM_STEPS)
            ]
            row = take_row(str(drawn), step, batches, self._reference(step, batches))
        except Exception as error:
            return Outcome(kind="crashed", why=f"{type(error).__name__}: {error}")
        return Outcome(kind="equal") if row.agrees else Outcome(kind="different", why=_why(row))


def _why(row: TrainingRow) -> str:
    told = [
        f"{name} differs by {error:.1e}"
        for name, error in (
            ("loss", row.loss_error),
            ("gradient norm", row.gradient_norm_error),
            ("parameters", row.parameter_error),
        )
        if not row.numbers_agree and not error <= 1e-5
    ]
    told += [f"{line}" for line in row.lines if not line.agrees]
    return "; ".join(told)


def rule(refusal: str) -> str:
    """What kind of refusal it is: its first sentence, without the numbers and names of this one."""
    first = refusal.split(". ")[0].split(": ")[-1]
    words = ["…" if any(c.isdigit() or c in "=×" for c in word) else word for word in first.split()]
    return " ".join(word for word, _ in itertools.groupby(words))[:100]
