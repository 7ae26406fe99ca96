"""What prefill and decode communicate, from shapes alone: the closed forms, and their cards.

One step on each device. B rows of one micro-batch and T tokens of each on one device (decode: 1;
prefill over `context`: chunk_len/context), R rows of all its micro-batches, L layers of one device,
u turns (1, or m + p - 1 in a pipeline of p stages and m micro-batches), c bytes per element of the
compute dtype; N and K heads and C = min(max_top_k, V/tensor) candidates on one device, n the size
of the axis, S the tokens that the step's block tables reach to (max_seq_len at most):

| collective         | axis    | count     | payload_bytes | why                                 |
|--------------------|---------|-----------|---------------|-------------------------------------|
| all-reduce         | tensor  | 2uL       | B·T·D·c       | leave attention, MLP of each layer  |
| all-reduce         | tensor  | 1         | R·T·D·c       | leave the embedding                 |
| all-gather         | tensor  | 2         | 4·R·n·C       | candidates: scores and tokens       |
| all-to-all         | expert  | 2uL       | n·B·T·k·D·c   | token vectors to experts and back   |
| all-to-all         | expert  | uL        | 4(E + n)      | how many rows will come             |
| all-reduce         | context | uL        | 4·B·N         | decode: largest logarithm of pieces |
| all-reduce         | context | uL        | 4·B·N·(H + 1) | decode: the pieces                  |
| collective-permute | context | 2uL(n-1)  | B·S/n·K·H·c   | prefill: keys, values go round      |
| all-reduce         | context | 1         | R·D·c         | prefill: the last token of each row |
| collective-permute | pipe    | u         | B·T·D·c       | activations to the stage behind     |
| all-reduce         | pipe    | 1         | 4·R           | tokens from the last stage          |

with k = min(experts per token, E/n). Over the batch axes nothing is sent: what is spread over
`data` are independent replicas of the model, whose steps only run at the same time. Dense layers
before layers with experts run once, whole rows at a time, on every stage.

Sources: Pope et al. 2022, "Efficiently scaling transformer inference", §3 (tensor); Dao et al. 2023
(Flash-Decoding); Yang et al. 2024, §3 (context).
"""

from __future__ import annotations

from jaxpar.model.config import ModelConfig
from jaxpar.serve.plan import Kind, ServePlan
from jaxpar.strategies.plan import DTYPES
from jaxpar.strategies.strategy import Card, Expected

CARDS = {
    "prefill": Card(
        name="prefill",
        axis="tensor, expert, context, pipe; batch axes",
        splits="a chunk of a prompt: heads and hidden dims, experts, its tokens, the layers",
        why="all tokens of a chunk at once: matmuls as large as in training, and no backward",
        costs="2 all-reduces of B·T·D per layer; over context, keys and values go round",
        source="Pope et al. 2022, §3; Yang et al. 2024, §3",
    ),
    "decode": Card(
        name="decode",
        axis="tensor, expert, context, pipe; batch axes",
        splits="the cache: heads, experts, every sequence's tokens, layers, sequences",
        why="one token per sequence: a step reads all weights and the whole cache",
        costs="2 all-reduces of B·1·D per layer, too small to be anything but latency",
        source="Pope et al. 2022, §3; Dao et al. 2023 (Flash-Decoding)",
    ),
}


def expected(
    config: ModelConfig, plan: ServePlan, kind: Kind, width: int | None = None
) -> list[Expected]:
    """The closed form of one step. Raises PlanError for a plan that this model does not allow.

    width: columns of its block tables, one of `plan.widths`; None for the most.
    """
    plan.check(config)
    form = _Form(config, plan, kind, width or plan.blocks_per_sequence)
    for find in (form.tensor, form.expert, form.context, form.pipe):
        find()
    return form.rows


