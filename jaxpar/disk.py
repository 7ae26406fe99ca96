"""Optimizer state on disk: read before each update, written behind it, not in memory in between.

For what is too large for host memory as well, or has to leave a machine to others between steps
(rollouts, evaluation). Each moment is one zarr array, in chunks that are one device's shards, so
that devices read and write their own. Needs tensorstore: `pip install "jaxpar[disk]"`.

Per step, 4 bytes of each of k moments of each trained parameter are read and as many written, over
all devices together and whatever the sharding; copies of a shard are written once and read by each.

Source: Rajbhandari et al. 2021 (ZeRO-Infinity), §5.1 and §6.3.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array

from jaxpar.errors import PlanError, shown
from jaxpar.strategies import offload
from jaxpar.text import Batch
from jaxpar.train import Metrics, TrainState, TrainStep


class OptimizerOnDisk:
    """A training step whose optimizer keeps its moments in `folder`.

    Use it like `step`: `state = on_disk.init()`, then `state, metrics = on_disk(state, batch)`;
    in the states it returns, moments are None. Raises PlanError where `folder` is no folder (or
    does not belong to this model and mesh), and where tensorstore is missing.

    num_bytes_read, num_bytes_written: since the object was made, by this process.
    """

    def __init__(self, step: TrainStep, folder: str | Path) -> None:
        self.step = step
        self.folder = Path(folder).absolute()
        self.num_bytes_read = self.num_bytes_written = 0
        self._tensorstore = _tensorstore()
        if self.folder.exists() and not self.folder.is_dir():
            raise PlanError(f"folder={shown(str(folder))} is a file, and has to be a folder.")
        abstract = step.abstract_inputs[0].opt_state
        self._is_moment = offload.is_moment(step.optimizer, abstract)
        self._wanted = abstract

    def init(self, seed: int = 0) -> TrainState:
        """A fresh state, its moments on disk in place of whatever was there."""
        return self._parked(self.step.init(seed), create=True)

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        """One step of the training, and of the moments in the folder."""
        new_state, metrics = self.step(self.loaded(state), batch)
        return self._parked(new_state, create=False), metrics

    def loaded(self, state: TrainState) -> TrainState:
        """The same state with its moments read from the folder, as `step` itself takes it."""
        moments = {
            name: self._read(name, wanted) for name, wanted in self._moments(self._wanted).items()
        }
        leaves, structure = jax.tree.flatten(self._is_moment)
        names = iter(moments)
        others = iter(jax.tree.leaves(state.opt_state))
        opt_state = [moments[next(names)] if is_moment else next(others) for is_moment in leaves]
        return state._replace(opt_state=jax.tree.unflatten(structure, opt_state))

    # --- the folder --------------------------------------------------------------------------

    def _moments(self, opt_state: Any) -> dict[str, Any]:
        """Leaves of an optimizer state that belong to a parameter, by their path in it."""
        flags = jax.tree.leaves(self._is_moment)
        named = zip(jax.tree.leaves_with_path(opt_state), flags, strict=True)
        return {
            jax.tree_util.keystr(path, simple=True, separator="."): leaf
            for (path, leaf), is_moment in named
            if is_moment
        }

    def _parked(self, state: TrainState, *, create: bool) -> TrainState:
        writes = []
        for name, moment in self._moments(state.opt_state).items():
            store = self._open(name, moment, create=create)
            for shard in moment.addressable_shards:
                if shard.replica_id == 0:
                    self.num_bytes_written += shard.data.nbytes
                    writes.append(store[shard.index].write(np.asarray(shard.data)))
        for write in writes:
            write.result()
        opt_state = jax.tree.map(
            lambda leaf, is_moment: None if is_moment else leaf, state.opt_state, self._is_moment
        )
        return state._replace(opt_state=opt_state)

    def _read(self, name: str, wanted: jax.ShapeDtypeStruct) -> Array:
        store = self._open(name, wanted, create=False)

        def shard(index: Any) -> np.ndarray:
            data = np.asarray(store[index].read().result())
            self.num_bytes_read += data.nbytes
            return data

        return jax.make_array_from_callback(wanted.shape, wanted.sharding, shard)

    def _open(self, name: str, like: Any, *, create: bool) -> Any:
        spec = {
            "driver": "zarr",
            "kvstore": {"driver": "file", "path": str(self.folder / name)},
            "metadata": {
                "shape": list(like.shape),
                "chunks": list(like.sharding.shard_shape(like.shape)),
                "dtype": np.dtype(like.dtype).str,
                "compressor": None,
            },
        }
        try:
            return self._tensorstore.open(spec, create=create, delete_existing=create).result()
        except ValueError as error:  # of another shape, or not there
            reason = str(error).splitlines()[0]
            raise PlanError(
                f"{self.folder / name} does not hold the moment {name} of this model and mesh, "
                f"{like.dtype}{list(like.shape)}: {reason} Start from init(), or give the folder "
                f"that an OptimizerOnDisk of the same plan has written."
            ) from None


def _tensorstore() -> Any:
    try:
        import tensorstore
    except ImportError as error:
        raise PlanError(
            f"Keeping optimizer state on disk needs tensorstore ({error}). Install it with: "
            f'pip install "jaxpar[disk]".'
        ) from None
    return tensorstore
