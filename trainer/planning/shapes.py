"""The sizes of a transformer, from its config alone: no weights are read."""

from __future__ import annotations

from dataclasses import dataclass, replace

from trainer.model.family import SavedActivations

Linear = tuple[int, int]
"""Rows and columns, `[out, in]`."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One decoder; sizes in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    """Columns between the MLP's two products; of one expert in a mixture of experts."""
    vocab: int
    gated: bool = True
    """SwiGLU: three matrices to an MLP, and norms without a bias. Else two, with biases (GPT)."""
    tied: bool = False
    experts: int = 1
    active_experts: int = 1
    """Experts that a token passes through."""
    dense_layers: int = 0
    """First layers without experts; their MLP has `dense_inner` columns."""
    dense_inner: int = 0
    shared_inner: int = 0
    """Columns of the MLP that every token passes through beside its experts."""
    positions: int = 0
    """Rows of a learned table of positions."""
    biases: int = 0
    """Elements of a layer's biases, and of its norms beyond the two of RMSNorm."""
    biased: tuple[str, ...] = ()
    """The linears that have them, of Motley's own decoder."""
    extras: int = 0
    """Elements of all layers that no other size says."""
    normalised_heads: bool = False
    recurrent_layers: int = 0
    """Layers without attention, which pass a state from token to token."""
    recurrent_columns: int = 0
    """Columns of their keys and values, each for all heads."""
    kept: SavedActivations | None = None
    """Activations that transformers' code keeps; None: Motley's decoder, or Megatron-LM's GPT."""
    separable: bool = True
    """Each layer can run a group of micro-batches before the next one does."""
    adapts_experts: bool = False
    """Adapters by default are on experts and routers too, as PEFT's."""
    counted: int | None = None
    """Parameters counted in the headers of the weights; None: by the sizes."""
    matrices: tuple[int, ...] = ()
    """Elements of each layer's matrices, counted there; empty: by the sizes."""
    stored: str = "BF16"
    """The dtype of most of them in safetensors' words; what models are published in if unknown."""
    in_gguf: bool = False
    """GGUF files of its architecture are converted, if it has no experts."""
    remark: str = ""
    """Remark on what the config leaves open."""

    @property
    def queries(self) -> int:
        """Columns of all queries together."""
        return self.heads * self.head_dim

    @property
    def keys(self) -> int:
        """Columns of all keys together."""
        return self.kv_heads * self.head_dim

    @property
    def is_decoder(self) -> bool:
        """Whether Motley's own decoder computes it, not transformers' code."""
        return self.experts == 1 and self.gated and self.kept is None

    @property
    def mlp_matrices(self) -> int:
        """Matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def attention_parameters(self) -> int:
        """Elements of a layer's four projections."""
        return 2 * self.hidden * (self.queries + self.keys)

    def linear_parameters(self, *, active: bool = False) -> int:
        """Return the elements of the matrices of all layers."""
        experts = self.active_experts if active else self.experts
        matrix = self.mlp_matrices * self.hidden
        sparse = matrix * (experts * self.inner + self.shared_inner)
        dense = matrix * self.dense_inner
        mlp = (self.layers - self.dense_layers) * sparse + self.dense_layers * dense
        return self.layers * self.attention_parameters + mlp

    @property
    def stored_matrices(self) -> int:
        """Elements of the matrices of all layers as they are stored."""
        return sum(self.matrices) or self.linear_parameters()

    @property
    def layer_experts(self) -> int:
        """Elements of the experts of one layer, which transformers stacks."""
        return self.mlp_matrices * self.hidden * self.experts * self.inner * (self.experts > 1)

    @property
    def expert_parameters(self) -> int:
        """Elements of all experts."""
        return (self.layers - self.dense_layers) * self.layer_experts

    def expert_adapters(self, rank: int) -> tuple[int, int]:
        """Return the elements of A and B of one layer's experts and router.

        Gate and up are one parameter, with the rank of both.
        """
        a = self.experts * (2 * self.hidden + self.inner) + self.hidden
        b = self.experts * (4 * self.inner + self.hidden) + self.experts
        return rank * a, rank * b

    @property
    def small_parameters(self) -> int:
        """Elements of norms, biases and routers of all layers, and the final norm."""
        norms = 2 * self.hidden + (2 * self.head_dim if self.normalised_heads else 0)
        router = self.experts * self.hidden if self.experts > 1 else 0
        sparse = self.layers - self.dense_layers
        final = self.hidden if self.gated else 2 * self.hidden
        return self.layers * (norms + self.biases) + sparse * router + final

    @property
    def table_parameters(self) -> int:
        """Elements of the embedding, or of the output matrix."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All elements."""
        if self.counted is not None:
            return self.counted
        tables = (1 if self.tied else 2) * self.table_parameters
        return (
            self.linear_parameters()
            + self.small_parameters
            + self.extras
            + tables
            + self.positions * self.hidden
        )

    @property
    def active_parameters(self) -> int:
        """Elements that a token passes through: all but those of other experts."""
        idle = self.linear_parameters() - self.linear_parameters(active=True)
        return self.parameters - idle

    @property
    def layer_parameters(self) -> int:
        """Elements of the largest layer."""
        sparse = self.mlp_matrices * self.hidden * (self.experts * self.inner + self.shared_inner)
        return self.attention_parameters + sparse + 2 * self.hidden + self.biases

    @property
    def widest_linear(self) -> int:
        """Elements of the largest matrix of a layer; an expert's gate and up are one."""
        inner = self.inner if self.experts == 1 else 2 * self.inner
        return self.hidden * max(self.queries, inner, self.dense_inner, self.shared_inner)

    def layer_matrices(self) -> dict[str, Linear]:
        """Return the matrices of one layer that an adapter may extend, `[out, in]`.

        Experts have none: transformers stores them as one tensor, which is no linear.
        """
        hidden, inner, mlp = self.hidden, self.inner, dict[str, Linear]()
        if self.experts == 1:
            mlp = {"up_proj": (inner, hidden), "down_proj": (hidden, inner)}
        if self.gated and mlp:
            mlp["gate_proj"] = (inner, hidden)
        return {
            "q_proj": (self.queries, hidden),
            "k_proj": (self.keys, hidden),
            "v_proj": (self.keys, hidden),
            "o_proj": (hidden, self.queries),
            **mlp,
        }


