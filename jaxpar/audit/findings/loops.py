"""Rules about communication that is done more often than needed: per trip, or piece by piece."""

from __future__ import annotations

from collections.abc import Iterator

from jaxpar.audit.dataflow import Place
from jaxpar.audit.findings.common import (
    Use,
    above,
    axes_text,
    finding,
    home_of,
    step_bytes,
    uses,
)
from jaxpar.audit.findings.values import (
    CONSTANTS,
    PURE,
    REARRANGED,
    Groups,
    Producers,
    operand_bytes,
    operand_places,
    reducer,
    result_paths,
    standing,
    value_key,
)
from jaxpar.audit.reader import Computation, Instruction, Operand
from jaxpar.audit.reading import Reading, Site
from jaxpar.audit.result import Finding

SMALL_BYTES = 1 << 16
"""Payload below which an operation costs its launch and its hops rather than its bytes."""

MIN_SMALL = 8
"""So many small operations are worth merging."""

MAX_TERMS = 32
"""Terms of one sum in a loop that are looked at."""

_INVARIANT_KINDS = frozenset({"all-gather", "all-reduce", "reduce-scatter", "all-to-all"})
_REDUCTIONS = frozenset({"all-reduce", "reduce-scatter"})
_MERGEABLE = _REDUCTIONS | {"all-gather"}
_LINEAR = REARRANGED | {"slice", "negate"}
_GRADIENT = frozenset({"backward", "unknown"})  # a fused TPU reduce-scatter tells no phase


def loop_invariant_collective(reading: Reading) -> Iterator[Finding]:
    """A collective in a loop whose operands no trip changes."""
    producers = Producers(reading)
    for site in reading.sites:
        if site.collective.kind not in _INVARIANT_KINDS:
            continue
        home = _made_outside(producers, site)
        if home is None:
            continue
        outside, count = reading.runs.counts.get(home.name), site.collective.count
        once = outside.exact if outside is not None else None
        if count is not None and count == once:
            continue  # a loop of one trip
        part = 1 - once / count if once is not None and count else None
        yield finding(
            reading,
            "loop-invariant-collective",
            f"{site.instruction.name}, {axes_text(site)}, is in a loop and communicates the same "
            f"value on every trip ({'an unknown number of' if count is None else count} times a "
            "step)",
            "Communicate before the loop (lax.scan, fori_loop), and let its body close over the "
            "result; under jax.checkpoint, outside of what is checkpointed.",
            [site.instruction],
            wire_bytes=None if part is None else step_bytes(site, part),
        )


def _made_outside(producers: Producers, site: Site) -> Computation | None:
    """The computation around the loops that change no operand of `site`; None if there is none.

    Only constants are no reason to leave a loop: that is another rule's. Values are not followed
    out of branches, since what runs on some trips only may be cheapest there.
    """
    num_loops = 0
    level = {site.computation.name: 0}
    homes = [site.computation]
    for home, call in above(producers.reading, site.computation):
        num_loops += call.opcode == "while"
        level.setdefault(home.name, num_loops)
        homes += [home] if call.opcode == "while" else []
    if not num_loops:
        return None
    nearest = [num_loops + 1]

    def decide(end: Place) -> bool | None:
        made, loops = end.instruction, level.get(home_of(end).name, 0)
        if made is not None and made.opcode in CONSTANTS:
            return True
        if loops:
            nearest.append(loops)
            return True
        return None if made is not None and made.opcode in PURE else False

    for operand in site.instruction.operands:
        if not producers.made_from(Place(computation=site.computation, operand=operand), decide):
            return None
    return homes[min(nearest)] if min(nearest) <= num_loops else None


def reduction_in_accumulation_loop(reading: Reading) -> Iterator[Finding]:
    """A gradient that each trip reduces, only to add it to a sum that no trip looks at."""
    producers = Producers(reading)
    inside: dict[str, list[Site]] = {}
    for site in reading.sites:
        if site.collective.kind not in _REDUCTIONS or site.collective.phase not in _GRADIENT:
            continue
        body = _body_around(producers.reading, site)
        if body is not None:
            inside.setdefault(body.name, []).append(site)
    for name, sites in inside.items():
        body = reading.module.computations[name]
        sums = _Sums(producers, body)
        for site in sites:
            paths = enumerate(result_paths(site))
            added = [number for number, path in paths if sums.is_only_added(site, path)]
            found = _accumulation(reading, site, added, body) if added else None
            if found is not None:
                yield found


