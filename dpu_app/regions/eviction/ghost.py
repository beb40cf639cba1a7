"""The ghost list of S3-FIFO: which blocks were evicted lately, remembered by fingerprint in 2 bytes each.

A set-associative table instead of a queue (the paper, section 4.2, proposes one): a cell holds 12 bits of
fingerprint and the epoch of its insertion. An entry is forgotten when `window` others have been inserted since, give
or take one epoch, a thirteenth of it. Two buckets of four to choose from keep early overwriting to about one
in twenty; a chance match has a chance of about 0.2 %.
"""

from __future__ import annotations

import numpy as np

from dpu_app.regions.huge_array import huge_zeros

_LANES = 4
_EPOCHS = 16
_WINDOW_EPOCHS = 13
_SWEEPS_MIN = 16
_SWEEP_CELLS = 1 << 14
"""Cells that one sweep clears at most, in about a tenth of a millisecond."""
_K1 = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


class Ghost:
    def __init__(self, window: int) -> None:
        """Remembers the last `window` insertions, at least 1."""
        self._buckets = -(-int(window * 1.05 + 1) // _LANES)
        self._cells = huge_zeros(self._buckets * _LANES, np.uint16)
        """Fingerprint << 4 | epoch; the fingerprint is never 0, so 0 is an empty cell."""
        self._cell = self._cells.data
        self._epoch_insertions = max(1, round(window / _WINDOW_EPOCHS))
        sweeps = max(_SWEEPS_MIN, -(-len(self._cells) // _SWEEP_CELLS))
        self._window_epochs = min(_WINDOW_EPOCHS, round(window / self._epoch_insertions))
        self._sweep_insertions = max(1, self._epoch_insertions // sweeps)
        self.cells_per_sweep = -(-len(self._cells) // sweeps)
        self._insertions = 0
        self._epoch = 0
        self._swept = 0

    @property
    def nbytes(self) -> int:
        return self._cells.nbytes

    def insert(self, fingerprint: int) -> None:
        tag, cells = self._places(fingerprint)
        oldest, oldest_age = cells[0], -1
        for cell in cells:
            value = self._cell[cell]
            age = (self._epoch - value) % _EPOCHS if value else _EPOCHS
            if value >> 4 == tag:
                oldest = cell
                break
            if age > oldest_age:
                oldest, oldest_age = cell, age
        self._cell[oldest] = tag << 4 | self._epoch
        self._insertions += 1
        if self._insertions % self._sweep_insertions == 0:
            self._sweep()
        if self._insertions % self._epoch_insertions == 0:
            self._epoch = (self._epoch + 1) % _EPOCHS

    def take(self, fingerprint: int) -> bool:
        """Whether it is remembered; it is then forgotten."""
        if not self._insertions:
            return False
        tag, cells = self._places(fingerprint)
        for cell in cells:
            value = self._cell[cell]
            if value >> 4 == tag and (self._epoch - value) % _EPOCHS <= self._window_epochs:
                self._cell[cell] = 0
                return True
        return False

    def _places(self, fingerprint: int) -> tuple[int, tuple[int, ...]]:
        mixed = (fingerprint * _K1) & _MASK
        mixed ^= mixed >> 32
        mixed = (mixed * _K1) & _MASK
        first = ((mixed & 0xFFFFFFFF) * self._buckets >> 32) * _LANES
        second = ((mixed >> 20 & 0xFFFFFFFF) * self._buckets >> 32) * _LANES
        lanes = (first, first + 1, first + 2, first + 3, second, second + 1, second + 2, second + 3)
        return (mixed >> 52) or 1, lanes

    def _sweep(self) -> None:
        """Clear what is out of the window in the next part of the table, before its epoch number comes round."""
        part = self.cells_per_sweep
        cells = self._cells[self._swept : self._swept + part]
        ages = (self._epoch - (cells & 15).astype(np.int16)) % _EPOCHS
        cells[ages > self._window_epochs] = 0
        self._swept = self._swept + part if self._swept + part < len(self._cells) else 0
