"""Everything is in pyproject.toml but this: native modules that are built where there is a compiler, and not missed
where there is none (docs/adr/0005-native-table-load.md, docs/adr/0006-native-hot-path.md)."""

from glob import glob
from os.path import dirname

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra", "-ffp-contract=off"]
MODULES = {
    "dpu_app.regions._table_load": ["dpu_app/regions/_table_load.c"],
    "dpu_app.regions._hot_path": [
        f"dpu_app/regions/{name}.c" for name in ("_hot_path", "_hot_batch", "_hot_keys", "_hot_frames")
    ],
    "host_agent._batches": ["host_agent/_batches.c"],
    "emulator._shm_channel": [f"emulator/{name}.c" for name in ("_shm_channel", "_shm_regions", "_shm_transfer")],
}
"""Module -> sources."""

setup(
    ext_modules=[
        Extension(name, files, depends=glob(f"{dirname(files[0])}/_*.h"), extra_compile_args=FLAGS, optional=True)
        for name, files in MODULES.items()
    ]
)
