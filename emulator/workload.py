"""The project's own workload: seeded multi-turn conversations under shared system prompts, as trace records.

Owns what a request looks like: its prefix (hash ids), and from that the ordered block keys of its whole blocks.
Never moves a byte. `emulator.demo` replays the records; `emulator.trace` writes and reads the same type, so that
a public trace and a generated workload are told apart by nothing further down.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from common.errors import UserError
from common.identity import UNKNOWN, NamespaceRecord, block_key
from common.models import ModelGeometry
from common.wire import MAX_SGES_PER_ENTRY
from emulator.trace import HASH_TOKENS, TraceRecord, hash_id_count

_ENGINE_HASH: Final = struct.Struct("<QI")


@dataclass(frozen=True)
class WorkloadSettings:
    """Statistics of the generated conversations. Log-normal ones are given by median and by the standard
    deviation of the logarithm; the medians are of the order that public chat traces show."""

    seed: int = 1
    system_prompts: int = 8
    system_prompt_zipf: float = 1.2
    """Popularity of system prompt k is proportional to 1 / k ** system_prompt_zipf."""
    system_prompt_tokens_median: float = 1200
    system_prompt_tokens_sigma: float = 0.5
    document_fraction: float = 0.35
    """Of the conversations: those whose first turn brings a document along."""
    document_tokens_median: float = 5000
    document_tokens_sigma: float = 0.8
    user_tokens_median: float = 150
    user_tokens_sigma: float = 1.0
    output_tokens_median: float = 280
    output_tokens_sigma: float = 0.7
    turns_mean: float = 4.0
    """Turns of a conversation are geometric, at least one."""
    session_interval_s: float = 4.0
    """Mean time between the starts of conversations (exponential)."""
    think_time_s_median: float = 12.0
    think_time_s_sigma: float = 1.0
    context_tokens_max: int = 32768
    """A conversation ends where its next prompt would be longer."""


@dataclass
class _Session:
    number: int
    system_prompt: int
    turns_left: int
    turn: int
    context_tokens: int
    """Tokens of the conversation so far: the system prompt, then all prompts and outputs."""


class WorkloadGenerator:
    """An endless stream of requests in order of time; the same settings give the same stream everywhere."""

    def __init__(self, settings: WorkloadSettings) -> None:
        self._settings = settings
        self._random = np.random.Generator(np.random.PCG64(settings.seed))
        ranks = np.arange(1, settings.system_prompts + 1, dtype=np.float64)
        weights = ranks**-settings.system_prompt_zipf
        self._popularity = np.cumsum(weights / weights.sum())
        self._system_tokens = [
            self._tokens(settings.system_prompt_tokens_median, settings.system_prompt_tokens_sigma)
            for _ in range(settings.system_prompts)
        ]
        self._ids: dict[tuple[str, int, int], int] = {}
        self._sessions = 0

    def records(self) -> Iterator[TraceRecord]:
        settings = self._settings
        waiting: list[tuple[float, int, _Session]] = []
        next_start_s = 0.0
        while True:
            if not waiting or next_start_s <= waiting[0][0]:
                session = self._start_session()
                heapq.heappush(waiting, (next_start_s, session.number, session))
                next_start_s += float(self._random.exponential(settings.session_interval_s))
                continue
            now_s, _number, session = heapq.heappop(waiting)
            prompt = session.context_tokens + self._new_tokens(session)
            if prompt > settings.context_tokens_max:
                continue
            output = self._tokens(settings.output_tokens_median, settings.output_tokens_sigma)
            yield TraceRecord(round(now_s * 1000), prompt, output, self._prefix(session, prompt))
            session.context_tokens = prompt + output
            session.turn += 1
            session.turns_left -= 1
            if session.turns_left:
                pause_s = self._random.lognormal(np.log(settings.think_time_s_median), settings.think_time_s_sigma)
                heapq.heappush(waiting, (now_s + float(pause_s), session.number, session))

    def _start_session(self) -> _Session:
        prompt = int(np.searchsorted(self._popularity, self._random.random()))
        prompt = min(prompt, self._settings.system_prompts - 1)
        turns = int(self._random.geometric(1.0 / self._settings.turns_mean))
        self._sessions += 1
        return _Session(self._sessions, prompt, turns, 0, self._system_tokens[prompt])

    def _new_tokens(self, session: _Session) -> int:
        settings = self._settings
        tokens = self._tokens(settings.user_tokens_median, settings.user_tokens_sigma)
        if session.turn == 0 and self._random.random() < settings.document_fraction:
            tokens += self._tokens(settings.document_tokens_median, settings.document_tokens_sigma)
        return tokens

    def _prefix(self, session: _Session, prompt_tokens: int) -> tuple[int, ...]:
        """A full run of the system prompt belongs to the prompt, one of the conversation to the conversation
        (what was said stays said); the last run that is not full yet is this turn's alone."""
        system_tokens = self._system_tokens[session.system_prompt]
        names: list[tuple[str, int, int]] = []
        for index in range(hash_id_count(prompt_tokens)):
            end = (index + 1) * HASH_TOKENS
            if end <= system_tokens:
                names.append(("system", session.system_prompt, index))
            elif end <= prompt_tokens:
                names.append(("session", session.number, index))
            else:
                names.append(("turn", session.number, session.turn))
        return tuple(self._ids.setdefault(name, len(self._ids)) for name in names)

    def _tokens(self, median: float, sigma: float) -> int:
        return max(1, round(float(self._random.lognormal(np.log(median), sigma))))


