"""Checkpoints of a training: saved under one plan and mesh, restored under any other.

What is on disk is the state as every plan has it: whole arrays, layers in their order, no padding,
named by their path (`params.layers.mlp.up`, `opt_state.0.mu.layers.mlp.up`). How arrays are split
is the reader's business: each process reads the parts that its devices hold, so that no host ever
has the whole model. A pipeline holds layers in the order of its stages, padded; one jitted program
puts them in order before they are saved and back after they are read, on the devices.

Beside the arrays stand the step, the model, the plan in words, where the data was, and of each
array shape, dtype and a checksum that does not depend on how it is split (the sum of its 32-bit
words, each times an odd number by its place, modulo 2³²). It is computed where the array is, and
again after it was read and laid out anew: a bit that flipped on disk, a layer in another's place or
an axis read the wrong way round is told, not trained on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.checkpoint_folder import CheckpointFolder
from jaxpar.errors import CheckpointError, require_whole, shown
from jaxpar.model.transformer import Params
from jaxpar.strategies import offload, pipeline
from jaxpar.strategies.pipeline.choice import AXIS as PIPE
from jaxpar.strategies.plan import plan_json
from jaxpar.train import TrainStep
from jaxpar.update import TrainState

NOT_IN_THE_WEIGHTS = ("name", "max_seq_len", "dropout")
"""Fields of a model that may differ between who saves and who restores."""


@dataclass(frozen=True, kw_only=True)
class Restored:
    """A state as its new step takes it, how many steps it has seen, and what `save` was told."""

    state: TrainState
    num_steps: int
    data: dict[str, Any]


class Checkpoints:
    """The checkpoints of one training in `folder`, the last `keep` of them (None: all).

    Use it as a context manager, or call `close`. Raises CheckpointError for a folder that holds
    something else. Of several processes all have to make every call.
    """

    def __init__(self, folder: str | Path, *, keep: int | None = None) -> None:
        self.folder = CheckpointFolder(folder, keep=keep)
        self._layouts: dict[int, tuple[TrainStep, _Layout]] = {}

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.folder.close()

    def save(
        self,
        step: TrainStep,
        state: TrainState,
        num_steps: int,
        data: Mapping[str, Any] | None = None,
    ) -> None:
        """Save `state` after `num_steps` steps; `data` is JSON that tells where the data stands.

        The files are written behind the training, which may go on at once; `wait` ends that. Raises
        CheckpointError where this or the save before it cannot be written.
        """
        self.folder.wait()
        layout = self._layout(step)
        tree, checksums = layout.canonical(state)
        leaves = {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "checksum": int(checksum)}
            for (name, leaf), checksum in zip(
                _named(tree).items(), jax.device_get(checksums), strict=True
            )
        }
        about = {
            "step": num_steps,
            "model": asdict(step.config),
            "plan": plan_json(step.plan),
            "data": dict(data or {}),
            "leaves": leaves,
            "versions": {"jaxpar": jaxpar.__version__, "jax": jax.__version__},
        }
        self.folder.save(num_steps, _nested(tree), about)

    def wait(self) -> None:
        """Until the last save is complete."""
        self.folder.wait()

    def close(self) -> None:
        self.folder.close()

    def restore(self, step: TrainStep, num_steps: int | None = None) -> Restored:
        """The state after `num_steps` steps, or the latest, laid out for `step`.

        `step` may have any mesh and plan for the same model and optimizer. Raises CheckpointError
        for another model, optimizer or schema, and for what is missing or damaged.
        """
        self.folder.wait()
        if num_steps is not None:
            require_whole(CheckpointError, "num_steps", num_steps, at_least=0)
        number = self.folder.latest() if num_steps is None else num_steps
        about = self.folder.about(number)
        where, layout = self.folder.folder(number), self._layout(step)
        _check_model(about, step, where)
        if about.get("step") != number:
            raise CheckpointError(
                f"{where} was saved after step {shown(about.get('step'))}: its folder has another "
                f"name now. Nothing was changed. Give it the name back."
            )
        leaves = _check_leaves(about, layout, where)
        tree = self.folder.restore(number, _nested(layout.abstract))
        state, checksums = layout.placed(tree)
        for (name, leaf), checksum in zip(leaves.items(), jax.device_get(checksums), strict=True):
            if int(checksum) != leaf["checksum"]:
                raise self.folder.damaged(
                    number,
                    f"{name} has checksum {int(checksum)}, and was saved with "
                    f"{shown(leaf['checksum'])}",
                )
        data = about.get("data")
        return Restored(state=state, num_steps=number, data=data if isinstance(data, dict) else {})

    def _layout(self, step: TrainStep) -> _Layout:
        """Kept with its step, so that no other one takes its place."""
        if id(step) not in self._layouts:
            self._layouts[id(step)] = step, _Layout(step)
        return self._layouts[id(step)][1]


# --- one state, two layouts ------------------------------------------------------------------


class _Layout:
    """Between a step's state and the same state in the form that is on disk."""

    def __init__(self, step: TrainStep) -> None:
        self._step = step
        self._is_reordered = step.plan.size(PIPE) > 1
        whole = step.abstract_inputs[0]
        if self._is_reordered:
            whole = jax.eval_shape(self._in_layer_order, whole)
        shardings = jax.tree.map(_sharding_of_whole, whole, step.shardings)
        self.abstract: TrainState = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            whole,
            shardings,
        )
        replicated = NamedSharding(step.mesh, PartitionSpec())
        self._sums = jax.jit(self._checksums, out_shardings=replicated)
        self._to_disk = jax.jit(self._in_layer_order, out_shardings=shardings)
        self._from_disk = jax.jit(self._in_stage_order, out_shardings=step.shardings)

    def canonical(self, state: TrainState) -> tuple[TrainState, Array]:
        """The state as it goes to disk, and its leaves' checksums."""
        whole = self._to_disk(state) if self._is_reordered else state
        return whole, self._sums(whole)

    def placed(self, tree: Any) -> tuple[TrainState, Array]:
        """What was on disk as the step takes it, and checksums as they were when it was saved."""
        found = _named(tree)
        leaves = [found[name] for name in _named(self.abstract)]
        state: TrainState = jax.tree.unflatten(jax.tree.structure(self.abstract), leaves)
        if self._is_reordered:
            state = self._from_disk(state)
        return state, self.canonical(state)[1]

    def _checksums(self, whole: TrainState) -> Array:
        """One of each leaf, uint32 [leaves]."""
        here = jax.tree.map(_on_device, whole, self._step.shardings)
        return jnp.stack([_checksum(leaf) for leaf in jax.tree.leaves(here)])

    def _in_layer_order(self, state: TrainState) -> TrainState:
        return self._each(pipeline.in_layer_order, state)

    def _in_stage_order(self, state: TrainState) -> TrainState:
        return self._each(pipeline.in_stage_order, state)

    def _each(self, arrange: Callable[..., Params], state: TrainState) -> TrainState:
        """The parameters and every moment that the optimizer keeps of them, arranged."""
        step = self._step

        def is_like_params(node: Any) -> bool:
            return isinstance(node, dict) and node.keys() == state.params.keys()

        def arranged(node: Any, where: Any) -> Any:
            if not is_like_params(node):
                return node
            return arrange(jax.tree.map(_on_device, node, where), step.config, step.plan)

        result: TrainState = jax.tree.map(arranged, state, step.shardings, is_leaf=is_like_params)
        return result