class _Form:
    def __init__(self, config: ModelConfig, plan: ServePlan, kind: Kind, width: int) -> None:
        self.table_len = width * plan.block_len
        self.config, self.plan, self.kind = config, plan, kind
        self.rows: list[Expected] = []
        p, m = plan.size("pipe"), plan.num_parts(kind)
        self.turns = m + p - 1
        self.all_rows = plan.num_rows(kind) // plan.num_batch_shards
        self.part_rows = self.all_rows // m
        self.num_tokens = plan.row_len(kind)
        if kind == "prefill":
            self.num_tokens //= plan.size("context")
        num_staged = config.num_layers - config.num_dense_layers
        # (layers in turn, rows of each turn, turns): of what runs in stages, and of what does not.
        self.staged = plan.training.num_local_layers(num_staged), self.part_rows, self.turns
        self.dense = config.num_dense_layers, self.all_rows, 1
        self.heads = config.num_heads // plan.size("tensor")
        self.kv_heads = plan.num_kv_heads(config) // plan.size("tensor")

    def add(
        self, kind: str, axis: str, count: int, elements: int, why: str, dtype: str | None = None
    ) -> None:
        if count == 0 or self.plan.size(axis) == 1:
            return
        size = self.plan.compute_bytes if dtype is None else 4
        self.rows.append(
            Expected(
                kind=kind,
                axes=(axis,),
                count=count,
                payload_bytes=elements * size,
                dtype=dtype or DTYPES[self.plan.compute_dtype],
                phase="forward",
                why=why,
            )
        )

    def tensor(self) -> None:
        D, n = self.config.embed, self.plan.size("tensor")
        for layers, rows, turns in (self.staged, self.dense):
            elements = rows * self.num_tokens * D
            why = "leave attention and MLP of each layer"
            self.add("all-reduce", "tensor", 2 * layers * turns, elements, why)
        elements = self.all_rows * self.num_tokens * D
        self.add("all-reduce", "tensor", 1, elements, "leave the embedding")
        found = self.all_rows * n * min(self.plan.max_top_k, self.config.vocab // n)
        for what, dtype in (("scores", "f32"), ("tokens", "s32")):
            self.add("all-gather", "tensor", 1, found, f"{what} of candidates", dtype)

    def expert(self) -> None:
        config, n = self.config, self.plan.size("expert")
        if not config.num_experts:
            return
        layers, rows, turns = self.staged
        E, k = config.num_experts, config.num_experts_per_token
        sent = rows * self.num_tokens * k
        slots = n * rows * self.num_tokens * min(k, E // n)
        self.add("all-to-all", "expert", layers * turns, E + n, "rows that will come", "s32")
        kind = "all-to-all" if self.plan.expert_exchange == "padded" else "ragged-all-to-all"
        for way in ("to experts", "back to tokens"):
            num = sent if kind != "all-to-all" and way == "to experts" else slots
            why = f"token vectors {way}"
            self.add(kind, "expert", layers * turns, num * config.embed, why)

    def context(self) -> None:
        n, H = self.plan.size("context"), self.config.head_dim
        for layers, rows, turns in (self.staged, self.dense):
            if self.kind == "decode":
                queries = rows * self.num_tokens * self.heads
                for elements, why in (
                    (queries, "largest logarithm of the pieces"),
                    (queries * (H + 1), "pieces of attention"),
                ):
                    self.add("all-reduce", "context", layers * turns, elements, why, "f32")
            else:
                elements = rows * self.table_len // n * self.kv_heads * H
                hops, why = 2 * (n - 1) * layers * turns, "keys, values go round"
                self.add("collective-permute", "context", hops, elements, why)
        if self.kind == "prefill":
            elements = self.all_rows * self.config.embed
            self.add("all-reduce", "context", 1, elements, "the last token of each row")

    def pipe(self) -> None:
        elements = self.part_rows * self.num_tokens * self.config.embed
        why = "activations to the stage behind, in every turn"
        self.add("collective-permute", "pipe", self.turns, elements, why)
        self.add("all-reduce", "pipe", 1, self.all_rows, "tokens from the last stage", "s32")
