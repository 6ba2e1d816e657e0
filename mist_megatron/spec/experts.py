"""Parts of a layer that not every model has: experts that share out tokens, and latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mist_megatron.errors import InputError
from mist_megatron.spec import check

Router = Literal["softmax", "softmax_before_top_k", "sigmoid"]
"""How scores become weights: softmax over the chosen experts, over all of them, or a sigmoid of each."""
Balance = Literal["aux_loss", "seq_aux_loss", "global_aux_loss", "none"]
"""What a loss that evens loads looks at, by Megatron's names: a micro-batch, a sequence, a global batch."""

MOST_EXPERTS = 65_536
"""A hundred times the experts of the widest published layer (Qwen3-Next: 512)."""


@dataclass(frozen=True, kw_only=True)
class ExpertSpec:
    """The MLP of a layer as a mixture of experts: a router sends each token to `top_k` of `count` MLPs."""

    count: int
    """Routed experts of a layer."""
    top_k: int
    """Experts that compute each token."""
    ffn_hidden: int
    """Inner size of one expert."""
    shared_ffn_hidden: int = 0
    """Inner size of the experts that see every token, together; 0 for none."""
    shared_gate: bool = False
    """What the shared experts give is weighted by a sigmoid of one more projection (Qwen2)."""
    latent: int = 0
    """Width at which routed experts work; 0 for the hidden size."""
    router: Router = "softmax"
    """What makes weights of scores: a softmax over the chosen, over all before the choice, or sigmoids."""
    router_bias: bool = False
    """A trained bias on the router's scores (GPT-OSS), not the one that balances loads."""
    groups: int = 1
    """Experts stand in so many groups ..."""
    group_top_k: int = 1
    """... of which each token's come from so many."""
    scaling: float = 1.0
    """By which the weights of a token's experts are multiplied."""
    weighs_input: bool = False
    """A token's weight multiplies what its one expert reads, not what it gives (Llama 4)."""
    balance: Balance = "none"
    """What the loss that evens loads looks at."""
    balance_loss: float = 0.0
    """Its share of the loss."""
    balance_bias: bool = False
    """Each expert's score for the choice has a bias that is moved after every step to even loads
    (DeepSeek-V3); neither this nor the loss changes time or memory."""
    first_dense: int = 0
    """Layers at the start that keep a plain MLP."""
    every: int = 1
    """Of the others each n-th has experts, the last of each n; 1 for all."""

    def __post_init__(self) -> None:
        where = "experts"
        check.at_least(
            where,
            1,
            count=self.count,
            top_k=self.top_k,
            ffn_hidden=self.ffn_hidden,
            groups=self.groups,
            group_top_k=self.group_top_k,
            every=self.every,
        )
        check.at_least(
            where,
            0,
            shared_ffn_hidden=self.shared_ffn_hidden,
            latent=self.latent,
            first_dense=self.first_dense,
        )
        check.at_most(where, MOST_EXPERTS, "a hundred times the most of any known model", count=self.count)
        if self.top_k > self.count:
            raise InputError(f"{where}: top_k is {self.top_k}; wanted at most count, which is {self.count}")
        if self.shared_gate and not self.shared_ffn_hidden:
            raise InputError(f"{where}: shared_gate is true without shared experts; wanted shared_ffn_hidden")
        self._check_choice(where)

    def _check_choice(self, where: str) -> None:
        """How experts are chosen."""
        check.divides(where, ("groups", self.groups), ("count", self.count))
        if self.group_top_k > self.groups or self.top_k > self.group_top_k * (self.count // self.groups):
            raise InputError(
                f"{where}: group_top_k is {self.group_top_k} of {self.groups} groups; wanted at most all of "
                f"them, and enough for top_k {self.top_k} of {self.count // self.groups} experts in each"
            )
        for name, value in (("scaling", self.scaling), ("balance_loss", self.balance_loss)):
            if not 0.0 <= value < float("inf") or (name == "scaling" and not value):
                raise InputError(f"{where}: {name} is {value}; wanted a number above 0")
        if self.weighs_input and self.top_k > 1:
            raise InputError(f"{where}: weighs_input is true with top_k {self.top_k}; wanted top_k 1")
        if self.balance_bias and self.router != "sigmoid":
            raise InputError(f"{where}: balance_bias goes with router: sigmoid; got router {self.router}")

    def has_experts(self, layer: int) -> bool:
        """Whether layer `layer` (from 0) is a mixture."""
        return layer >= self.first_dense and (layer + 1) % self.every == 0

    def layers_with(self, layers: int) -> int:
        """How many of so many layers are mixtures."""
        return sum(self.has_experts(layer) for layer in range(layers))

    def expert_parameters(self, hidden: int, *, gated: bool, bias: bool) -> int:
        """Trainable elements of one routed expert."""
        width = self.latent or hidden
        inputs = 2 if gated else 1
        biases = inputs * self.ffn_hidden + width if bias else 0
        return (inputs + 1) * width * self.ffn_hidden + biases

    def other_parameters(self, hidden: int, *, gated: bool, bias: bool) -> int:
        """Of a layer's mixture besides routed experts: router, shared experts and their gate, and the
        projections into and out of a latent width."""
        inputs = 2 if gated else 1
        shared = (inputs + 1) * hidden * self.shared_ffn_hidden
        if bias and self.shared_ffn_hidden:
            shared += inputs * self.shared_ffn_hidden + hidden
        router = hidden * self.count + (self.count if self.router_bias else 0)
        return router + shared + (hidden if self.shared_gate else 0) + 2 * hidden * self.latent


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2): keys and values, and as a rule queries, are made of narrow
    latents; one rotated key is common to all heads."""

    kv_lora: int
    """Width of the latent of keys and values."""
    q_lora: int = 0
    """Width of the queries' latent; 0 where they are made of the hidden state directly."""
    nope_head_dim: int = 128
    """Columns of a query or key head that carry no position ..."""
    rope_head_dim: int = 64
    """... and that do."""
    v_head_dim: int = 128
    """Columns of a value head."""

    def __post_init__(self) -> None:
        check.at_least(
            "latent_attention",
            1,
            kv_lora=self.kv_lora,
            nope_head_dim=self.nope_head_dim,
            rope_head_dim=self.rope_head_dim,
            v_head_dim=self.v_head_dim,
        )
        check.at_least("latent_attention", 0, q_lora=self.q_lora)

    @property
    def qk_head_dim(self) -> int:
        """Columns of a query or key head."""
        return self.nope_head_dim + self.rope_head_dim

    def parameters(self, hidden: int, heads: int) -> int:
        """Projections down and up, the norms of the latents, and the output projection."""
        queries = heads * self.qk_head_dim
        q = hidden * self.q_lora + self.q_lora + self.q_lora * queries if self.q_lora else hidden * queries
        kv_up = self.kv_lora * heads * (self.nope_head_dim + self.v_head_dim)
        kv = hidden * (self.kv_lora + self.rope_head_dim) + self.kv_lora + kv_up
        return q + kv + heads * self.v_head_dim * hidden
