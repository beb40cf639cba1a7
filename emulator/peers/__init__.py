"""The same work on other stores: Redis, NIXL, Mooncake and LMCache beside Entresol, in one run, in the same rounds.

`adapters/` is what runs in a peer's own environment and imports nothing of this project; the rest starts it, takes
turns, bounds it in time and writes the report. `entresol-emu bench-peers` is the caller.
"""
