"""Sizes of blocks, against figures worked out by hand."""

from __future__ import annotations

import pytest

from common.errors import UserError
from common.models import MODELS, model_geometry


def test_known_sizes() -> None:
    assert model_geometry("llama-3-70b").token_bytes == 320 * 1024
    llama = model_geometry("Llama-3-8B")
    assert llama.token_bytes == 128 * 1024
    assert llama.block_bytes(16) == 2 << 20
    assert llama.block_bytes(16, tp_size=8) == 256 * 1024
    assert llama.block_bytes(16, tp_size=16) == 256 * 1024  # heads are copied beyond one a rank
    assert llama.block_bytes(16, pp_size=2) == 1 << 20
    latent = model_geometry("DeepSeek-V3")
    assert latent.token_bytes == 61 * 576 * 2
    assert latent.block_bytes(64, tp_size=8) == 64 * latent.token_bytes
    assert all(model.block_bytes(16) == 16 * model.token_bytes for model in MODELS.values())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(UserError, match="Llama-3-8B"):
        model_geometry("GPT-9")
    with pytest.raises(UserError, match="evenly"):
        model_geometry("Llama-3-8B").block_bytes(16, tp_size=3)
    with pytest.raises(UserError, match="evenly"):
        model_geometry("Llama-3-8B").block_bytes(16, pp_size=5)