def _sharding_of_whole(leaf: Any, sharding: NamedSharding) -> NamedSharding:
    """Of an array without padding, whose layers may not divide among the stages any more."""
    spec = [*sharding.spec, *[None] * (len(leaf.shape) - len(sharding.spec))]
    size = sharding.mesh.shape[PIPE]
    if PIPE not in spec or leaf.shape[spec.index(PIPE)] % size == 0:
        return sharding
    spec[spec.index(PIPE)] = None
    for dim, (entry, length) in enumerate(zip(spec, leaf.shape, strict=True)):
        if entry is None and length % size == 0:
            spec[dim] = PIPE
            break
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def _on_device(leaf: Any, sharding: NamedSharding) -> Any:
    """Inside jit, where arithmetic with what is in host memory is refused."""
    is_away = sharding.memory_kind == offload.HOST
    return jax.device_put(leaf, jax.memory.Space.Device) if is_away else leaf


def _checksum(leaf: Array) -> Array:
    """Sum of the leaf's words, each times 2·place + 1, modulo 2³²; the same for any sharding."""
    if leaf.dtype == jnp.bool:
        leaf = leaf.astype(jnp.uint8)
    bits = jax.typeof(leaf).dtype.itemsize * 8
    words = lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{min(bits, 32)}")).astype(jnp.uint32)
    weights = jnp.ones(words.shape, jnp.uint32)
    stride = 2
    for dim in reversed(range(words.ndim)):
        weights += lax.broadcasted_iota(jnp.uint32, words.shape, dim) * jnp.uint32(stride % 2**32)
        stride *= words.shape[dim]
    return jnp.sum(words * weights, dtype=jnp.uint32)