@dataclass(frozen=True)
class BlockShape:
    """How a request's tokens become Entresol blocks: `block_tokens` tokens of all layers of one tensor-parallel
    rank, gathered from the engine's pages. Llama-3-8B in bf16 keeps 128 KiB a token, so that one 16-token page
    over all 32 layers is 2 MiB, or 256 KiB on each of 8 ranks.

    Raises UserError where the sizes do not divide.
    """

    model: ModelGeometry
    tp_size: int = 8
    page_tokens: int = 16
    block_tokens: int = 16

    def __post_init__(self) -> None:
        if self.page_tokens < 1 or self.block_tokens < 1 or self.block_tokens % self.page_tokens:
            raise UserError(f"a block of {self.block_tokens} tokens is not whole pages of {self.page_tokens} tokens")
        if HASH_TOKENS % self.block_tokens:
            raise UserError(f"blocks of {self.block_tokens} tokens do not divide a trace's runs of {HASH_TOKENS}")

    @property
    def block_bytes(self) -> int:
        return self.model.block_bytes(self.block_tokens, tp_size=self.tp_size)

    @property
    def layer_pieces(self) -> int:
        """Pieces of one length that a block is scattered over where an engine keeps one pool a layer. Raises UserError
        where that is more than a scatter list may have."""
        if self.model.layers > MAX_SGES_PER_ENTRY:
            raise UserError(f"{self.model.name}'s {self.model.layers} layers exceed a list of {MAX_SGES_PER_ENTRY}")
        return self.model.layers

    def namespace(self, tenant: str) -> NamespaceRecord:
        """Where these blocks' keys are valid: generated contents in the shape of the model's rank 0."""
        return NamespaceRecord(
            tenant=tenant,
            salt=b"",
            model_id=self.model.name,
            weights_revision=UNKNOWN,
            lora_id="",
            lora_revision="",
            kv_dtype=self.model.kv_dtype,
            quantisation="",
            layout="entresol-pattern",
            page_tokens=self.page_tokens,
            block_tokens=self.block_tokens,
            layers=self.model.layers,
            kv_heads=max(self.model.kv_heads // self.tp_size, 1),
            head_size=self.model.head_size,
            tp_rank=0,
            tp_size=self.tp_size,
            pp_rank=0,
            pp_size=1,
            cp_rank=0,
            cp_size=1,
        )

    def block_keys(self, namespace_digest: bytes, record: TraceRecord) -> list[bytes]:
        """Keys of the whole blocks of the prompt, in order. Tokens that do not fill a block have none, as in the
        engines. A hash id stands in the place of the engine's own block hash."""
        blocks_per_id = HASH_TOKENS // self.block_tokens
        keys: list[bytes] = []
        parent: bytes | None = None
        for index in range(record.input_length // self.block_tokens):
            engine_hash = _ENGINE_HASH.pack(record.hash_ids[index // blocks_per_id], index % blocks_per_id)
            parent = block_key(namespace_digest, parent, engine_hash=engine_hash)
            keys.append(parent)
        return keys
