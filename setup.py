"""Everything is in pyproject.toml but this: native modules that are built where there is a compiler, and not missed
where there is none (docs/adr/0005-native-table-load.md, docs/adr/0006-native-hot-path.md)."""

from setuptools import Extension, setup

FLAGS = ["-O3", "-std=c11", "-Wall", "-Wextra"]
MODULES = {
    "dpu_app.regions._table_load": ["dpu_app/regions/_table_load.c"],
    "emulator._shm_channel": [f"emulator/{name}.c" for name in ("_shm_channel", "_shm_regions", "_shm_transfer")],
}
"""Module -> sources."""

setup(
    ext_modules=[Extension(name, sources, extra_compile_args=FLAGS, optional=True) for name, sources in MODULES.items()]
)
