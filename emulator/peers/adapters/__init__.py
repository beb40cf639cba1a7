"""What runs in a peer's own environment, loaded by path by `emulator.peers.driver`: imports nothing of this project
but in `entresol_client`, which is Entresol's own.

Each module has `class Adapter(options)` with `about`, `prepare`, `store`, `retrieve`, `lookup`, `forget`, `close`, and
where the peer reaches flash `flash_store`, `flash_ready`, `flash_read`; and `serve(options, allocate)` where the peer's
server is Python; `allocate(length, huge)` gives it memory. `allocate`, `names` and `settle` are the driver's to tell.
"""