def gpt_shape(name: str, layers: int, hidden: int, heads: int) -> ModelShape:
    """Return a GPT of Megatron-LM: an MLP of `4 h` without a gate, biases, learned positions."""
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        inner=4 * hidden,
        vocab=51_200,
        gated=False,
        tied=True,
        positions=2048,
        biases=11 * hidden,  # of q, k, v, o (4 h), of the MLP (5 h), of two norms (2 h)
    )


def llama_shape(
    name: str, layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int
) -> ModelShape:
    """Return a decoder of the Llama family: SwiGLU, grouped keys and values."""
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=hidden // heads,
        inner=inner,
        vocab=vocab,
        in_gguf=True,
    )


def qwen3(
    name: str, layers: int, hidden: int, heads: int, inner: int, *, tied: bool = False
) -> ModelShape:
    """Return a dense Qwen3."""
    made = llama_shape(name, layers, hidden, heads, 8, inner, 151_936)
    return replace(made, head_dim=128, tied=tied, normalised_heads=True)


NAMED: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        replace(llama_shape("1b", 16, 2048, 32, 8, 8192, 128_256), tied=True),
        llama_shape("7b", 32, 4096, 32, 32, 11_008, 32_000),
        llama_shape("8b", 32, 4096, 32, 8, 14_336, 128_256),
        llama_shape("13b", 40, 5120, 40, 40, 13_824, 32_000),
        llama_shape("33b", 60, 6656, 52, 52, 17_920, 32_000),
        llama_shape("65b", 80, 8192, 64, 64, 22_016, 32_000),
        llama_shape("70b", 80, 8192, 64, 8, 28_672, 32_000),
        llama_shape("llama-3.3-70b", 80, 8192, 64, 8, 28_672, 128_256),
        llama_shape("405b", 126, 16_384, 128, 8, 53_248, 128_256),
        replace(llama_shape("albor-350m", 24, 1024, 16, 4, 4096, 32_768), tied=True),
        qwen3("qwen3-0.6b", 28, 1024, 16, 3072, tied=True),
        qwen3("qwen3-1.7b", 28, 2048, 16, 6144, tied=True),
        qwen3("qwen3-4b", 36, 2560, 32, 9728, tied=True),
        qwen3("qwen3-8b", 36, 4096, 32, 12_288),
        qwen3("qwen3-14b", 40, 5120, 40, 17_408),
        qwen3("qwen3-32b", 64, 5120, 64, 25_600),
        replace(
            qwen3("qwen3-30b-a3b", 48, 2048, 32, 768),
            kv_heads=4,
            experts=128,
            active_experts=8,
            adapts_experts=True,
        ),
        replace(
            qwen3("qwen3-next-80b-a3b", 48, 2048, 16, 512),
            kv_heads=2,
            head_dim=256,
            experts=512,
            active_experts=10,
            shared_inner=512,
            recurrent_layers=36,
            recurrent_columns=8192,
            counted=79_674_391_296,
        ),
        replace(
            llama_shape("mixtral-8x7b", 32, 4096, 32, 8, 14_336, 32_000),
            experts=8,
            active_experts=2,
            adapts_experts=True,
        ),
        gpt_shape("gpt-22b", 48, 6144, 64),
        gpt_shape("gpt3-175b", 96, 12_288, 96),
        gpt_shape("gpt-530b", 105, 20_480, 128),
        gpt_shape("gpt-1t", 128, 25_600, 160),
    )
}
"""Shapes by name, from the models' config.json and, for `gpt-`, Table 3 of arXiv 2205.05198."""