def _body_around(reading: Reading, site: Site) -> Computation | None:
    """The body of the innermost loop around `site`."""
    inside = site.computation
    for home, call in above(reading, site.computation):
        if call.opcode == "while":
            return inside if dict(call.called).get("body") == inside.name else None
        inside = home
    return None


def _accumulation(
    reading: Reading, site: Site, found: list[int], body: Computation
) -> Finding | None:
    """The finding about operands `found` of `site`; None for a loop of one trip."""
    trips = reading.runs.counts.get(body.name)
    callers = reading.flow.callers.get(body.name, [])
    outside = reading.runs.counts.get(callers[0][0].name) if callers else None
    part = None
    if trips is not None and outside is not None and trips.exact and outside.exact is not None:
        part = 1 - outside.exact / trips.exact
    if part == 0:
        return None
    scatters = site.collective.kind == "reduce-scatter"
    each = sum(operand_bytes(site, number) for number in found)
    return finding(
        reading,
        "reduction-in-accumulation-loop",
        f"{site.instruction.name} reduces a gradient {axes_text(site)} on every trip, and the loop "
        "only adds the results up",
        "Reduce once after the loop: make the parameters varying before it "
        '(lax.pcast(p, axis, to="varying")), accumulate local gradients, and apply one '
        f"{'lax.psum_scatter' if scatters else 'lax.psum'} to the sum."
        # Sharded gradients are what ZeRO-2 and FSDP are for.
        + (" That keeps whole gradients in memory, where this keeps shards." if scatters else ""),
        [site.instruction],
        severity="info" if scatters else "warning",
        wire_bytes=None if part is None else step_bytes(site, part, each),
    )


class _Sums:
    """The elements of a loop's state that every trip adds something to."""

    def __init__(self, producers: Producers, body: Computation) -> None:
        self.producers = producers
        self.body = body
        self.reading = producers.reading
        self._adds: dict[tuple[str, str, tuple[int, ...]], int] = {}
        self._places: dict[int, list[Place]] = {}
        self._clean: dict[int, bool] = {}
        root = body.root
        for index in range(len(root.operands) if root is not None else 0):
            self._walk(index, Operand(name=root.name, path=(index,)) if root else Operand(name=""))

    def is_only_added(self, site: Site, path: tuple[int, ...]) -> bool:
        """Whether all that becomes of a result of `site` is that such elements grow by it."""
        found = self._uses(site.computation, site.instruction, path)
        indices = {self._adds.get(_key(use)) for use in found or ()}
        return bool(indices) and all(
            index is not None and self._is_clean(index) for index in indices
        )

    def _walk(self, index: int, operand: Operand) -> None:
        """Note the additions that make element `index`, when its old value is one of the terms."""
        todo = [Place(computation=self.body, operand=operand)]
        adds: list[Place] = []
        num_old = 0
        for _ in range(MAX_TERMS):
            if not todo:
                break
            end = self.reading.flow.origin(todo.pop(), through=_LINEAR, stop=self.body.name)
            if end is None or end.instruction is None:
                continue
            if end.instruction.opcode == "add":
                adds.append(end)
                todo += operand_places(end.instruction, end)
            elif end.instruction.opcode == "parameter":
                num_old += end.operand.path == (index,)
            elif (number := self._scaled(end)) is not None:
                todo.append(operand_places(end.instruction, end)[number])
        if num_old == 1 and not todo:
            self._places[index] = adds
            for end in adds:
                self._adds[value_key(end)] = index

    def _scaled(self, end: Place) -> int | None:
        """Which operand an instruction multiplies by a constant, or divides by one, if it does."""
        made = end.instruction
        if made is None or made.opcode not in ("multiply", "divide") or len(made.operands) != 2:
            return None
        left, right = operand_places(made, end)
        if self.producers.made_from(right, _is_constant):
            return 0
        if made.opcode == "multiply" and self.producers.made_from(left, _is_constant):
            return 1
        return None

    def _is_clean(self, index: int) -> bool:
        """Whether neither the old element nor the new one is used for anything but the sum."""
        if index not in self._clean:
            self._clean[index] = self._stays(index)
        return self._clean[index]

    def _stays(self, index: int) -> bool:
        parameter = self.body.parameters.get(0)
        if parameter is None:
            return False
        old = self._uses(self.body, parameter, (index,))
        if not old or any(self._adds.get(_key(use)) != index for use in old):
            return False
        for end in self._places[index]:
            if end.instruction is None:
                return False
            for use in self._uses(end.computation, end.instruction, (), end.calls) or (None,):
                if use is None:
                    return False
                out = use.escapes and use.computation is self.body and use.path == (index,)
                if not out and self._adds.get(_key(use)) != index:
                    return False
        return True

    def _uses(
        self,
        computation: Computation,
        found: Instruction,
        path: tuple[int, ...],
        calls: tuple[tuple[Computation, Instruction], ...] = (),
    ) -> tuple[Use, ...] | None:
        return uses(
            self.reading,
            computation,
            found,
            path,
            calls=calls,
            through=_LINEAR,
            passes=lambda use: self._scaled(_made_by(use)) == use.index,
        )


