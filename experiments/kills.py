"""Kill a training 20 times while it saves; what is restored, and does its loss go on?

    .venv/bin/python experiments/kills.py

A child process trains a small model (ZeRO-3 over four virtual CPU devices, AdamW), saves after each
step and is killed (SIGKILL) at a random moment from when it begins to save until a little after
that is usually over. The next one restores the latest complete checkpoint and goes on in the same
folder. A checkpoint that was reported as saved has to be there, and the loss of each step has to be
the same, to the bit, whenever it is computed: as in a run that nobody has killed.
"""

from __future__ import annotations

import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Annotated

import optax
import typer

from jaxpar import Checkpoints, Experiment, MeshSpec, ModelConfig, Plan

MODEL = ModelConfig(
    name="kills", num_layers=2, embed=128, num_heads=4, num_kv_heads=4, head_dim=32,
    mlp_hidden=512, vocab=256, max_seq_len=16,
)  # fmt: skip

experiment = Experiment(
    config=MODEL,
    plan=Plan(
        mesh=MeshSpec.parse("fsdp=4"), batch_size=8, seq_len=16, compute_dtype="float32"
    ),
    optimizer=optax.adamw(1e-3),
    num_steps=1_000_000,
)  # fmt: skip


def child(folder: Path, num_steps: int) -> None:
    """Restore, then train and save each step; tell each of these as it happens."""
    step = experiment.step()
    with Checkpoints(folder, keep=2) as checkpoints:
        number, state = 0, step.init(0)
        if checkpoints.folder.numbers():
            restored = checkpoints.restore(step)
            number, state = restored.num_steps, restored.state
        print("restored", number, flush=True)
        while number < num_steps:
            state, metrics = step(state, experiment.batch(number))
            number += 1
            print("loss", number, float(metrics.loss).hex(), flush=True)
            print("saving", number, flush=True)
            started = time.perf_counter()
            checkpoints.save(step, state, number)
            checkpoints.wait()
            print("saved", number, time.perf_counter() - started, flush=True)


class Watcher:
    """What children have said, held against what they said before."""

    def __init__(self) -> None:
        self.losses: dict[int, str] = {}
        self.save_times: list[float] = []
        self.saved = self.saving = 0
        self.differing: list[int] = []

    def hear(self, line: str) -> str:
        word, number, *rest = line.split()
        if word == "loss" and self.losses.setdefault(int(number), rest[0]) != rest[0]:
            self.differing.append(int(number))
        if word == "saving":
            self.saving = int(number)
        if word == "saved":
            self.saved = int(number)
            self.save_times.append(float(rest[0]))
        return word


def main(
    kills: Annotated[int, typer.Option(min=1)] = 20,
    seed: int = 0,
    child_folder: Annotated[Path | None, typer.Option(hidden=True)] = None,
    num_steps: Annotated[int, typer.Option(hidden=True)] = 1_000_000,
) -> None:
    if child_folder is not None:
        return child(child_folder, num_steps)
    moments, heard = random.Random(seed), Watcher()
    found: Counter[str] = Counter()
    lost: list[int] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoints"
        for kill in range(kills + 1):
            last = heard.saving + (3 if kill == kills else 1_000_000)
            command = [sys.executable, __file__, "--child-folder", str(folder)]
            with subprocess.Popen(
                [*command, "--num-steps", str(last)], stdout=subprocess.PIPE, text=True
            ) as process:
                assert process.stdout is not None
                restored = int(process.stdout.readline().split()[1])
                assert heard.saved <= restored <= heard.saving, (restored, heard.saved)
                lost.append(heard.saving - restored)
                waits = moments.randrange(1, 5)
                for line in process.stdout:
                    if heard.hear(line) == "saving" and kill < kills:
                        waits -= 1
                        if not waits:
                            break
                if kill < kills:
                    usual = statistics.median(heard.save_times) if heard.save_times else 0.1
                    time.sleep(moments.uniform(0, 1.2 * usual))
                    process.kill()
                    for line in process.stdout:
                        if line.endswith("\n"):
                            heard.hear(line)
                    state = "while saving" if heard.saved < heard.saving else "after the save"
                    left = any("tmp" in entry.name for entry in folder.iterdir())
                    deleting = any("deleting" in entry.name for entry in folder.iterdir())
                    found[state] += 1
                    found["leftover of a save"] += left
                    found["leftover of a deletion"] += deleting
                    print(
                        f"kill {kill + 1}: restored {restored}, killed {state} "
                        f"{heard.saving}{', leftovers' * (left or deleting)}",
                        flush=True,
                    )
        assert process.returncode == 0, process.returncode
        names = sorted(entry.name for entry in folder.iterdir())
    print(
        f"restored: every time, {kills} of {kills}, and once more; steps computed again: "
        f"{sum(lost[1:])}, at most {max(lost)}"
    )
    print(", ".join(f"{key}: {value}" for key, value in found.items()))
    print(f"losses: {len(heard.losses)} steps, {len(heard.differing)} that differ from before")
    print(f"a save takes {1e3 * statistics.median(heard.save_times):.0f} ms (median)")
    print(f"in the folder at the end: {', '.join(names)}")
    assert not heard.differing


if __name__ == "__main__":
    typer.run(main)