def _named(tree: Any) -> dict[str, Any]:
    """Leaves by their path: params.layers.mlp.up, opt_state.0.mu.layers.mlp.up."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf
        for path, leaf in jax.tree.leaves_with_path(tree)
    }


def _nested(tree: Any) -> dict[str, Any]:
    """The same as dicts in dicts, which need none of our types to be read."""
    nested: dict[str, Any] = {}
    for name, leaf in _named(tree).items():
        *folders, last = name.split(".")
        node = nested
        for folder in folders:
            node = node.setdefault(folder, {})
        node[last] = leaf
    return nested


# --- what a checkpoint has to be -------------------------------------------------------------


def _check_model(about: Mapping[str, Any], step: TrainStep, where: Path) -> None:
    saved = about.get("model")
    if not isinstance(saved, dict):
        raise CheckpointError(f"{where} does not say of which model it is; it is damaged.")
    mine = asdict(step.config)
    differs = [
        f"{field}={shown(saved.get(field))} there and {shown(mine.get(field))} here"
        for field in {**mine, **saved}
        if saved.get(field) != mine.get(field) and field not in NOT_IN_THE_WEIGHTS
    ]
    if differs:
        more = f"; {len(differs) - 3} more" if len(differs) > 3 else ""
        raise CheckpointError(
            f"{where} was saved of model {shown(saved.get('name'))}, and this is "
            f"{shown(mine['name'])}: {'; '.join(differs[:3])}{more}. Give the model that it was "
            f"saved of, or another folder."
        )


def _check_leaves(
    about: Mapping[str, Any], layout: _Layout, where: Path
) -> dict[str, Mapping[str, Any]]:
    """What was told of each array of this state, in the state's order."""
    told = about.get("leaves")
    if not isinstance(told, dict):
        raise CheckpointError(f"{where} does not say what arrays it has; it is damaged.")
    wanted = _named(layout.abstract)
    for problem, names in (
        ("does not have", wanted.keys() - told.keys()),
        ("has an array that this training has not:", told.keys() - wanted.keys()),
    ):
        if names:
            first, more = min(names), f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise CheckpointError(
                f"{where} {problem} {first}{more}. It was saved with another optimizer, or with "
                f"other parameters frozen. Give the optimizer and `frozen` that it was saved with."
            )
    for name, leaf in wanted.items():
        entry = told[name] if isinstance(told[name], dict) else {}
        have = entry.get("dtype"), entry.get("shape")
        if have != (str(leaf.dtype), list(leaf.shape)):
            raise CheckpointError(
                f"{where}: {name} is {shown(have[0])} {shown(have[1])}, and has to be "
                f"{leaf.dtype}{list(leaf.shape)}. It was saved with another optimizer."
            )
        if not isinstance(entry.get("checksum"), int):
            raise CheckpointError(f"{where} has no checksum of {name}; it is damaged.")
    return {name: told[name] for name in wanted}
