"""Train a small model on real text; what it trains is below, on which mesh is an option.

    .venv/bin/jaxpar run experiments/train.py
    .venv/bin/jaxpar run experiments/train.py --mesh fsdp=4,tensor=2 --checkpoint saved
    .venv/bin/jaxpar run experiments/train.py --mesh data=8 --checkpoint saved --resume --steps 80
    .venv/bin/python experiments/train.py --mesh pipe=2,data=2 --set num_microbatches=4

The first two train the same model on the same tokens; the third goes on with what the second has
saved, on another mesh. Half a minute each, on virtual CPU devices where there is nothing better.
"""

from __future__ import annotations

import sys

import optax

from jaxpar import Experiment, MeshSpec, Plan, main, preset

experiment = Experiment(
    config=preset("tiny"),
    plan=Plan(mesh=MeshSpec.load("data2-tensor4"), batch_size=16, seq_len=64),
    optimizer=optax.adamw(
        optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=10, decay_steps=200),
        b1=0.9, b2=0.95, eps=1e-5, weight_decay=0.1,
    ),
    num_steps=60,
    checkpoint_every=20,
)  # fmt: skip

if __name__ == "__main__":
    main(["run", *sys.argv])
