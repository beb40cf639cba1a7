"""Geometry of the KV cache of named models: how many bytes a token, a page and a block take.

Figures are those of the models' published configurations. Used where sizes of blocks are chosen: the command
line's generated blocks, the emulator's workload, the benchmark. Never the identity of a namespace by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from common.errors import UserError

DTYPE_BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8_e4m3": 1, "fp8_e5m2": 1}
"""Bytes of one element of the KV cache, by data type."""


@dataclass(frozen=True)
class ModelGeometry:
    """Shape of one model's KV cache. `kv_width` is elements a layer and token: 2 x kv_heads x head_size, or the
    latent width where the model keeps a compressed latent (MLA)."""

    name: str
    layers: int
    kv_heads: int
    head_size: int
    kv_width: int
    kv_dtype: str = "bfloat16"

    @property
    def token_bytes(self) -> int:
        return self.layers * self.kv_width * DTYPE_BYTES[self.kv_dtype]

    def block_bytes(self, block_tokens: int, *, tp_size: int = 1, pp_size: int = 1) -> int:
        """Bytes of `block_tokens` tokens in one shard. Raises UserError when the shards do not divide evenly."""
        if self.layers % pp_size:
            raise UserError(f"{self.name} has {self.layers} layers, which {pp_size} stages do not share evenly")
        if self.is_latent:
            shard_width = self.kv_width  # every tensor-parallel rank keeps the whole latent
        elif self.kv_heads % tp_size and tp_size % self.kv_heads:
            raise UserError(f"{self.name} has {self.kv_heads} KV heads, which {tp_size} ranks do not share evenly")
        else:
            shard_width = 2 * max(self.kv_heads // tp_size, 1) * self.head_size
        return block_tokens * (self.layers // pp_size) * shard_width * DTYPE_BYTES[self.kv_dtype]

    @property
    def is_latent(self) -> bool:
        return self.kv_width != 2 * self.kv_heads * self.head_size


def _gqa(name: str, layers: int, kv_heads: int, head_size: int) -> ModelGeometry:
    return ModelGeometry(name, layers, kv_heads, head_size, 2 * kv_heads * head_size)


MODELS: Final[dict[str, ModelGeometry]] = {
    model.name: model
    for model in (
        _gqa("Llama-3-8B", 32, 8, 128),
        _gqa("Llama-3-70B", 80, 8, 128),
        _gqa("Llama-3.1-405B", 126, 8, 128),
        _gqa("Mistral-7B", 32, 8, 128),
        _gqa("Mixtral-8x7B", 32, 8, 128),
        _gqa("Qwen2.5-7B", 28, 4, 128),
        _gqa("Qwen2.5-72B", 80, 8, 128),
        _gqa("Qwen3-32B", 64, 8, 128),
        ModelGeometry("DeepSeek-V3", 61, 1, 576, 576),  # MLA: latent of 512 and 64 rotary elements
    )
}


def model_geometry(name: str) -> ModelGeometry:
    """The named model, whatever the case of `name`. Raises UserError that lists what there is."""
    for known, model in MODELS.items():
        if known.lower() == name.lower():
            return model
    raise UserError(f"unknown model {name!r}; known: {', '.join(MODELS)}")