def _is_constant(end: Place) -> bool | None:
    opcode = end.instruction.opcode if end.instruction is not None else ""
    return True if opcode in CONSTANTS else (None if opcode in PURE else False)


def _made_by(use: Use) -> Place:
    made = Operand(name=use.instruction.name)
    return Place(computation=use.computation, operand=made, calls=use.calls)


def _key(use: Use) -> tuple[str, str, tuple[int, ...]]:
    return value_key(_made_by(use))


def many_small_collectives(reading: Reading) -> Iterator[Finding]:
    """Small collectives of one kind and group, none of which needs the result of another."""
    groups = Groups()
    homes: dict[str, dict[str, Site]] = {}
    for site in reading.sites:
        if site.collective.payload_bytes < SMALL_BYTES and site.collective.kind in _MERGEABLE:
            home, found = standing(site)
            homes.setdefault(home.name, {})[found.name] = site
    for name, sites in homes.items():
        if len(sites) < MIN_SMALL:
            continue
        levels = _levels(reading.module.computations[name], sites)
        together: dict[tuple[object, ...], list[Site]] = {}
        for called, level in levels.items():
            site = sites[called]
            key = (site.collective.kind, groups.number(site), reducer(reading, site), level)
            together.setdefault(key, []).append(site)
        for alike in together.values():
            if len(alike) >= MIN_SMALL:
                yield _many(reading, alike)


def _many(reading: Reading, alike: list[Site]) -> Finding:
    first = alike[0].collective
    largest = max(site.collective.payload_bytes for site in alike)
    lines = ", ".join(str(site.instruction.line) for site in alike[:MIN_SMALL])
    more = f" and {len(alike) - MIN_SMALL} more" if len(alike) > MIN_SMALL else ""
    return finding(
        reading,
        "many-small-collectives",
        f"{len(alike)} {first.kind} operations {axes_text(alike[0])} of at most {largest:,} bytes "
        f"each do not depend on one another (lines {lines}{more}); one could do",
        "Pass them as one pytree to one call (lax.psum takes a tree), or concatenate the raveled "
        "arrays first: each operation costs its latency, whatever its size.",
        [site.instruction for site in alike[:MIN_SMALL]],
        severity="info",
    )


def _levels(home: Computation, sites: dict[str, Site]) -> dict[str, int]:
    """How many of `sites` stand one behind the other before each of them, by name.

    Two on the same level cannot depend on one another. Empty where a value is read before the line
    that makes it, since then this says nothing.
    """
    users = home.all_users
    if not users.keys() <= home.instructions.keys():
        return {}
    levels: dict[str, int] = {}  # of those that need one of `sites`
    found_at: dict[str, int] = {}
    for name, found in home.instructions.items():
        readers = users.get(name, ())
        if readers and readers[0].line <= found.line:
            return {}
        level = levels.get(name, 0)
        if name in sites:
            found_at[name] = level
            level += 1
        for reader in readers if level else ():
            if levels.get(reader.name, 0) < level:
                levels[reader.name] = level
    return found_at


RULES = (
    loop_invariant_collective,
    reduction_in_accumulation_loop,
    many_small_collectives,
)
