"""The namespace of a benchmark's run: its blocks are nobody else's, and nothing is known of their inside."""

from __future__ import annotations

from common.identity import UNKNOWN, NamespaceRecord


def bench_record(tenant: str, salt: bytes, model_id: str = "entresol-bench") -> NamespaceRecord:
    """`salt`: of this run, or this process, alone."""
    return NamespaceRecord(
        tenant=tenant,
        salt=salt,
        model_id=model_id,
        weights_revision="",
        lora_id="",
        lora_revision="",
        kv_dtype=UNKNOWN,
        quantisation="",
        layout="entresol-pattern",
        page_tokens=UNKNOWN,
        block_tokens=UNKNOWN,
        layers=UNKNOWN,
        kv_heads=UNKNOWN,
        head_size=UNKNOWN,
        tp_rank=0,
        tp_size=1,
        pp_rank=0,
        pp_size=1,
        cp_rank=0,
        cp_size=1,
    )
